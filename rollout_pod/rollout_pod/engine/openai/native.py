"""One attempt of a sequence, on its way from vLLM's server through the gate into vLLM."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout_pod.engine.base import EngineDelta
from rollout_pod.engine.outputs import NON_FINITE


@dataclass(frozen=True)
class Native:
    """What ``AsyncLLM.generate`` is called with, and who gets its outputs."""

    prompt: dict[str, Any]
    params: Any
    options: dict[str, Any]
    on_output: Callable[[Any], None]

    def read(self, output: Any) -> tuple[EngineDelta, bool]:
        """Hand an output on; returns its tokens, for the gate to count, and whether it was cut at a
        token whose log-prob is asked for and is NaN or infinite. Such an output ends in ``error``,
        which vLLM's server answers in its own way.
        """
        raw = output.outputs[0]
        end = _end_of_finite(raw)
        is_cut = end is not None
        if is_cut:
            raw.token_ids, raw.logprobs = list(raw.token_ids)[:end], list(raw.logprobs)[:end]
            raw.finish_reason, raw.stop_reason = "error", NON_FINITE
        delta = EngineDelta(tuple(raw.token_ids), ())
        self.on_output(output)
        return delta, is_cut


def _end_of_finite(raw: Any) -> int | None:
    """The index of the first token whose log-prob is not finite; None where there is none."""
    pairs = zip(raw.token_ids, raw.logprobs or (), strict=False)
    return next((i for i, (t, p) in enumerate(pairs) if not math.isfinite(p[t].logprob)), None)
