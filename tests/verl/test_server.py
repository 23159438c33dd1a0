"""The server before a replica, on a scripted pod and a scripted adapter."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from rollout_client import DeadlineExceeded, RequestRefused, RolloutClient
from rollout_client.trainer import Unreachable
from rollout_client.verl import server as bridge
from rollout_client.verl.parsing import parse
from rollout_client.verl.server import PodServer
from tests.support.fake_fleet import Act, FakeFleet, FakeReplica
from tests.support.fakes import fake_tokens
from tests.verl.kit import model_config, rollout_config

PROMPT = [5, 6, 7]
WHOLE = fake_tokens("base", PROMPT, 20)
MINE = {
    "pods": [{"data": "http://pod-0:8000", "admin": "http://pod-0:8001", "run_dir": "/run/a"}],
    "max_seconds_to_reject": 0.05,
}


class FakeAdapter:
    """Remembers what it is asked; ``fails`` are the methods that fail once."""

    def __init__(self, target: Any, **settings: Any) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.fails: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
            if name in self.fails:
                self.fails.discard(name)
                raise Unreachable(f"{name}: nobody answers")
            self.asked.append((name, *args, *kwargs.values()))
            return {}

        return call


class Kit:
    """A server, its adapter, and the pod that it asks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pods: FakeFleet) -> None:
        self._pods = pods
        monkeypatch.setattr(bridge, "ServerAdapter", FakeAdapter)
        monkeypatch.setattr(
            bridge, "RolloutClient", lambda url, **more: RolloutClient(url, transport=pods, **more)
        )
        self._made: list[PodServer] = []

    def make(self, mode: RolloutMode = RolloutMode.HYBRID, **changes: Any) -> PodServer:
        mine = MINE | changes.pop("mine", {})
        mine["pods"] = [mine["pods"][0] | {"data": self._pods.urls[0]}]
        settings = parse({"rollout_replica": mine})
        made = PodServer(
            config=rollout_config(mine=mine, response_length=20, **changes),
            model_config=model_config(), settings=settings, place=settings.place(0),
            rollout_mode=mode, replica_rank=0,
        )  # fmt: skip
        self._made.append(made)
        return made

    async def close(self) -> None:
        for made in self._made:
            await made.shutdown()


@pytest_asyncio.fixture
async def kit(request, monkeypatch) -> AsyncIterator[Kit]:
    made = Kit(monkeypatch, FakeFleet(FakeReplica(script=list(getattr(request, "param", ())))))
    yield made
    await made.close()


async def ask(server: PodServer, **more: Any) -> TokenOutput:
    params = {"temperature": 0, "logprobs": True} | more.pop("params", {})
    return await server.generate(PROMPT, params, request_id="r1", **more)


cut = pytest.mark.parametrize("kit", [[Act(tokens=8), Act(tokens=5)]], indirect=True)
parked = pytest.mark.parametrize(
    "kit", [[Act(how="status", code="gate_closed")] * 400], indirect=True
)


@cut
async def test_a_cut_that_verl_did_not_ask_for_is_not_seen(kit):
    output = await ask(kit.make())
    assert (output.token_ids, output.stop_reason) == (WHOLE, "completed")
    assert len(output.log_probs) == 20


@cut
async def test_a_cut_behind_verls_gate_returns_the_partial(kit):
    server = kit.make()
    arrived, answers = asyncio.Event(), asyncio.Event()

    async def hook(_: int) -> None:
        arrived.set()
        await answers.wait()

    kit._pods.hook = hook
    call = asyncio.create_task(ask(server))
    await arrived.wait()
    assert await server.abort_all_requests() == {"aborted_count": 1, "request_ids": []}
    answers.set()
    output = await call
    assert (output.token_ids, output.stop_reason) == (WHOLE[:8], "aborted")
    assert len(output.log_probs) == 8
    assert server._adapter.asked == [("cancel",)]


@parked
async def test_what_the_pod_has_not_begun_is_sent_back_only_if_verl_rejects_it(kit):
    server = kit.make()
    call = asyncio.create_task(ask(server))
    await asyncio.sleep(0)
    await server.abort_all_requests()
    await asyncio.sleep(0.3)
    assert not call.done()
    await server.abort_all_requests(reject_request=True)
    output = await call
    assert (output.token_ids, output.log_probs, output.stop_reason) == ([], [], "aborted")
    assert output.extra_fields["global_steps"] is None


async def test_a_pause_that_fails_lets_nothing_pass_until_it_is_asked_for_again(kit):
    server = kit.make()
    server._adapter.fails = {"cancel"}
    with pytest.raises(Unreachable):
        await server.abort_all_requests()
    call = asyncio.create_task(ask(server))
    await asyncio.sleep(0.05)
    assert not call.done()
    server._adapter.fails = {"resume_generation"}
    with pytest.raises(Unreachable):
        await server.resume_generation()
    await asyncio.sleep(0.05)
    assert not call.done()
    await server.resume_generation()
    assert (await call).token_ids == WHOLE


@pytest.mark.parametrize(
    ("mode", "changes", "asked"),
    [
        (RolloutMode.HYBRID, {}, [
            ("release", 2), ("resume", ["weights", "kv_cache"]), ("resume", ["weights"]),
            ("release", 1, ["kv_cache"]), ("resume", ["kv_cache"]), ("clear_kv_cache",),
        ]),
        (RolloutMode.HYBRID, {"free_cache_engine": False}, [("clear_kv_cache",)]),
        (RolloutMode.COLOCATED, {}, [
            ("release", 1), ("resume", ["weights", "kv_cache"]), ("resume", ["weights"]),
            ("clear_kv_cache",),
        ]),
        (RolloutMode.STANDALONE, {}, [
            ("release", 1, ["kv_cache"]), ("resume", ["kv_cache"]), ("clear_kv_cache",),
        ]),
    ],
)  # fmt: skip
async def test_memory_by_mode_as_verls_own_servers_do_it(kit, mode, changes, asked):
    server = kit.make(mode, **changes)
    await server.sleep()
    await server.wake_up()
    await server.wake_up(["weights"])
    await server.release_kv_cache()
    await server.resume_kv_cache()
    await server.clear_kv_cache()
    assert server._adapter.asked == asked


@pytest.mark.parametrize("field", ["video_data", "audio_data"])
async def test_what_no_pod_takes_is_refused_by_name(kit, field):
    with pytest.raises(ValueError, match=f"{field}: "):
        await ask(kit.make(), **{field: [b"x"]})
    with pytest.raises(ValueError, match="mm_processor_kwargs: "):
        await ask(kit.make(), mm_processor_kwargs={"fps": 2})


@pytest.mark.parametrize(
    "kit", [[Act(how="status", status=422, code="invalid_field")]], indirect=True
)
async def test_a_refusal_of_the_pod_reaches_verl(kit):
    with pytest.raises(RequestRefused, match="invalid_field"):
        await ask(kit.make())


@parked
async def test_a_call_ends_at_its_deadline_with_what_it_has(kit):
    with pytest.raises(DeadlineExceeded) as late:
        await ask(kit.make(mine={"deadline_s": 0.2}))
    assert late.value.partial.token_ids == ()


async def test_it_says_where_it_is(kit):
    server = kit.make()
    assert f"http://{await server.get_server_address()}" == kit._pods.urls[0]
    assert (await server.get_rollout_config()).response_length == 20
    await server.start_profile()
    await server.stop_profile()
    assert server._adapter.asked == []
