"""What can go wrong with a push, as seen by the trainer."""

from rollout_pod.protocol import StateDocument


class PushError(Exception):
    """Base of all. ``state`` is the pod's last state document, where one was read.

    After any of them the same version can be pushed again: the pod says in ``needs`` whether it
    waits for it.
    """

    def __init__(self, message: str, state: StateDocument | None = None) -> None:
        super().__init__(message)
        self.state = state


class NotDesired(PushError):
    """The pod waits for another version, or for none: ask for this one first
    (``spec.weightVersion``, or the desired document).
    """


class PushRefused(PushError):
    """Nothing was sent and nothing is interrupted: the version does not fit the model, the
    transport that was named cannot work, there is no room, or the version was rejected.
    """


class PushFailed(PushError):
    """The update began and did not commit. The pod serves the old version, or none (``state``
    says which); a complete push of the version it needs mends it.
    """


class PushTimeout(PushError):
    """The time is over; the message says what was waited for."""


class PodGone(PushError):
    """Nobody answers, or the pod started anew meanwhile: it says what it needs when it is back."""
