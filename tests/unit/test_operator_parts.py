"""Small parts: quantities, names, the cache, settings, workers."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_operator import cli as program
from rollout_operator.api import names
from rollout_operator.api.quantity import parse_bytes
from rollout_operator.api.replica import Replica
from rollout_operator.apply.cache import Cache
from rollout_operator.apply.errors import KubeError
from rollout_operator.metrics import Metrics
from rollout_operator.reconcile import Next
from rollout_operator.settings import Settings
from rollout_operator.workers import Workers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        (5, 5),
        ("256Mi", 256 << 20),
        ("40Gi", 40 << 30),
        ("1.5Gi", 3 << 29),
        ("1k", 1000),
        ("1G", 10**9),
        ("1e3", 1000),
        ("1E3", 1000),
        ("2E", 2 * 10**18),
        ("1Ei", 1 << 60),
        ("1500m", 2),
        (".5Ki", 512),
        ("1.", 1),
    ],
)
def test_quantities(text: str | int, expected: int):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "-1", "1KiB", "1K", "1e", "0x10", "\u0661"])
def test_no_quantities(text: str):
    with pytest.raises(ValueError, match="no quantity"):
        parse_bytes(text)


@given(st.integers(0, 1 << 62))
def test_whole_bytes_are_themselves(number: int):
    assert parse_bytes(number) == parse_bytes(str(number)) == number


def test_children_of_the_longest_name_are_valid():
    name = "a" * names.MAX_NAME
    for made in (
        names.pod_name(name, 9999),
        names.secret_name(name),
        names.service_name(name),
        names.nodes_service_name(name),
    ):
        assert len(made) <= 63


def _object(version: str, uid: str = "u") -> dict[str, Any]:
    meta = {"namespace": "ns", "name": "x", "uid": uid, "resourceVersion": version}
    return {"metadata": {**meta, "managedFields": [{"manager": "kubelet"}]}}


def _owner(manager: str, time: str, *fields: str) -> dict[str, Any]:
    owned = {"f:spec": {f"f:{field}": {} for field in fields}}
    return {"manager": manager, "time": time, "fieldsType": "FieldsV1", "fieldsV1": owned}


def test_who_asked_for_a_version_is_the_last_owner_of_that_field_and_survives_the_cache():
    entries = [
        _owner("kubectl-client-side-apply", "2026-01-03T00:00:00Z", "model", "paused"),
        _owner("argocd", "2026-01-01T00:00:00Z", "weightVersion", "model"),
        _owner("trainer", "2026-01-02T00:00:00Z", "weightVersion"),
        {"manager": "rollout-operator", "subresource": "status", "fieldsV1": {"f:status": {}}},
        {"manager": "odd", "fieldsV1": None},
    ]
    raw = _object("1")
    raw |= {"spec": {"model": "m"}}
    raw["metadata"]["managedFields"] = entries
    assert Replica.parse(raw).asked_by == "trainer"
    cache = Cache()
    cache.put(raw)
    kept = cache.get(("ns", "x")) or {}
    assert Replica.parse(kept).asked_by == "trainer"
    assert len(str(kept["metadata"]["managedFields"])) < len(str(entries)) / 2
    raw["metadata"]["managedFields"] = entries[:1]
    assert Replica.parse(raw).asked_by == ""


def test_late_news_does_not_replace_newer_news():
    cache = Cache()
    key = ("ns", "x")
    assert cache.put(_object("9"))
    assert cache.put(_object("10"))
    assert not cache.put(_object("9"))
    assert not cache.put(_object("10"))
    assert (cache.get(key) or {})["metadata"]["resourceVersion"] == "10"
    assert "managedFields" not in (cache.get(key) or {})["metadata"]
    assert not cache.drop(key, last={"metadata": {"uid": "another"}})
    assert cache.drop(key, last={"metadata": {"uid": "u", "resourceVersion": "9"}})
    assert not cache.drop(key)
    assert cache.get(key) is None


def test_what_left_a_watch_and_is_read_by_name_is_known_again():
    cache = Cache()
    cache.put(_object("9"))
    cache.drop(("ns", "x"), last=_object("11"))
    # a list that began before, and a read that is as old
    assert not cache.put(_object("11"))
    assert not cache.put(_object("10"), exists=True)
    assert cache.put(_object("11"), exists=True)
    assert not cache.put(_object("11"), exists=True)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"POD_NAMESPACE": "own"}, ("own",)),
        ({"POD_NAMESPACE": "own", "ROLLOUT_OPERATOR_WATCH_NAMESPACES": "a, b,"}, ("a", "b")),
        ({"POD_NAMESPACE": "own", "ROLLOUT_OPERATOR_WATCH_NAMESPACES": ""}, ("own",)),
        ({"ROLLOUT_OPERATOR_CLUSTER_WIDE": "true"}, ()),
    ],
)
def test_namespaces(
    environment: dict[str, str], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert Settings().namespaces() == expected


def test_settings_that_contradict(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLOUT_OPERATOR_CLUSTER_WIDE", "true")
    monkeypatch.setenv("ROLLOUT_OPERATOR_WATCH_NAMESPACES", "a")
    with pytest.raises(ValidationError, match="exclude each other"):
        Settings()


class Passes:
    """Counts passes over replicas and answers as told."""

    def __init__(self, *answers: Next | Exception | None) -> None:
        self.answers = list(answers)
        self.fresh: list[bool] = []
        self.reported: list[Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, key: Any, memory: Any, *, fresh: bool, wake: Any) -> Next | None:
        self.fresh.append(fresh)
        await self.gate.wait()
        answer = self.answers.pop(0) if self.answers else Next(delay=3600)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def report(self, key: Any, error: Exception) -> None:
        self.reported.append(error)
        raise KubeError(500, "not", "now")


async def _passes(passes: Passes, count: int) -> None:
    async with asyncio.timeout(5):
        while len(passes.fresh) < count:
            await asyncio.sleep(0.005)


KEY = ("ns", "x")


async def test_wakes_during_a_pass_make_one_more():
    passes = Passes()
    workers = Workers(passes, report=passes.report, metrics=Metrics())
    workers.open()
    passes.gate.clear()
    workers.wake(KEY)
    await _passes(passes, 1)
    for _ in range(5):
        workers.wake(KEY)
    workers.wake(KEY, fresh=True)
    passes.gate.set()
    await _passes(passes, 2)
    await asyncio.sleep(0.05)
    assert passes.fresh == [False, True]
    await workers.stop()


async def test_the_clock_wakes_without_trust_in_the_cache():
    passes = Passes(Next(delay=0.01), Next(delay=0.01, fresh=False))
    workers = Workers(passes, report=passes.report, metrics=Metrics())
    workers.open()
    workers.wake(KEY)
    await _passes(passes, 3)
    assert passes.fresh == [False, True, False]
    await workers.stop()


@pytest.mark.parametrize("error", [KubeError(500, "x", "y"), RuntimeError("a bug")])
async def test_a_pass_that_fails_is_tried_again_afresh(error: Exception):
    passes = Passes(error)
    workers = Workers(passes, report=passes.report, metrics=Metrics())
    workers.open()
    workers.wake(KEY)
    await _passes(passes, 2)
    assert passes.fresh == [False, True]
    # an API server in trouble is no fault of ours, and could not be told of it
    assert passes.reported == ([] if isinstance(error, KubeError) else [error])
    await workers.stop()


async def test_a_worker_ends_with_its_replica_and_comes_back_with_it():
    passes = Passes(None, None)
    workers = Workers(passes, report=passes.report, metrics=Metrics())
    workers.open()
    workers.wake(KEY)
    await _passes(passes, 1)
    async with asyncio.timeout(5):
        while workers.knows(KEY):
            await asyncio.sleep(0.005)
    workers.wake(KEY)
    await _passes(passes, 2)
    await workers.stop()


async def test_a_worker_that_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollout_operator.workers.PASS_DEADLINE_S", -1.0)
    monkeypatch.setattr("rollout_operator.workers.QUEUE_DEADLINE_S", -1.0)
    passes = Passes(Next(delay=0))
    workers = Workers(passes, report=passes.report, metrics=Metrics())
    workers.open()
    assert workers.overdue() is None
    workers.wake(KEY)
    late = workers.overdue()
    assert late is not None
    assert late[0] == KEY
    await workers.stop()


@pytest.mark.parametrize("content", [None, "clusters: {", "apiVersion: v1\nkind: Config\n"])
def test_without_a_kubeconfig_the_operator_says_so_and_ends(tmp_path, monkeypatch, content):
    file = tmp_path / "config"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(file))
    command = ["rollout-operator", "--watch-namespaces=a", "--metrics-port=0", "--probe-port=0"]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr(program.logs, "configure", lambda **_: None)
    with pytest.raises(SystemExit, match=r"no way to the API server: .*; set KUBECONFIG"):
        program.main()
