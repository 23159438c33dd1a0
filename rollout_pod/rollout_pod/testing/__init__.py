"""For authors of engines: the Engine Protocol as a suite of tests (needs pytest, pytest-asyncio).

``EngineContract`` is subclassed with a fixture ``subject``, which says how to make the author's
engine; see docs/engines.md.
"""

import pytest

pytest.register_assert_rewrite("rollout_pod.testing.contract")

from rollout_pod.testing.contract import EngineContract  # noqa: E402 - after the line above
from rollout_pod.testing.subject import EngineSubject, Fault, send_tensors  # noqa: E402

__all__ = ["EngineContract", "EngineSubject", "Fault", "send_tensors"]
