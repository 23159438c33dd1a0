"""The operator's metrics: those of the page, with their labels, and gone with their replica."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from rollout_operator.api.status import ReplicaStatus
from rollout_operator.metrics import Metrics
from rollout_operator.plan.history import finished_steps
from rollout_operator.series import ReplicaSeries
from tests.support.operator_objects import replica

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
PAGE = TEXT.partition("\n# Metrics of the operator\n")[2]
ROW = re.compile(r"^\| `(rollout_\w+)` \| (\w+) \| (.*?) \|", re.MULTILINE)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def test_the_page_lists_what_is_exported(metrics: Metrics) -> None:
    ReplicaSeries(metrics.registry, clock=lambda: 0.0)
    exported = set()
    for family in metrics.registry.collect():
        assert family.documentation
        assert not family.documentation.endswith(".")
        assert not re.search(r"_(ms|millis|minutes|kb|mb|count|sum|bucket)$", family.name)
        exported.add((family.name + ("_total" if family.type == "counter" else ""), family.type))
    listed = [(name, kind) for name, kind, _ in ROW.findall(PAGE)]
    assert len(listed) == len(set(listed))
    assert set(listed) == exported


def test_labels_are_those_of_the_page(metrics: Metrics) -> None:
    rows = {name.removesuffix("_total"): labels for name, _, labels in ROW.findall(PAGE)}
    for collector in metrics.registry._collector_to_names:
        assert tuple(re.findall(r"`(\w+)`", rows[collector._name])) == collector._labelnames
    series = ReplicaSeries(CollectorRegistry(), clock=lambda: 0.0)
    for family in series.collect():
        assert tuple(re.findall(r"`(\w+)`", rows[family.name])) == tuple(family._labelnames)


def status(version: str, step: int | None = None, **more: object) -> ReplicaStatus:
    return ReplicaStatus.parse(
        {
            "weightVersion": version,
            "lastCommitted": {"version": version, "step": step},
            "conditions": [
                {
                    "type": "Ready", "status": "True", "reason": "Serving", "message": "",
                    "observedGeneration": 3, "lastTransitionTime": "2027-01-01T00:00:00Z",
                }
            ],
            **more,
        }
    )  # fmt: skip


def test_a_replicas_series_follow_it_and_vanish_with_it() -> None:
    registry, now = CollectorRegistry(), 1000.0
    series = ReplicaSeries(registry, clock=lambda: now)
    own = {"namespace": "ns", "name": "qwen"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"rollout_replica_{name}", own | more)

    source = {"source": {"path": "/w/{version}"}}
    wanted = replica(weightVersion="step-7", weightStep=7, weights=source)
    restarts = {"total": 3, "byReason": [{"reason": "OOMKilled", "count": 3}]}
    series.show(wanted, status("step-5", 5, restarts=restarts))
    now = 1030.0
    series.show(wanted, status("step-5", 5, restarts=restarts))
    assert value("ready") == 1
    assert (value("weight_lag_seconds"), value("weight_lag_steps")) == (30, 2)
    assert value("restarts", reason="OOMKilled") == 3
    series.show(wanted, status("step-7", 7))
    assert (value("weight_lag_seconds"), value("weight_lag_steps")) == (0, 0)
    assert value("restarts", reason="OOMKilled") is None
    # behind again: counted from then
    now = 1100.0
    series.show(replica(weights=source), status("step-7", 7))
    now = 1101.0
    assert value("weight_lag_seconds") == 1
    assert value("weight_lag_steps") is None
    series.forget(("ns", "qwen"))
    assert value("ready") is None
    series.forget(("ns", "qwen"))
    assert [sample for family in registry.collect() for sample in family.samples] == []


def test_a_replica_made_anew_is_late_from_its_own_beginning_on() -> None:
    registry, now = CollectorRegistry(), 1000.0
    series = ReplicaSeries(registry, clock=lambda: now)

    def lag() -> float | None:
        own = {"namespace": "ns", "name": "qwen"}
        return registry.get_sample_value("rollout_replica_weight_lag_seconds", own)

    wanted = replica(weightVersion="step-7", weights={"source": {"path": "/w/{version}"}})
    series.show(wanted, status("step-5"))
    now = 5000.0
    series.show(replace(wanted, uid="another"), status("step-5"))
    assert lag() == 0
    now = 5010.0
    series.show(replace(wanted, uid="another"), status("step-5"))
    assert lag() == 10


def test_an_updates_steps_are_counted_once() -> None:
    update = {
        "target": "step-1", "phase": "Committed", "startedAt": "2027-01-01T00:00:00Z",
        "seconds": {"prefetch": 3.0, "cancel": 0.03, "transfer": 0.5, "steps": {"load": 0.4}},
        "pausedSeconds": 0.6,
    }  # fmt: skip
    before = status("base", weightUpdate={**update, "phase": "Transferring"})
    after = status("step-1", weightUpdate=update)
    steps = {"prefetch": 3.0, "cancel": 0.03, "transfer": 0.5, "paused": 0.6}
    assert finished_steps(before, after) == steps
    assert finished_steps(after, after) == {}
    assert finished_steps(before, before) == {}
    again = status("step-1", weightUpdate={**update, "startedAt": "2027-01-01T01:00:00Z"})
    assert finished_steps(after, again) == steps
