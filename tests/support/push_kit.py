"""A trainer that pushes into a real engine of this process."""

import asyncio
from pathlib import Path

import torch

from rollout_pod.engine.vllm import VllmEngine
from rollout_pod.weights.trainer import SentWeights, WeightSender
from tests.support.engine_kit import prompts, run, tensors_of


def on_gpu(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cuda:0") for name, tensor in tensors_of(path).items()}


async def push(
    engine: VllmEngine, sender: WeightSender, version: str, tensors
) -> tuple[SentWeights, str]:
    loop = asyncio.get_running_loop()
    loads: list[asyncio.Future] = []
    accepted: set[str] = set()

    async def load(session: str):
        accepted.update(await engine.accepted_manifests(session))
        await engine.pause()
        return await engine.load_weights(session, version=version, flush=False, timeout_s=60)

    def offer(session: str) -> None:
        loads.append(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(load(session), loop),
                                         loop=loop))  # fmt: skip

    sent = await sender.send_async(version, tensors, timeout_s=60, on_accepted=offer)
    reports = await loads[0]
    assert all(report.ok for report in reports), reports
    assert all(accepted) and accepted == {report.manifest for report in reports}
    assert (await engine.clear_caches()).is_complete
    await engine.resume()
    (path,) = {f"{report.path}: {report.note}".rstrip(": ") for report in reports}
    return sent, path


async def says(engine: VllmEngine) -> list[tuple[int, ...]]:
    return [tuple((await run(engine, prompt, 32)).token_ids) for prompt in prompts(3)]


async def stage(engine: VllmEngine, sender: WeightSender, version: str, tensors) -> SentWeights:
    """Beside the model, while the engine serves."""
    loop = asyncio.get_running_loop()

    def accepted(session: str) -> None:
        call = engine.stage_weights(session, version=version, timeout_s=60)
        asyncio.run_coroutine_threadsafe(call, loop).result(30)

    return await sender.send_async(version, tensors, timeout_s=60, on_accepted=accepted)


async def switch(engine: VllmEngine, version: str):
    """Give the engine what was staged; every rank's report."""
    await engine.pause()
    reports = await engine.switch_weights(version, timeout_s=30)
    if all(report.ok for report in reports):
        assert (await engine.clear_caches()).is_complete
    await engine.resume()
    return reports
