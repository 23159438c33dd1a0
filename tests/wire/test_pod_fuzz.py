"""Both ports fuzzed by their own OpenAPI documents, around the fakes, over real sockets."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import schemathesis

from rollout_pod.protocol import DesiredDocument, Problem
from rollout_pod.serve import Server, bind
from rollout_pod.server.admin_app import make_admin_app
from rollout_pod.server.auth import Tokens
from rollout_pod.server.data_app import make_data_app
from tests.support.fakes import VOCAB, FakeEngine, fake_tokens
from tests.support.fuzz import close_to_valid, documents, fuzzer, no_leak, quick, shown
from tests.support.pods import Pod, running_pod

TOKEN = "a-secret-that-nobody-tells"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
EXAMPLES = 200
SAMPLING = {
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 60},
    "min_tokens": {"type": "integer", "minimum": 0, "maximum": 60},
    "temperature": {"type": "number"},
}

data_document, admin_document = documents()
data_port = fuzzer(data_document, examples=EXAMPLES)
generating = fuzzer(
    close_to_valid(data_document, sampling=SAMPLING, vocab_size=VOCAB),
    examples=EXAMPLES, valid_only=True,
)  # fmt: skip
admin_port = fuzzer(admin_document, examples=EXAMPLES)
locked_port = fuzzer(admin_document, examples=50)
serial = itertools.count(1)


@dataclass
class Served:
    """A pod in a thread of its own."""

    data: str
    admin: str
    folder: Path
    pod: Pod
    loop: asyncio.AbstractEventLoop
    end: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def secrets(self) -> list[str]:
        return [TOKEN, str(self.folder)]

    def generate(self) -> list[int]:
        body = {"request_id": "x", "prompt_token_ids": [1, 2], "sampling_params": {"max_tokens": 9}}
        answer = httpx.post(f"{self.data}/v1/rollout/generate", json=body)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["token_ids"])


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served]:
    (folder / "token").write_text(TOKEN)
    engine = FakeEngine(max_model_len=64)
    first = DesiredDocument(owner="o", generation=0)
    async with running_pod(folder / "run", engine=engine, first=first) as pod:
        await pod.serving("base")
        listeners = [bind(("127.0.0.1", 0)) for _ in range(2)]
        apps = [make_data_app(pod.supervisor), make_admin_app(pod.supervisor, Tokens(folder))]
        servers = [Server(app, at) for app, at in zip(apps, listeners, strict=True)]
        tasks = [asyncio.create_task(server.run_until_exit()) for server in servers]
        data, admin = (f"http://127.0.0.1:{at.getsockname()[1]}" for at in listeners)
        before = own_tasks()
        served = Served(data, admin, folder, pod, asyncio.get_running_loop())
        try:
            yield served
            deadline = time.monotonic() + 5  # connections of the fuzzer end in their own time
            while len(own_tasks()) > len(before):
                assert time.monotonic() < deadline, own_tasks() - before
                await asyncio.sleep(0.01)
            assert pod.engine.running == 0
            assert pod.supervisor.gate.unfinished == pod.supervisor.gate.parked == 0
        finally:
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*tasks)


def own_tasks() -> set[asyncio.Task[object]]:
    """Without the one that sse-starlette keeps for all streams of a loop."""
    return {t for t in asyncio.all_tasks() if "_shutdown_watcher" not in repr(t.get_coro())}


@contextmanager
def in_a_thread(folder: Path) -> Iterator[Served]:
    found: list[Served] = []
    failed: list[BaseException] = []
    begun = threading.Event()

    async def run() -> None:
        async with serving(folder) as served:
            found.append(served)
            begun.set()
            await served.end.wait()

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failed.append(error)
            begun.set()

    thread = threading.Thread(target=main)
    thread.start()
    try:
        assert begun.wait(20) and not failed, failed
        yield found[0]
    finally:
        if found:
            found[0].loop.call_soon_threadsafe(found[0].end.set)
        thread.join(30)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with in_a_thread(tmp_path_factory.mktemp("pod")) as pod:
        yield pod
        assert pod.generate() == fake_tokens("base", [1, 2], 9)
        for path in ("/startupz", "/readyz", "/healthz"):
            assert httpx.get(pod.data + path).status_code == 200


@pytest.fixture(scope="module")
def steered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A pod that becomes whatever the fuzzer asks for, and afterwards what we ask for."""
    with in_a_thread(tmp_path_factory.mktemp("steered")) as pod:
        yield pod
        document = {"owner": "o", "generation": next(serial)}
        url = f"{pod.admin}/admin/v1/"
        assert httpx.put(url + "desired", json=document, headers=BEARER).status_code == 200
        state = httpx.get(url + "state", headers=BEARER).json()
        for _ in range(100):
            if (state["phase"], state["weight_version"]) == ("Serving", "base"):
                break
            after = f"{state['boot_id']}:{state['revision']}"
            asked = {"after": after, "timeout": "1"}
            state = httpx.get(url + "state", params=asked, headers=BEARER).json()
        assert pod.generate() == fake_tokens("base", [1, 2], 9)


@data_port.parametrize()
@quick
def test_the_data_port(case: schemathesis.Case, pod: Served) -> None:
    case.call_and_validate(base_url=pod.data, additional_checks=[no_leak(pod.secrets)])


@generating.parametrize()
@quick
def test_what_the_engine_gets(case: schemathesis.Case, pod: Served) -> None:
    case.call_and_validate(base_url=pod.data, additional_checks=[no_leak(pod.secrets)])


def test_a_good_part_of_it_got_there(pod: Served, request: pytest.FixtureRequest) -> None:
    chosen = {i.name.partition("[")[0] for i in request.session.items if i.path == request.path}
    missing = {"test_the_data_port", "test_what_the_engine_gets"} - chosen
    if missing:
        pytest.skip(f"counts what these send, too, and they were not chosen: {sorted(missing)}")
    assert len(pod.pod.engine.requests) > EXAMPLES // 4


@admin_port.parametrize()
@quick
def test_the_admin_port(case: schemathesis.Case, steered: Served) -> None:
    """Every document comes from the owner and is newer, so that it is taken into force."""
    if isinstance(case.body, dict):
        owner, generation = case.body.get("owner"), case.body.get("generation")
        if isinstance(owner, str) and 0 < len(owner) < 254 and type(generation) is int:
            case.body |= {"owner": "o", "generation": next(serial) if generation >= 0 else -1}
    if isinstance(case.query.get("timeout"), int | float) and case.query["timeout"] > 0.01:
        case.query["timeout"] = case.query["timeout"] if case.query["timeout"] > 60 else 0.01
    case.call_and_validate(
        base_url=steered.admin, headers=BEARER, additional_checks=[no_leak([TOKEN])]
    )


@locked_port.parametrize()
@quick
def test_nothing_is_said_without_the_token(case: schemathesis.Case, pod: Served) -> None:
    unauthorized(case.call(base_url=pod.admin), pod)


@pytest.mark.parametrize("token", [None, "wrong", "\xff", TOKEN[:-1], TOKEN + "x"])
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/admin/v1/desired", b"{"),
        ("PUT", "/admin/v1/desired", b"x" * (2 << 20)),
        ("DELETE", "/admin/v1/desired", b""),
        ("GET", "/admin/v1/state?timeout=x", b""),
        ("GET", "/admin/v1/state/", b""),
        ("GET", "/openapi.json", b""),
        ("GET", "/nowhere", b""),
        ("GET", "/", b""),
    ],
)
def test_nor_with_another(
    pod: Served, method: str, path: str, body: bytes, token: str | None
) -> None:
    headers = {} if token is None else {b"Authorization": f"Bearer {token}".encode("latin-1")}
    with httpx.Client(base_url=pod.admin) as client:
        try:
            answer = client.request(method, path, content=body, headers=headers)
        except httpx.WriteError:
            assert len(body) > 1 << 20  # answered before all of it was sent
            return
    unauthorized(answer, pod)


def unauthorized(answer: "httpx.Response | schemathesis.Response", pod: Served) -> None:
    assert answer.status_code == 401
    told = Problem.model_validate_json(answer.content)
    assert told.code == "unauthorized" and not told.errors
    assert told.detail == "give the pod's token as 'Authorization: Bearer' or 'X-Rollout-Token'"
    assert not shown(answer, pod.secrets)


def test_the_documents_are_served(pod: Served) -> None:
    assert httpx.get(f"{pod.data}/openapi.json").json() == data_document
    assert httpx.get(f"{pod.admin}/openapi.json", headers=BEARER).json() == admin_document
