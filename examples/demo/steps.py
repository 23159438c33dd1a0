"""The steps of the demo that pause the replica, update it, mislead it and delete it."""

import asyncio
import time

import httpx

from examples.demo.callers import CALLERS, Batch
from examples.demo.check import returned_tokens
from examples.demo.cluster import DemoError
from examples.demo.play import Play
from rollout_pod.protocol import GateState, PodPhase, StateDocument, UpdatePhase

BAD = "step-404"
LONG_S = 25.0
"""How long the 16 long generations should take, so that a person can act meanwhile."""
MAX_LONG = 3900
SOON_S = 5.0
"""Far above what is measured on two busy cores: a pause that takes longer is broken."""
HEAD_START_S = 2.0
"""Lets every caller collect tokens before the next step cuts it."""


def closed(state: StateDocument) -> bool:
    """The gate holds requests back."""
    return state.gate is GateState.CLOSED


async def pause_and_update(play: Play, batch: Batch) -> None:
    """The heart of it: 16 long generations, cut twice, none the wiser."""
    stage, report = play.stage, play.stage.report
    stage.step("Pause it", "every caller gets the tokens it has so far; no connection is cut")
    await play.all_in_flight()
    await asyncio.sleep(HEAD_START_S)
    took, patched = await play.patch(paused=True)
    gate = await play.watch.until(closed, "the gate to close", since=patched)
    if not await play.callers.until(lambda: len(batch.partials) >= CALLERS, timeout_s=30):
        raise DemoError(f"only {len(batch.partials)} of {CALLERS} callers got a partial")
    lengths = sorted(len(partial.token_ids) for _, _, partial in batch.partials)
    last = max(at for at, _, _ in batch.partials)
    stage.say(f"all {CALLERS} callers hold a partial of {lengths[0]} to {lengths[-1]} tokens")
    holding = {caller for _, caller, _ in batch.partials}
    report.add("callers that hold a partial while paused", f"{len(holding)} of {CALLERS}",
               len(holding) == CALLERS and lengths[0] > 0)  # fmt: skip
    report.add(
        "seconds from patch to gate closed",
        f"{gate.at - patched:.3f} (from starting kubectl, which ran {took:.3f}, until the pod's "
        "state document said so here)",
        gate.at - patched < SOON_S,
    )
    report.add(
        "seconds from patch to the last caller's partial",
        f"{last - patched:.3f}",
        last - patched < SOON_S,
    )
    await play.wait_for(condition="Paused")
    await stage.show("get", "rr")

    stage.step("Unpause it", "the client goes on from the partials by itself")
    _, unpaused = await play.patch(paused=False)
    opened = await play.watch.until(lambda s: not closed(s), "the gate to open", since=unpaused)
    report.add("seconds paused by the person", f"{opened.at - gate.at:.2f}")
    await play.wait_for(reason="Serving")

    stage.step("New weights while requests run", "WEIGHTS becomes step-1; requests are cut once")
    await play.all_in_flight()
    await asyncio.sleep(HEAD_START_S)
    before = len(batch.partials)
    _, updated = await play.patch(weightVersion="step-1", weightStep=1)
    done = await play.watch.until(
        lambda s: s.weight_version == "step-1" and s.phase is PodPhase.SERVING,
        "step-1 to be committed", since=updated,
    )  # fmt: skip
    update = done.state.update
    if update is None or update.phase is not UpdatePhase.COMMITTED:
        raise DemoError(f"the pod serves step-1 and says of the update: {update}")
    cut = len(batch.partials) - before
    took_s = update.seconds
    stage.say(f"{update.bytes / 1e6:.1f} MB by {update.transport}; {cut} requests were cut")
    report.add("requests cut by the update, all of them continued", f"{cut}", cut == CALLERS)
    paused_s = took_s.paused
    report.add("seconds paused by the update", "?" if paused_s is None else f"{paused_s:.3f}",
               paused_s is not None)  # fmt: skip
    await play.wait_for(condition="Ready")
    await stage.show("get", "rr")


async def long_generations(play: Play) -> None:
    """16 long generations, paused and given new weights on the way."""
    stage = play.stage
    stage.step(
        f"{CALLERS} long generations", "the client library asks; greedy, token in, token out"
    )
    warm = play.batch(64)
    await play.callers.run(warm)
    rate = warm.max_tokens / (warm.ended - warm.started)
    batch = play.batch(max(256, min(MAX_LONG, int(rate * LONG_S))))
    stage.say(f"{CALLERS} requests of {batch.max_tokens} tokens, at about {rate:.0f} tokens/s each")
    async with asyncio.TaskGroup() as group:
        load = group.create_task(play.callers.run(batch))
        await pause_and_update(play, batch)
        with stage.waiting("the rest of the 16 generations", total=CALLERS) as bar:
            while not load.done():
                bar.update(bar.task_ids[0], completed=len(batch.rollouts))
                await asyncio.wait({load}, timeout=0.5)


async def bad_version(play: Play) -> None:
    """A version that nobody wrote: said so, and serving goes on."""
    stage, report = play.stage, play.stage.report
    stage.step(f"A version that does not exist: {BAD}", "Ready=False, Available=True; it serves on")
    first = len(play.batches)
    before = play.callers.transport.answers.copy()
    stop = asyncio.Event()

    async def keep_asking() -> None:
        while not stop.is_set():
            await play.callers.run(play.batch(48))

    async with asyncio.TaskGroup() as group:
        group.create_task(keep_asking())
        await play.patch(weightVersion=BAD, weightStep=404)
        await play.wait_for(reason="WeightsUnavailable")
        conditions = {
            c["type"]: c for c in (await stage.shell.get("rr", stage.name))["status"]["conditions"]
        }
        await stage.show("get", "rr", "-o", "wide")
        stage.say(f"Ready: {conditions['Ready']['message']}")
        await asyncio.sleep(HEAD_START_S)  # serving goes on after that, too
        stop.set()
    answers = play.callers.transport.answers - before
    batches = play.batches[first:]
    rollouts = [r for batch in batches for r in batch.rollouts.values()]
    versions = {span.version for r in rollouts for span in r.weight_versions}
    refused = sum(n for status, n in answers.items() if status != "200")
    refused += sum(len(batch.partials) for batch in batches)
    report.add(
        f"Ready / its reason / Available for {BAD}",
        f"{conditions['Ready']['status']} / {conditions['Ready']['reason']} / "
        f"{conditions['Available']['status']}",
        conditions["Ready"]["status"] == "False" and conditions["Available"]["status"] == "True",
    )
    report.add("requests refused or cut meanwhile", f"{refused} of {len(rollouts)}",
               refused == 0 and len(rollouts) >= CALLERS)  # fmt: skip
    report.add("versions served meanwhile", ", ".join(sorted(versions)), versions == {"step-1"})

    stage.step("A version that does exist", "the replica heals by itself")
    await play.patch(weightVersion="step-2", weightStep=2)
    await play.wait_for(condition="Ready")
    await play.callers.run(play.batch(48))
    healed = {s.version for r in play.batches[-1].rollouts.values() for s in r.weight_versions}
    report.add("version served after mending", ", ".join(sorted(healed)), healed == {"step-2"})


async def count_tokens(play: Play) -> None:
    """What the pod says it returned, against what the callers hold."""
    async with httpx.AsyncClient() as http:
        metrics = await http.get(f"{play.data_url}/metrics", timeout=10)
    returned, held = returned_tokens(metrics.text), sum(batch.tokens for batch in play.batches)
    play.stage.report.add(
        "tokens lost (the pod returned them, no caller holds them)",
        f"{returned - held} of {returned}",
        returned == held > 0,
    )


async def delete(play: Play) -> None:
    """Deletion drains: what is in flight ends as if nothing had happened."""
    stage, report = play.stage, play.stage.report
    stage.step("Delete it while requests run", "what is in flight ends in peace, then all is gone")
    batch = play.batch(play.batches[1].max_tokens // 5)
    async with asyncio.TaskGroup() as group:
        load = group.create_task(play.callers.run(batch))
        await play.all_in_flight()
        deleted = await stage.shell.kubectl("delete", "rr", stage.name, "--wait=false")
        with stage.waiting("draining"):
            await load
    whole = sum(r.attempts == 1 for r in batch.rollouts.values())
    report.add("in flight at the deletion, finished without a cut", f"{whole} of {CALLERS}",
               whole == CALLERS)  # fmt: skip
    await stage.shell.kubectl(
        "wait", "--for=delete", f"pod/{stage.name}-0", "--timeout=60s", timeout_s=70
    )
    gone_s = time.perf_counter() - deleted.started
    label = f"rollout.dev/replica={stage.name}"
    left = "?"
    for _ in range(100):
        left = (await stage.shell.kubectl(
            "get", "pods,services,secrets", "-l", label, "-o", "name", quiet=True
        )).output.strip()  # fmt: skip
        if not left:
            break
        await asyncio.sleep(0.2)
    report.add("seconds from delete until the pod was gone", f"{gone_s:.1f}", not left)
    if left:
        stage.say(f"[red]left behind:[/red] {left}")
