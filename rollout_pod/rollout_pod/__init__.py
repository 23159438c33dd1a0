"""The pod side of a RolloutReplica: a vLLM server whose generation can be cut and continued."""

__version__ = "0.1.0"
