"""What a trainer is told of a push that did not go well."""

from typing import Final

from rollout_pod.protocol import ProblemCode, StateDocument
from rollout_pod.weights.device import DeviceError
from rollout_pod.weights.push_errors import (
    NotDesired,
    PodGone,
    PushError,
    PushFailed,
    PushRefused,
    PushTimeout,
)
from rollout_pod.weights.push_link import Refusal, Watch
from rollout_pod.weights.segment import RoomError
from rollout_pod.weights.session_errors import ManifestError, RanksError

PASSING: Final = frozenset(
    {
        ProblemCode.PUSH_IN_PROGRESS, ProblemCode.STALE_SESSION, ProblemCode.ENGINE_NOT_UP,
        ProblemCode.ASLEEP,
    }
)  # fmt: skip
"""Refusals that end by themselves."""


class NotNow(Exception):
    """Nothing was begun; it may be tried again."""


def before_the_offer(error: Exception, version: str, state: StateDocument | None) -> Exception:
    """Of a send that raised before the pod had taken it: nothing is interrupted."""
    if isinstance(error, Refusal):
        code = error.problem.code
        if code in PASSING:
            return NotNow(str(error))
        kind = NotDesired if code is ProblemCode.NOT_DESIRED else PushRefused
        return kind(f"{version}: {error}", state)
    if isinstance(error, RanksError) and error.retryable:
        return NotNow(str(error))
    if isinstance(error, ManifestError | RanksError | RoomError | DeviceError):
        return PushRefused(f"{version}: {error}", state)
    return error


def after_the_offer(error: Exception, version: str, watch: Watch) -> PushError:
    """Of one that the pod had taken; its own words count most."""
    status = watch.status
    state = status.state if status else None
    words = status.message if status and status.over else ""
    if not words and watch.gone is not None:
        return PodGone(f"{version}: {watch.gone}", state)
    if not words and isinstance(error, TimeoutError):
        return PushTimeout(f"{version}: {error}", state)
    return PushFailed(f"{version}: {words or error}", state)


def never_needed(version: str, state: StateDocument | None, gone: PodGone | None) -> PushError:
    """Of a deadline that came before the pod needed ``version``."""
    if gone is not None:
        return PodGone(f"{version}: {gone}", state)
    if state is None:
        return PushTimeout(f"{version}: the pod said nothing in time")
    if state.desired_version != version:
        needs = f", and needs {state.needs}" if state.needs else ""
        return NotDesired(
            f"the pod asks for {state.desired_version}{needs}, not for {version}: ask for it first",
            state,
        )
    update = state.update
    what = f"; its update is {update.phase}: {update.message}" if update else ""
    return PushTimeout(f"{version}: the pod is {state.phase} and does not wait for it{what}", state)
