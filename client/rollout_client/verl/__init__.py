"""verl's rollout ``rollout_replica``: its calls drive RolloutReplicas, or pods without an operator.

Importing this registers it; verl does so by itself, through the entry point ``verl.plugins``. See
docs/verl.md.
"""

try:
    import verl  # noqa: F401
except ImportError as error:  # pragma: no cover - no test runs without verl here
    raise ImportError(
        "rollout_client.verl needs verl 0.9.1 and ray beside it: pip install verl==0.9.1"
    ) from error

from rollout_client.verl.registry import register
from rollout_client.verl.settings import KEY, Settings, SettingsError

register()

__all__ = ["KEY", "Settings", "SettingsError", "register"]
