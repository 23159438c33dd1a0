"""Brings one engine to what the desired document says."""
