"""Two RolloutReplicas of the dev cluster: the adapter patches their ``weightVersion``."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from devcluster.client import Cluster, CommandError, connect
from devcluster.errors import DevclusterError
from devcluster.settings import load_settings
from examples.async_grpo.model import save_model
from examples.async_grpo.replicas import Published, Replicas, RunError, by_folder
from rollout_client.kube import Kube, KubeError, ReplicaGone
from rollout_client.trainer import SelectorTarget, SyncServerAdapter

MANIFEST = Path(__file__).with_name("replica.yaml")
NAMESPACE = "rollout"
MANAGER = "async-grpo"
READY_S = 300.0
UPDATE_S = 120.0
GONE_S = 90.0


@asynccontextmanager
async def cluster_replicas(model: Any, *, count: int = 2) -> AsyncIterator[Replicas]:
    """Apply them, wait until they are ready, and delete them afterwards.

    Args:
        model: What they start with.
        count: How many.

    Raises:
        RunError: there is no cluster, no operator, or a replica does not become ready.
    """
    manifest = yaml.safe_load(MANIFEST.read_text())
    folder = Path(manifest["spec"]["template"]["spec"]["volumes"][0]["hostPath"]["path"])
    names = [f"{manifest['metadata']['name']}-{n}" for n in range(count)]
    selector = f"app={manifest['metadata']['labels']['app']}"
    try:
        cluster = _cluster()
        target = SelectorTarget(selector=selector, namespace=NAMESPACE)
        async with await Kube.connect(namespace=NAMESPACE, manager=MANAGER) as kube:
            shutil.rmtree(folder, ignore_errors=True)
            save_model(model, folder / manifest["spec"]["model"].rpartition("/")[2])
            try:
                await _apply(kube, manifest, names)
                urls = [await asyncio.to_thread(_url, cluster, name) for name in names]
                # the trainer is in no pod of theirs: it cannot share memory with them
                with SyncServerAdapter(target, timeout_s=UPDATE_S, manager=MANAGER) as adapter:
                    deliver = by_folder(adapter, folder, names_source=False)
                    yield Replicas(urls, deliver, lambda: _look(kube, names))
            finally:
                for name in names:
                    await _delete(kube, name)
                shutil.rmtree(folder, ignore_errors=True)
    except (DevclusterError, CommandError) as error:
        raise RunError(str(error)) from error
    except KubeError as error:
        raise RunError(
            f"{error} (is the operator installed in namespace {NAMESPACE}? See the README)"
        ) from error


def _cluster() -> Cluster:
    try:
        settings = load_settings(os.environ)
    except ValueError as error:
        raise RunError(str(error)) from error
    if settings.external:
        raise RunError(
            "weights go by a folder that the nodes and this machine share: run it on the dev "
            "cluster, or with --local"
        )
    cluster = connect(settings)
    os.environ["KUBECONFIG"] = cluster.kubeconfig  # the kube client's
    return cluster


async def _apply(kube: Kube, manifest: Mapping[str, Any], names: Sequence[str]) -> None:
    changes = [
        await kube.apply({**manifest, "metadata": {**manifest["metadata"], "name": name}})
        for name in names
    ]
    for change in changes:
        await change.wait(READY_S)


def _url(cluster: Cluster, name: str) -> str:
    """Of its Service; this machine resolves no names of the cluster."""
    spec = cluster.get("service", name, NAMESPACE)["spec"]
    return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"


async def _look(kube: Kube, names: Sequence[str]) -> list[Published]:
    updates = [(await kube.replica(name).get())["status"]["weightUpdate"] for name in names]
    return [
        Published(name, paused_s=update.get("pausedSeconds") or 0.0)
        for name, update in zip(names, updates, strict=True)
    ]


async def _delete(kube: Kube, name: str) -> None:
    try:
        await (await kube.replica(name).delete()).wait(GONE_S)
    except ReplicaGone:
        pass
    except KubeError as error:
        print(f"{name} was not deleted: {error}")
