"""The RolloutReplica as Python: names, spec, status. Pure."""
