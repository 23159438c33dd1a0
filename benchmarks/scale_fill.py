"""Fills an API server with replicas as an operator has left them: nothing is to be done."""

import asyncio
import base64
import json
import ssl
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from benchmarks.api_server import authority
from rollout_operator.api import names
from rollout_operator.api.replica import Replica
from rollout_operator.apply.kube import PODS, REPLICAS, SECRETS, SERVICES
from rollout_operator.plan import manifests
from rollout_operator.plan.observed import ChildSeen, Ownership, Report, Seen, pod_seen
from rollout_operator.plan.plan import PodDefaults, make_plan
from rollout_operator.plan.status import render_status
from rollout_pod.protocol import StateDocument
from tests.support.operator_kit import running_status
from tests.support.operator_objects import state

Json = dict[str, Any]
NAMESPACE = "scale"
IMAGE = "pod:1"
AT_ONCE = 24
ROOT = Path(__file__).resolve().parent.parent


def address(number: int) -> str:
    """The pod's own address: all of 127.0.0.0/8 is this machine."""
    return f"127.{1 + number // 62500}.{number // 250 % 250}.{1 + number % 250}"


class Api:
    """Requests of the admin."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def send(
        self, method: str, path: str, body: Mapping[str, Any], kind: str = "application/json"
    ) -> Json:
        headers = {"Content-Type": kind}
        async with self._session.request(
            method, self._url + path, data=json.dumps(body), headers=headers
        ) as answer:
            text = await answer.text()
            if answer.status >= 300:
                raise SystemExit(f"{method} {path}: {answer.status} {text[:500]}")
            found: Json = json.loads(text)
            return found


def path(resource: str, name: str = "", subresource: str = "") -> str:
    prefix = f"/apis/{names.API_VERSION}" if resource == REPLICAS else "/api/v1"
    parts = (prefix, "namespaces", NAMESPACE, resource, name, subresource)
    return "/".join(part for part in parts if part)


def session(token: str, kubeconfig: Path) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {token}"},
        connector=aiohttp.TCPConnector(
            limit=AT_ONCE, ssl=ssl.create_default_context(cadata=authority(kubeconfig))
        ),
    )


async def prepare(api: Api) -> None:
    """The kind, the namespace, and the account that a controller would make."""
    crd = yaml.safe_load((ROOT / "crds" / "rolloutreplica.yaml").read_text())
    await api.send("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
    meta = {"metadata": {"name": NAMESPACE}}
    await api.send("POST", "/api/v1/namespaces", meta)
    account = {"metadata": {"name": "default"}}
    await api.send("POST", path("serviceaccounts"), account)
    # the kind is served a moment after it is accepted
    await asyncio.sleep(3)


async def fill(api: Api, numbers: range) -> dict[str, Any]:
    """Make replicas; return the pods' states by address."""
    turns = asyncio.Semaphore(AT_ONCE)
    states: dict[str, Any] = {}

    async def one(number: int) -> None:
        async with turns:
            states[address(number)] = (await _replica(api, number)).model_dump(mode="json")

    async with asyncio.TaskGroup() as group:
        for number in numbers:
            group.create_task(one(number))
    return states


async def _replica(api: Api, number: int) -> StateDocument:
    name = f"r-{number:05}"
    body = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {
            "model": "Qwen/Qwen3-8B",
            "engineArgs": ["--max-model-len=8192"],
            "weights": {"source": {"path": "/checkpoints/{version}"}},
        },
    }
    replica = Replica.parse(await api.send("POST", path(REPLICAS), body))
    assert replica.spec is not None
    token = base64.b64encode(uuid.uuid4().hex.encode()).decode()
    secret = {**manifests.secret(replica), "data": {names.TOKEN_KEY: token}}
    await api.send("POST", path(SECRETS), secret)
    for service in manifests.services(replica):
        await api.send("POST", path(SERVICES), service)
    said = state(
        owner=replica.uid, generation=replica.generation, boot_id=uuid.uuid4().hex,
    )  # fmt: skip
    services = tuple(
        ChildSeen(kind="Service", name=n, owner=Ownership.OURS, complete=True)
        for n in (names.service_name(name), names.nodes_service_name(name))
    )
    secret_seen = ChildSeen(
        kind="Secret", name=names.secret_name(name), owner=Ownership.OURS, complete=True
    )
    defaults = PodDefaults(image=IMAGE)
    now = time.time()
    absent = Seen(secret=secret_seen, services=services)
    (create,) = make_plan(replica, absent, now, defaults=defaults).actions
    made = await api.send("POST", path(PODS), dict(create.manifest))  # type: ignore[union-attr]
    ran = {"status": running_status(address(number))}
    raw = await api.send(
        "PATCH", path(PODS, made["metadata"]["name"], "status"), ran,
        "application/strategic-merge-patch+json",
    )  # fmt: skip
    seen = Seen(
        secret=secret_seen,
        services=services,
        pod=pod_seen(raw, name=name, uid=replica.uid),
        report=Report(state=said),
    )
    plan = make_plan(replica, seen, now, defaults=defaults)
    status = render_status(replica, seen, plan, now).dump()
    whole = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "status": status,
    }
    query = f"?fieldManager={names.MANAGER}&force=true"
    await api.send(
        "PATCH", path(REPLICAS, name, "status") + query, whole, "application/apply-patch+yaml"
    )
    return said
