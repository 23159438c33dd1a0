"""A real one-node Kubernetes for demo and tests: ``python -m devcluster up|down|status``."""
