"""The adapter for trainers without an event loop."""

import sys
from collections.abc import Collection, Sequence
from typing import Any, Literal

from rollout_client.sync import LoopThread, Synchronous
from rollout_client.trainer.adapter import ALL_TAGS, ServerAdapter
from rollout_client.trainer.targets import Target
from rollout_client.trainer.update import Update
from rollout_client.trainer.updates import Results
from rollout_client.trainer.weights import Weights


class SyncUpdate:
    """See ``Update``."""

    def __init__(self, thread: LoopThread, update: Update) -> None:
        self._thread, self._update = thread, update
        self.version = update.version

    def done(self) -> bool:
        """See ``Update.done``."""
        return self._update.done()

    def wait(self) -> Results:
        """See ``Update.wait``."""
        return self._thread.run(self._update.wait())

    def give_up(self) -> None:
        """See ``Update.give_up``."""
        self._thread.run(self._update.give_up())


class SyncServerAdapter(Synchronous[ServerAdapter]):
    """``ServerAdapter`` with plain methods; takes its arguments.

    Its loop lives in a thread of its own: ``update_weights`` blocks the caller, and
    ``begin_update`` returns at once.
    """

    def __init__(self, targets: Target | Sequence[Target], **settings: Any) -> None:
        torch = sys.modules.get("torch")
        if settings.get("gpu") is None and torch is not None and torch.cuda.is_initialized():
            settings["gpu"] = torch.cuda.current_device()  # that of the caller's thread

        async def make() -> ServerAdapter:
            return ServerAdapter(targets, **settings)

        super().__init__("rollout-trainer", make())

    def resume(
        self, tags: Collection[str] = ALL_TAGS, *, timeout_s: float | None = None
    ) -> Results:
        """See ``ServerAdapter.resume``."""
        return self._thread.run(self._client.resume(tags, timeout_s=timeout_s))

    def release(
        self,
        level: Literal[1, 2] | None = None,
        tags: Collection[str] = ALL_TAGS,
        *,
        timeout_s: float | None = None,
    ) -> Results:
        """See ``ServerAdapter.release``."""
        return self._thread.run(self._client.release(level, tags, timeout_s=timeout_s))

    def cancel(self, *, timeout_s: float | None = None) -> Results:
        """See ``ServerAdapter.cancel``."""
        return self._thread.run(self._client.cancel(timeout_s=timeout_s))

    def resume_generation(self, *, timeout_s: float | None = None) -> Results:
        """See ``ServerAdapter.resume_generation``."""
        return self._thread.run(self._client.resume_generation(timeout_s=timeout_s))

    def clear_kv_cache(self, *, timeout_s: float = 30.0) -> Results:
        """See ``ServerAdapter.clear_kv_cache``."""
        return self._thread.run(self._client.clear_kv_cache(timeout_s=timeout_s))

    def update_weights(self, weights: Weights | None = None, **options: Any) -> Results:
        """See ``ServerAdapter.update_weights``. An interrupt of the caller gives it up."""
        return self._thread.run(self._client.update_weights(weights, **options))

    def begin_update(self, weights: Weights | None = None, **options: Any) -> SyncUpdate:
        """See ``ServerAdapter.begin_update``."""

        async def begin() -> Update:
            return self._client.begin_update(weights, **options)

        return SyncUpdate(self._thread, self._thread.run(begin()))

    def resend(self, *, timeout_s: float | None = None) -> Results:
        """See ``ServerAdapter.resend``."""
        return self._thread.run(self._client.resend(timeout_s=timeout_s))

    def status(self, *, timeout_s: float = 10.0) -> Results:
        """See ``ServerAdapter.status``."""
        return self._thread.run(self._client.status(timeout_s=timeout_s))
