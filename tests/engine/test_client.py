"""``RolloutClient`` on two real pods: a hundred rollouts through pauses, updates and kills -9, at random.

``ATTACK_SEED`` picks other days.
"""

import asyncio
import os
from random import Random

import pytest

from rollout_client import Rollout, RolloutClient
from rollout_pod.engine.base import EngineOutput
from tests.support.engine_kit import GREEDY, checkpoint, prompts, reference
from tests.support.process import ServeProcess, serve_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(280)]

TOKENS = 200


def is_greedy(prompt: list[int], rollout: Rollout) -> bool:
    """Every span's tokens are the greedy ones of that version after all that came before."""
    paths = {"base": checkpoint("dense", 0), "step-1": checkpoint("dense", 1)}
    covered = 0
    for span in rollout.weight_versions:
        assert span.start == covered < span.end
        history = [*prompt, *rollout.token_ids[: span.start]]
        piece = slice(span.start, span.end)
        output = EngineOutput(rollout.token_ids[piece], rollout.log_probs[piece], "length")
        if not reference(paths[span.version]).agrees(history, output):
            return False
        covered = span.end
    return covered == len(rollout.token_ids)


async def test_a_hundred_rollouts_through_pauses_updates_and_kills_at_random() -> None:
    with (
        serve_process(checkpoint("dense", 0)) as a,
        serve_process(checkpoint("dense", 0)) as b,
    ):
        for pod in (a, b):
            pod.start()
        for pod in (a, b):
            await asyncio.to_thread(pod.serving, "base")
        over = asyncio.Event()
        day = BadDay(Random(int(os.environ.get("ATTACK_SEED", "1"))), a, b)
        asked = iter(prompts(10_000))
        done: list[tuple[list[int], Rollout]] = []

        async with RolloutClient([f"http://{a.data}", f"http://{b.data}"]) as api:

            async def caller() -> None:
                while not over.is_set() or len(done) < 100:
                    prompt = next(asked)
                    params = GREEDY | {"max_tokens": TOKENS}
                    rollout = await api.generate(prompt, params, deadline_s=120)
                    done.append((prompt, rollout))

            async with asyncio.TaskGroup() as group:
                for _ in range(16):
                    group.create_task(caller())
                await day()
                over.set()

        print(day.told)  # of a day that failed
        assert len(done) >= 100
        assert {len(rollout.token_ids) for _, rollout in done} == {TOKENS}
        assert len({rollout.request_id for _, rollout in done}) == len(done)
        # all that was cut or moved, and some that were not: the oracle is slow
        cut = [pair for pair in done if pair[1].attempts > 1]
        assert len(cut) >= 16
        assert any(len(rollout.weight_versions) > 1 for _, rollout in done)
        for prompt, rollout in [*cut, *done[:20]]:
            assert is_greedy(prompt, rollout), rollout


class BadDay:
    """Pauses, updates and kills, in an order, at moments and on pods that dice choose.

    Args:
        dice: The same ones do the same things; requests are wherever they are by then.
        pods: Two that serve their base. The first that is killed comes back, the second does not.
    """

    def __init__(self, dice: Random, *pods: ServeProcess) -> None:
        self._dice = dice
        self._held = dict.fromkeys(map(id, pods), "base")
        self._pods, self._alive = pods, list(pods)
        self._restart: asyncio.Task[None] | None = None
        self.told: list[str] = []
        """What was done."""

    async def __call__(self) -> None:
        acts = [self._pause] * 2 + [self._update] * 4
        self._dice.shuffle(acts)
        acts.insert(self._dice.randint(1, 2), self._kill)
        acts.insert(self._dice.randint(5, 7), self._kill)
        for act in acts:
            if act == self._kill and self._restart is not None:
                await self._restart  # one of them is always there
            pod = self._dice.choice(self._alive)
            await self._busy(pod)
            await asyncio.sleep(self._dice.uniform(0, 0.3))
            self.told.append(f"{act.__name__} {self._pods.index(pod)}")
            await act(pod)

    async def _pause(self, pod: ServeProcess) -> None:
        await self._ctl(pod, "pause")
        await asyncio.sleep(self._dice.uniform(0, 0.3))
        await self._ctl(pod, "resume")

    async def _update(self, pod: ServeProcess) -> None:
        if self._held[id(pod)] == "base":
            self._held[id(pod)] = "step-1"
            await self._ctl(pod, "update", "step-1", "--path", str(checkpoint("dense", 1)))
        else:
            self._held[id(pod)] = "base"
            await self._ctl(pod, "update", "base")

    async def _kill(self, pod: ServeProcess) -> None:
        self._alive.remove(pod)
        await asyncio.to_thread(pod.kill)
        if self._restart is None:
            self._restart = asyncio.create_task(self._start(pod))

    async def _start(self, pod: ServeProcess) -> None:
        await asyncio.to_thread(pod.start)
        await asyncio.to_thread(pod.serving, "base")
        self._held[id(pod)] = "base"
        self._alive.append(pod)

    async def _ctl(self, pod: ServeProcess, *args: str) -> None:
        answer = await asyncio.to_thread(pod.cli, *args)
        assert answer.returncode == 0, answer.stdout + answer.stderr

    async def _busy(self, pod: ServeProcess) -> None:
        async with asyncio.timeout(60):
            while await asyncio.to_thread(pod.metric, "rollout_unfinished ") == 0:
                await asyncio.sleep(0.02)
