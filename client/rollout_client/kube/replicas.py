"""Patch a RolloutReplica and wait until it is so."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, Self

from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

from rollout_client.kube.api import API_VERSION, KIND, Object, ReplicaApi
from rollout_client.kube.errors import ERRORS, ApiError, ReplicaGone, WaitTimeout
from rollout_client.kube.judge import BASE, Ask, Goal, judge
from rollout_client.verdict import Failed, Reached
from rollout_pod.protocol import SleepSpec, SleepTag

MANAGER: Final = "rollout-client"
_CONFLICTS: Final = 10
OnProgress = Callable[[str, Mapping[str, Any]], None]
"""Called with one line for people and the status."""


class Change:
    """A write that was accepted; ``wait`` follows it."""

    def __init__(self, api: ReplicaApi, namespace: str, ask: Ask) -> None:
        self._api = api
        self._namespace = namespace
        self.ask = ask

    async def wait(
        self, timeout: float = 600.0, *, on_progress: OnProgress | None = None
    ) -> Object:
        """Wait until the replica is what was asked; return its status.

        Args:
            timeout: Seconds.
            on_progress: Told whenever something is new.

        Raises:
            Superseded: another writer changed the same field before.
            UpdateFailed, WeightsUnavailable, Stalled: see there.
            ReplicaGone: it was deleted.
            WaitTimeout: carries the status; the replica goes on by itself.
            ApiError: the API server refuses us.
        """
        seen: Mapping[str, Any] = {}
        told = "nothing was seen of it"
        try:
            async with asyncio.timeout(timeout) as limit:
                async with aclosing(self._objects()) as objects:
                    async for body in objects:
                        seen = (body or {}).get("status") or {}
                        verdict = judge(self.ask, body)
                        if isinstance(verdict, Reached):
                            return dict(seen)
                        if isinstance(verdict, Failed):
                            raise ERRORS[verdict.kind](verdict.message, status=seen)
                        if on_progress is not None and verdict.progress != told:
                            on_progress(verdict.progress, seen)
                        told = verdict.progress
        except TimeoutError as error:
            if not limit.expired():
                raise
            goal = f"{self.ask.name} is not {_named(self.ask)} after {timeout:g} s"
            raise WaitTimeout(f"{goal}: {told}", status=seen) from error
        raise AssertionError("the objects ended")

    async def _objects(self) -> AsyncGenerator[Object | None, None]:
        """The newest object, and then each newer one; None where there is none."""
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda e: isinstance(e, ApiError) and e.is_passing),
            wait=wait_random_exponential(multiplier=0.1, max=5),
            reraise=True,
        )
        name = self.ask.name
        while True:
            body: Object | None = await retrying(self._api.get, self._namespace, name)
            yield body
            if body is None:
                # it may be made anew, but that is another one
                await asyncio.sleep(1)
                continue
            version = body["metadata"]["resourceVersion"]
            try:
                async with aclosing(
                    self._api.watch(self._namespace, name=name, version=version)
                ) as events:
                    async for kind, newer in events:
                        if newer["metadata"]["name"] == name:
                            yield None if kind == "DELETED" else newer
            except ApiError as error:
                if not error.is_passing:
                    raise
                await asyncio.sleep(0.1)


class Replica:
    """One RolloutReplica by name. Every method raises ``ApiError``."""

    def __init__(self, api: ReplicaApi, name: str, namespace: str) -> None:
        self._api = api
        self.name = name
        self.namespace = namespace

    async def get(self) -> Object:
        """The object as it is now.

        Raises:
            ReplicaGone: there is none.
        """
        body = await self._api.get(self.namespace, self.name)
        if body is None:
            raise ReplicaGone(
                f"there is no RolloutReplica {self.name} in namespace {self.namespace}", status={}
            )
        return body

    async def pause(self) -> Change:
        """Close the gate: each request in flight returns its partial."""
        return await self._write({"paused": True}, Goal.PAUSED)

    async def resume(self) -> Change:
        """Open the gate."""
        return await self._write({"paused": False}, Goal.RESUMED)

    async def set_weight_version(self, version: str | None, *, step: int | None = None) -> Change:
        """Ask for a version; None (or ``base``) for the model's own checkpoint.

        Args:
            version: Its name.
            step: The trainer's counter; one that was set before is removed where this is None.
        """
        wanted = None if version == BASE else version
        return await self._write(
            {"weightVersion": wanted, "weightStep": step}, Goal.WEIGHTS, ("weightVersion",)
        )

    async def sleep(self, sleep: SleepSpec) -> Change:
        """Release memory of the engine: exactly what is named, and for as long as it is."""
        spec = {"level": sleep.level, "tags": [tag.value for tag in sleep.tags]}
        return await self._write({"sleep": spec}, Goal.ASLEEP)

    async def wake(self, tags: Collection[SleepTag] = tuple(SleepTag)) -> Change:
        """Take these parts back. With all of them resident it serves, unless it is paused."""
        for _ in range(_CONFLICTS):
            body = await self.get()
            asleep = body["spec"].get("sleep")
            left = SleepSpec.model_validate(asleep).without(tags) if asleep else None
            sleep = {"level": left.level, "tags": list(left.tags)} if left else None
            try:
                # nobody else's sleep is to be forgotten between reading and writing
                return await self._write(
                    {"sleep": sleep}, Goal.AWAKE, version=body["metadata"]["resourceVersion"]
                )
            except ApiError as error:
                if error.code != 409:
                    raise
        raise ApiError(409, "Conflict", f"{self.name} changed {_CONFLICTS} times meanwhile")

    async def delete(self) -> Change:
        """Delete it and what belongs to it."""
        body = await self.get()
        await self._api.delete(self.namespace, self.name)
        return self._change(body, Goal.GONE, {})

    async def _write(
        self,
        spec: Mapping[str, Any],
        goal: Goal,
        fields: tuple[str, ...] = (),
        *,
        version: str | None = None,
    ) -> Change:
        patch: dict[str, Any] = {"spec": dict(spec)}
        if version is not None:
            patch["metadata"] = {"resourceVersion": version}
        try:
            body = await self._api.merge(self.namespace, self.name, patch)
        except ApiError as error:
            if error.code == 404:
                await self.get()
            raise
        return self._change(body, goal, {n: spec[n] for n in fields or spec})

    def _change(self, body: Object, goal: Goal, fields: Mapping[str, Any]) -> Change:
        meta = body["metadata"]
        ask = Ask(
            name=self.name,
            uid=meta["uid"],
            generation=meta.get("generation", 0),
            goal=goal,
            fields=fields,
            history=tuple((body.get("status") or {}).get("history") or ()),
        )
        return Change(self._api, self.namespace, ask)


class Kube:
    """The RolloutReplicas of a cluster. Use ``async with await Kube.connect()``."""

    def __init__(self, api: ReplicaApi) -> None:
        self.api = api

    @classmethod
    async def connect(
        cls,
        *,
        namespace: str | None = None,
        manager: str = MANAGER,
        context: str | None = None,
        server: str | None = None,
    ) -> Self:
        """Connect by the service account, else by the kubeconfig.

        Args:
            namespace: Where none is named; else that of the context or of the pod we run in.
            manager: Who we are: stands in ``status.history[].by``.
            context: Of the kubeconfig.
            server: A plain address instead, for tests.

        Raises:
            ApiError: there is no usable configuration.
        """
        return cls(
            await ReplicaApi.connect(
                namespace=namespace, manager=manager, context=context, server=server
            )
        )

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
        """Close the connections."""
        await self.api.close()

    def replica(self, name: str, namespace: str | None = None) -> Replica:
        """One replica; it is not read yet."""
        return Replica(self.api, name, namespace or self.api.namespace)

    async def apply(self, manifest: Mapping[str, Any]) -> Change:
        """Apply a whole RolloutReplica server-side; ``wait`` waits until it is Ready.

        Raises:
            ValueError: it is none.
            ApiError: the API server refuses it, or another manager owns one of its fields.
        """
        if (manifest.get("apiVersion"), manifest.get("kind")) != (API_VERSION, KIND):
            raise ValueError(f"manifest: must be a {KIND} of {API_VERSION}")
        meta = manifest.get("metadata") or {}
        if not meta.get("name"):
            raise ValueError("manifest: metadata.name is missing")
        replica = self.replica(meta["name"], meta.get("namespace"))
        body = await self.api.apply(replica.namespace, replica.name, manifest)
        return replica._change(body, Goal.READY, {})


def _named(ask: Ask) -> str:
    if ask.goal is Goal.WEIGHTS:
        return f"on {ask.fields.get('weightVersion') or BASE}"
    return str(ask.goal)
