"""The client for programs without an event loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from rollout_client.client import RolloutClient
from rollout_client.endpoints import Endpoints
from rollout_client.errors import RolloutError
from rollout_client.rollout import Rollout

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end and return the result; an interrupt of the caller cancels it."""
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop and join the thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class Closable(Protocol):
    """What lives in a loop and is closed there."""

    async def aclose(self) -> None:
        """Close all connections."""


C = TypeVar("C", bound=Closable)


class Synchronous(Generic[C]):
    """Owns a client and the thread whose loop it lives in.

    Args:
        name: Of the thread.
        make: Makes the client, in that loop.
    """

    def __init__(self, name: str, make: Coroutine[Any, Any, C]) -> None:
        self._thread = LoopThread(name)
        try:
            self._client = self._thread.run(make)
        except BaseException:
            self._thread.close()
            raise
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        if not self._closed:
            self._closed = True
            self._thread.run(self._client.aclose())
            self._thread.close()


class SyncRolloutClient(Synchronous[RolloutClient]):
    """``RolloutClient`` with plain methods; may be used from several threads at once.

    Takes the arguments of ``RolloutClient``; ``endpoints`` may also be a function that makes them.
    """

    def __init__(
        self, endpoints: Sequence[str] | str | Callable[[], Endpoints], **settings: Any
    ) -> None:
        async def make() -> RolloutClient:
            return RolloutClient(endpoints() if callable(endpoints) else endpoints, **settings)

        super().__init__("rollout-client", make())

    def generate(
        self,
        prompt_ids: Any,
        sampling_params: Mapping[str, Any],
        request_id: str | None = None,
        **options: Any,
    ) -> Rollout:
        """See ``RolloutClient.generate``."""
        return self._thread.run(
            self._client.generate(prompt_ids, sampling_params, request_id, **options)
        )

    def generate_group(
        self, prompt_ids: Any, sampling_params: Mapping[str, Any], n: int, **options: Any
    ) -> list[Rollout]:
        """See ``RolloutClient.generate_group``."""
        return self._thread.run(
            self._client.generate_group(prompt_ids, sampling_params, n, **options)
        )

    def generate_batch(
        self,
        prompts: Sequence[Any],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        **options: Any,
    ) -> list[Rollout | RolloutError]:
        """See ``RolloutClient.generate_batch``."""
        return self._thread.run(self._client.generate_batch(prompts, sampling_params, **options))
