"""The fake engine keeps the contract: else what it shows of the supervisor would mean nothing."""

import asyncio
import inspect
import sys
import tomllib
import types
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollout_pod.engine import registry
from rollout_pod.engine.base import CacheReport, Engine, EngineSettings, EngineStartError
from rollout_pod.testing import EngineContract, EngineSubject, Fault, contract
from tests.support.docs import blocks
from tests.support.fakes import FakeAgent, FakeEngine, fake_tokens


class FakeSubject(EngineSubject):
    greedy: ClassVar = {"temperature": 0}
    long = 300

    def __init__(self, world: int) -> None:
        self.world = world

    def create(self, version: str = "base") -> Engine:
        return FakeEngine(world=self.world, step_s=0.002, agent=FakeAgent(), holds=version)

    def create_broken(self) -> Engine:
        return FakeEngine(start_error=EngineStartError("no model"))

    async def send(
        self, engine: Engine, version: str, *, fault: Fault, accepted: Callable[[str], None]
    ) -> None:
        assert isinstance(engine, FakeEngine) and engine.agent is not None
        if fault == "wrong":
            raise ValueError("unknown names")
        agent, session = engine.agent, uuid.uuid4().hex
        agent.staged[session] = version
        if fault == "lost":
            agent.send_script[version].append("midway")
        accepted(session)
        await agent.send(session=session, timeout_s=5)

    def kill(self, engine: Engine) -> None:
        assert isinstance(engine, FakeEngine)
        engine.kill("killed")


class TestFakeEngine(EngineContract):
    @pytest.fixture(scope="class", params=[1, 2])
    @classmethod
    def subject(cls, request: pytest.FixtureRequest) -> EngineSubject:
        return FakeSubject(request.param)


# --- the contract finds engines that do not keep it ---


class Forgetful(FakeEngine):
    async def generate(self, request, on_delta=None):
        output = await super().generate(request, on_delta)
        aborted = output.finish_reason == "abort"
        return replace(output, token_ids=(), log_probs=()) if aborted else output


class Restless(FakeEngine):
    async def pause(self, *, keep=False):
        await super().pause(keep=keep)
        self.paused = False
        self._move()


class Deaf(FakeEngine):
    async def pause(self, *, keep=False):
        self.paused = True


class WakesItself(FakeEngine):
    async def wake(self, tags):
        taken = await super().wake(tags)
        if not self.asleep:
            self.paused = False
            self._move()
        return taken


class ClearsNothing(FakeEngine):
    async def clear_caches(self):
        return CacheReport(prefix=True, multimodal=True, encoder=True)


class Mute(FakeEngine):
    async def generate(self, request, on_delta=None):
        def quiet(delta):
            on_delta(replace(delta, finish_reason=None))

        return await super().generate(request, quiet if on_delta else None)


class Greedy(FakeEngine):
    def sampling_params(self, raw, *, max_tokens):
        raw["max_tokens"] = max_tokens
        return max_tokens


class Lies(FakeEngine):
    async def load_weights(self, session, *, version, flush, timeout_s):
        reports = await super().load_weights(
            session, version=version, flush=flush, timeout_s=timeout_s
        )
        return tuple(replace(report, ok=True) for report in reports)


class Lingers(FakeEngine):
    async def pause(self, *, keep=False):
        if self.dead:
            await asyncio.Event().wait()
        await super().pause(keep=keep)


class Survives(FakeEngine):
    async def shutdown(self):
        pass


CONTRACT = EngineContract


@pytest.mark.parametrize(
    ("engine", "test"),
    [
        (Forgetful, CONTRACT.test_an_abort_returns_the_partial),
        (Forgetful, CONTRACT.test_a_pause_returns_every_partial),
        (Restless, CONTRACT.test_a_pause_returns_every_partial),
        (Restless, CONTRACT.test_a_pause_that_keeps_goes_on_where_it_was),
        (Deaf, CONTRACT.test_a_pause_returns_every_partial),
        (Deaf, CONTRACT.test_what_waits_in_a_paused_engine_is_cut_by_the_next_pause),
        (WakesItself, CONTRACT.test_it_sleeps_and_wakes_or_says_why_not),
        (ClearsNothing, CONTRACT.test_an_updated_engine_is_a_fresh_one),
        (Mute, CONTRACT.test_deltas_are_the_output_bit_by_bit),
        (Greedy, CONTRACT.test_sampling_parameters_are_checked_and_never_changed),
        (Lies, CONTRACT.test_a_sender_that_never_comes_holds_nothing_up),
        (Lies, CONTRACT.test_a_lost_sender_is_repaired_by_a_complete_load),
        (Lingers, CONTRACT.test_a_death_is_told_to_everybody),
        (Survives, CONTRACT.test_a_shutdown_ends_all_and_may_come_twice),
    ],
)
async def test_a_breach_is_found(
    monkeypatch: pytest.MonkeyPatch, engine: type[FakeEngine], test: Callable[..., Any]
) -> None:
    monkeypatch.setattr(contract, "CALL_S", 1.0)
    broken = engine(step_s=0.002, agent=FakeAgent())
    await broken.start()
    with pytest.raises((AssertionError, TimeoutError, pytest.fail.Exception)):
        await _call(test, broken)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def test_a_rank_that_does_not_report_is_found() -> None:
    broken = FakeEngine(world=2, silent_ranks={1}, agent=FakeAgent())
    with pytest.raises(AssertionError):
        await _call(CONTRACT.test_an_updated_engine_is_a_fresh_one, broken)


async def _call(test: Callable[..., Any], engine: FakeEngine) -> None:
    more = {}
    if "fresh" in inspect.signature(test).parameters:
        prompt = FakeSubject.prompt
        more["fresh"] = {v: tuple(fake_tokens(v, prompt, 16)) for v in ("base", "step-1")}
    await test(EngineContract(), FakeSubject(engine.world), engine, **more)


# --- the page for authors ---


def test_the_example_of_the_page_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("engines.md", "python")
    made: list[EngineSettings] = []
    author = types.ModuleType("my_engine")
    author.create = made.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_engine", author)
    scope: dict[str, Any] = {}
    exec(compile(code, "docs/engines.md", "exec"), scope)
    subject = scope["MySubject"]()
    subject.create("step-1")
    subject.create_broken()
    assert [Path(settings.model).name for settings in made] == ["tiny-step-1", "model"]
    made[0].run_dir.rmdir()
    assert issubclass(scope["TestMyEngine"], EngineContract)


def test_the_entry_point_of_the_page_is_ours() -> None:
    (toml,) = blocks("engines.md", "toml")
    (group,) = tomllib.loads(toml)["project"]["entry-points"]
    assert group == registry.GROUP
