"""Measurements: each prints its figure beside its reference from the same run."""
