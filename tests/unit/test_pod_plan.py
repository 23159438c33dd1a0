"""The pod's plan as tables, and as a machine that must come to rest."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_pod.protocol import (
    CancelReason,
    DesiredDocument,
    InterruptionMode,
    PodPhase,
    SleepState,
    SleepTag,
    WeightsRef,
    WeightsSource,
)
from rollout_pod.supervisor import plan
from rollout_pod.supervisor.plan import next_step
from rollout_pod.supervisor.pushed import needed_push
from rollout_pod.supervisor.state import (
    BASE,
    EngineStatus,
    PodState,
    Stage,
    StageStatus,
    is_ready,
    phase_of,
)


def ref(version: str) -> WeightsRef:
    return WeightsRef(version=version, source=WeightsSource(path=f"/w/{version}"))


def pushed(version: str) -> WeightsRef:
    return WeightsRef(version=version, source=WeightsSource.model_validate({"push": {}}))


ONE, TWO = ref("step-1"), ref("step-2")
PUSHED, ALSO_PUSHED = pushed("step-8"), pushed("step-9")
UP = PodState(engine=EngineStatus.UP, loaded=BASE)
SERVING = replace(
    UP, gate_open=True, loaded=ONE, transferred=True, committed=ONE, last_committed=ONE
)
READY_TWO = Stage(TWO, "s", StageStatus.READY)
AWAITS = Stage(PUSHED, "", StageStatus.AWAITING)
OFFERED = Stage(PUSHED, "p", StageStatus.READY)
CLOSED = replace(SERVING, gate_open=False, closed_for=CancelReason.UPDATING, idle=True)
POISONED = replace(CLOSED, committed=None, loaded=None, poisoned=True)


WEIGHTS, KV = SleepTag.WEIGHTS, SleepTag.KV_CACHE
BOTH = frozenset(SleepTag)


def asleep(level: int, *tags: SleepTag, **changes: object) -> PodState:
    """A pod that sleeps as the supervisor leaves it."""
    awake = replace(
        SERVING, gate_open=False, closed_for=CancelReason.SLEEPING, idle=True, caches_clear=False
    )
    if level == 2:
        awake = replace(awake, loaded=None, committed=None, transferred=False)
    sleep = SleepState(level=level, tags=tags, released=True)
    return replace(awake, sleep=sleep, **changes)


FULL_1, FULL_2 = asleep(1, WEIGHTS, KV), asleep(2, WEIGHTS, KV)
LEVEL_1, LEVEL_2 = {"level": 1}, {"level": 2}
ONLY_KV = {"level": 1, "tags": ["kv_cache"]}


def doc(weights: WeightsRef | None = ONE, **more: object) -> DesiredDocument:
    return DesiredDocument.model_validate(
        {"owner": "o", "generation": 1, "weights": weights, **more}
    )


@pytest.mark.parametrize(
    ("desired", "state", "step"),
    [
        pytest.param(doc(), PodState(), plan.Load(), id="a new process loads the model"),
        pytest.param(
            doc(),
            replace(SERVING, engine=EngineStatus.DEAD, last_error="boom"),
            plan.Restart("boom"),
            id="a dead engine ends the process",
        ),
        pytest.param(None, UP, plan.Wait(), id="without a document nothing is served"),
        pytest.param(doc(None), UP, plan.Commit(BASE), id="base is what the boot loaded"),
        pytest.param(doc(), UP, plan.Prefetch(ONE), id="a fresh pod fetches what is wanted"),
        pytest.param(
            doc(fallback=BASE), UP, plan.Prefetch(ONE), id="and does not serve the fallback first"
        ),
        pytest.param(
            doc(fallback=BASE),
            UP.with_stage_failure(ONE, retry_at=9.0),
            plan.Commit(BASE),
            id="the fallback is served when the wanted version cannot be had",
        ),
        pytest.param(
            doc(fallback=TWO),
            UP.with_stage_failure(ONE, retry_at=9.0),
            plan.Prefetch(TWO),
            id="a fallback that is not loaded is fetched",
        ),
        pytest.param(
            doc(fallback=TWO),
            replace(UP, last_committed=BASE).with_stage_failure(ONE, retry_at=9.0),
            plan.Commit(BASE),
            id="the pod's own record wins over the document's fallback",
        ),
        pytest.param(
            doc(TWO, fallback=ONE),
            replace(
                UP,
                idle=True,
                closed_for=CancelReason.UPDATING,
                stage=Stage(ONE, "s", StageStatus.RUNNING),
            ).with_stage_failure(TWO, retry_at=0.5),
            plan.Wait(),
            id="a retry does not chase off the fallback that is on its way",
        ),
        pytest.param(doc(), SERVING, plan.Wait(), id="served and wanted: rest"),
        pytest.param(
            doc(paused=True), SERVING, plan.CloseGate(CancelReason.PAUSED), id="pause closes"
        ),
        pytest.param(
            doc(paused=True),
            replace(SERVING, gate_open=False, closed_for=CancelReason.PAUSED),
            plan.Cancel(),
            id="then cuts",
        ),
        pytest.param(
            doc(paused=True),
            replace(SERVING, gate_open=False, closed_for=CancelReason.PAUSED, idle=True),
            plan.Wait(),
            id="then rests",
        ),
        pytest.param(
            doc(),
            replace(SERVING, gate_open=False, closed_for=CancelReason.PAUSED, idle=True),
            plan.OpenGate(),
            id="unpause opens",
        ),
        pytest.param(doc(TWO), SERVING, plan.Prefetch(TWO), id="a new version is fetched first"),
        pytest.param(
            doc(TWO),
            replace(SERVING, stage=Stage(TWO, "s", StageStatus.RUNNING)),
            plan.Wait(),
            id="serving goes on while it is",
        ),
        pytest.param(
            doc(TWO, paused=True),
            replace(SERVING, stage=Stage(TWO, "s", StageStatus.RUNNING)),
            plan.CloseGate(CancelReason.PAUSED),
            id="a pause does not wait for a prefetch",
        ),
        pytest.param(
            doc(TWO),
            replace(SERVING, stage=READY_TWO),
            plan.CloseGate(CancelReason.UPDATING),
            id="the gate closes only when every rank accepted the manifest",
        ),
        pytest.param(
            doc(TWO),
            replace(CLOSED, idle=False, stage=READY_TWO),
            plan.Cancel(),
            id="update: cut",
        ),
        pytest.param(
            doc(TWO),
            replace(CLOSED, stage=READY_TWO),
            plan.Transfer(TWO, "s", flush=False),
            id="update: transfer",
        ),
        pytest.param(
            doc(TWO),
            replace(CLOSED, loaded=TWO, caches_clear=False, stage=READY_TWO),
            plan.ClearCaches(),
            id="update: caches before the commit",
        ),
        pytest.param(
            doc(TWO),
            replace(CLOSED, loaded=TWO, stage=READY_TWO),
            plan.Commit(TWO),
            id="update: commit",
        ),
        pytest.param(
            doc(ref("step-3")),
            replace(CLOSED, loaded=TWO, stage=READY_TWO),
            plan.Commit(TWO),
            id="what was loaded is committed, also when something newer is wanted by now",
        ),
        pytest.param(
            doc(TWO),
            replace(CLOSED, loaded=TWO, committed=TWO),
            plan.OpenGate(),
            id="update: open",
        ),
        pytest.param(
            doc(TWO, paused=True),
            replace(CLOSED, loaded=TWO, committed=TWO),
            plan.CloseGate(CancelReason.PAUSED),
            id="an update under a pause ends paused",
        ),
        pytest.param(
            doc(TWO),
            SERVING.with_stage_failure(TWO, retry_at=9.0),
            plan.Wait(9.0),
            id="a version that cannot be had touches nothing and is tried again",
        ),
        pytest.param(
            doc(TWO),
            SERVING.with_stage_failure(TWO, retry_at=0.5),
            plan.Prefetch(TWO),
            id="when its time has come",
        ),
        pytest.param(
            doc(ref("step-3")),
            replace(SERVING, stage=READY_TWO),
            plan.Prefetch(ref("step-3")),
            id="a newer wish supersedes a staged version",
        ),
        pytest.param(doc(TWO), POISONED, plan.Prefetch(TWO), id="poisoned: fetch it all again"),
        pytest.param(
            doc(TWO),
            replace(POISONED, stage=READY_TWO),
            plan.Transfer(TWO, "s", flush=True),
            id="poisoned: a complete resend, flushed first",
        ),
        pytest.param(
            doc(TWO),
            replace(POISONED, rejected=TWO),
            plan.Prefetch(ONE),
            id="poisoned and rejected: back to what was committed last",
        ),
        pytest.param(
            doc(TWO), replace(SERVING, rejected=TWO), plan.Wait(), id="rejected: serve on"
        ),
        pytest.param(
            doc(None),
            replace(UP, rejected=BASE, last_committed=PUSHED),
            plan.Commit(BASE),
            id="base rejected before a restart: the engine holds it",
        ),
        pytest.param(
            doc(TWO),
            replace(POISONED, rejected=TWO, last_committed=None),
            plan.Prefetch(TWO),
            id="rejected with nothing to fall back to: it is tried all the same",
        ),
        pytest.param(
            doc(ONE),
            replace(UP, rejected=ONE, last_committed=ONE),
            plan.Prefetch(ONE),
            id="rejected, but it is the fallback as well",
        ),
        pytest.param(
            doc(TWO, max_attempts=1),
            replace(POISONED, rejected=TWO).with_load_failure(ONE),
            plan.Restart("step-1 failed 1 times"),
            id="the fallback fails too: only a restart helps",
        ),
        pytest.param(
            doc(PUSHED), SERVING, plan.AwaitPush(PUSHED), id="push: say that it is needed"
        ),
        pytest.param(
            doc(PUSHED),
            replace(SERVING, stage=READY_TWO),
            plan.AwaitPush(PUSHED),
            id="push: it supersedes what was staged",
        ),
        pytest.param(
            doc(PUSHED), replace(SERVING, stage=AWAITS), plan.Wait(), id="push: serve on till then"
        ),
        pytest.param(
            doc(PUSHED),
            replace(SERVING, stage=OFFERED),
            plan.CloseGate(CancelReason.UPDATING),
            id="push: offered, so every rank accepted the manifest",
        ),
        pytest.param(
            doc(PUSHED),
            replace(CLOSED, stage=OFFERED),
            plan.Transfer(PUSHED, "p", flush=False),
            id="push: the trainer's session",
        ),
        pytest.param(
            doc(PUSHED),
            replace(CLOSED, stage=None),
            plan.AwaitPush(PUSHED),
            id="push: its sender is gone behind a closed gate",
        ),
        pytest.param(
            doc(PUSHED),
            replace(CLOSED, stage=AWAITS),
            plan.OpenGate(),
            id="push: which opens again",
        ),
        pytest.param(
            doc(PUSHED),
            replace(POISONED, stage=OFFERED),
            plan.Transfer(PUSHED, "p", flush=True),
            id="push: poisoned: flushed first",
        ),
        pytest.param(
            doc(PUSHED),
            POISONED,
            plan.Prefetch(ONE),
            id="push: poisoned: nobody knows when it comes again, the old version can be had now",
        ),
        pytest.param(
            doc(PUSHED),
            replace(POISONED, last_committed=ALSO_PUSHED, stage=AWAITS),
            plan.Wait(),
            id="push: poisoned, and all that helps has to be pushed",
        ),
        pytest.param(
            doc(PUSHED, max_attempts=2),
            replace(POISONED, last_committed=None)
            .with_load_failure(PUSHED)
            .with_load_failure(PUSHED),
            plan.Restart("step-8 failed 2 times"),
            id="push: it failed too often with nothing to fall back to",
        ),
        pytest.param(
            doc(PUSHED, fallback=BASE),
            UP,
            plan.Commit(BASE),
            id="push: a fresh pod serves the fallback meanwhile",
        ),
        pytest.param(
            doc(PUSHED, fallback=ONE), UP, plan.Prefetch(ONE), id="push: also one to be fetched"
        ),
        pytest.param(
            doc(PUSHED, fallback=ONE),
            replace(UP, idle=True, closed_for=CancelReason.UPDATING, stage=OFFERED),
            plan.Transfer(PUSHED, "p", flush=False),
            id="push: an offer goes before the fallback",
        ),
        pytest.param(
            doc(PUSHED, fallback=PUSHED), UP, plan.AwaitPush(PUSHED), id="push: restarted: again"
        ),
        pytest.param(
            doc(PUSHED),
            replace(SERVING, rejected=PUSHED),
            plan.Wait(),
            id="push: rejected: serve on",
        ),
        pytest.param(
            doc(PUSHED),
            replace(POISONED, rejected=PUSHED, last_committed=ALSO_PUSHED),
            plan.AwaitPush(ALSO_PUSHED),
            id="push: poisoned and rejected: the fallback has to be pushed",
        ),
        pytest.param(
            doc(ONE, fallback=PUSHED),
            replace(UP, idle=True, closed_for=CancelReason.UPDATING).with_stage_failure(
                ONE, retry_at=9.0
            ),
            plan.Wait(9.0),
            id="push: a fallback that nobody offers keeps no retry from its time",
        ),
        pytest.param(
            doc(ONE, fallback=PUSHED),
            replace(
                UP, idle=True, closed_for=CancelReason.UPDATING, stage=OFFERED
            ).with_stage_failure(ONE, retry_at=9.0),
            plan.Transfer(PUSHED, "p", flush=False),
            id="push: an offered fallback is taken while the wanted version cannot be had",
        ),
        pytest.param(
            doc(PUSHED, sleep=LEVEL_1),
            replace(FULL_1, stage=OFFERED),
            plan.Wait(),
            id="push: asleep: what was offered waits for the wake",
        ),
        pytest.param(
            doc(PUSHED),
            replace(FULL_2, sleep=None, last_committed=PUSHED, stage=OFFERED),
            plan.CloseGate(CancelReason.UPDATING),
            id="push: the complete update that level 2 makes necessary",
        ),
        pytest.param(
            doc(PUSHED, paused=True),
            replace(
                SERVING, gate_open=False, closed_for=CancelReason.PAUSED, idle=True, stage=AWAITS
            ),
            plan.Wait(),
            id="push: a pause goes on while it is awaited",
        ),
        pytest.param(
            doc(),
            replace(SERVING, stage=OFFERED),
            plan.GiveUp(),
            id="push: the wish is taken back: its sender is told",
        ),
        pytest.param(
            doc(ONE.model_copy(update={"step": 7})),
            SERVING,
            plan.Relabel(7),
            id="another step of the same version moves no byte",
        ),
        pytest.param(
            doc(ONE.model_copy(update={"source": WeightsSource(path="/elsewhere")})),
            SERVING,
            plan.Wait(),
            id="another source of the committed version is not looked at",
        ),
        pytest.param(
            doc(),
            replace(SERVING, stage=READY_TWO),
            plan.GiveUp(),
            id="what was prepared is forgotten when the wish is taken back",
        ),
        pytest.param(
            doc(),
            replace(POISONED, kept=True),
            plan.Cancel(),
            id="poisoned: what was kept is cut",
        ),
        pytest.param(
            doc(TWO, interruption={"mode": "keep"}),
            replace(CLOSED, idle=False, stage=READY_TWO),
            plan.Cancel(InterruptionMode.KEEP),
            id="keep: the engine only pauses",
        ),
        pytest.param(
            doc(TWO),
            replace(CLOSED, kept=True, stage=READY_TWO),
            plan.Cancel(),
            id="kept by an earlier wish: cut before the update",
        ),
        pytest.param(
            doc(sleep=LEVEL_1),
            SERVING,
            plan.CloseGate(CancelReason.SLEEPING),
            id="sleep: the gate first",
        ),
        pytest.param(
            doc(sleep=LEVEL_1),
            replace(SERVING, gate_open=False, closed_for=CancelReason.SLEEPING),
            plan.Cancel(),
            id="sleep: then cut",
        ),
        pytest.param(
            doc(sleep=LEVEL_1, interruption={"mode": "drain"}),
            replace(SERVING, gate_open=False, closed_for=CancelReason.SLEEPING),
            plan.Cancel(InterruptionMode.DRAIN),
            id="sleep: requests may end by themselves",
        ),
        pytest.param(
            doc(sleep=LEVEL_1, interruption={"mode": "keep"}),
            replace(SERVING, gate_open=False, closed_for=CancelReason.SLEEPING),
            plan.Cancel(),
            id="sleep: nothing can be kept",
        ),
        pytest.param(
            doc(sleep=LEVEL_1, paused=True, interruption={"mode": "keep"}),
            replace(SERVING, gate_open=False, closed_for=CancelReason.PAUSED, idle=True, kept=True),
            plan.CloseGate(CancelReason.SLEEPING),
            id="sleep after a pause that kept requests: they are told why",
        ),
        pytest.param(
            doc(sleep=LEVEL_1, interruption={"mode": "keep"}),
            replace(
                SERVING, gate_open=False, closed_for=CancelReason.SLEEPING, idle=True, kept=True
            ),
            plan.Cancel(),
            id="and cut",
        ),
        pytest.param(
            doc(sleep=LEVEL_2),
            replace(SERVING, gate_open=False, closed_for=CancelReason.SLEEPING, idle=True),
            plan.Sleep(2),
            id="sleep: then sleep",
        ),
        pytest.param(doc(sleep=LEVEL_1), FULL_1, plan.Wait(), id="asleep: rest"),
        pytest.param(doc(sleep=LEVEL_1), FULL_2, plan.Prefetch(ONE), id="asleep: prefetch goes on"),
        pytest.param(
            doc(sleep=LEVEL_1),
            replace(FULL_2, stage=Stage(ONE, "s", StageStatus.READY)),
            plan.Wait(),
            id="a deeper sleep will do, and an update waits for the wake",
        ),
        pytest.param(
            doc(sleep=LEVEL_2), FULL_1, plan.Wake(BOTH), id="deeper than it sleeps: wake first"
        ),
        pytest.param(
            doc(sleep=ONLY_KV), FULL_1, plan.Wake(frozenset({WEIGHTS})), id="wake one tag"
        ),
        pytest.param(
            doc(sleep={"level": 2, "tags": ["kv_cache"]}),
            replace(SERVING, gate_open=False, closed_for=CancelReason.SLEEPING, idle=True),
            plan.Sleep(1),
            id="weights that are to stay are not dropped on the way",
        ),
        pytest.param(doc(sleep=ONLY_KV), asleep(1, KV), plan.Wait(), id="one tag asleep: rest"),
        pytest.param(
            doc(sleep=LEVEL_1),
            asleep(1, KV),
            plan.Wake(frozenset({KV})),
            id="more than sleeps: an engine falls asleep only as a whole",
        ),
        pytest.param(
            doc(TWO, sleep=ONLY_KV),
            asleep(1, KV, stage=READY_TWO),
            plan.CloseGate(CancelReason.UPDATING),
            id="an update needs the weights only",
        ),
        pytest.param(
            doc(TWO, sleep=ONLY_KV),
            asleep(1, KV, stage=READY_TWO, closed_for=CancelReason.UPDATING),
            plan.Transfer(TWO, "s", flush=False),
            id="and goes on while the cache sleeps",
        ),
        pytest.param(
            doc(TWO, sleep=ONLY_KV),
            asleep(1, KV, loaded=TWO, closed_for=CancelReason.UPDATING),
            plan.ClearCaches(),
            id="and is committed before it wakes",
        ),
        pytest.param(
            doc(TWO),
            replace(FULL_2, sleep=None, stage=Stage(ONE, "s", StageStatus.READY)),
            plan.Prefetch(TWO),
            id="the old version, fetched while it slept, does not come first",
        ),
        pytest.param(doc(), FULL_1, plan.Wake(BOTH), id="wake all"),
        pytest.param(
            doc(),
            replace(FULL_1, sleep=None),
            plan.ClearCaches(),
            id="woken from level 1: the caches before the gate",
        ),
        pytest.param(
            doc(), replace(FULL_1, sleep=None, caches_clear=True), plan.OpenGate(), id="then serve"
        ),
        pytest.param(
            doc(),
            replace(FULL_2, sleep=None),
            plan.Prefetch(ONE),
            id="woken from level 2: nothing is served before a complete update",
        ),
        pytest.param(
            doc(None),
            replace(FULL_2, sleep=None, last_committed=BASE),
            plan.Prefetch(BASE),
            id="base is no exception",
        ),
        pytest.param(
            doc(paused=True),
            replace(FULL_1, sleep=None),
            plan.CloseGate(CancelReason.PAUSED),
            id="woken under a pause: paused",
        ),
        pytest.param(
            doc(TWO, sleep=LEVEL_1),
            replace(CLOSED, loaded=TWO, caches_clear=False, stage=READY_TWO),
            plan.ClearCaches(),
            id="an update that was loaded is finished before it sleeps",
        ),
        pytest.param(
            doc(TWO, sleep=LEVEL_1),
            replace(CLOSED, stage=READY_TWO),
            plan.CloseGate(CancelReason.SLEEPING),
            id="one that was not begun waits",
        ),
        pytest.param(
            doc(TWO, max_attempts=1, sleep=LEVEL_1),
            replace(FULL_1, poisoned=True, committed=None, loaded=None).with_load_failure(TWO),
            plan.Prefetch(TWO),
            id="asleep it does not restart: that would take the memory back",
        ),
        pytest.param(
            doc(sleep=LEVEL_1),
            replace(SERVING, sleep_refusal="no"),
            plan.Wait(),
            id="an engine that cannot sleep serves on",
        ),
        pytest.param(doc(sleep=LEVEL_1), PodState(), plan.Load(), id="a restarted one loads first"),
        pytest.param(
            doc(sleep=LEVEL_1),
            UP,
            plan.CloseGate(CancelReason.SLEEPING),
            id="and sleeps before it loads what is wanted: the memory may be another's by now",
        ),
        pytest.param(
            doc(sleep=LEVEL_1), replace(FULL_1, draining=True), plan.Drain(), id="asleep: drain"
        ),
        pytest.param(doc(), replace(SERVING, draining=True), plan.Drain(), id="drain"),
        pytest.param(
            doc(), replace(SERVING, draining=True, drained=True), plan.Wait(), id="drained"
        ),
    ],
)
def test_next_step(desired: DesiredDocument | None, state: PodState, step: plan.Step) -> None:
    assert next_step(desired, state, now=1.0) == step


@pytest.mark.parametrize(
    ("desired", "state", "needs"),
    [
        pytest.param(None, UP, None, id="without a document"),
        pytest.param(doc(ONE), UP, None, id="what can be fetched"),
        pytest.param(doc(PUSHED), PodState(), None, id="no ranks yet"),
        pytest.param(doc(PUSHED), replace(UP, draining=True), None, id="it ends"),
        pytest.param(doc(PUSHED), UP, PUSHED, id="fresh"),
        pytest.param(doc(PUSHED), SERVING, PUSHED, id="serving the old version"),
        pytest.param(doc(PUSHED), replace(SERVING, stage=AWAITS), PUSHED, id="awaited"),
        pytest.param(doc(PUSHED), replace(SERVING, stage=OFFERED), None, id="offered"),
        pytest.param(
            doc(PUSHED), replace(SERVING, loaded=PUSHED, committed=PUSHED), None, id="held"
        ),
        pytest.param(doc(PUSHED), POISONED, PUSHED, id="poisoned, whatever is done meanwhile"),
        pytest.param(doc(PUSHED, fallback=ONE), UP, PUSHED, id="while the fallback is fetched"),
        pytest.param(doc(PUSHED), FULL_2, None, id="asleep there is nothing to load into"),
        pytest.param(
            doc(PUSHED, sleep=ONLY_KV), asleep(1, KV), PUSHED, id="the weights are awake"
        ),
        pytest.param(doc(PUSHED), replace(SERVING, rejected=PUSHED), None, id="rejected"),
        pytest.param(
            doc(PUSHED, fallback=ALSO_PUSHED), replace(UP, rejected=PUSHED), ALSO_PUSHED,
            id="rejected: the fallback",
        ),
        pytest.param(
            doc(PUSHED, fallback=ALSO_PUSHED), UP, PUSHED, id="of two the one that is wanted"
        ),
        pytest.param(
            doc(PUSHED), replace(UP, rejected=PUSHED), PUSHED, id="rejected, and nothing else there"
        ),
        pytest.param(doc(ONE, fallback=PUSHED), UP, None, id="the wanted one is being fetched"),
        pytest.param(
            doc(ONE, fallback=PUSHED), UP.with_stage_failure(ONE, retry_at=9.0), PUSHED,
            id="the wanted one cannot be fetched",
        ),
    ],
)  # fmt: skip
def test_what_a_trainer_has_to_bring(
    desired: DesiredDocument | None, state: PodState, needs: WeightsRef | None
) -> None:
    assert needed_push(desired, state) == needs


@pytest.mark.parametrize(
    ("state", "phase", "ready"),
    [
        (PodState(), PodPhase.LOADING, False),
        (UP, PodPhase.STALE, False),
        (SERVING, PodPhase.SERVING, True),
        (replace(SERVING, gate_open=False, closed_for=CancelReason.PAUSED), PodPhase.PAUSING, True),
        (
            replace(SERVING, gate_open=False, closed_for=CancelReason.PAUSED, idle=True),
            PodPhase.PAUSED,
            True,
        ),
        (CLOSED, PodPhase.UPDATING, True),
        (replace(CLOSED, transferring=True, loaded=None), PodPhase.UPDATING, True),
        (POISONED, PodPhase.POISONED, False),
        (replace(POISONED, transferring=True), PodPhase.UPDATING, False),
        (FULL_1, PodPhase.SLEEPING, False),
        (FULL_2, PodPhase.SLEEPING, False),
        (asleep(1, KV), PodPhase.SLEEPING, True),
        (asleep(1, WEIGHTS), PodPhase.SLEEPING, False),
        (asleep(2, KV), PodPhase.SLEEPING, False),
        (asleep(1, KV, closed_for=CancelReason.UPDATING), PodPhase.UPDATING, True),
        (replace(FULL_1, poisoned=True, committed=None), PodPhase.SLEEPING, False),
        (asleep(1, KV, poisoned=True, committed=None), PodPhase.POISONED, False),
        (replace(FULL_2, sleep=None), PodPhase.STALE, False),
        (replace(SERVING, draining=True), PodPhase.DRAINING, False),
        (replace(SERVING, engine=EngineStatus.DEAD), PodPhase.FAILED, False),
    ],
)
def test_phase_and_readiness(state: PodState, phase: PodPhase, ready: bool) -> None:
    assert (phase_of(state), is_ready(state)) == (phase, ready)


REFS = [BASE, ONE, TWO, ref("step-3"), PUSHED, ALSO_PUSHED]
some_ref = st.sampled_from(REFS)
maybe_ref = st.none() | some_ref


@st.composite
def states(draw: st.DrawFn) -> PodState:
    """States that a supervisor can be in."""
    poisoned = draw(st.booleans())
    committed = None if poisoned else draw(maybe_ref)
    loaded = None if poisoned else (committed or draw(some_ref))
    if committed and draw(st.booleans()):
        loaded = draw(some_ref)
    transferred = draw(st.booleans()) if loaded == BASE else True
    if committed is not None and loaded != committed:
        transferred = True
    gate_open = committed is not None and loaded == committed and draw(st.booleans())
    stage_ref = draw(maybe_ref)
    statuses = (
        [StageStatus.AWAITING, StageStatus.READY]
        if stage_ref and stage_ref.is_pushed
        else [StageStatus.RUNNING, StageStatus.READY, StageStatus.FAILED]
    )
    tags = () if gate_open else draw(st.sampled_from([(), (WEIGHTS,), (KV,), (WEIGHTS, KV)]))
    level = draw(st.sampled_from([1, 2]))
    if WEIGHTS in tags and level == 2:
        loaded, committed, transferred = None, None, False
    state = PodState(
        engine=EngineStatus.UP,
        gate_open=gate_open,
        closed_for=None if gate_open else draw(st.sampled_from(CancelReason)),
        idle=not gate_open and (bool(tags) or draw(st.booleans())),
        kept=not gate_open and not tags and draw(st.booleans()),
        sleep=SleepState(level=level, tags=tags, released=True) if tags else None,
        sleep_refusal=None if tags else draw(st.sampled_from([None, "no"])),
        loaded=loaded,
        transferred=transferred,
        caches_clear=not tags and (loaded == committed or draw(st.booleans())),
        committed=committed,
        last_committed=committed or draw(maybe_ref),
        poisoned=poisoned,
        stage=Stage(stage_ref, "s", draw(st.sampled_from(statuses))) if stage_ref else None,
        rejected=draw(maybe_ref),
    )
    for failed in draw(st.lists(st.sampled_from(REFS[:4]), max_size=2, unique=True)):
        state = state.with_stage_failure(failed, retry_at=draw(st.sampled_from([0.0, 5.0])))
    return state


@st.composite
def documents(draw: st.DrawFn) -> DesiredDocument:
    wanted = draw(st.none() | st.sampled_from(REFS[1:]))
    sleep = draw(st.none() | st.sampled_from([LEVEL_1, LEVEL_2, ONLY_KV, {"tags": ["weights"]}]))
    mode = draw(st.sampled_from(InterruptionMode))
    return doc(
        wanted, paused=draw(st.booleans()), fallback=draw(maybe_ref), sleep=sleep,
        interruption={"mode": mode},
    )  # fmt: skip


def do(step: plan.Step, state: PodState) -> PodState:
    """The effect of a step when everything goes well."""
    match step:
        case plan.AwaitPush(target):
            return replace(state, stage=Stage(target, "", StageStatus.AWAITING))
        case plan.Prefetch(target):
            assert not target.is_pushed
            return replace(
                state.without_stage_failure(target), stage=Stage(target, "s", StageStatus.READY)
            )
        case plan.CloseGate(reason):
            return replace(state, gate_open=False, closed_for=reason)
        case plan.Cancel():
            assert not state.gate_open
            return replace(state, idle=True, kept=False)
        case plan.Transfer(target, _, flush):
            assert state.idle and not state.gate_open
            assert flush == state.poisoned
            assert WEIGHTS not in state.asleep
            return replace(
                state, loaded=target, transferred=True, caches_clear=False, poisoned=False
            )
        case plan.Sleep(level):
            assert state.idle and not state.gate_open and not state.kept and not state.asleep
            assert not state.sleep_refusal
            lost: dict = {"loaded": None, "committed": None, "transferred": False}
            return replace(
                state,
                caches_clear=False,
                sleep=SleepState(level=level, tags=tuple(SleepTag), released=True),
                **(lost if level == 2 else {}),
            )
        case plan.Wake(tags):
            assert state.sleep and tags and tags <= state.asleep
            left = tuple(tag for tag in state.sleep.tags if tag not in tags)
            rest = state.sleep.model_copy(update={"tags": left})
            return replace(state, sleep=rest if left else None)
        case plan.ClearCaches():
            assert not state.gate_open and not state.weights_asleep
            return replace(state, caches_clear=True)
        case plan.Commit(target):
            assert not state.gate_open
            assert state.loaded is not None and state.loaded.version == target.version
            assert state.caches_clear and not state.poisoned
            return replace(state, committed=target, last_committed=target, stage=None)
        case plan.Relabel(step):
            assert state.committed
            ref = state.committed.model_copy(update={"step": step})
            return replace(state, committed=ref, last_committed=ref)
        case plan.GiveUp():
            return replace(state, stage=None)
        case plan.OpenGate():
            assert state.committed and state.loaded
            assert state.committed.version == state.loaded.version and state.caches_clear
            assert not state.asleep
            return replace(state, gate_open=True, idle=False, closed_for=None)
        case _:
            raise AssertionError(step)


@settings(deadline=None)
@given(desired=documents(), state=states())
def test_every_state_comes_to_rest_where_the_document_says(
    desired: DesiredDocument, state: PodState
) -> None:
    now, offers = 10.0, 3
    for _ in range(60):
        step = next_step(desired, state, now)
        if isinstance(step, plan.Wait):
            running = state.stage is not None and state.stage.status is StageStatus.RUNNING
            if running:  # the agent ends its work
                assert state.stage
                state = do(plan.Prefetch(state.stage.ref), state)
                continue
            needed = needed_push(desired, state)
            if needed and offers > 0:  # a trainer that looks for it
                offers -= 1
                state = replace(state, stage=Stage(needed, "p", StageStatus.READY))
                continue
            break
        before, state = state, do(step, state)
        if before.committed and not state.committed:
            assert desired.sleep and desired.sleep.level == 2 and WEIGHTS in desired.sleep.tags
    else:
        raise AssertionError("no rest")
    wanted = desired.weights or BASE
    fallback = state.last_committed or desired.fallback
    sleep = None if state.sleep_refusal else desired.sleep
    assert state.asleep == (frozenset(sleep.tags) if sleep else frozenset())
    if sleep:
        assert not state.gate_open and not state.kept
        assert is_ready(state) == (WEIGHTS not in sleep.tags and state.committed is not None)
        assert not state.weights_asleep or state.sleep.level >= sleep.level
    if state.weights_asleep:
        return
    if state.rejected != wanted or fallback is None or fallback.version == wanted.version:
        assert state.committed is not None and state.committed.version == wanted.version
    if state.committed is not None:
        assert state.gate_open == (not desired.paused and not sleep)
    assert isinstance(next_step(desired, state, now), plan.Wait)
