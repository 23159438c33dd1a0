"""One rollout on its way, and how it fails."""

import asyncio
from collections.abc import Callable
from typing import Any

from rollout_client.errors import (
    EngineFailed,
    ProtocolError,
    RequestRefused,
    RetriesExhausted,
    RolloutCancelled,
    RolloutError,
)
from rollout_client.planning import Counts, GiveUp, Outcome, Refused
from rollout_client.rollout import Draft, Rollout
from rollout_pod.protocol import GenerateRequest, OnPause

OnPartial = Callable[[Rollout], None]


class Run:
    """One rollout on its way: what is asked, what is held, what went wrong."""

    def __init__(
        self,
        *,
        draft: Draft,
        prompt: list[int],
        params: dict[str, Any],
        session_id: str | None,
        min_step: int | None,
        deadline: float,
        on_partial: OnPartial | None,
        give_up: Callable[[], bool] | None,
        fields: dict[str, Any],
    ) -> None:
        self.draft, self.prompt, self.params = draft, prompt, params
        self.session_id, self.min_step, self.fields = session_id, min_step, fields
        self.deadline, self.on_partial = deadline, on_partial
        self._give_up = give_up
        self.key = session_id or draft.request_id
        self.counts = Counts()
        self.avoid: set[str] = set()
        self.last_failure: str | None = None

    def is_given_up(self) -> bool:
        """Whether the caller wants what there is instead of another attempt."""
        return self.draft.attempts > 0 and self._give_up is not None and self._give_up()

    def request(self, park_s: float) -> GenerateRequest:
        """What is asked next.

        Raises:
            ValueError: the arguments are wrong.
        """
        left = self.deadline - asyncio.get_running_loop().time()
        return GenerateRequest(
            **{
                **self.fields,
                "request_id": self.draft.request_id,
                "prompt_token_ids": self.prompt,
                "generated_token_ids": self.draft.token_ids,
                "sampling_params": self.params,
                "attempt": max(1, self.draft.attempts),
                "session_id": self.session_id,
                "stream": True,
                "on_pause": OnPause.WAIT,
                "timeout_s": max(0.001, min(park_s, left)),
            }
        )


def error_of(kind: GiveUp, why: str, outcome: Outcome, partial: Rollout) -> RolloutError:
    """The error of a rollout that is given up."""
    if isinstance(outcome, Refused) and kind is GiveUp.REFUSED:
        return RequestRefused(why, status=outcome.status, problem=outcome.problem, partial=partial)
    kinds: dict[GiveUp, type[RolloutError]] = {
        GiveUp.ENGINE: EngineFailed,
        GiveUp.RETRIES: RetriesExhausted,
        GiveUp.PROTOCOL: ProtocolError,
        GiveUp.CANCELLED: RolloutCancelled,
    }
    return kinds[kind](why, partial=partial)
