"""Two RolloutReplicas of the dev cluster: the adapter patches their ``weightVersion``."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from devcluster.client import connect
from devcluster.settings import load_settings
from examples.async_grpo.model import save_model
from examples.async_grpo.replicas import Published, Replicas, RunError, by_folder
from rollout_client.kube import Kube, KubeError
from rollout_client.trainer import SelectorTarget, ServerAdapter

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
    settings = load_settings(os.environ)
    cluster = connect(settings)
    os.environ["KUBECONFIG"] = cluster.kubeconfig
    manifest = yaml.safe_load(MANIFEST.read_text())
    folder = Path(manifest["spec"]["template"]["spec"]["volumes"][0]["hostPath"]["path"])
    shutil.rmtree(folder, ignore_errors=True)
    save_model(model, folder / manifest["spec"]["model"].rpartition("/")[2])
    names = [f"{manifest['metadata']['name']}-{n}" for n in range(count)]
    async with await Kube.connect(namespace=NAMESPACE, manager=MANAGER) as kube:
        try:
            changes = []
            for name in names:
                body = manifest | {"metadata": manifest["metadata"] | {"name": name}}
                changes.append(await kube.apply(body))
            statuses = [await change.wait(READY_S) for change in changes]
            urls = [status["endpoint"] for status in statuses]
            if not settings.external:  # this machine resolves no name of the cluster
                services = [
                    await asyncio.to_thread(cluster.get, "service", name, NAMESPACE)
                    for name in names
                ]
                urls = [
                    f"http://{s['spec']['clusterIP']}:{s['spec']['ports'][0]['port']}"
                    for s in services
                ]
            target = SelectorTarget(
                selector=f"app={manifest['metadata']['labels']['app']}", namespace=NAMESPACE
            )

            async def look() -> list[Published]:
                found = [(await kube.replica(name).get())["status"] for name in names]
                return [
                    Published(name, paused_s=status["weightUpdate"].get("pausedSeconds") or 0.0)
                    for name, status in zip(names, found, strict=True)
                ]

            async with ServerAdapter(target, timeout_s=UPDATE_S, manager=MANAGER) as adapter:
                # the trainer is in no pod of theirs: it cannot share memory with them
                deliver = by_folder(adapter, folder, names_source=False)
                yield Replicas(urls, deliver, look)
        except KubeError as error:
            raise RunError(
                f"{error} (is the operator installed in namespace {NAMESPACE}? See the README)"
            ) from error
        finally:
            for name in names:
                await _delete(kube, name)
            shutil.rmtree(folder, ignore_errors=True)


async def _delete(kube: Kube, name: str) -> None:
    try:
        await (await kube.replica(name).delete()).wait(GONE_S)
    except KubeError as error:
        print(f"{name} was not deleted: {error}")
