"""The bridge on a real pod: verl's base classes, its load balancer and its clients."""

import asyncio
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import (
    FullyAsyncLLMServerClient,
    LLMServerClient,
    LLMServerManager,
)
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from rollout_client.verl.parsing import parse
from rollout_client.verl.server import PodServer
from rollout_pod.engine.base import EngineOutput
from rollout_pod.protocol import StateDocument
from tests.support.engine_kit import checkpoint, prompts, reference, tensors_of
from tests.support.process import ServeProcess, serve_process
from tests.verl.gloo_engine import NAME, Trainer
from tests.verl.kit import model_config, rollout_config, trainer_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(100)]

ROOT = Path(__file__).resolve().parents[2]
GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": True}
LONG = 1500
"""Seconds of work: on a busy machine, too, a call is cut long before its end."""


@pytest.fixture(scope="module")
def pod() -> Iterator[ServeProcess]:
    with serve_process(checkpoint("dense", 0)) as running:
        running.start()
        running.serving("base")
        yield running


@pytest.fixture(autouse=True)
def awake(pod: ServeProcess) -> Iterator[None]:
    """One test that fails shall not let the others wait for a pod that sleeps."""
    yield
    with pod.ctl() as ctl:
        ctl.change(lambda d: d.model_copy(update={"paused": False, "sleep": None}))


def mine(pod: ServeProcess, **more: Any) -> dict[str, Any]:
    return {
        "pods": [
            {
                "data": f"http://{pod.data}", "admin": f"http://{pod.admin}",
                "run_dir": str(pod.run_dir),
            }
        ],
        "control_timeout_s": 60,
        "deadline_s": 90,
        "max_seconds_to_reject": 0.5,
        **more,
    }  # fmt: skip


def trained(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """As a trainer's model hands its tensors over: one after another, always in one order."""
    yield from sorted(tensors_of(checkpoint("dense", seed)).items())


def is_greedy(seed: int, prompt: list[int], output: TokenOutput, start: int = 0) -> bool:
    """From ``start`` on exactly the greedy tokens of transformers with this checkpoint."""
    assert output.log_probs is not None
    assert len(output.log_probs) == len(output.token_ids)
    rest = EngineOutput(tuple(output.token_ids[start:]), tuple(output.log_probs[start:]), "length")
    return reference(checkpoint("dense", seed)).agrees([*prompt, *output.token_ids[:start]], rest)


def same(first: list[int], second: list[int]) -> int:
    """The length of what both begin with."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def asleep(state: StateDocument) -> set[str]:
    """What the engine was told to release: on a CPU vLLM keeps it all the same."""
    return set(state.sleep.tags) if state.sleep else set()


async def generating(pod: ServeProcess, tokens: int = 20) -> None:
    """Wait until the engine has generated so many more."""
    name = "vllm:generation_tokens_total"
    before = await asyncio.to_thread(pod.metric, name)
    deadline = time.monotonic() + 30
    while await asyncio.to_thread(pod.metric, name) < before + tokens:
        assert time.monotonic() < deadline, pod.tail()
        await asyncio.sleep(0.02)


# --- the trainer's side: BaseRollout


@asynccontextmanager
async def server(pod: ServeProcess) -> AsyncIterator[PodServer]:
    settings = parse({"rollout_replica": mine(pod)})
    made = PodServer(
        config=rollout_config(mine=mine(pod), response_length=LONG),
        model_config=model_config(), settings=settings, place=settings.place(0),
        rollout_mode=RolloutMode.HYBRID, replica_rank=0,
    )  # fmt: skip
    try:
        yield made
    finally:
        await made.shutdown()


async def ask(server: PodServer, prompt: list[int], n: int, name: str = "") -> TokenOutput:
    return await server.generate(
        prompt, GREEDY | {"max_tokens": n}, request_id=name or f"r{time.monotonic_ns()}"
    )


_whole: dict[tuple[int, ...], list[int]] = {}


async def uninterrupted(server: PodServer, prompt: list[int]) -> list[int]:
    """What the first checkpoint generates where nothing happens; found out once."""
    if tuple(prompt) not in _whole:
        output = await ask(server, prompt, LONG)
        assert is_greedy(0, prompt, output)
        assert len(output.token_ids) == LONG
        _whole[tuple(prompt)] = output.token_ids
    return _whole[tuple(prompt)]


async def test_a_hybrid_step_wakes_updates_generates_and_releases(pod, monkeypatch):
    """What verl's actor worker and its driver call in one synchronous step, twice."""
    monkeypatch.setenv("RANK", "0")
    kind = get_rollout_class("rollout_replica", "async")
    rollout = kind(
        config=rollout_config(mine=mine(pod)), model_config=model_config(), device_mesh=None
    )
    prompt = prompts(1)[0]
    async with server(pod) as api:
        before = await ask(api, prompt, 48)
        assert is_greedy(0, prompt, before)
        for step, seed in ((1, 1), (2, 2)):
            await api.sleep()
            state = await asyncio.to_thread(pod.until, lambda s: s.phase == "Sleeping")
            assert asleep(state) == {"weights", "kv_cache"}
            await rollout.resume(["weights"])
            await rollout.update_weights(trained(seed), global_steps=step)
            state = await asyncio.to_thread(
                pod.until, lambda s, version=f"step-{step}": s.weight_version == version
            )
            assert asleep(state) == {"kv_cache"}
            await rollout.resume(["kv_cache"])
            output = await ask(api, prompt, 48)
            assert is_greedy(seed, prompt, output)
            assert output.token_ids != before.token_ids
            assert output.stop_reason == "completed"
            assert output.extra_fields["global_steps"] == step
        await rollout.release()
        await asyncio.to_thread(pod.until, lambda s: s.phase == "Sleeping")
        await api.wake_up()
        # level 2 dropped the weights: a trainer has to bring them before anything is served
        await rollout.update_weights(trained(0), global_steps=3)
        assert is_greedy(0, prompt, await ask(api, prompt, 48))
        await rollout.aclose()


async def test_a_wire_format_is_refused_and_the_pod_serves_on(pod, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    kind = get_rollout_class("rollout_replica", "async")
    rollout = kind(
        config=rollout_config(mine=mine(pod)), model_config=model_config(), device_mesh=None
    )
    with pytest.raises(ValueError, match="wire_format: 'delta_flush'"):
        await rollout.update_weights(iter([]), wire_format="delta_flush", global_steps=9)
    async with server(pod) as api:
        prompt = prompts(1)[0]
        assert is_greedy(0, prompt, await ask(api, prompt, 16))


async def test_abort_returns_partials_and_resume_goes_on(pod):
    first, second = prompts(2)
    async with server(pod) as api:
        whole = await uninterrupted(api, first)
        running = [asyncio.create_task(ask(api, p, LONG)) for p in (first, second)]
        await generating(pod)
        told = await api.abort_all_requests()
        assert told["aborted_count"] == 2
        partial, other = await asyncio.gather(*running)
        assert partial.stop_reason == other.stop_reason == "aborted"
        cut = len(partial.token_ids)
        assert 0 < cut < LONG
        assert partial.token_ids == whole[:cut]
        # one that comes now waits
        rest = asyncio.create_task(ask(api, [*first, *partial.token_ids], LONG - cut))
        await asyncio.sleep(0.3)
        assert not rest.done()
        await api.abort_all_requests()  # twice is once
        await api.resume_generation()
        await api.resume_generation()
        continued = await rest
        assert partial.token_ids + continued.token_ids == whole


async def test_rejecting_sends_everything_back_also_what_waits(pod):
    prompt = prompts(1)[0]
    async with server(pod) as api:
        await api.abort_all_requests()
        waiting = asyncio.create_task(ask(api, prompt, 8))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await api.abort_all_requests(reject_request=True)
        for output in (await waiting, await ask(api, prompt, 8)):
            assert (output.token_ids, output.stop_reason) == ([], "aborted")
        await api.resume_generation()
        assert (await ask(api, prompt, 8)).stop_reason == "completed"


async def test_a_pause_that_verl_did_not_ask_for_is_not_seen(pod):
    prompt = prompts(1)[0]
    async with server(pod) as api:
        whole = await uninterrupted(api, prompt)
        running = asyncio.create_task(ask(api, prompt, LONG))
        await generating(pod)
        for words in (("pause",), ("resume",)):
            done = await asyncio.to_thread(pod.cli, *words)
            assert done.returncode == 0, done.stderr
        output = await running
        assert output.token_ids == whole
        assert output.stop_reason == "completed"


async def test_caches_and_memory_as_the_checkpoint_manager_asks(pod):
    prompt = prompts(1)[0]
    async with server(pod) as api:
        await api.clear_kv_cache()
        await api.abort_all_requests()
        await api.release_kv_cache()
        state = await asyncio.to_thread(pod.until, lambda s: s.phase == "Sleeping")
        assert asleep(state) == {"kv_cache"}
        await api.resume_kv_cache()
        await api.resume_generation()
        assert is_greedy(0, prompt, await ask(api, prompt, 16))


@pytest.mark.timeout(200)
async def test_a_pod_that_dies_is_not_seen(pod):
    """It comes back with the model's own checkpoint, which is what the last step had sent."""
    prompt = prompts(1)[0]
    async with server(pod) as api:
        whole = await uninterrupted(api, prompt)
        running = asyncio.create_task(ask(api, prompt, LONG))
        await generating(pod)
        await asyncio.to_thread(pod.kill)
        pod.start()
        output = await running
    assert output.token_ids == whole
    assert len(output.log_probs) == LONG


# --- verl's own path: LLMServerManager, its load balancer, clients and CheckpointEngineManager


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # else Ray writes one into the home folder
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # short, for the paths of its sockets
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    ray.init(
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
        object_store_memory=100 << 20,
        num_cpus=4,
        num_gpus=0,
        resources={"rollout-0": 1},
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}},
    )
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(200)
async def test_verls_own_servers_clients_and_checkpoint_engine(pod, cluster):
    """A standalone replica in fully asynchronous training: partial rollouts over updates."""
    prompt = prompts(1)[0]
    pods = mine(pod)["pods"][0]
    key = "actor_rollout_ref.rollout"
    config = trainer_config(
        f"{key}.name=rollout_replica",
        f"{key}.nnodes=1",
        f"{key}.n_gpus_per_node=1",
        f"{key}.tensor_model_parallel_size=1",
        f"{key}.dtype=float32",
        f"{key}.response_length={LONG}",
        f"{key}.checkpoint_engine.backend={NAME}",
        f"{key}.checkpoint_engine.custom_backend_module=tests.verl.gloo_engine",
        f"+{key}.custom.rollout_replica.pods=[{{data: '{pods['data']}', admin: '{pods['admin']}', "
        f"run_dir: '{pods['run_dir']}'}}]",
        f"+{key}.custom.rollout_replica.receivers='rollout-{{rank}}'",
        f"+{key}.custom.rollout_replica.receiver_gpus=0",
        f"actor_rollout_ref.model.path={checkpoint('dense', 0)}",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    )
    servers = await LLMServerManager.create(config=config)
    assert servers.get_addresses() == [pod.data]
    steps = {1: str(checkpoint("dense", 1)), 2: str(checkpoint("dense", 2))}
    trainer = RayWorkerGroup(
        resource_pool=RayResourcePool([1], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(cls=Trainer, checkpoints=steps),
        device_name="cpu",
    )
    weights = CheckpointEngineManager(
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine),
        trainer,
        servers.get_replicas(),
    )
    params = GREEDY | {"max_tokens": LONG}

    await weights.update_weights(global_steps=1)
    plain = servers.get_client(LLMServerClient)
    old = await plain.generate("one", prompt_ids=prompt, sampling_params=params)
    assert is_greedy(1, prompt, old)
    assert old.extra_fields["global_steps"] == 1

    client = servers.get_client(FullyAsyncLLMServerClient)
    running = asyncio.create_task(client.generate("two", prompt_ids=prompt, sampling_params=params))
    await generating(pod)
    metrics = await weights.update_weights(global_steps=2)
    assert metrics["sent"] > 0
    output = await running
    assert len(output.token_ids) == LONG
    assert output.extra_fields["min_global_steps"] == 1
    assert output.extra_fields["max_global_steps"] == 2
    kept = same(output.token_ids, old.token_ids)
    assert 0 < kept < LONG
    assert is_greedy(2, prompt, output, start=kept)
    new = await client.generate("three", prompt_ids=prompt, sampling_params=params)
    assert is_greedy(2, prompt, new)
