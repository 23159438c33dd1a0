"""I/O to the API server."""
