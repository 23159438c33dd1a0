"""Waiting until a pod needs a version."""

import threading
import time
from typing import Final

from rollout_pod.protocol import PushTarget, StateDocument
from rollout_pod.weights.push_errors import PodGone, PushFailed, PushRefused
from rollout_pod.weights.push_link import PushLink, Refusal
from rollout_pod.weights.push_verdict import PASSING, never_needed

HOLD_S: Final = 10.0
RETRY_S: Final = 0.2
"""Between two looks at a pod that is not there, or whose ranks are busy."""


def until_needed(
    link: PushLink, version: str, *, deadline: float, cancelled: threading.Event
) -> tuple[PushTarget | None, StateDocument]:
    """The target as soon as it needs ``version``; None if that is committed already.

    Raises:
        PushRefused: the version was rejected.
        PushFailed: ``cancelled`` was set.
        NotDesired, PushTimeout, PodGone: it was not needed until the deadline (of
            ``time.monotonic``), and why.
    """
    state: StateDocument | None = None
    gone: PodGone | None = None
    after: str | None = None
    while True:
        if cancelled.is_set():
            raise PushFailed(f"{version}: given up by its sender", state)
        left = deadline - time.monotonic()
        if left <= 0:
            raise never_needed(version, state, gone)
        try:
            state = link.state(after=after, hold_s=min(HOLD_S, left))
            gone, after = None, f"{state.boot_id}:{state.revision}"
            if state.weight_version == version:
                return None, state
            if state.needs == version:
                return link.target(), state
        except PodGone as error:
            gone, after = error, None
            cancelled.wait(min(RETRY_S, left))
        except Refusal as error:
            if error.problem.code not in PASSING:
                raise PushRefused(str(error), state) from error
            cancelled.wait(min(RETRY_S, left))
        else:
            _check_rejected(version, state)


def _check_rejected(version: str, state: StateDocument) -> None:
    if state.rejected and state.rejected.version == version == state.desired_version:
        raise PushRefused(
            f"{version} was rejected: {state.rejected_message}; ask for another version, or give "
            "it another step, to have it tried again",
            state,
        )
