"""``RolloutClient`` and whole pods (fake engine) over real sockets: cut, killed, drained, replaced."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from rollout_client import DeadlineExceeded, Rollout, RolloutClient, Service
from rollout_pod.serve import Server, bind
from rollout_pod.server.data_app import make_data_app
from tests.support.fake_fleet import check_rollout
from tests.support.fakes import FakeEngine, fake_tokens
from tests.support.operator_kit import free_port
from tests.support.pods import Pod, ref, running_pod
from tests.support.relay import Relay, relay

EOS = 500  # of 50,000
PROMPT = [5, 6, 7]


class Host:
    """An address at which one pod after another lives."""

    def __init__(self, folder: Path, wire: Relay) -> None:
        self.folder, self.wire = folder, wire
        self.boots = 0
        self.pod: Pod | None = None
        self._life: AsyncExitStack | None = None

    async def boot(self, version: str, step: int) -> Pod:
        """A new pod with the version; it knows nothing of the one before."""
        self.boots += 1
        self._life = AsyncExitStack()
        engine = FakeEngine(step_s=0.002, eos_below=EOS)
        folder = self.folder / str(self.boots)
        folder.mkdir(parents=True)
        pod = await self._life.enter_async_context(running_pod(folder, engine=engine))
        pod.want(ref(version, step=step))
        await pod.serving(version)
        port = free_port()
        server = Server(make_data_app(pod.supervisor), bind(("127.0.0.1", port)))
        task = asyncio.create_task(server.run_until_exit())

        async def stop() -> None:
            server.should_exit = server.force_exit = True
            await task

        self._life.push_async_callback(stop)
        while not server.started:
            await asyncio.sleep(0.01)
        self.pod, self.wire.target = pod, port
        return pod

    async def kill(self) -> None:
        """As a node dies: the connections break, and nobody answers any more."""
        self.wire.target = None
        self.wire.cut()
        if self._life is not None:
            assert self.pod is not None
            self.pod.engine.kill("killed")
            life, self._life = self._life, None
            await life.aclose()


@asynccontextmanager
async def hosts(folder: Path, count: int) -> AsyncIterator[list[Host]]:
    async with AsyncExitStack() as stack:
        made = []
        for n in range(count):
            wire = await stack.enter_async_context(relay())
            made.append(Host(folder / f"host-{n}", wire))
            stack.push_async_callback(made[-1].kill)
            await made[-1].boot("step-1", 1)
        yield made


async def some_tokens(pod: Pod) -> None:
    while not pod.engine.running:
        await asyncio.sleep(0.005)


async def test_a_hundred_rollouts_through_everything(tmp_path: Path):
    async with hosts(tmp_path, 2) as (a, b):
        urls = [a.wire.url, b.wire.url]
        async with RolloutClient(urls, max_concurrency=24) as api:
            over = asyncio.Event()
            done: list[tuple[list[int], Rollout]] = []

            async def caller(n: int) -> None:
                while not over.is_set() or len(done) < 100:
                    prompt = [n + 1, len(done) + 1]
                    rollout = await api.generate(prompt, {"max_tokens": 60}, deadline_s=60)
                    done.append((prompt, rollout))

            async def bad_day() -> None:
                assert a.pod
                assert b.pod
                await some_tokens(a.pod)
                a.pod.want(ref("step-1", step=1), paused=True)
                await a.pod.until(lambda s: s.phase == "Paused")
                b.wire.cut()
                a.pod.want(ref("step-2", step=2))
                await a.pod.serving("step-2")
                await some_tokens(b.pod)
                await b.kill()
                await some_tokens(a.pod)
                a.wire.cut()
                await b.boot("step-2", 2)
                b.pod.want(ref("step-3", step=3))
                await b.pod.serving("step-3")
                await some_tokens(a.pod)
                a.pod.supervisor.begin_drain()  # scaled away
                await a.kill()

            async with asyncio.TaskGroup() as group:
                for n in range(24):
                    group.create_task(caller(n))
                await bad_day()
                over.set()
            for prompt, rollout in done:
                check_rollout(prompt, rollout, 60, eos_below=EOS)
            results = [rollout for _, rollout in done]
            versions = {s.version for r in results for s in r.weight_versions}
            assert versions == {"step-1", "step-2", "step-3"}
            assert sum(r.attempts > 1 for r in results) >= 24
            assert any(len(r.weight_versions) > 1 for r in results)
            # nothing of it is left in the pod that lives
            await b.pod.until(lambda s: s.unfinished == 0)


async def test_the_deadline_keeps_what_has_arrived_and_ends_it_in_the_pod(tmp_path: Path):
    async with hosts(tmp_path, 1) as (host,), RolloutClient(host.wire.url) as api:
        pod = host.pod
        assert pod
        pod.engine.eos_below = 0  # it must not end before its deadline
        with pytest.raises(DeadlineExceeded) as late:
            await api.generate([3, 1], {"max_tokens": 4000}, deadline_s=0.6)
        partial = late.value.partial
        assert partial.token_ids
        n = len(partial.token_ids)
        assert list(partial.token_ids) == fake_tokens("step-1", [3, 1], n)
        assert [(s.version, s.start, s.end) for s in partial.weight_versions] == [("step-1", 0, n)]
        await pod.until(lambda s: s.unfinished == 0)
        # a gate that never opens again
        pod.want(ref("step-1", step=1), paused=True)
        await pod.until(lambda s: s.phase == "Paused")
        with pytest.raises(DeadlineExceeded):
            await api.generate(PROMPT, {"max_tokens": 4}, deadline_s=0.3)
        pod.want(ref("step-1", step=1))
        await pod.serving("step-1")
        check_rollout(PROMPT, await api.generate(PROMPT, {"max_tokens": 4}), 4)


async def test_the_steps_of_pods_are_asked_of_the_pods(tmp_path: Path):
    async with hosts(tmp_path, 2) as (a, b):
        assert b.pod
        b.pod.want(ref("step-9", step=9))
        await b.pod.serving("step-9")
        async with RolloutClient([a.wire.url, b.wire.url]) as api:
            for n in range(4):
                rollout = await api.generate([n + 1], {"max_tokens": 4}, min_step=9)
                assert {s.step for s in rollout.weight_versions} == {9}
        async with httpx.AsyncClient() as http:
            facts = await http.get(f"{b.wire.url}/readyz")
        assert facts.json() == {
            "status": "ok",
            "boot_id": b.pod.state.boot_id,
            "weight_version": "step-9",
            "weight_step": 9,
        }


async def test_a_service_is_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch):
    found = ["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.1"]
    answers: list[object] = [OSError("no such name")] * 50

    async def getaddrinfo(host, port, **more):
        assert (host, port) == ("rollouts.default.svc", 8000)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return [(0, 0, 0, "", (address, port)) for address in answer]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    service = Service("http://rollouts.default.svc:8000/", refresh_s=0)
    transport = httpx.MockTransport(lambda request: httpx.Response(404))
    async with RolloutClient(service, transport=transport) as api:
        with pytest.raises(DeadlineExceeded, match=r"rollouts\.default\.svc: no such name"):
            await api.generate(PROMPT, {"max_tokens": 1}, deadline_s=0.2)
    answers[:] = [found, OSError("for a moment")]
    wanted = ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]
    assert [e.url for e in await service.list()] == wanted
    assert [e.url for e in await service.list()] == wanted, "the last answer is kept"
    with pytest.raises(ValueError, match="must begin with http://"):
        Service("https://rollouts:8000")
