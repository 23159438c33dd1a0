"""One attempt of a sequence, on its way from vLLM's server through the gate into vLLM."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout_pod.engine.base import EngineDelta


@dataclass(frozen=True)
class Native:
    """What ``AsyncLLM.generate`` is called with, and who gets its outputs."""

    prompt: dict[str, Any]
    params: Any
    options: dict[str, Any]
    on_output: Callable[[Any], None]

    def read(self, output: Any) -> tuple[EngineDelta, bool]:
        """Hand an output on; returns its tokens, for the gate to count."""
        delta = EngineDelta(tuple(output.outputs[0].token_ids), ())
        self.on_output(output)
        return delta, False
