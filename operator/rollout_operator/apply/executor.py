"""Does what a plan says. A fresh read stands before every create and delete."""

import base64
import secrets
from collections.abc import Callable
from typing import Any, Final

import structlog

from rollout_operator.api import names
from rollout_operator.api.conditions import Reason
from rollout_operator.api.replica import Replica
from rollout_operator.apply.cache import Cache, reread
from rollout_operator.apply.errors import KubeError
from rollout_operator.apply.events import Kind, event
from rollout_operator.apply.kube import EVENTS, PODS, SECRETS, SERVICES, Kube
from rollout_operator.memory import Memory, Token
from rollout_operator.metrics import Metrics
from rollout_operator.plan.actions import (
    Action,
    ApplyService,
    ChildAction,
    CreatePod,
    CreateSecret,
    DeletePod,
    Manifest,
    RepairSecret,
    child_of,
)
from rollout_operator.plan.observed import ChildRefusal, Refusal

INVALID_RETRY_S: Final = 300.0
FORBIDDEN_RETRY_S: Final = 30.0
_TOKEN_BYTES: Final = 32
_QUOTA: Final = "exceeded quota"

log = structlog.get_logger(__name__)


class Executor:
    """Acts on the API server and remembers what it answered."""

    def __init__(
        self,
        kube: Kube,
        *,
        pods: Cache,
        services: Cache,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._kube = kube
        self._pods = pods
        self._services = services
        self._metrics = metrics
        self._clock = clock

    async def execute(self, action: Action, replica: Replica, memory: Memory) -> bool:
        """Do one thing. What turns out to be done or undone already is left to the next plan.

        Returns whether what stands behind it may follow: not where a person has to mend something.

        Raises:
            KubeError: the API server did not answer, or refused what no person can have caused.
        """
        self._metrics.actions.labels(action=type(action).__name__).inc()
        match action:
            case CreatePod():
                await self._create_pod(action, replica, memory)
            case DeletePod():
                await self._delete_pod(action, replica, memory)
            case _:
                return await self._make_child(action, replica, memory)
        return True

    async def _make_child(self, action: ChildAction, replica: Replica, memory: Memory) -> bool:
        child = child_of(action)
        try:
            await self._child(action, replica, memory)
        except KubeError as error:
            if not (error.invalid or error.forbidden):
                raise
            memory.refused[child] = ChildRefusal(
                child=child,
                reason=_forbidden(error),
                message=f"the API server refuses {child}: {error.message or error.reason}",
                retry_at=self._clock() + FORBIDDEN_RETRY_S,
            )
            return False
        memory.refused.pop(child, None)
        return True

    async def _child(self, action: ChildAction, replica: Replica, memory: Memory) -> None:
        match action:
            case CreateSecret():
                raw = await self._create_secret(action.manifest)
                memory.token = Token.read(raw, replica=replica.name, uid=replica.uid)
            case RepairSecret():
                raw = await self._kube.merge(
                    SECRETS, replica.namespace, action.name, {"data": _token()}
                )
                memory.token = Token.read(raw, replica=replica.name, uid=replica.uid)
            case ApplyService():
                await self._apply_service(action.manifest)

    async def tell(self, replica: Replica, kind: Kind, reason: str, message: str) -> None:
        """Post an event; its loss is no harm."""
        body = event(replica, kind, reason, message, now=self._clock())
        try:
            await self._kube.create(EVENTS, replica.namespace, body)
        except KubeError as error:
            log.warning("event lost", replica=replica.name, reason=reason, error=str(error))

    async def _create_secret(self, manifest: Manifest) -> dict[str, Any] | None:
        namespace, name = _key(manifest)
        found = await self._kube.get(SECRETS, namespace, name)
        if found is not None:
            return found
        return await self._create(SECRETS, namespace, {**manifest, "data": _token()})

    async def _apply_service(self, manifest: Manifest) -> None:
        key = _key(manifest)
        known = self._services.get(key)
        found = await reread(self._kube, self._services, SERVICES, key)
        if found is not None:
            uid = found["metadata"]["uid"]
            if known is None or known["metadata"]["uid"] != uid:
                # somebody was faster: whose it is, the next plan sees
                return
            # a precondition: never one that takes its place meanwhile
            manifest = {**manifest, "metadata": {**manifest["metadata"], "uid": uid}}
        self._services.put(await self._kube.apply(SERVICES, *key, manifest))

    async def _create_pod(self, action: CreatePod, replica: Replica, memory: Memory) -> None:
        key = _key(action.manifest)
        if await reread(self._kube, self._pods, PODS, key) is not None:
            return
        try:
            created = await self._create(PODS, key[0], action.manifest)
        except KubeError as error:
            if not (error.invalid or error.forbidden):
                raise
            memory.refusal = self._refusal(action.hash, error)
            return
        memory.refusal = None
        if created is not None:
            self._pods.put(created)
            log.info("pod created", replica=replica.name, namespace=key[0], pod=key[1])
            await self.tell(replica, "Normal", "PodCreated", f"created pod {key[1]}")

    async def _delete_pod(self, action: DeletePod, replica: Replica, memory: Memory) -> None:
        key = (replica.namespace, action.name)
        found = await reread(self._kube, self._pods, PODS, key)
        if (
            found is None
            or found["metadata"]["uid"] != action.uid
            or (found["metadata"].get("deletionTimestamp") and not action.force)
            or not await self._accepted(action, replica, memory)
        ):
            return
        try:
            await self._kube.delete(PODS, *key, uid=action.uid, force=action.force)
        except KubeError as error:
            # 404 and 409: gone, or another one by now
            if not (error.absent or error.conflict):
                raise
        # what DELETE answers may be older than the news that the pod is gone
        await reread(self._kube, self._pods, PODS, key)
        log.info(
            "pod deleted",
            replica=replica.name,
            namespace=replica.namespace,
            pod=action.name,
            uid=action.uid,
            reason=action.reason,
        )
        await self.tell(replica, "Normal", action.reason, action.message)

    async def _accepted(self, action: DeletePod, replica: Replica, memory: Memory) -> bool:
        if action.replacement is None:
            return True
        try:
            await self._kube.create(PODS, replica.namespace, action.replacement, dry_run=True)
        except KubeError as error:
            # its name is taken still, and a quota counts the old one still
            if error.conflict or (error.forbidden and _QUOTA in error.message):
                return True
            if not (error.invalid or error.forbidden):
                raise
            memory.refusal = self._refusal(action.replacement_hash, error)
            return False
        return True

    async def _create(self, resource: str, namespace: str, body: Manifest) -> dict[str, Any] | None:
        try:
            return await self._kube.create(resource, namespace, body)
        except KubeError as error:
            if not error.conflict:
                raise
            return await self._kube.get(resource, namespace, body["metadata"]["name"])

    def _refusal(self, wanted: str, error: KubeError) -> Refusal:
        invalid = error.invalid
        return Refusal(
            hash=wanted,
            reason=Reason.INVALID_TEMPLATE if invalid else _forbidden(error),
            message=f"the API server refuses the pod: {error.message or error.reason}",
            retry_at=self._clock() + (INVALID_RETRY_S if invalid else FORBIDDEN_RETRY_S),
        )


def _forbidden(error: KubeError) -> Reason:
    return Reason.QUOTA_EXCEEDED if _QUOTA in error.message else Reason.POD_FORBIDDEN


def _key(manifest: Manifest) -> tuple[str, str]:
    meta = manifest["metadata"]
    return meta["namespace"], meta["name"]


def _token() -> dict[str, str]:
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    return {names.TOKEN_KEY: base64.b64encode(token.encode()).decode()}
