"""The trainer's side: steer the replicas that generate, and give them each new version."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

from rollout_client.trainer.control import Control
from rollout_client.trainer.fanout import Reached, fan_out
from rollout_client.trainer.fleet import Fleet
from rollout_client.trainer.targets import Target
from rollout_client.trainer.update import Update
from rollout_client.trainer.updates import Results, Settings, Updates
from rollout_client.trainer.weights import Keep, Names, Specs, Weights
from rollout_client.trainer.wishes import Open, Pause, Release, TakeBack, Wish, version_of
from rollout_pod.protocol import SleepSpec, SleepTag, WeightsSource

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from rollout_client.trainer.ranks import Ranks

ALL_TAGS: Final = (SleepTag.WEIGHTS, SleepTag.KV_CACHE)


class ServerAdapter:
    """Steers one or many replicas for a trainer. Use it as an async context manager.

    Every method asks all replicas at once, waits until each has become what was asked, and returns
    one result for each. Where one fails, the others are not stopped, and the method raises: the
    ``AdapterError`` itself where there is one replica, else ``ReplicaErrors``; ``results`` of
    either has all of them. ``except* Superseded`` and the like catch both. All methods may be
    called again after any failure: they ask for a state and not for a change.

    On a trainer of many ranks, make one on each of them, with the same arguments. Only the sender
    steers and sends; on other ranks ``update_weights`` takes part in gathering, and all other
    methods return ``{}`` at once.

    Args:
        targets: one or several. ``ReplicaTarget.here()`` is the replica whose pod we run in.
        names: the checkpoint's name of each tensor; a function (None: is not sent) or a mapping
            (what it lacks keeps its name).
        cast: the type in which floating-point tensors are sent: one for all, or a function of name
            and type. None sends them as they are.
        keep: what is kept of the last version to send it again to a pod that has lost it (one that
            restarted). ``reference``: the mapping, or the function that was given; it is sent again
            only while its tensors have not been written to since. ``copy``: the tensors, in host
            memory, of which it takes a whole model. ``nothing``: only the next ``update_weights``
            brings such a pod back.
        resend: send again by itself, whenever a pod asks (``state.needs``). Not where several
            ranks gather (unless ``keep`` is ``copy``): call ``resend`` on all of them.
        transport: ``auto`` picks the fastest that works and the results say which; a named one
            that cannot work is an error.
        sleep_level: that of ``release``: 2 drops the weights, 1 keeps them in host memory.
        timeout_s: for each replica and call that names none.
        group: the ranks that call ``update_weights`` together (``"world"``: all), because every
            one of them is needed to gather a tensor; None where each rank has whole tensors.
        sender: whether this rank steers and sends; None: rank 0 of ``group``, and every rank
            where there is no group.
        gpu: the present GPU of this rank, for pairs that come one after another; None: the one that
            is present when they are handed over.
        manager: who we are, in ``status.history[].by``.
        server: a plain address of the API server instead of the usual configuration, for tests.
    """

    def __init__(
        self,
        targets: Target | Sequence[Target],
        *,
        names: Names | None = None,
        cast: "torch.dtype | Callable[[str, torch.dtype], torch.dtype] | None" = None,
        keep: Keep = "reference",
        resend: bool = True,
        transport: Literal["auto", "shared_memory", "cuda_ipc"] = "auto",
        sleep_level: Literal[1, 2] = 2,
        timeout_s: float = 600.0,
        group: "ProcessGroup | Literal['world'] | None" = None,
        sender: bool | None = None,
        gpu: int | None = None,
        manager: str = "rollout-trainer",
        server: str | None = None,
    ) -> None:
        self._sleep_level = sleep_level
        self._timeout_s = timeout_s
        several = targets if isinstance(targets, Sequence) else (targets,)
        self._fleet = Fleet(several, manager=manager, server=server)
        self._is_sender = sender is not False
        ranks: Ranks | None = None
        if group is not None:
            from rollout_client.trainer import ranks as gathering  # torch

            ranks = gathering.Ranks(group, sender=sender)
            self._is_sender = ranks.is_sender
        settings = Settings(names, cast, keep, resend, transport, gpu)
        self._updates = Updates(self._fleet, settings, ranks, sender=self._is_sender)
        self._update: Update | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Give up what is being sent, close all connections and give memory back. Idempotent."""
        if self._update is not None:
            await self._update.give_up()
        await self._updates.aclose()
        await self._fleet.aclose()

    # --- memory

    async def resume(
        self, tags: Collection[str] = ALL_TAGS, *, timeout_s: float | None = None
    ) -> Results:
        """Take released memory back (a wake-up); returns when it is resident.

        Nothing is generated before all of it is, and after level 2 not before a complete update.
        A replica that was paused stays paused: ``resume_generation`` is another call.

        Args:
            tags: ``weights``, ``kv_cache`` or both.
            timeout_s: for each replica.
        """
        return await self._make(TakeBack(frozenset(map(SleepTag, tags))), timeout_s)

    async def release(
        self,
        level: Literal[1, 2] | None = None,
        tags: Collection[str] = ALL_TAGS,
        *,
        timeout_s: float | None = None,
    ) -> Results:
        """Release memory of the engine for the trainer; returns when it is free.

        Requests in flight return their partials first. On CPU nothing is released.

        Args:
            level: 1 keeps the weights in host memory, 2 drops them; None: ``sleep_level``.
            tags: what is released; exactly that, whatever was released before.
            timeout_s: for each replica.

        Raises:
            Refused: the engine was started so that it cannot sleep.
        """
        sleep = SleepSpec(level=level or self._sleep_level, tags=tuple(map(SleepTag, tags)))
        return await self._make(Release(sleep), timeout_s)

    # --- generation

    async def cancel(self, *, timeout_s: float | None = None) -> Results:
        """Stop generation: returns when every request in flight has returned its partial and the
        engines hold none. New ones wait or are refused until ``resume_generation``.
        """
        return await self._make(Pause(), timeout_s)

    async def resume_generation(self, *, timeout_s: float | None = None) -> Results:
        """Let generation go on after ``cancel``; returns when the gates are open."""
        return await self._make(Open(), timeout_s)

    async def clear_kv_cache(self, *, timeout_s: float = 30.0) -> Results:
        """Forget what prefix, multimodal and encoder caches hold. Generation goes on.

        Every update and every release of the KV cache does so by itself.

        Args:
            timeout_s: how long it is tried: a request in flight holds the prefix cache.

        Raises:
            Unreachable: a cache was in use all the time.
            Asleep: the engine sleeps.
            Refused: it is owned by an operator, and its push socket is not here (``run_dir``).
        """

        async def work(control: Control) -> Reached:
            return Reached(await control.clear_caches(timeout_s))

        return await self._each("without cached blocks", work, timeout_s + 200.0)

    # --- weights

    async def update_weights(
        self,
        weights: Weights | None = None,
        *,
        global_steps: int | None = None,
        version: str | None = None,
        source: WeightsSource | None = None,
        manifest: Specs | None = None,
        timeout_s: float | None = None,
    ) -> Results:
        """Bring a version to every replica; returns when each of its ranks has committed it.

        Prepare (every rank checks the manifest while it still serves), close the gate and return
        partials, send in buckets, load, clear all caches, commit, open the gate: the pods do these
        steps by themselves. A replica that is paused stays so, and one whose KV cache is released
        too. Where one rank fails, the replica serves nothing, or the version before it: never a
        mix. With ``group`` every rank of it has to call this.

        Args:
            weights: what to send; see ``Weights``. It is read once, and must not change before
                this returns. None: nothing is sent, and the replicas fetch the version from
                ``spec.weights.source``, or from ``source``.
            global_steps: the trainer's counter; replicas hand it on with every answer.
            version: its name; None: ``step-{global_steps}``. One name stands for one set of
                bytes: a replica that holds this version already is sent nothing.
            source: of pods without an operator, where they fetch the version, if nothing is sent.
            manifest: name, type and shape of each tensor, in the order in which they come; only of
                use for pairs that come one after another, and only for the first time. Without it
                the first ones wait in host memory until their end is known.
            timeout_s: for each replica, for all of it.

        Raises:
            Superseded: another writer asked for another version before this one was committed.
            UpdateFailed: the replica refused or lost the bytes; it says what it serves instead.
            WeightsUnavailable: nothing was sent, and the version's source does not have it.
            Asleep: the weights are released: ``resume(("weights",))`` first.
            Refused: ``spec.weights.source`` is not what this needs; the push socket is not here.
            PeerFailed: on ranks that do not send, whatever failed on the one that does.
            Late, Unreachable, ReplicaGone: see there.
            ValueError: neither a version nor a step; two tensors of one name; and the like.
                Nothing was asked of anybody.
        """
        update = self.begin_update(
            weights, global_steps=global_steps, version=version, source=source,
            manifest=manifest, timeout_s=timeout_s,
        )  # fmt: skip
        try:
            return await update.wait()
        except asyncio.CancelledError:
            await update.give_up()
            raise

    def begin_update(
        self,
        weights: Weights | None = None,
        *,
        global_steps: int | None = None,
        version: str | None = None,
        source: WeightsSource | None = None,
        manifest: Specs | None = None,
        timeout_s: float | None = None,
    ) -> Update:
        """``update_weights`` that does not wait: returns a handle at once (in a running loop).

        Tensors are read on another thread meanwhile, and must not change before its ``wait``
        returns. Takes and raises what ``update_weights`` does.

        Raises:
            RuntimeError: an earlier update has not ended: wait for it, or give it up.
        """
        if self._update is not None and not self._update.done():
            raise RuntimeError(
                f"the update to {self._update.version} has not ended: wait for it, or give it up"
            )
        wish = version_of(version, global_steps, source, pushes=weights is not None)
        limit = self._timeout_s if timeout_s is None else timeout_s
        work = (
            self._updates.fetch(wish, limit)
            if weights is None
            else self._updates.send(wish, weights, manifest, limit)
        )
        self._update = Update(wish.version, work)
        return self._update

    async def resend(self, *, timeout_s: float | None = None) -> Results:
        """Send the last version again to every replica that asks for it; with ``group``, on every
        rank of it. Returns ``{}`` where none asks.

        Raises:
            Refused: nothing was kept of it, or its tensors have been written to since.
        """
        return await self._updates.resend(self._timeout_s if timeout_s is None else timeout_s)

    async def status(self, *, timeout_s: float = 10.0) -> Results:
        """What each replica does and holds now."""

        async def work(control: Control) -> Reached:
            return Reached(await control.facts())

        return await self._each("heard of", work, timeout_s)

    # --- all of them

    async def _make(self, wish: Wish, timeout_s: float | None) -> Results:
        async def work(control: Control) -> Reached:
            return Reached(await (await control.wish(wish)).reached())

        return await self._each(str(wish), work, timeout_s)

    async def _each(
        self, goal: str, work: Callable[[Control], Awaitable[Reached]], timeout_s: float | None
    ) -> Results:
        if not self._is_sender:
            return {}
        limit = self._timeout_s if timeout_s is None else timeout_s
        return await fan_out(await self._fleet.controls(), goal, work, limit)
