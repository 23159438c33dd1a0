"""From ``spec.paused`` patched to the gate closed in the pod.

The clock starts just before the PATCH is sent, so the time that the API server takes to accept it
is counted as well; it stops at the moment that the pod itself notes (one machine, one clock).
"""

import json
import ssl
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.report import Result, percentile
from benchmarks.site import measured_replica
from tests.support.replica import Replica, metric

P50_MS, P99_MS = 30.0, 100.0


def run(quick: bool) -> Result:
    """Measure."""
    rounds = 20 if quick else 200
    sent_to_closed: list[float] = []
    accepted_to_closed: list[float] = []
    with measured_replica() as replica, _api(replica) as api:
        for _ in range(rounds):
            before = time.time()
            _patch(api, replica, paused=True)
            accepted = time.time()
            closed = _gate_changed(replica, is_open=False)
            sent_to_closed.append((closed - before) * 1e3)
            accepted_to_closed.append((closed - accepted) * 1e3)
            _patch(api, replica, paused=False)
            _gate_changed(replica, is_open=True)
    p50, p99 = percentile(sent_to_closed, 0.5), percentile(sent_to_closed, 0.99)
    rows = [
        {"from": label, "p50 ms": percentile(v, 0.5), "p99 ms": percentile(v, 0.99), "n": len(v)}
        for label, v in (
            ("PATCH sent", sent_to_closed),
            ("PATCH answered", accepted_to_closed),
        )
    ]
    return Result(
        name="patch-latency", figure=p50, unit="ms (p50, from PATCH sent)", reference=None,
        ratio=None, goal=f"p50 <= {P50_MS:g} ms, p99 <= {P99_MS:g} ms",
        holds=p50 <= P50_MS and p99 <= P99_MS, rows=rows,
    )  # fmt: skip


def _api(replica: Replica) -> httpx.Client:
    """A connection that is open already: kubectl alone would need 75 ms to start."""
    config: dict[str, Any] = yaml.safe_load(Path(replica.cluster.kubeconfig).read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    return httpx.Client(
        base_url=cluster["server"],
        verify=ssl.create_default_context(cafile=cluster["certificate-authority"]),
        headers={"Authorization": f"Bearer {user['token']}"},
    )


def _patch(api: httpx.Client, replica: Replica, *, paused: bool) -> None:
    answer = api.patch(
        f"/apis/rollout.dev/v1alpha1/namespaces/{replica.namespace}/rolloutreplicas/{replica.name}",
        content=json.dumps({"spec": {"paused": paused}}),
        headers={"Content-Type": "application/merge-patch+json"},
    )
    answer.raise_for_status()


def _gate_changed(replica: Replica, *, is_open: bool) -> float:
    """Wait for the gate; the Unix time that the pod noted."""
    deadline = time.monotonic() + 10
    while True:
        text = replica.metrics()
        if metric(text, "rollout_gate_open ") == float(is_open):
            return metric(text, "rollout_gate_changed_timestamp_seconds ")
        if time.monotonic() > deadline:
            raise SystemExit("the gate did not follow within 10 s")
        time.sleep(0.002)
