"""A request in each of its phases: waiting, in the middle of its prompt, short of its minimum. The
engine takes one at a time, a prompt in pieces, and by priority.
"""

import asyncio
import re
import time
import uuid

import pytest

from rollout_pod.engine.base import EngineRequest
from rollout_pod.engine.vllm import VllmEngine
from rollout_pod.gate import Gate
from rollout_pod.generation import Generation
from rollout_pod.protocol import CancelReason, GenerateRequest, GenerateResponse, WeightsRef
from tests.support.engine_kit import GREEDY, prompts, run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

KIND = "dense"
ARGS = ("--max-num-batched-tokens=64", "--max-num-seqs=1", "--scheduling-policy=priority")


def asked(prompt: list[int], **more: object) -> GenerateRequest:
    return GenerateRequest.model_validate(
        {"request_id": uuid.uuid4().hex, "prompt_token_ids": prompt} | more
    )


def behind_a_gate(engine: VllmEngine) -> tuple[Gate, Generation]:
    gate = Gate(engine)
    gate.open(WeightsRef(version="base"), 1)
    return gate, Generation(engine, gate, max_model_len=lambda: 2048)


async def cut(engine: VllmEngine, gate: Gate) -> None:
    gate.close(CancelReason.PAUSED)
    await gate.cancel(timeout_s=30)
    await engine.resume()
    gate.open(WeightsRef(version="base"), 1)


async def test_one_that_is_cut_in_the_middle_of_its_prompt_goes_on_as_if_it_was_not(engine):
    gate, generation = behind_a_gate(engine)
    (prompt,) = prompts(1, length=1900, seed=21)
    sampling = {**GREEDY, "max_tokens": 12}
    asking = asyncio.create_task(generation.generate(asked(prompt, sampling_params=sampling)))
    async with asyncio.timeout(30):
        while not re.search(
            r"vllm:num_requests_running{[^}]*} 1\.0", engine.metrics_text().decode()
        ):
            await asyncio.sleep(0.002)
    await cut(engine, gate)
    part = await asking
    # it ran, and has no token: so it was cut in one of the thirty steps of its prompt
    assert (part.token_ids, part.cancel_reason) == ([], CancelReason.PAUSED)
    whole = await generation.generate(asked(prompt, sampling_params=sampling))
    (other,) = prompts(1, length=1900, seed=22)
    await run(engine, other, 1)
    assert whole.token_ids == list((await run(engine, prompt, 12)).token_ids)


async def test_the_minimum_counts_over_the_cut(engine):
    gate, generation = behind_a_gate(engine)
    (prompt,) = prompts(1, seed=23)
    plain = (await run(engine, prompt, 40)).token_ids
    stops = sorted(set(plain[:20]))
    sampling = {**GREEDY, "max_tokens": 60, "min_tokens": 30, "stop_token_ids": stops}
    uncut = await generation.generate(asked(prompt, sampling_params=sampling))
    assert len(uncut.token_ids) >= 30
    assert not set(uncut.token_ids[:29]) & set(stops)
    came: list[int] = []
    request = asked(prompt, sampling_params=sampling)
    asking = asyncio.create_task(
        generation.generate(request, on_delta=lambda delta, _: came.extend(delta.token_ids))
    )
    async with asyncio.timeout(30):
        while len(came) < 5:
            await asyncio.sleep(0)
    await cut(engine, gate)
    part = await asking
    assert 5 <= len(part.token_ids) < 29, "it was not cut short of its minimum"
    rest = await generation.generate(
        asked(prompt, sampling_params=sampling, generated_token_ids=part.token_ids)
    )
    assert part.token_ids + rest.token_ids == uncut.token_ids
    assert (rest.finish_reason, rest.stop_reason) == (uncut.finish_reason, uncut.stop_reason)


async def test_the_urgent_one_is_taken_first(engine):
    ends: list[str] = []

    async def one(name: str, priority: int, tokens: int) -> None:
        params = engine.sampling_params(GREEDY, max_tokens=tokens)
        await engine.generate(EngineRequest(name, [5, 6], params, priority=priority))
        ends.append(name)

    names = (("first", 0, 200), ("low", 9, 4), ("urgent", 1, 4))
    await asyncio.gather(*(one(*each) for each in names))
    assert ends == ["first", "urgent", "low"]


async def test_the_gate_counts_what_the_engine_has(engine):
    gate, generation = behind_a_gate(engine)
    tasks = [
        asyncio.create_task(
            generation.generate(asked(prompt, sampling_params={**GREEDY, "max_tokens": 1500}))
        )
        for prompt in prompts(5, seed=24)
    ]

    def in_engine() -> int:
        text = engine.metrics_text().decode()
        found = re.findall(r"^vllm:num_requests_(?:running|waiting){[^}]*} (\S+)$", text, re.M)
        assert found
        return sum(int(float(count)) for count in found)

    async def equal(count: int) -> None:
        deadline = time.monotonic() + 20
        while (gate.unfinished, in_engine()) != (count, count):
            assert time.monotonic() < deadline, (gate.unfinished, in_engine())
            await asyncio.sleep(0.02)

    await equal(5)
    await cut(engine, gate)
    answers: list[GenerateResponse] = await asyncio.gather(*tasks)
    assert {answer.cancel_reason for answer in answers} == {CancelReason.PAUSED}
    await run(engine, [5], 2)  # its steps bring the engine's own counts
    await equal(0)
