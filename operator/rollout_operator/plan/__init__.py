"""What was seen of the cluster, and what follows from it. Pure."""
