"""Replicas whose engine spans several pods: the head, and the nodes that follow it."""
