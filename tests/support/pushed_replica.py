"""A RolloutReplica that takes versions from a trainer: an operator owns its pod, whose ranks are real."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rollout_client.trainer import ReplicaTarget, ServerAdapter
from tests.support.local_pods import Local
from tests.support.operator_kit import Bench, running_status
from tests.support.weights import make_place


def target_of(pod: Local) -> ReplicaTarget:
    """As the trainer sees it: steered by patching it, bytes over its run folder."""
    return ReplicaTarget(name="qwen", namespace="ns", run_dir=pod.run_dir)


def adapter_of(b: Bench, target: ReplicaTarget, **settings: Any) -> ServerAdapter:
    """It patches replicas on the bench's API server."""
    return ServerAdapter(target, **{"timeout_s": 15, "server": b.server.url, **settings})


@asynccontextmanager
async def replica(
    b: Bench, *, weights: dict[str, Any] | None = None, **traits: Any
) -> AsyncIterator[Local]:
    """One that serves its base.

    Args:
        b: An operator works on its API server.
        weights: More of ``spec.weights``.
        traits: Of ``Local``.
    """
    b.apply(weights={"source": {"push": {}}, **(weights or {})})
    await b.until(lambda: b.server.get("pods", "qwen-0"), "the pod")
    with make_place() as place:
        pod = Local(place, host="127.0.0.2", port=b.port, token=b.token(), **traits)
        try:
            await pod.boot(first=None)
            b.server.change("pods", "qwen-0", {"status": running_status(pod.host)})
            await b.ready("Serving")
            yield pod
        finally:
            await pod.kill()
