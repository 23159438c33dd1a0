"""Names and numbers that pods, operator and clients must agree on."""

from typing import Final

DATA_PORT: Final = 8000
"""Generation, probes and metrics."""

ADMIN_PORT: Final = 8001
"""Desired and state documents; every request needs the token."""

RANKS_PORT: Final = 8002
"""Of the head, where the ranks of a replica of several pods meet. Without a token, as all that
the ranks say to each other: on a network that is not trusted, a NetworkPolicy has to guard it.
"""

TOKEN_HEADER: Final = "X-Rollout-Token"  # noqa: S105 # the name of a header
"""Carries the token where a proxy strips ``Authorization``."""

DESIRED_ANNOTATION: Final = "rollout.dev/desired"
"""A new pod's first desired document; a part of no hash."""

STATE_POLL_MAX_S: Final = 60.0
"""The longest that ``GET /admin/v1/state`` is held open, in seconds."""
