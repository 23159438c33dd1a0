"""The two HTTP ports."""
