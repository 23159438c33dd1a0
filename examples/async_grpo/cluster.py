"""Two RolloutReplicas of the dev cluster, steered by patches of their ``weightVersion``."""

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
from examples.async_grpo import replicas as seam
from examples.async_grpo.model import save_model
from examples.async_grpo.replicas import Published, RunError
from rollout_client.kube import Kube, KubeError
from rollout_client.kube.replicas import Replica

MANIFEST = Path(__file__).with_name("replica.yaml")
NAMESPACE = "rollout"
MANAGER = "async-grpo"
READY_S = 300.0
UPDATE_S = 120.0
GONE_S = 90.0


class ClusterReplica:
    """One RolloutReplica.

    Args:
        replica: Its handle.
    """

    def __init__(self, replica: Replica) -> None:
        self.name = replica.name
        self._replica = replica

    async def load(self, version: str, *, step: int, folder: Path) -> Published:
        """See ``replicas.Replica``; the folder is known to it by its source's template."""
        try:
            change = await self._replica.set_weight_version(version, step=step)
            status = await change.wait(UPDATE_S)
        except KubeError as error:
            raise RunError(f"{self.name}: {error}") from error
        return Published(self.name, paused_s=status["weightUpdate"].get("pausedSeconds") or 0.0)


@asynccontextmanager
async def cluster_replicas(model: Any, *, count: int = 2) -> AsyncIterator[seam.Replicas]:
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
            pods = [ClusterReplica(kube.replica(name)) for name in names]
            yield seam.Replicas(pods, urls, folder)
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
