"""Nodes and their head over real sockets: late, twice, killed, and of another group."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_pod.engine.base import EngineStartError
from rollout_pod.nodes.follower import BEAT_S, Follower, FollowError, Standing
from rollout_pod.nodes.head import DISMISS_S
from rollout_pod.server.auth import Tokens
from rollout_pod.server.node_app import make_node_data_app
from rollout_pod.supervisor.state import EngineStatus
from rollout_pod.weights.agent_client import StageError, TransferError
from tests.support.fakes import FakeStaged
from tests.support.installed import installed_engines
from tests.support.node_group import (
    HERE,
    SILENCE_S,
    TOKEN,
    GroupSite,
    Ranks,
    TwoAgents,
    group_site,
    served,
    two_agents,
)
from tests.support.process import serve_process

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def site() -> AsyncIterator[GroupSite]:
    async with group_site() as made:
        yield made


async def until(true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.01)


def start(follower: Follower, ranks: Ranks) -> "asyncio.Task[None]":
    return asyncio.create_task(follower.run(ranks.run))


async def following(follower: Follower, ranks: Ranks) -> "asyncio.Task[None]":
    """One that has its orders."""
    task = start(follower, ranks)
    await until(lambda: ranks.orders is not None)
    return task


async def test_a_node_that_is_there_before_its_head_waits_and_starts_with_it(
    site: GroupSite,
) -> None:
    ranks, follower = Ranks(), site.follower()
    task = start(follower, ranks)
    await until(lambda: "connect" in follower.message.lower())
    assert follower.standing is Standing.WAITING_FOR_HEAD
    assert ranks.orders is None
    head, pod = site.head()
    async with site.listening(head):
        await head.gather(10)
        await until(lambda: ranks.orders is not None)
        assert ranks.orders is not None
        assert (ranks.orders.host, ranks.orders.port) == (HERE, 4242)
        assert follower.standing is Standing.STARTING
        pod.is_started = True
        await until(lambda: follower.standing is Standing.UP)
        pod.begin_drain()
        await asyncio.sleep(3 * follower.beat_s)
    await task
    assert ranks.ended


async def test_no_node_starts_before_all_are_there(site: GroupSite) -> None:
    head, _ = site.head(nodes=3)
    one, other = Ranks(), Ranks()
    async with site.listening(head):
        first, second = site.follower(boot="a"), site.follower(rank=2, boot="b")
        tasks = [start(first, one)]
        await until(lambda: first.standing is Standing.WAITING_FOR_NODES)
        assert one.orders is None
        tasks.append(start(second, other))
        await until(lambda: bool(one.orders and other.orders))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_head_says_who_did_not_come(site: GroupSite) -> None:
    head, _ = site.head(nodes=3)
    head.hear(site.follower(rank=2).beat())
    with pytest.raises(EngineStartError, match=r"node 1 was not there within 0\.2 s \(group g\)"):
        await head.gather(0.2)
    assert head.members() == ()


async def test_a_node_says_what_it_waited_for(site: GroupSite) -> None:
    with pytest.raises(FollowError, match=r"not in group g within 0\.2 s \(WaitingForHead: "):
        await site.follower(join_timeout_s=0.2).run(Ranks().run)


@pytest.mark.parametrize(
    ("how", "words"),
    [({"group": "old"}, "leads group g, not old"), ({"token": "wrong"}, "token")],
)
async def test_a_head_of_another_group_is_not_joined(
    site: GroupSite, how: dict[str, str], words: str
) -> None:
    head, _ = site.head()
    ranks = Ranks()
    async with site.listening(head):
        with pytest.raises(FollowError, match=words):
            await site.follower(join_timeout_s=0.3, **how).run(ranks.run)  # type: ignore[arg-type]
    assert ranks.orders is None
    assert head.members() == ()


async def test_a_second_process_of_a_rank_that_comes_too_late_ends(site: GroupSite) -> None:
    head, _ = site.head()
    async with site.listening(head):
        head.hear(site.follower(boot="first").beat())
        with pytest.raises(FollowError, match="another process as node 1"):
            await site.follower(boot="second").run(Ranks().run)


async def test_a_node_whose_head_was_killed_ends(site: GroupSite) -> None:
    head, _ = site.head()
    ranks, follower = Ranks(), site.follower()
    async with site.listening(head):
        task = await following(follower, ranks)
    gone = time.monotonic()
    with pytest.raises(FollowError, match="the head is lost"):
        await task
    assert SILENCE_S / 2 < time.monotonic() - gone < 5
    assert ranks.ended


async def test_a_node_whose_head_was_started_again_ends(site: GroupSite) -> None:
    head, _ = site.head()
    ranks = Ranks()
    async with site.listening(head):
        task = await following(site.follower(), ranks)
    again, _ = site.head()
    async with site.listening(again):
        with pytest.raises(FollowError, match="the head was started again"):
            await task
    assert ranks.ended


async def test_a_head_that_drained_is_followed_at_once(site: GroupSite) -> None:
    """It waits until its nodes know: a node that only misses it would wait far longer."""
    head, pod = site.head()
    ranks = Ranks()
    async with site.listening(head):
        task = await following(site.follower(), ranks)
        pod.begin_drain()
        await head.dismiss()
    await task
    assert ranks.ended


async def test_a_head_whose_engine_is_dead_takes_its_nodes_along(site: GroupSite) -> None:
    head, pod = site.head()
    ranks = Ranks()
    async with site.listening(head):
        task = await following(site.follower(), ranks)
        pod.board.change(engine=EngineStatus.DEAD)
        await head.dismiss()
        with pytest.raises(FollowError, match="the engine is dead"):
            await task
    assert ranks.ended


async def test_a_head_does_not_wait_for_a_node_that_is_gone(site: GroupSite) -> None:
    head, pod = site.head()
    async with asyncio.timeout(1):
        await site.head()[0].dismiss()  # nobody had joined
    head.hear(site.follower().beat())
    pod.begin_drain()
    started = time.monotonic()
    await head.dismiss()
    assert DISMISS_S <= time.monotonic() - started < 2 * DISMISS_S


async def test_a_head_that_fails_while_its_engine_lives_takes_its_nodes_along(
    site: GroupSite,
) -> None:
    head, _ = site.head()
    ranks = Ranks()
    async with site.listening(head):
        task = await following(site.follower(), ranks)
        started = time.monotonic()
        await head.dismiss()
        assert time.monotonic() - started < SILENCE_S
        with pytest.raises(FollowError, match="the engine is dead"):
            await task


async def test_a_node_ends_in_order_with_an_idle_head_whose_drain_takes_no_time(
    site: GroupSite,
) -> None:
    """At the pace of real beats: the head's process waits until the node has heard of it."""
    options = ("--engine=fake", "--nodes=2", "--group=g", f"--advertise={HERE}")
    with (
        installed_engines({"fake": "tests.support.fakes:create"}) as env,
        serve_process(site.folder, *options, engine_args=(), env=env) as pod,
    ):
        pod.start()
        token = pod.run_dir / "admin" / "token"
        await until(token.exists, 60)
        ranks, follower = Ranks(), site.follower(join_timeout_s=60, token=token.read_text())
        follower.head, follower.beat_s, follower.silence_s = f"http://{pod.admin}", BEAT_S, 30
        task = start(follower, ranks)
        await until(lambda: follower.standing is Standing.UP, 60)
        assert pod.process is not None
        pod.process.send_signal(signal.SIGTERM)
        await until(lambda: pod.process is not None and pod.process.poll() is not None, 30)
        ranks.fail()  # the engine's end takes them along
        async with asyncio.timeout(10):
            await task
        assert pod.process.returncode == 0


async def test_a_node_whose_ranks_end_ends(site: GroupSite) -> None:
    head, _ = site.head()
    ranks = Ranks()
    async with site.listening(head):
        task = await following(site.follower(), ranks)
        ranks.fail()
        with pytest.raises(FollowError, match="ranks ended"):
            await task


async def test_a_node_that_is_asked_to_end_lets_the_head_drain_first(site: GroupSite) -> None:
    head, pod = site.head()
    ranks, follower = Ranks(), site.follower(drain_timeout_s=30)
    async with site.listening(head):
        task = await following(follower, ranks)
        follower.begin_drain()
        follower.begin_drain()
        await until(lambda: pod.drains > 0)
        await asyncio.sleep(3 * follower.beat_s)
        assert not task.done()
        assert not ranks.ended
    await task
    assert ranks.ended


class LosesBeats(httpx.AsyncHTTPTransport):
    """The next ``lost`` requests do not arrive."""

    lost = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.lost:
            self.lost -= 1
            raise httpx.ReadError("reset", request=request)
        return await super().handle_async_request(request)


@pytest.mark.parametrize("told", [False, True], ids=["the first", "a later one"])
async def test_a_lost_beat_does_not_end_a_node_that_drains(site: GroupSite, told: bool) -> None:
    """With its ranks would end all that the head has to finish yet."""
    head, pod = site.head()
    ranks, follower = Ranks(), site.follower(drain_timeout_s=30)
    network = follower.transport = LosesBeats()
    async with site.listening(head):
        task = await following(follower, ranks)
        if not told:
            network.lost = 2
        follower.begin_drain()
        await until(lambda: pod.drains > 0)
        network.lost = 2
        await until(lambda: network.lost == 0)
        drains = pod.drains
        await until(lambda: pod.drains > drains)
        assert not task.done()
        assert not ranks.ended
    gone = time.monotonic()
    await task
    assert time.monotonic() - gone < SILENCE_S, "a head that is gone is no lost beat"
    assert ranks.ended


async def test_a_node_that_drains_does_not_wait_for_ever_for_a_head_that_it_cannot_tell(
    site: GroupSite,
) -> None:
    head, pod = site.head()
    ranks, follower = Ranks(), site.follower(drain_timeout_s=30)
    network = follower.transport = LosesBeats()
    async with site.listening(head):
        task = await following(follower, ranks)
        network.lost = 1_000_000
        asked = time.monotonic()
        follower.begin_drain()
        await task
    assert SILENCE_S / 2 < time.monotonic() - asked < 5
    assert pod.drains == 0
    assert ranks.ended


async def test_a_node_that_is_asked_to_end_before_it_joined_ends_at_once(site: GroupSite) -> None:
    follower = site.follower()
    task = start(follower, Ranks())
    await until(lambda: follower.message != "")
    follower.begin_drain()
    async with asyncio.timeout(5):
        await task


async def test_the_head_notices_a_node_that_falls_silent(site: GroupSite) -> None:
    head, _ = site.head()
    lost: list[str] = []
    watch = asyncio.create_task(head.watch(lost.append))
    async with site.listening(head):
        ranks = Ranks()
        task = await following(site.follower(), ranks)
        await asyncio.sleep(2 * SILENCE_S)
        assert lost == []
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: bool(lost))
    await watch
    assert lost == [f"node 1 was not heard for {SILENCE_S:g} s"]


@pytest.mark.parametrize("first", ["node", "head"])
@pytest.mark.parametrize("with_previous", [True, False])
async def test_a_new_token_that_comes_to_one_side_first_ends_nothing(
    site: GroupSite, tmp_path: Path, first: str, with_previous: bool
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    head, _ = site.head()
    ranks, follower = Ranks(), site.follower()
    follower.tokens = Tokens(tmp_path).lately
    lost: list[str] = []
    watch = asyncio.create_task(head.watch(lost.append))
    async with site.listening(head):
        task = await following(follower, ranks)
        folder = tmp_path if first == "node" else site.folder
        if with_previous:
            (folder / "previous").write_text(TOKEN)
        (folder / "token").write_text("new")
        await asyncio.sleep(max(3 * SILENCE_S, 1.5))
        assert (task.done(), lost) == (False, [])
        for other in (tmp_path, site.folder):
            (other / "token").write_text("new")
            (other / "previous").unlink(missing_ok=True)
        await asyncio.sleep(2 * SILENCE_S)
        assert (task.done(), lost) == (False, [])
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def test_probes_tell_where_a_node_stands(site: GroupSite) -> None:
    head, pod = site.head()
    follower = site.follower()
    async with (
        served(make_node_data_app(follower)) as (port, _),
        httpx.AsyncClient(base_url=f"http://{HERE}:{port}") as http,
    ):
        waiting = await http.get("/startupz")
        assert waiting.status_code == 503
        assert "WaitingForHead" in waiting.json()["detail"]
        assert (await http.get("/healthz")).status_code == 200
        async with site.listening(head):
            ranks = Ranks()
            task = await following(follower, ranks)
            assert (await http.get("/readyz")).status_code == 503
            pod.is_started = True
            await until(lambda: follower.standing is Standing.UP)
            assert (await http.get("/startupz")).status_code == 200
            assert (await http.get("/readyz")).status_code == 200
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


# -- weights


@pytest.fixture
async def agents(site: GroupSite) -> AsyncIterator[TwoAgents]:
    async with two_agents(site) as made:
        yield made


async def stage(agents: TwoAgents, session: str = "s1", version: str = "v1") -> None:
    await agents.both.stage(
        session=session, version=version, path="/v1", rank_sockets=[Path("rank-0.sock")],
        bucket_bytes=4096, timeout_s=5,
    )  # fmt: skip


async def test_a_node_obeys_a_head_that_has_the_new_token_already(
    site: GroupSite, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("new")
    (tmp_path / "previous").write_text(TOKEN)
    async with two_agents(site, tokens=Tokens(tmp_path).lately) as agents:
        await stage(agents)
        await agents.both.send(session="s1", timeout_s=5)
        assert agents.nodes.calls == ["stage v1 /v1", "send v1 ok"]


async def test_a_version_is_staged_sent_and_kept_on_every_node(agents: TwoAgents) -> None:
    await stage(agents)
    await agents.both.send(session="s1", timeout_s=5)
    await agents.both.committed(session="s1")
    await agents.both.committed(session="s1")
    said = ["stage v1 /v1", "send v1 ok", "committed v1", "committed v1"]
    assert agents.own.calls == agents.nodes.calls == said


@pytest.mark.parametrize("which", ["own", "nodes"])
async def test_what_one_node_cannot_stage_no_node_keeps(agents: TwoAgents, which: str) -> None:
    getattr(agents, which).stage_script["v1"] = ["no such file"]
    with pytest.raises(StageError, match="no such file" if which == "own" else "node 1: no such"):
        await stage(agents)
    assert (agents.own.staged, agents.nodes.staged) == ({}, {})
    await stage(agents, "s2")
    assert list(agents.nodes.staged) == ["s2"]


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"bytes": 7}, "2 tensors of 7 bytes, the head 2 of 4096"),
        ({"tensors": 3}, "3 tensors of 4096 bytes, the head 2 of 4096"),
        ({"sample": "0" * 64}, "other names or other bytes"),
        ({"sums": "0" * 64}, "files with other SHA-256"),
    ],
)
async def test_nodes_that_see_different_files_do_not_stage(
    agents: TwoAgents, node: dict[str, Any], words: str
) -> None:
    agents.own.found = FakeStaged(sums="1" * 64)
    agents.nodes.found = replace(agents.own.found, **node)
    with pytest.raises(StageError, match=f"/v1 is not the same on all nodes: node 1 has .*{words}"):
        await stage(agents)
    assert (agents.own.staged, agents.nodes.staged) == ({}, {})


@pytest.mark.parametrize("which", ["own", "nodes"])
async def test_hashes_that_one_node_knows_are_not_compared(agents: TwoAgents, which: str) -> None:
    getattr(agents, which).found = FakeStaged(sums="1" * 64)
    await stage(agents)


async def test_a_node_that_is_killed_while_it_stages_fails_it(agents: TwoAgents) -> None:
    agents.nodes.stage_gate = asyncio.Event()
    staging = asyncio.create_task(stage(agents))
    await until(lambda: bool(agents.nodes.calls))
    await agents.kill_node()
    with pytest.raises(StageError, match=r"node 1 at .* does not answer"):
        await staging
    assert agents.own.staged == {}


async def test_a_node_that_is_killed_while_it_sends_fails_it(agents: TwoAgents) -> None:
    await stage(agents)
    agents.nodes.send_gate = asyncio.Event()
    sending = asyncio.create_task(agents.both.send(session="s1", timeout_s=5))
    await until(lambda: "send v1 ok" in agents.nodes.calls)
    await agents.kill_node()
    with pytest.raises(TransferError, match=r"node 1 at .* does not answer"):
        await sending


async def test_a_send_that_fails_on_one_node_waits_for_the_others(agents: TwoAgents) -> None:
    await stage(agents)
    agents.nodes.send_script["v1"] = ["midway"]
    agents.own.send_gate = asyncio.Event()
    sending = asyncio.create_task(agents.both.send(session="s1", timeout_s=5))
    await until(lambda: "send v1 midway" in agents.nodes.calls)
    await asyncio.sleep(0.1)
    assert not sending.done()
    agents.own.send_gate.set()
    with pytest.raises(TransferError, match=r"^node 1: scripted: midway$"):
        await sending


async def test_what_was_never_staged_cannot_be_sent(agents: TwoAgents) -> None:
    with pytest.raises(TransferError, match="node 1: scripted: untouched"):
        await agents.both.send(session="late", timeout_s=5)


async def test_a_stage_that_is_given_up_ends_on_every_node(agents: TwoAgents) -> None:
    agents.nodes.stage_gate = asyncio.Event()
    staging = asyncio.create_task(stage(agents))
    await until(lambda: bool(agents.nodes.calls))
    staging.cancel()
    await asyncio.gather(staging, return_exceptions=True)
    await agents.both.discard(session="s1")
    assert agents.own.calls[-1] == agents.nodes.calls[-1] == "discard"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"node_group": "old"}, "this node is of group old, not g"),
        ({"tokens": lambda: ("wrong",)}, "token"),
    ],
)
async def test_a_node_of_another_group_obeys_nothing(
    site: GroupSite, how: dict[str, Any], words: str
) -> None:
    async with two_agents(site, **how) as agents:
        with pytest.raises(StageError, match=words):
            await stage(agents)
        with pytest.raises(TransferError, match=words):
            await agents.both.send(session="s1", timeout_s=5)
        assert agents.nodes.calls == []
