"""What is kept of thousands of replicas is small, and is what was put."""

import asyncio
import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Gauge

from rollout_operator.app import configure
from rollout_operator.apply.cache import Cache
from rollout_operator.control.pod_client import PodError, Unauthorized, Unreachable
from rollout_operator.control.pod_watch import PodWatch
from rollout_operator.control.routes import PodAddress
from rollout_operator.memory import Memory, Token
from rollout_operator.plan.observed import Ownership
from rollout_pod.protocol import StateDocument
from tests.support.operator_objects import UID, state

texts = st.text(st.characters(codec="utf-8"), max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)


@given(specs=st.lists(values, min_size=1, max_size=6))
def test_an_object_comes_out_of_the_cache_as_it_went_in(specs: list[Any]):
    cache = Cache()
    made = [
        {
            "metadata": {
                "namespace": "ns",
                "name": f"r-{n}",
                "uid": f"u{n}",
                "resourceVersion": "1",
            },
            "spec": spec,
        }
        for n, spec in enumerate(specs)
    ]
    for raw in made:
        assert cache.put(raw)
    assert [cache.get(("ns", f"r-{n}")) for n in range(len(made))] == made


def test_of_objects_that_are_alike_little_is_kept():
    cache = Cache()
    args = [f"--argument-{n}={n * n}" for n in range(50)]
    for n in range(100):
        meta = {"namespace": "ns", "name": f"r-{n}", "uid": f"u{n}", "resourceVersion": "1"}
        cache.put({"metadata": meta, "spec": {"engineArgs": args}})
    packed = [len(kept.packed) for kept in cache._objects.values()]
    assert len(str(args)) > 1000
    assert max(packed) < 150


@pytest.mark.parametrize(
    ("ref", "data", "owner", "text"),
    [
        ({"uid": UID}, {"token": base64.b64encode(b"x").decode()}, Ownership.OURS, "x"),
        ({"uid": UID}, {"token": "?"}, Ownership.OURS, ""),
        ({"uid": UID}, {"token": base64.b64encode(b"\xff").decode()}, Ownership.OURS, ""),
        ({"uid": UID}, None, Ownership.OURS, ""),
        ({"uid": "x"}, {"token": base64.b64encode(b"x").decode()}, Ownership.FOREIGN, ""),
        (
            {
                "uid": "x",
                "kind": "RolloutReplica",
                "name": "qwen",
                "apiVersion": "rollout.dev/v1alpha1",
            },
            {"token": base64.b64encode(b"x").decode()},
            Ownership.PREDECESSOR,
            "",
        ),
    ],
)
def test_only_our_own_secret_has_a_token(
    ref: dict[str, str], data: dict[str, str] | None, owner: Ownership, text: str
):
    raw = {"metadata": {"name": "qwen-admin", "ownerReferences": [ref]}, "data": data}
    assert Token.read(raw, replica="qwen", uid=UID) == Token(
        name="qwen-admin", owner=owner, text=text
    )
    assert Token.read(None, replica="qwen", uid=UID) is None


async def test_another_replica_of_the_same_name_is_known_nothing_of():
    memory = Memory(uid="a", token=Token(name="s", owner=Ownership.OURS, text="x"), denied=True)
    await memory.belong_to("a")
    assert memory.denied
    await memory.belong_to("b")
    assert memory == Memory(uid="b")


@pytest.mark.parametrize(
    "traits",
    [
        {},
        {"committed": {"version": "v1", "step": 3, "source": {"push": {}}}},
        {"ranks": ({"rank": 0, "host": "h", "weight_version": None},), "resident": ("weights",)},
        {"update": {"target": "v2", "phase": "Transferring", "seconds": {"cancel": 0.5}}},
        {"sleep": {"level": 1, "tags": (), "released": False, "message": "no"}},
    ],
)
async def test_a_state_that_was_told_is_reported_whole(traits: dict[str, Any]):
    said = StateDocument.model_validate({**state().model_dump(), **traits})

    class Pods:
        async def get_state(self, pod: Any, token: str, *, after: Any) -> StateDocument:
            if after is not None:
                assert (after.boot_id, after.revision) == (said.boot_id, said.revision)
                await asyncio.Event().wait()
            return said

    woken = asyncio.Event()
    watch = PodWatch(
        Pods(),  # type: ignore[arg-type]  # only what it needs
        uid="u",
        pod=PodAddress(namespace="ns", name="p", ip="127.0.0.1"),
        token=lambda: "t",
        wake=woken.set,
        gauge=Gauge("polls", "", registry=None),
    )
    watch.start()
    async with asyncio.timeout(5):
        await woken.wait()
    assert watch.report().state == said
    await watch.stop()


async def test_a_watch_wakes_when_an_unreachable_pod_refuses_the_token(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("rollout_operator.control.pod_watch._BACKOFF_S", (0.0,))
    answers: asyncio.Queue[PodError] = asyncio.Queue()
    asked = wakes = 0

    class Pods:
        async def get_state(self, *_: Any, **__: Any) -> StateDocument:
            nonlocal asked
            asked += 1
            raise await answers.get()

    def wake() -> None:
        nonlocal wakes
        wakes += 1

    watch = PodWatch(
        Pods(),  # type: ignore[arg-type]  # only what it needs
        uid="u",
        pod=PodAddress(namespace="ns", name="p", ip="127.0.0.1"),
        token=lambda: "t",
        wake=wake,
        gauge=Gauge("denied_polls", "", registry=None),
    )
    watch.start()
    seen = []
    for error in (Unreachable, Unreachable, Unauthorized, Unauthorized, Unreachable, Unauthorized):
        before = asked
        answers.put_nowait(error("no"))
        async with asyncio.timeout(5):
            while asked == before or not answers.empty():
                await asyncio.sleep(0)
        seen.append(wakes)
    assert seen == [1, 1, 2, 2, 2, 3]
    await watch.stop()


def test_kopf_copies_nothing():
    import kopf

    settings = kopf.OperatorSettings()
    configure(settings)
    body, patch = kopf.Body({"spec": {"a": 1}, "metadata": {"name": "x"}}), kopf.Patch()
    storage, progress = (
        settings.persistence.diffbase_storage,
        settings.persistence.progress_storage,
    )
    essence = storage.build(body=body)
    assert essence == {}
    assert storage.fetch(body=body) is None
    assert progress.clear(essence=essence) is essence
    assert progress.fetch(key="x", body=body) is None  # type: ignore[arg-type]
    storage.store(body=body, patch=patch, essence=essence)
    progress.touch(body=body, patch=patch, value="x")
    assert not patch
