"""Calls to the engine's process that end: by their answer, their deadline, or its death."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic import ValidationError

from rollout_pod.engine.base import (
    EngineDeadError,
    EngineError,
    EngineHungError,
    EngineInternalError,
)
from rollout_pod.engine.output_tail import OutputTail

T = TypeVar("T")

_POLL_S = 0.1
_LAST_WORDS_S = 1.0
_DEATH_NOTE_S = 60.0
"""Error lines older than this do not explain a death."""
_CHARS = 1000


class Lifeline:
    """Knows whether vLLM lives, and why not.

    Args:
        tail: What its processes printed.
    """

    def __init__(self, tail: OutputTail) -> None:
        self._tail = tail
        self._llm: Any = None
        self._death: str | None = None

    def watch(self, llm: Any) -> None:
        """Watch an ``AsyncLLM``, once it is made."""
        self._llm = llm

    def cut(self, reason: str) -> None:
        """It was ended on purpose. A death before that keeps its reason."""
        self._death = self.death() or reason
        self._llm = None

    def condemn(self, reason: str) -> None:
        """What is left of it is of no use. A death before that keeps its reason."""
        self._death = self.death() or reason

    def death(self) -> str | None:
        """Why it is dead; None while it lives. Cheap."""
        if self._death is None and self._llm is not None and self._llm.errored:
            self._death = self._cause()
        return self._death

    async def last_words(self) -> str:
        """The cause of a death that vLLM has just reported."""
        # The process may still be ending; its exit code and last lines say more.
        deadline = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline:
            if all(process.exitcode is not None for process in self._processes()):
                break
            await asyncio.sleep(_POLL_S)
        return self.death() or "the engine's process is gone"

    async def call(self, call: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
        """Await a call of vLLM's.

        vLLM itself never answers a call that its process has taken when it died.

        Args:
            call: The call.
            what: Completes "the engine could not".
            timeout_s: Its deadline.

        Raises:
            EngineDeadError: it is dead, or died meanwhile.
            EngineHungError: it was late.
            EngineInternalError: it failed.
        """
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

        deadline = time.monotonic() + timeout_s
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise EngineHungError(f"the engine did not {what} within {timeout_s:g} s")
                await asyncio.wait({task}, timeout=min(_POLL_S, left))
                if not task.done() and (death := self.death()) is not None:
                    raise EngineDeadError(death)
            return task.result()
        except VllmDeadError as error:
            raise EngineDeadError(await self.last_words()) from error
        except (EngineDeadError, EngineError):
            raise
        except Exception as error:
            raise EngineInternalError(f"the engine could not {what}: {words_of(error)}") from error
        finally:
            task.cancel()  # a call that nobody waits for any more; never a generation

    def _processes(self) -> list[Any]:
        if self._llm is None:
            return []
        manager = getattr(self._llm.engine_core.resources, "engine_manager", None)
        return list(getattr(manager, "processes", ()))

    def _cause(self) -> str:
        ends = [
            f"{process.name} ended by signal {-process.exitcode}"
            for process in self._processes()
            if process.exitcode is not None and process.exitcode < 0
        ]
        line = self._tail.last_error(within_s=_DEATH_NOTE_S)
        known = [*ends, *([line] if line else [])]
        return "; ".join(known) or "the engine's process is gone"


def words_of(error: BaseException) -> str:
    """The text of an error, or of its cause where it has none of its own; in one line."""
    if isinstance(error, ValidationError):
        # without pydantic's frame around the words of the check that failed
        return "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
    cause = error.__cause__ if not str(error) and error.__cause__ is not None else error
    return " ".join(str(cause).split())[:_CHARS] or type(cause).__name__
