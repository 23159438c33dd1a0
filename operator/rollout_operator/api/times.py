"""Times as the API server writes them."""

from datetime import UTC, datetime


def rfc3339(unix: float) -> str:
    """Return unix seconds as a timestamp of whole seconds."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def unix(timestamp: str | None) -> float:
    """Return a timestamp as unix seconds; 0 where there is none.

    Raises:
        ValueError: it is no timestamp.
    """
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0
