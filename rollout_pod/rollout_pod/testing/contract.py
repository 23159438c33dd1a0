"""The Engine Protocol as tests. Each says what a pod relies on; ``engine.base`` has the words.

One engine serves the tests of a class, in their order; each leaves it running, with nothing in it.
The last ones take an engine of their own, which they end.
"""

import asyncio
import contextlib
import copy
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from rollout_pod.engine.base import (
    Engine,
    EngineDeadError,
    EngineDelta,
    EngineError,
    EngineOutput,
    EngineRequest,
    EngineStartError,
    InvalidSamplingParams,
    InvalidTokens,
    OnDelta,
    RankReport,
    SleepUnsupported,
)
from rollout_pod.engine.front_end import NoFrontEnd
from rollout_pod.protocol import EngineInfo, SleepTag
from rollout_pod.testing.subject import EngineSubject, Fault

T = TypeVar("T")

START_S = 600.0
CALL_S = 60.0
LOAD_S = 60.0
MUTE_S = 2.0
REST_S = 0.3
"""So long nothing may come of an engine that rests."""


class EngineContract:
    """Subclass it, with a fixture ``subject`` of scope ``class``."""

    pytestmark = pytest.mark.asyncio(loop_scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> EngineSubject:
        """To be overridden."""
        raise NotImplementedError("give this class a fixture 'subject' of scope 'class'")

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def started(cls, subject: EngineSubject) -> AsyncIterator[tuple[Engine, EngineInfo]]:
        """The engine of the class, and what it said of itself."""
        engine = subject.create()
        try:
            yield engine, await within(START_S, engine.start())
        finally:
            await within(CALL_S, engine.shutdown())

    @pytest.fixture
    def engine(self, started: tuple[Engine, EngineInfo]) -> Engine:
        """The engine of the class."""
        return started[0]

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def fresh(cls, subject: EngineSubject) -> dict[str, tuple[int, ...]]:
        """The tokens of engines that were started with each version."""
        tokens = {}
        for version in ("base", "step-1"):
            engine = subject.create(version)
            try:
                await within(START_S, engine.start())
                tokens[version] = (await ask(subject, engine, 16)).token_ids
            finally:
                await within(CALL_S, engine.shutdown())
        assert tokens["base"] != tokens["step-1"], "these versions cannot be told apart"
        return tokens

    @pytest_asyncio.fixture(loop_scope="class")
    async def own(self, subject: EngineSubject) -> AsyncIterator[Engine]:
        """An engine for one test, which may do with it what it likes."""
        engine = subject.create()
        try:
            await within(START_S, engine.start())
            yield engine
        finally:
            await within(CALL_S, engine.shutdown())

    # --- life ---

    async def test_it_says_what_it_is(self, started: tuple[Engine, EngineInfo]) -> None:
        """The state document shows it, and the ranks' sockets are those that a sender talks to."""
        engine, info = started
        assert info.name and info.version
        assert info.max_model_len > 0
        assert len(engine.rank_sockets()) == info.world_size >= 1
        assert len(set(engine.rank_sockets())) == info.world_size
        assert len(engine.gpu_uuids()) == info.world_size
        path = engine.model_path()
        assert path is None or path.is_absolute()
        assert engine.dead_error() is None
        await within(CALL_S, engine.ping(timeout_s=CALL_S))
        assert isinstance(engine.metrics_text(), bytes)
        with contextlib.suppress(NoFrontEnd):
            assert callable(engine.front_end())

    async def test_a_start_that_fails_says_why(self, subject: EngineSubject) -> None:
        """The message becomes the container's last words."""
        engine = subject.create_broken()
        with pytest.raises(EngineStartError) as caught:
            await within(START_S, engine.start())
        assert str(caught.value).strip()
        await within(CALL_S, engine.shutdown())

    # --- what is asked ---

    async def test_sampling_parameters_are_checked_and_never_changed(
        self, subject: EngineSubject, engine: Engine
    ) -> None:
        """A caller's mistake is told before anything is queued, with the name of the parameter."""
        raw = dict(subject.greedy)
        before = copy.deepcopy(raw)
        engine.sampling_params(raw, max_tokens=4)
        assert raw == before
        with pytest.raises(InvalidSamplingParams) as caught:
            engine.sampling_params(raw | {"no_such_parameter": 1}, max_tokens=4)
        assert caught.value.field == "no_such_parameter"

    async def test_tokens_outside_the_vocabulary_are_found(self, engine: Engine) -> None:
        """They end some engines."""
        engine.check_tokens([])
        engine.check_tokens([5, 6])
        for bad in (-1, 1 << 40):
            with pytest.raises(InvalidTokens) as caught:
                engine.check_tokens([5, bad, 6])
            assert caught.value.position == 1

    async def test_every_token_has_its_log_prob(
        self, subject: EngineSubject, engine: Engine
    ) -> None:
        """The budget is kept, and the same request gives the same."""
        whole = await ask(subject, engine, 24)
        assert len(whole.token_ids) == len(whole.log_probs) == 24
        assert whole.finish_reason == "length"
        assert all(math.isfinite(value) and value <= 1e-3 for value in whole.log_probs)
        assert (await ask(subject, engine, 24)).token_ids == whole.token_ids

    async def test_deltas_are_the_output_bit_by_bit(
        self, subject: EngineSubject, engine: Engine
    ) -> None:
        """A reader of a stream has what the final output has; the last delta says how it ended."""
        deltas: list[EngineDelta] = []
        whole = await ask(subject, engine, 24, on_delta=deltas.append)
        assert tuple(t for delta in deltas for t in delta.token_ids) == whole.token_ids
        assert tuple(v for delta in deltas for v in delta.log_probs) == whole.log_probs
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
        assert deltas[-1].finish_reason == "length"

    async def test_many_at_once_do_not_mix(self, subject: EngineSubject, engine: Engine) -> None:
        """Each gets what it gets alone."""
        prompts = [[*subject.prompt, 3 + i] for i in range(8)]
        alone = [await ask(subject, engine, 12, prompt) for prompt in prompts]
        together = await asyncio.gather(*(ask(subject, engine, 12, prompt) for prompt in prompts))
        for one, other in zip(alone, together, strict=True):
            assert len(other.token_ids) == 12
            assert not subject.exact or other.token_ids == one.token_ids

    # --- cuts ---

    async def test_an_abort_returns_the_partial(
        self, subject: EngineSubject, engine: Engine
    ) -> None:
        """All that was sampled, once; other requests go on; the rest continues where it was cut."""
        name = uuid.uuid4().hex
        deltas: list[EngineDelta] = []
        other = asyncio.create_task(ask(subject, engine, subject.long))
        cut = asyncio.create_task(
            ask(subject, engine, subject.long, on_delta=deltas.append, engine_id=name)
        )
        await until(lambda: len(deltas) >= 3)
        await within(CALL_S, engine.abort(name))
        partial = await within(CALL_S, cut)
        await within(CALL_S, engine.abort(name))  # late
        await within(CALL_S, engine.abort("never-seen"))
        assert partial.finish_reason == "abort"
        assert 0 < len(partial.token_ids) == len(partial.log_probs) < subject.long
        seen = tuple(t for delta in deltas for t in delta.token_ids)
        assert partial.token_ids[: len(seen)] == seen
        assert (await within(CALL_S, other)).finish_reason == "length"
        n = len(partial.token_ids)
        whole = await ask(subject, engine, n + 8)
        rest = await ask(subject, engine, 8, [*subject.prompt, *partial.token_ids], generated=n)
        assert len(rest.token_ids) == 8
        if subject.exact:
            assert partial.token_ids + rest.token_ids == whole.token_ids

    async def test_a_pause_returns_every_partial(
        self, subject: EngineSubject, engine: Engine
    ) -> None:
        """Twice is as good as once, and what comes meanwhile waits for ``resume``."""
        deltas: list[list[EngineDelta]] = [[] for _ in range(4)]
        running = [
            asyncio.create_task(
                ask(subject, engine, subject.long, [*subject.prompt, i], on_delta=mine.append)
            )
            for i, mine in enumerate(deltas)
        ]
        await until(lambda: all(deltas))
        await at_rest(engine, running)
        for task, mine in zip(running, deltas, strict=True):
            partial = await task
            assert partial.finish_reason == "abort"
            assert len(partial.token_ids) == len(partial.log_probs) < subject.long
            seen = tuple(t for delta in mine for t in delta.token_ids)
            assert partial.token_ids[: len(seen)] == seen
        late = asyncio.create_task(ask(subject, engine, 4))
        await asyncio.wait({late}, timeout=REST_S)
        assert not late.done(), "a paused engine generated"
        await within(CALL_S, engine.resume())
        assert (await within(CALL_S, late)).finish_reason == "length"
        await within(CALL_S, engine.resume())
        assert len((await ask(subject, engine, 4)).token_ids) == 4

    async def test_what_waits_in_a_paused_engine_is_cut_by_the_next_pause(
        self, subject: EngineSubject, engine: Engine
    ) -> None:
        """So that a gate which closed while a request was handed over gets rid of it."""
        await within(CALL_S, engine.pause())
        late = asyncio.create_task(ask(subject, engine, 4))
        await asyncio.wait({late}, timeout=REST_S)
        await at_rest(engine, [late])
        output = await late
        assert (output.finish_reason, output.token_ids) == ("abort", ())
        await within(CALL_S, engine.resume())

    async def test_a_pause_that_keeps_goes_on_where_it_was(
        self, subject: EngineSubject, engine: Engine
    ) -> None:
        """Not one token comes between its return and ``resume``."""
        deltas: list[EngineDelta] = []
        budget = subject.long
        running = asyncio.create_task(ask(subject, engine, budget, on_delta=deltas.append))
        await until(lambda: len(deltas) >= 3)
        await within(CALL_S, engine.pause(keep=True))
        count = len(deltas)
        await asyncio.wait({running}, timeout=REST_S)
        assert len(deltas) == count
        assert not running.done()
        await within(CALL_S, engine.resume())
        output = await within(CALL_S, running)
        assert (output.finish_reason, len(output.token_ids)) == ("length", budget)
        if subject.exact:
            assert output.token_ids == (await ask(subject, engine, budget)).token_ids

    async def test_caches_are_cleared_of_an_idle_engine(
        self, subject: EngineSubject, engine: Engine
    ) -> None:
        """And only said to be where they were: old entries under new weights are wrong tokens."""
        first = await ask(subject, engine, 8)
        report = await within(CALL_S, engine.clear_caches())
        assert report.is_complete
        again = await ask(subject, engine, 8)
        assert again.num_cached_tokens == 0
        assert again.token_ids == first.token_ids

    # --- weights ---

    async def test_an_updated_engine_is_a_fresh_one(
        self, subject: EngineSubject, engine: Engine, fresh: dict[str, tuple[int, ...]]
    ) -> None:
        """Every rank loads, the next version as well; caches that are warm with old weights do not
        count.
        """
        await ask(subject, engine, 16)
        for version in ("step-1", "base", "step-1", "base"):
            reports, error = await load(subject, engine, version)
            assert error is None
            assert_loaded(engine, reports, version)
            await within(CALL_S, engine.publish_version(version))
            await serve_again(engine)
            assert (await ask(subject, engine, 16)).token_ids == fresh[version]

    async def test_a_version_that_does_not_fit_is_refused_untouched(
        self, subject: EngineSubject, engine: Engine
    ) -> None:
        """Before its first byte: the engine serves on, without any repair."""
        before = await ask(subject, engine, 16)
        reports, error = await load(subject, engine, "step-1", fault="wrong")
        assert error is not None and str(error)
        assert not any(report.ok or report.touched for report in reports)
        await within(CALL_S, engine.resume())
        assert (await ask(subject, engine, 16)).token_ids == before.token_ids

    async def test_a_sender_that_never_comes_holds_nothing_up(
        self, subject: EngineSubject, engine: Engine
    ) -> None:
        """The deadline is kept, every rank says that it failed, and nothing was touched."""
        before = await ask(subject, engine, 16)
        await within(CALL_S, engine.pause())
        began = time.monotonic()
        reports = await within(
            CALL_S,
            engine.load_weights(uuid.uuid4().hex, version="step-1", flush=False, timeout_s=MUTE_S),
        )
        assert time.monotonic() - began < MUTE_S + 5
        assert_failed(engine, reports)
        assert not any(report.touched for report in reports)
        await within(CALL_S, engine.resume())
        assert (await ask(subject, engine, 16)).token_ids == before.token_ids

    async def test_only_what_was_staged_is_switched_to(
        self, subject: EngineSubject, engine: Engine
    ) -> None:
        """Whether or not it reserves memory for a next version; nothing is touched otherwise."""
        before = await ask(subject, engine, 16)
        await within(CALL_S, engine.pause())
        reports = await within(CALL_S, engine.switch_weights("step-1", timeout_s=MUTE_S))
        assert_failed(engine, reports)
        assert not any(report.touched for report in reports)
        await within(CALL_S, engine.resume())
        assert (await ask(subject, engine, 16)).token_ids == before.token_ids

    async def test_a_lost_sender_is_repaired_by_a_complete_load(
        self, subject: EngineSubject, engine: Engine, fresh: dict[str, tuple[int, ...]]
    ) -> None:
        """It is not taken for a load; after ``flush`` the next one is whole."""
        for version in ("step-1", "base"):
            reports, error = await load(subject, engine, "step-1", fault="lost")
            assert error is not None
            assert_failed(engine, reports)
            assert any(report.touched for report in reports)
            reports, error = await load(subject, engine, version, flush=True)
            assert error is None
            assert_loaded(engine, reports, version)
            await serve_again(engine)
            assert (await ask(subject, engine, 16)).token_ids == fresh[version]

    # --- sleep ---

    async def test_it_sleeps_and_wakes_or_says_why_not(
        self, subject: EngineSubject, engine: Engine
    ) -> None:
        """The scheduler rests until ``resume``, also when everything is resident again."""
        before = await ask(subject, engine, 16)
        refusal = engine.sleep_refusal()
        await within(CALL_S, engine.pause())
        if refusal is not None:
            with pytest.raises(SleepUnsupported):
                await within(CALL_S, engine.sleep(1))
        else:
            for level, orders in ((1, ALL_AT_ONCE), (1, ONE_BY_ONE), (2, ONE_BY_ONE)):
                report = await within(START_S, engine.sleep(level))
                assert report.bytes >= 0
                assert report.bytes or report.message, "nothing was released, and nobody knows why"
                for tags in orders:
                    assert await within(START_S, engine.wake(tags)) >= 0
                if level == 2:
                    reports, error = await load(subject, engine, "base", flush=True)
                    assert error is None
                    assert_loaded(engine, reports, "base")
                assert (await within(CALL_S, engine.clear_caches())).is_complete
                early = asyncio.create_task(ask(subject, engine, 4))
                await asyncio.wait({early}, timeout=REST_S)
                assert not early.done(), "it went on before it was told to"
                await at_rest(engine, [early])
        await within(CALL_S, engine.resume())
        assert (await ask(subject, engine, 16)).token_ids == before.token_ids

    # --- ends ---

    async def test_a_death_is_told_to_everybody(self, subject: EngineSubject, own: Engine) -> None:
        """Nothing waits for a dead engine, and its cause becomes the container's last words."""
        deltas: list[EngineDelta] = []
        running = asyncio.create_task(ask(subject, own, 100 * subject.long, on_delta=deltas.append))
        await until(lambda: bool(deltas))
        params = own.sampling_params(subject.greedy, max_tokens=4)
        subject.kill(own)
        with pytest.raises(EngineDeadError) as caught:
            await within(CALL_S, running)
        assert str(caught.value).strip()
        await until(lambda: own.dead_error() is not None)
        late = EngineRequest(uuid.uuid4().hex, list(subject.prompt), params)
        calls: list[Callable[[], Coroutine[Any, Any, object]]] = [
            lambda: own.generate(late),
            own.pause,
            own.clear_caches,
            lambda: own.load_weights("s", version="v", flush=True, timeout_s=MUTE_S),
        ]
        for call in calls:
            with pytest.raises((EngineDeadError, EngineError)) as caught_late:
                await within(CALL_S, call())
            assert isinstance(caught_late.value, EngineDeadError)

    async def test_a_shutdown_ends_all_and_may_come_twice(
        self, subject: EngineSubject, own: Engine
    ) -> None:
        """Also with a request in it, whose caller is told."""
        deltas: list[EngineDelta] = []
        running = asyncio.create_task(ask(subject, own, 100 * subject.long, on_delta=deltas.append))
        await until(lambda: bool(deltas))
        await within(CALL_S, own.shutdown())
        with contextlib.suppress(EngineDeadError, EngineError):
            assert (await within(CALL_S, running)).finish_reason == "abort"
        await within(CALL_S, own.shutdown())
        assert own.dead_error() is not None

    async def test_a_shutdown_needs_no_start(self, subject: EngineSubject) -> None:
        """A pod may be ended before its engine is asked to start."""
        await within(CALL_S, subject.create().shutdown())


ALL_AT_ONCE = (frozenset(SleepTag),)
ONE_BY_ONE = (frozenset({SleepTag.WEIGHTS}), frozenset({SleepTag.KV_CACHE}))


async def within(seconds: float, call: Awaitable[T]) -> T:
    """Await, or fail: a hang would tell nothing."""
    async with asyncio.timeout(seconds):
        return await call


async def until(done: Callable[[], bool]) -> None:
    """Wait for something that comes by itself."""
    async with asyncio.timeout(CALL_S):
        while not done():
            await asyncio.sleep(0.005)


async def ask(
    subject: EngineSubject,
    engine: Engine,
    budget: int,
    prompt: list[int] | None = None,
    *,
    generated: int = 0,
    on_delta: OnDelta | None = None,
    engine_id: str | None = None,
) -> EngineOutput:
    """One request, greedily."""
    request = EngineRequest(
        engine_id=engine_id or uuid.uuid4().hex,
        prompt_token_ids=list(subject.prompt) if prompt is None else prompt,
        params=engine.sampling_params(subject.greedy, max_tokens=budget),
        num_generated=generated,
    )
    return await within(10 * CALL_S, engine.generate(request, on_delta))


async def at_rest(engine: Engine, running: list["asyncio.Task[EngineOutput]"]) -> None:
    """Pause until every caller has its partial, as the gate does."""
    async with asyncio.timeout(CALL_S):
        while True:
            await engine.pause()
            _, left = await asyncio.wait(running, timeout=REST_S)
            if not left:
                return


async def load(
    subject: EngineSubject,
    engine: Engine,
    version: str,
    *,
    fault: Fault = "none",
    flush: bool = False,
) -> tuple[tuple[RankReport, ...], Exception | None]:
    """Pause and load; what the ranks report, and what the sender died of.

    Without reports where the ranks did not accept the version: ``load_weights`` was not called.
    """
    await within(CALL_S, engine.pause())
    loop = asyncio.get_running_loop()
    loads: list[asyncio.Future[tuple[RankReport, ...]]] = []

    def accepted(session: str) -> None:
        started = asyncio.run_coroutine_threadsafe(
            engine.load_weights(session, version=version, flush=flush, timeout_s=LOAD_S), loop
        )
        loads.append(asyncio.wrap_future(started, loop=loop))

    error = None
    try:
        await within(2 * LOAD_S, subject.send(engine, version, fault=fault, accepted=accepted))
    except Exception as raised:  # of whatever kind the sender is
        error = raised
    reports = await within(2 * LOAD_S, loads[0]) if loads else ()
    return reports, error


def assert_loaded(engine: Engine, reports: tuple[RankReport, ...], version: str) -> None:
    """Every rank, in order, has loaded this version."""
    assert [report.rank for report in reports] == list(range(len(engine.rank_sockets())))
    assert all(report.ok for report in reports), reports
    assert {report.version for report in reports} == {version}


def assert_failed(engine: Engine, reports: tuple[RankReport, ...]) -> None:
    """Every rank has answered, and not all of them have loaded it; those say why."""
    assert [report.rank for report in reports] == list(range(len(engine.rank_sockets())))
    assert not all(report.ok for report in reports)
    assert all(report.error for report in reports if not report.ok)


async def serve_again(engine: Engine) -> None:
    """What a pod does after a load."""
    assert (await within(CALL_S, engine.clear_caches())).is_complete
    await within(CALL_S, engine.resume())
