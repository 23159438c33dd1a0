"""I/O to the pods' admin port."""
