"""Moves the weights of a version from shared memory into every rank of an engine.

Imports nothing of the rest of the pod, and torch only where tensors are (``receiver``, ``push``).
"""
