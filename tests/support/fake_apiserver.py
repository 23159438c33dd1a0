"""An API server in process: resource versions, watches, server-side apply, and faults on request.

Covers what the operator and Kopf use, for the kinds of one namespace, and records every request.
"""

import asyncio
import json
import pickle
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp
from aiohttp import web

Json = dict[str, Any]

KINDS = {
    "rolloutreplicas": ("rollout.dev/v1alpha1", "RolloutReplica"),
    "pods": ("v1", "Pod"),
    "services": ("v1", "Service"),
    "secrets": ("v1", "Secret"),
    "events": ("v1", "Event"),
    "nodes": ("v1", "Node"),
    "leases": ("coordination.k8s.io/v1", "Lease"),
}


_ASIDE = ("events", "leases")
"""What an operator writes that changes no replica."""


@dataclass(frozen=True)
class Request:
    """One request, as it came."""

    method: str
    resource: str
    name: str
    subresource: str
    query: dict[str, str]
    content_type: str
    body: Any
    door: str = ""
    """Which address it came to."""
    at: float = 0.0
    """Monotonic."""
    namespace: str = ""

    @property
    def write(self) -> bool:
        return self.method != "GET"

    def __str__(self) -> str:
        target = "/".join(filter(None, (self.resource, self.name, self.subresource)))
        return f"{self.method} {target}" + ("?dryRun" if "dryRun" in self.query else "")


@dataclass
class Fault:
    """Answers ``count`` matching requests with ``status``."""

    match: Callable[[Request], bool]
    status: int
    count: int = 1
    message: str = "made to fail"
    headers: dict[str, str] = field(default_factory=dict)


class Refused(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message


class Made(Refused):
    """A fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.status, "Made", fault.message)
        self.headers = fault.headers


class FakeApiServer:
    """Holds objects of one namespace; tests change them as kubelet or a person would."""

    def __init__(self, namespace: str = "ns") -> None:
        self.namespace = namespace
        self.clock = time.time
        self.requests: list[Request] = []
        self.accepted: list[Request] = []
        """Writes that were done, in the order in which they were."""
        self.faults: list[Fault] = []
        self.page = 0
        """Lists are cut into pages of so many where a client asks for pages; 0: they are not."""
        self.muted: set[str] = set()
        """Resources whose watch events are lost."""
        self.admit: Callable[[Json], None] = lambda body: None
        """May raise Refused for a pod that is to be created."""
        self.url = ""
        self.proxied: list[str] = []
        """The Authorization of every request to a pod."""
        self.cut: set[str] = set()
        """Doors behind which nothing arrives, and from which nothing leaves."""
        self._runner: web.AppRunner | None = None
        self._doors: dict[int, str] = {}
        self._version = 100
        self._objects: dict[str, dict[str, Json]] = {kind: {} for kind in KINDS}
        self._watches: dict[str, list[asyncio.Queue[Json | None]]] = {kind: [] for kind in KINDS}

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeApiServer"]:
        app = web.Application()
        app.router.add_get("/api", self._discover)
        app.router.add_get("/apis", self._discover)
        app.router.add_get("/api/v1", self._resources)
        app.router.add_get("/apis/rollout.dev/v1alpha1", self._resources)
        app.router.add_route(
            "*",
            "/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy/{rest:.*}",
            self._proxy,
        )
        for prefix in (
            "/api/v1",
            "/apis/rollout.dev/v1alpha1",
            "/apis/coordination.k8s.io/v1",
        ):
            base = prefix + "/namespaces/{namespace}/{resource}"
            for path in (base, base + "/{name}", base + "/{name}/{subresource}"):
                app.router.add_route("*", path, self._serve)
        app.router.add_get("/api/v1/{resource:nodes}/{name}", self._serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        self._runner = runner
        self.url = await self.open_door("")
        try:
            yield self
        finally:
            self.end_watches()
            await runner.cleanup()

    def handle(self, seen: Request) -> Json:
        """Do what a request asks for, and keep it.

        Raises:
            Refused: what a real one would refuse, or is made to (``Made``).
        """
        self.requests.append(seen)
        for fault in self.faults:
            if fault.count > 0 and fault.match(seen):
                fault.count -= 1
                raise Made(fault)
        answer = self._answer(seen)
        if seen.write:
            self.accepted.append(seen)
        return answer

    def watch(self, resource: str) -> "asyncio.Queue[Json | None]":
        """Return a queue that gets every later event; None and ERROR end it."""
        queue: asyncio.Queue[Json | None] = asyncio.Queue()
        self._watches[resource].append(queue)
        return queue

    def unwatch(self, resource: str, queue: "asyncio.Queue[Json | None]") -> None:
        self._watches[resource].remove(queue)

    def peek(self, resource: str) -> list[Json]:
        """Return the objects themselves: to be read only."""
        return list(self._objects[resource].values())

    def all(self, resource: str) -> list[Json]:
        """Return the objects as a list would."""
        return [_copy(o) for o in self._objects[resource].values()]

    # -- what tests do

    async def open_door(self, name: str) -> str:
        """Listen on one more address, so that requests tell by which they came."""
        assert self._runner is not None
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        (port,) = {port for _, port in self._runner.addresses} - self._doors.keys()
        self._doors[port] = name
        return f"http://127.0.0.1:{port}"

    def get(self, resource: str, name: str) -> Json | None:
        return self._objects[resource].get(name)

    def put(self, resource: str, body: Json) -> Json:
        """Create an object as somebody else would."""
        return self._create(resource, _copy(body))

    def change(self, resource: str, name: str, patch: Json, *, manager: str = "kubectl") -> Json:
        """Merge a patch as somebody else would; a changed spec makes a new generation."""
        return self._store(
            resource, self._owned(_merged(self._objects[resource][name], patch), patch, manager)
        )

    def remove(self, resource: str, name: str) -> None:
        """Let an object be gone; a replica takes its children along, pods with grace."""
        raw = self._objects[resource].pop(name)
        self._version += 1
        raw["metadata"]["resourceVersion"] = str(self._version)
        self._tell(resource, "DELETED", raw)
        uid = raw["metadata"]["uid"]
        for kind in ("secrets", "services", "pods"):
            for child in list(self._objects[kind].values()):
                owners = child["metadata"].get("ownerReferences") or ()
                if any(ref["uid"] == uid for ref in owners):
                    if kind == "pods":
                        self.end_pod(child["metadata"]["name"])
                    else:
                        self.remove(kind, child["metadata"]["name"])

    def collect_garbage(self) -> None:
        """Remove what was made for a replica that is gone by then."""
        alive = {raw["metadata"]["uid"] for raw in self._objects["rolloutreplicas"].values()}
        for kind in ("secrets", "services", "pods"):
            for child in list(self._objects[kind].values()):
                owners = child["metadata"].get("ownerReferences") or ()
                if owners and not any(ref["uid"] in alive for ref in owners):
                    if kind == "pods":
                        self.end_pod(child["metadata"]["name"])
                    else:
                        self.remove(kind, child["metadata"]["name"])

    def expire_watches(self) -> None:
        """End all watches with 410: clients have to list again."""
        gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
        for queues in self._watches.values():
            for queue in queues:
                queue.put_nowait({"type": "ERROR", "object": gone})

    def end_watches(self) -> None:
        for queues in self._watches.values():
            for queue in queues:
                queue.put_nowait(None)

    def writes(self, since: int = 0) -> list[str]:
        """Return the writes from request number ``since`` on, but events and the Lease."""
        return [str(r) for r in self.requests[since:] if r.write and r.resource not in _ASIDE]

    def asked(self) -> int:
        """Return how many requests there were, but for the Lease."""
        return sum(r.resource != "leases" for r in self.requests)

    def events(self) -> list[tuple[str, str]]:
        return [(e["type"], e["reason"]) for e in self._objects["events"].values()]

    # -- HTTP

    async def _discover(self, request: web.Request) -> web.Response:
        if request.path == "/api":
            return web.json_response({"versions": ["v1"]})
        version = {"groupVersion": "rollout.dev/v1alpha1", "version": "v1alpha1"}
        group = {"name": "rollout.dev", "versions": [version], "preferredVersion": version}
        return web.json_response({"groups": [group]})

    async def _resources(self, request: web.Request) -> web.Response:
        version = request.path.removeprefix("/apis/").removeprefix("/api/")
        verbs = ["get", "list", "watch", "create", "patch", "delete"]
        found = []
        for name, (api, kind) in KINDS.items():
            if api == version and name != "nodes":
                entry = {"kind": kind, "namespaced": True, "verbs": verbs}
                singular = kind.lower()
                found.append({"name": name, "singularName": singular, **entry})
                if name == "rolloutreplicas":
                    found.append({"name": f"{name}/status", "singularName": "", **entry})
        # Kopf begins when it knows of namespaces
        cluster = {"kind": "Namespace", "namespaced": False, "verbs": verbs}
        found.append({"name": "namespaces", "singularName": "namespace", **cluster})
        return web.json_response({"resources": found})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        info = request.match_info
        body = await request.read()
        door = self._door(request)
        await self._while_cut(door)
        seen = Request(
            method=request.method,
            resource=info["resource"],
            name=info.get("name", ""),
            subresource=info.get("subresource", ""),
            query=dict(request.query),
            content_type=request.content_type,
            body=json.loads(body) if body else None,
            door=door,
            at=time.monotonic(),
            namespace=info.get("namespace", ""),
        )
        if seen.namespace not in ("", self.namespace):
            if seen.write or seen.name:
                raise web.HTTPForbidden(text=f"no test needs objects of {seen.namespace}")
            # there are none
            seen.query["labelSelector"] = "of-another-namespace"
        if seen.query.get("watch") == "true":
            return await self._watch(request, seen)
        try:
            answer = web.json_response(self.handle(seen))
        except Made as fault:
            answer = _status(fault.status, fault.reason, fault.message, fault.headers)
        except Refused as refusal:
            answer = _status(refusal.status, refusal.reason, refusal.message, {})
        await self._while_cut(door)
        return answer

    async def _proxy(self, request: web.Request) -> web.Response:
        """Hand a request on to a pod, as the real one does: without its Authorization."""
        info = request.match_info
        pod = self._objects["pods"].get(info["name"]) or {}
        ip = (pod.get("status") or {}).get("podIP")
        self.proxied.append(request.headers.get("Authorization", ""))
        headers = {k: v for k, v in request.headers.items() if k.lower() != "authorization"}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(
                    request.method,
                    f"http://{ip}:{info['port']}/{info['rest']}",
                    params=request.query,
                    headers=headers,
                    data=await request.read(),
                ) as answer,
            ):
                return web.Response(
                    body=await answer.read(),
                    status=answer.status,
                    content_type=answer.content_type,
                )
        except aiohttp.ClientError as error:
            return _status(503, "ServiceUnavailable", f"error trying to reach: {error}", {})

    def _door(self, request: web.Request) -> str:
        assert request.transport is not None
        return self._doors[request.transport.get_extra_info("sockname")[1]]

    async def _while_cut(self, door: str) -> None:
        """Hold what a partition swallows; whoever waits gives up sooner or later."""
        while door in self.cut:
            await asyncio.sleep(0.02)

    async def _watch(self, request: web.Request, seen: Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        queue = self.watch(seen.resource)
        shown = {
            raw["metadata"]["uid"]
            for raw in self._objects[seen.resource].values()
            if _selected(raw, seen.query)
        }
        since = int(seen.query.get("resourceVersion") or 0)
        for raw in self._objects[seen.resource].values():
            if int(raw["metadata"]["resourceVersion"]) > since:
                queue.put_nowait({"type": "MODIFIED", "object": _copy(raw)})
        try:
            while (item := await queue.get()) is not None:
                if item["type"] != "ERROR" and not self._shows(item, seen.query, shown):
                    continue
                await self._while_cut(seen.door)
                await response.write(json.dumps(item).encode() + b"\n")
                if item["type"] == "ERROR":
                    break
        except ConnectionError:
            return response
        finally:
            self.unwatch(seen.resource, queue)
        return response

    def _shows(self, item: Json, query: dict[str, str], shown: set[str]) -> bool:
        """What leaves a watch's selector is DELETED for it."""
        uid = item["object"]["metadata"]["uid"]
        if _selected(item["object"], query):
            shown.add(uid)
            return True
        was_shown = uid in shown
        shown.discard(uid)
        item["type"] = "DELETED"
        return was_shown

    def _answer(self, seen: Request) -> Json:
        objects = self._objects[seen.resource]
        if seen.method == "GET" and not seen.name:
            api, kind = KINDS[seen.resource]
            meta = {"resourceVersion": str(self._version)}
            items = [o for o in self.all(seen.resource) if _selected(o, seen.query)]
            if self.page and "limit" in seen.query:
                start = int(seen.query.get("continue") or 0)
                if start + self.page < len(items):
                    meta["continue"] = str(start + self.page)
                items = items[start : start + self.page]
            return {"apiVersion": api, "kind": f"{kind}List", "metadata": meta, "items": items}
        if seen.method == "POST":
            return self._post(seen)
        raw = objects.get(seen.name)
        applying = seen.content_type == "application/apply-patch+yaml"
        if raw is None:
            if applying and not seen.subresource:
                if "uid" in seen.body["metadata"]:
                    raise Refused(409, "Conflict", "there is no object of this uid")
                return self._create(seen.resource, _copy(seen.body))
            raise Refused(404, "NotFound", f"{seen.resource} {seen.name} not found")
        if seen.method == "GET":
            return _copy(raw)
        if seen.method == "DELETE":
            return self._delete(seen, raw)
        uid = (seen.body.get("metadata") or {}).get("uid")
        if uid and uid != raw["metadata"]["uid"]:
            raise Refused(409, "Conflict", "uid mismatch")
        if seen.subresource == "status":
            # applied by its only owner: what it does not name is gone
            return self._store(seen.resource, {**raw, "status": seen.body["status"]})
        if seen.method == "PUT":
            wanted = seen.body["metadata"].get("resourceVersion")
            if wanted and wanted != raw["metadata"]["resourceVersion"]:
                raise Refused(409, "Conflict", "the object has been modified")
            return self._store(seen.resource, _copy(seen.body))
        manager = seen.query.get("fieldManager", "unknown")
        return self._store(seen.resource, self._owned(_merged(raw, seen.body), seen.body, manager))

    def _post(self, seen: Request) -> Json:
        name = seen.body["metadata"]["name"]
        if seen.resource == "pods":
            self.admit(seen.body)
        if name in self._objects[seen.resource]:
            raise Refused(409, "AlreadyExists", f"{seen.resource} {name} already exists")
        if "dryRun" in seen.query:
            return _copy(seen.body)
        return self._create(seen.resource, _copy(seen.body))

    def _delete(self, seen: Request, raw: Json) -> Json:
        wanted = ((seen.body or {}).get("preconditions") or {}).get("uid")
        if wanted and wanted != raw["metadata"]["uid"]:
            raise Refused(409, "Conflict", "the uid in the precondition does not match")
        if seen.resource == "pods" and (seen.body or {}).get("gracePeriodSeconds") != 0:
            return self.end_pod(seen.name)
        self.remove(seen.resource, seen.name)
        return {"kind": "Status", "status": "Success"}

    def end_pod(self, name: str) -> Json:
        """Begin a pod's end; kubelet's part is the test's."""
        known = self._objects["pods"][name]
        if known["metadata"].get("deletionTimestamp"):
            return _copy(known)
        return self.change("pods", name, {"metadata": {"deletionTimestamp": self._now()}})

    # -- the store

    def _create(self, resource: str, body: Json) -> Json:
        api, kind = KINDS[resource]
        meta = body.setdefault("metadata", {})
        body |= {"apiVersion": api, "kind": kind}
        meta |= {
            "namespace": self.namespace,
            "uid": str(uuid.uuid4()),
            "creationTimestamp": self._now(),
            "generation": 1,
        }
        return self._store(resource, body, kind="ADDED")

    def _store(self, resource: str, body: Json, kind: str = "MODIFIED") -> Json:
        name = body["metadata"]["name"]
        old = self._objects[resource].get(name)
        if old == body:
            return _copy(body)
        self._version += 1
        if old is not None and old.get("spec") != body.get("spec"):
            body["metadata"] = {
                **body["metadata"],
                "generation": old["metadata"]["generation"] + 1,
            }
        body["metadata"] = {**body["metadata"], "resourceVersion": str(self._version)}
        self._objects[resource][name] = body
        self._tell(resource, kind, body)
        return _copy(body)

    def _owned(self, raw: Json, patch: Json, manager: str) -> Json:
        """Keep ``managedFields`` for the one field whose owner the operator reads."""
        if "weightVersion" not in (patch.get("spec") or {}):
            return raw
        fields = {"f:spec": {"f:weightVersion": {}}}
        mine = {"manager": manager, "operation": "Update", "time": self._now(), "fieldsV1": fields}
        owners = [] if patch["spec"]["weightVersion"] is None else [mine]
        return {**raw, "metadata": {**raw["metadata"], "managedFields": owners}}

    def _now(self) -> str:
        return datetime.fromtimestamp(self.clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _tell(self, resource: str, kind: str, raw: Json) -> None:
        if resource in self.muted:
            return
        for queue in self._watches[resource]:
            queue.put_nowait({"type": kind, "object": _copy(raw)})


def _selected(raw: Json, query: dict[str, str]) -> bool:
    """Whether the labels are as ``labelSelector`` (by equality) wants them."""
    labels = (raw["metadata"].get("labels") or {}).items()
    for part in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = part.partition("=")
        if ((key.removesuffix("!"), value) in labels) is key.endswith("!"):
            return False
    return True


def _copy(body: Any) -> Any:
    """A tenth of what ``copy.deepcopy`` takes."""
    return pickle.loads(pickle.dumps(body, pickle.HIGHEST_PROTOCOL))


def _merged(old: Any, patch: Any) -> Any:
    if not isinstance(patch, dict) or not isinstance(old, dict):
        return _copy(patch)
    new = dict(old)
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = _merged(new.get(key), value)
    return new


def _status(status: int, reason: str, message: str, headers: dict[str, str]) -> web.Response:
    body = {"kind": "Status", "code": status, "reason": reason, "message": message}
    return web.json_response(body, status=status, headers=headers)
