"""Both ports over ASGI: stable codes, no body that reaches the engine by mistake."""

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from rollout_pod import cli
from rollout_pod.ctl import Ctl, CtlError, is_asleep, is_paused, is_settled_on
from rollout_pod.engine.base import Node
from rollout_pod.local import first_document
from rollout_pod.nodes.head import Head
from rollout_pod.protocol import DesiredDocument, Problem, SleepSpec, StateDocument, WeightsRef
from rollout_pod.server.admin_app import make_admin_app
from rollout_pod.server.auth import Tokens
from rollout_pod.server.body_limit import BodyLimit
from rollout_pod.server.data_app import make_data_app
from tests.support.fakes import fake_tokens
from tests.support.pods import Pod, pushed, ref, running_pod

BODY = {"request_id": "r", "prompt_token_ids": [1, 2], "sampling_params": {"max_tokens": 3}}


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    async with running_pod(tmp_path / "run") as pod:
        pod.want()
        await pod.serving("base")
        yield pod


@pytest.fixture
async def data(pod: Pod) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_data_app(pod.supervisor), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
        yield client


@pytest.fixture
async def admin(pod: Pod, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    (tmp_path / "token").write_text("secret\n")
    app = make_admin_app(pod.supervisor, Tokens(tmp_path))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport,
        base_url="http://pod",
        headers={"Authorization": "Bearer secret", "Content-Type": "application/json"},
    ) as client:
        yield client


def problem(answer: httpx.Response) -> Problem:
    assert answer.headers["content-type"] == "application/problem+json"
    body = Problem.model_validate_json(answer.content)
    assert body.status == answer.status_code
    return body


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_generate(data: httpx.AsyncClient) -> None:
    answer = await data.post("/v1/rollout/generate", json=BODY)
    assert answer.status_code == 200
    assert list(answer.json())[:3] == ["token_ids", "log_probs", "is_cancel"]
    assert answer.json()["token_ids"] == fake_tokens("base", [1, 2], 3)


async def test_the_budget_counts_all_attempts(data: httpx.AsyncClient) -> None:
    first = fake_tokens("base", [1, 2], 3)
    for generated, n in ((first[:2], 1), (first, 0), (first * 2, 0)):
        answer = await data.post(
            "/v1/rollout/generate", json=BODY | {"generated_token_ids": generated}
        )
        body = answer.json()
        assert len(body["token_ids"]) == n
        assert (body["finish_reason"], body["is_cancel"]) == ("length", False)


async def test_the_model_has_no_more_room(data: httpx.AsyncClient, pod: Pod) -> None:
    pod.engine.max_model_len = 5
    pod.supervisor.board.change(
        info=pod.supervisor.board.state.info.model_copy(update={"max_model_len": 5})
    )
    answer = await data.post("/v1/rollout/generate", json=BODY | {"sampling_params": {}})
    assert len(answer.json()["token_ids"]) == 3
    answer = await data.post("/v1/rollout/generate", json=BODY | {"prompt_token_ids": [1] * 5})
    assert (answer.status_code, problem(answer).code) == (400, "prompt_too_long")


@pytest.mark.parametrize(
    ("body", "status", "code", "names"),
    [
        (b"{", 400, "invalid_json", ""),
        (b"[]", 422, "invalid_field", "body"),
        (b"{}", 422, "invalid_field", "request_id"),
        (BODY | {"prompt_token_ids": []}, 422, "invalid_field", "prompt_token_ids"),
        (BODY | {"prompt_token_ids": [-1]}, 422, "invalid_field", "prompt_token_ids.0"),
        (BODY | {"prompt_token_ids": ["x"]}, 422, "invalid_field", "prompt_token_ids.0"),
        (BODY | {"prompt_token_ids": [1, 60_000]}, 422, "invalid_field", "prompt_token_ids.1"),
        (BODY | {"generated_token_ids": [60_000]}, 422, "invalid_field", "generated_token_ids.0"),
        (BODY | {"prompt_token_ids": [True]}, 422, "invalid_field", "prompt_token_ids.0"),
        (BODY | {"prompt_token_ids": [3.0]}, 422, "invalid_field", "prompt_token_ids.0"),
        (BODY | {"sampling_params": {"\ud800": 1}}, 422, "invalid_sampling_params", r"\ud800"),
        (BODY | {"request_id": "a b"}, 422, "invalid_field", "request_id"),
        (BODY | {"bogus": 1}, 422, "invalid_field", "bogus"),
        (BODY | {"on_pause": "sometimes"}, 422, "invalid_field", "on_pause"),
        (BODY | {"stream": "yes"}, 422, "invalid_field", "stream"),
        (BODY | {"attempt": True}, 422, "invalid_field", "attempt"),
        (BODY | {"timeout_s": "1"}, 422, "invalid_field", "timeout_s"),
        (BODY | {"timeout_s": 0}, 422, "invalid_field", "timeout_s"),
        (BODY | {"sampling_params": {"max_tokens": 0}}, 422, "invalid_sampling_params", "max_tokens"),
        (BODY | {"sampling_params": {"max_tokens": True}}, 422, "invalid_sampling_params", "max_tokens"),
        (BODY | {"sampling_params": {"tempreture": 1}}, 422, "invalid_sampling_params", "tempreture"),
    ],
)  # fmt: skip
async def test_bad_input_is_named_and_never_reaches_the_engine(
    data: httpx.AsyncClient, pod: Pod, body: object, status: int, code: str, names: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await data.post(
        "/v1/rollout/generate", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status
    told = problem(answer)
    assert told.code == code
    assert names in told.detail
    assert pod.engine.cache_of is None, "the engine generated"
    assert pod.supervisor.gate.unfinished == 0


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_large(pod: Pod, announced: bool) -> None:
    app = BodyLimit(make_data_app(pod.supervisor), limit=64)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 16

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://pod",
        headers={"Content-Type": "application/json"},
    ) as client:
        answer = await client.post(
            "/v1/rollout/generate", content=b" " * 160 if announced else pieces()
        )
    assert (answer.status_code, problem(answer).code) == (413, "body_too_large")


async def test_duplicates_pauses_and_the_state_of_the_pod(
    data: httpx.AsyncClient, pod: Pod
) -> None:
    slow = asyncio.create_task(
        data.post("/v1/rollout/generate", json=BODY | {"sampling_params": {"max_tokens": 2000}})
    )
    while not pod.engine.running:
        await asyncio.sleep(0)
    answer = await data.post("/v1/rollout/generate", json=BODY)
    assert (answer.status_code, problem(answer).code) == (409, "duplicate_request")
    assert (await slow).status_code == 200
    pod.want(paused=True)
    await pod.until(lambda s: s.phase == "Paused")
    answer = await data.post("/v1/rollout/generate", json=BODY)
    assert (answer.status_code, answer.json()["cancel_reason"]) == (200, "refused")
    waits = BODY | {"on_pause": "wait", "timeout_s": 0.02}
    answer = await data.post("/v1/rollout/generate", json=waits)
    assert (answer.status_code, problem(answer).code) == (503, "gate_closed")
    assert answer.headers["retry-after"] == "1"
    assert (await data.get("/readyz")).status_code == 200, "a pause changes no readiness"
    metrics = (await data.get("/metrics")).text
    assert "rollout_gate_open 0.0" in metrics
    assert 'rollout_requests_total{result="refused"} 1.0' in metrics
    assert "process_open_fds " in metrics and "rollout_asyncio_tasks " in metrics
    pod.supervisor.begin_drain()
    answer = await data.post("/v1/rollout/generate", json=BODY)
    assert (answer.status_code, problem(answer).code) == (503, "draining")
    assert (await data.get("/readyz")).status_code == 503


async def test_probes_of_a_pod_whose_engine_died(data: httpx.AsyncClient, pod: Pod) -> None:
    for path in ("/startupz", "/readyz", "/healthz"):
        assert (await data.get(path)).status_code == 200
    pod.engine.kill("gone")
    for path in ("/readyz", "/healthz"):
        assert (await data.get(path)).status_code == 503
    answer = await data.post("/v1/rollout/generate", json=BODY)
    assert (answer.status_code, problem(answer).code) == (503, "not_ready")


async def test_unknown_paths_and_methods(data: httpx.AsyncClient) -> None:
    assert problem(await data.get("/nowhere")).code == "not_found"
    assert problem(await data.get("/v1/rollout/generate")).code == "method_not_allowed"


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Bearer "}],
)  # fmt: skip
async def test_the_admin_port_needs_the_token(pod: Pod, tmp_path: Path, headers: dict) -> None:
    (tmp_path / "token").write_text("secret")
    app = make_admin_app(pod.supervisor, Tokens(tmp_path))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://pod", headers=headers
    ) as client:
        for call in (client.get("/admin/v1/state"), client.put("/admin/v1/desired", json={})):
            answer = await call
            assert (answer.status_code, problem(answer).code) == (401, "unauthorized")


async def test_tokens_roll_over(pod: Pod, tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    assert not tokens.accepts("")
    (tmp_path / "token").write_text("old")
    assert tokens.accepts("old")
    (tmp_path / "previous").write_text("old")
    (tmp_path / "token").write_text("new")
    assert tokens.accepts("old") and tokens.accepts("new") and not tokens.accepts("newer")
    app = make_admin_app(pod.supervisor, tokens)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://pod",
        headers={"X-Rollout-Token": "new"},
    ) as client:
        assert (await client.get("/admin/v1/state")).status_code == 200


async def test_a_token_of_before_passes_for_a_while_where_pods_of_the_replica_call(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelets bring a new token to the nodes of a group one after the other."""
    tokens, head = Tokens(tmp_path), Head("g", Node(0, 2, "h", "h", 1))
    head.lead(pod.supervisor)
    app = make_admin_app(pod.supervisor, tokens, head=head)
    beat = {"group": "g", "rank": 1, "boot_id": "b", "url": "http://n"}

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://pod"
    ) as client:

        async def codes(token: str) -> tuple[int, int]:
            headers = {"X-Rollout-Token": token}
            heard = await client.post("/admin/v1/nodes/beat", json=beat, headers=headers)
            return heard.status_code, (
                await client.get("/admin/v1/state", headers=headers)
            ).status_code

        (tmp_path / "token").write_text("old")
        assert await codes("old") == (200, 200)
        (tmp_path / "token").write_text("new")
        assert await codes("new") == (200, 200)
        assert await codes("old") == (200, 401)
        assert await codes("never") == (401, 401)
        assert await codes("") == (401, 401)
        assert tokens.lately() == ("new", "old")
        (tmp_path / "token").unlink()
        assert await codes("new") == (200, 401)
        (tmp_path / "token").write_text("new")
        monkeypatch.setattr("rollout_pod.server.auth.LATELY_S", 0.0)
        assert await codes("old") == (401, 401)
        assert await codes("new") == (200, 200)
        assert tokens.lately() == ("new",)


async def test_desired_and_state(admin: httpx.AsyncClient, pod: Pod) -> None:
    state = StateDocument.model_validate_json((await admin.get("/admin/v1/state")).content)
    news = asyncio.create_task(
        admin.get(
            "/admin/v1/state",
            params={"after": f"{state.boot_id}:{state.revision}", "timeout": "5"},
        )
    )
    document = DesiredDocument(owner="o", generation=7, paused=True)
    answer = await admin.put("/admin/v1/desired", content=document.model_dump_json())
    assert answer.status_code == 200
    assert StateDocument.model_validate_json((await news).content).revision > state.revision
    assert (
        DesiredDocument.model_validate_json((await admin.get("/admin/v1/desired")).content)
        == document
    )
    other_boot = await admin.get("/admin/v1/state", params={"after": "other:99", "timeout": "30"})
    assert other_boot.status_code == 200
    late = document.model_copy(update={"generation": 6})
    answer = await admin.put("/admin/v1/desired", content=late.model_dump_json())
    assert (answer.status_code, problem(answer).code) == (409, "fenced")
    answer = await admin.put(
        "/admin/v1/desired", content=document.model_dump_json(), headers={"If-Match": '"x:1"'}
    )
    assert (answer.status_code, problem(answer).code) == (412, "precondition_failed")
    answer = await admin.put(
        "/admin/v1/desired",
        json={"owner": "o", "generation": 8, "weights": {"version": "v", "source": None}},
    )
    assert (answer.status_code, problem(answer).code) == (422, "invalid_field")
    assert "needs a source" in problem(answer).detail
    for wrong in ({"paused": "yes"}, {"generation": "8"}, {"update_timeout_s": True}):
        document = {"owner": "o", "generation": 8} | wrong
        answer = await admin.put("/admin/v1/desired", json=document)
        assert (answer.status_code, problem(answer).code) == (422, "invalid_field")


@pytest.mark.parametrize(
    ("sleep", "field"),
    [
        ({"level": 0}, "sleep.level"),
        ({"level": 3}, "sleep.level"),
        ({"tags": []}, "sleep.tags"),
        ({"tags": ["weights", "weights"]}, "sleep.tags"),
        ({"tags": ["scheduling"]}, "sleep.tags.0"),
    ],
)
async def test_a_sleep_that_makes_no_sense_is_refused_by_name(
    admin: httpx.AsyncClient, sleep: dict, field: str
) -> None:
    body = {"owner": "o", "generation": 9, "sleep": sleep}
    answer = await admin.put("/admin/v1/desired", json=body)
    assert answer.status_code == 422
    assert problem(answer).errors[0].field == field


def test_sleep_is_both_tags_at_level_1_in_one_order() -> None:
    assert SleepSpec() == SleepSpec.model_validate({"tags": ["kv_cache", "weights"], "level": 1})


async def test_a_full_run_folder_fails_a_put_with_its_remedy(
    admin: httpx.AsyncClient, pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pod.supervisor.board.desired
    document = DesiredDocument(owner="o", generation=7, weights=ref("step-1"))
    with monkeypatch.context() as full:
        full.setattr("rollout_pod.supervisor.store.os.replace", no_space)
        answer = await admin.put("/admin/v1/desired", content=document.model_dump_json())
    told = problem(answer)
    assert (told.status, told.code) == (507, "store_failed")
    assert told.detail.startswith(f"run folder {tmp_path / 'run'}: No space left on device; ")
    assert "ephemeral-storage" in told.detail
    assert pod.supervisor.board.desired == before
    answer = await admin.put("/admin/v1/desired", content=document.model_dump_json())
    assert answer.status_code == 200
    await pod.serving("step-1")


async def test_clear_caches(admin: httpx.AsyncClient, pod: Pod) -> None:
    path = "/admin/v1/clear-caches"
    await pod.serving("base")
    answer = await admin.post(path)
    assert answer.json()["cleared"] == ["prefix", "multimodal", "encoder"]
    assert answer.json()["attempts"] == 1
    bad = await admin.post(path, json={"timeout_s": -1, "level": 2})
    assert {e.field for e in problem(bad).errors} == {"timeout_s", "level"}
    pod.engine.refuse_clear = 9
    late = await admin.post(path, json={"timeout_s": 0})
    assert (late.status_code, problem(late).code) == (503, "cache_in_use")
    assert late.headers["Retry-After"] == "1"
    pod.want(sleep={"level": 1})
    await pod.until(lambda s: s.phase == "Sleeping")
    asleep = await admin.post(path)
    assert (asleep.status_code, problem(asleep).code) == (409, "asleep")


def test_unknown_fields_of_a_document_are_ignored() -> None:
    document = DesiredDocument.model_validate({"owner": "o", "generation": 1, "later": True})
    assert document.model_dump() == DesiredDocument(owner="o", generation=1).model_dump()
    with pytest.raises(ValidationError):
        DesiredDocument.model_validate({"owner": "o", "generation": -1})


@pytest.mark.parametrize(
    "source",
    [
        {}, {"path": "/a", "url": "s3://b/a"}, {"url": "ftp://h/a"}, {"url": "https://u:p@h/a"},
        {"url": "https://h/a?sig=x"}, {"url": "s3://b/a b"}, {"url": "https://"}, {"url": "b/a"},
        {"path": "/a", "push": {}}, {"push": None},
    ],
)  # fmt: skip
def test_sources_that_are_refused(source: dict) -> None:
    with pytest.raises(ValidationError, match="source"):
        WeightsRef.model_validate({"version": "v", "source": source})


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("/w/{version}", {"path": "/w/v"}),
        ("hf://org/tiny@{version}", {"url": "hf://org/tiny@v"}),
        ("s3://b/run/{version}/model", {"url": "s3://b/run/v/model"}),
    ],
)
def test_ctl_takes_paths_and_urls(template: str, expected: dict) -> None:
    assert cli._source(template, "v").model_dump() == expected


def test_ctl_refuses_a_url_with_a_secret_and_does_not_print_it() -> None:
    with pytest.raises(CtlError, match="without user, query or fragment") as caught:
        cli._source("https://user:s3cr3t@h/{version}?sig=s3cr3t", "v")
    assert "s3cr3t" not in str(caught.value)


async def test_ctl_drives_a_local_pod(tmp_path: Path) -> None:
    async with running_pod(tmp_path / "run", first=first_document()) as pod:
        (tmp_path / "token").write_text("t")
        app = make_admin_app(pod.supervisor, Tokens(tmp_path))
        loop = asyncio.get_running_loop()

        class ThroughTheLoop(httpx.BaseTransport):
            """The sync client in a thread, the app on the loop."""

            def handle_request(self, request: httpx.Request) -> httpx.Response:
                async def call() -> httpx.Response:
                    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
                        answer = await client.request(
                            request.method, request.url, headers=request.headers,
                            content=request.content,
                        )  # fmt: skip
                    return httpx.Response(
                        answer.status_code, headers=answer.headers, content=answer.content
                    )

                return asyncio.run_coroutine_threadsafe(call(), loop).result(10)

        def drive() -> None:
            with Ctl("http://pod", "t", transport=ThroughTheLoop()) as ctl:
                ctl.wait(lambda s: s.phase == "Serving", timeout_s=5)
                ctl.change(lambda d: d.model_copy(update={"paused": True}))
                ctl.wait(is_paused, timeout_s=5)
                ctl.change(lambda d: d.model_copy(update={"weights": ref("step-1")}))
                ctl.wait(is_settled_on("step-1"), timeout_s=5)
                assert ctl.state().phase == "Paused"
                assert ctl.clear_caches(timeout_s=1).cleared == ("prefix", "multimodal", "encoder")
                spec = SleepSpec(level=2)
                ctl.change(lambda d: d.model_copy(update={"sleep": spec}))
                ctl.wait(is_asleep(spec.tags, spec.level), timeout_s=5)
                with pytest.raises(CtlError, match="Asleep: the engine sleeps"):
                    ctl.clear_caches(timeout_s=1)
                ctl.change(lambda d: d.model_copy(update={"sleep": None}))
                ctl.wait(is_asleep((), 1), timeout_s=5)
                ctl.wait(is_settled_on("step-1"), timeout_s=5)
                ctl.change(lambda d: d.model_copy(update={"paused": False}))
                ctl.wait(lambda s: s.gate == "open", timeout_s=5)
                pod.agent.send_script["bad"] = ["midway"] * 5
                ctl.change(lambda d: d.model_copy(update={"weights": ref("bad")}))
                with pytest.raises(CtlError, match="bad was rejected"):
                    ctl.wait(is_settled_on("bad"), timeout_s=5)
                ctl.change(lambda d: d.model_copy(update={"weights": pushed("step-2")}))
                with pytest.raises(CtlError, match="A trainer has to push step-2"):
                    ctl.wait(is_settled_on("step-2"), timeout_s=0.2)

        await asyncio.to_thread(drive)


@pytest.mark.parametrize(
    ("phase", "gate", "paused"),
    [
        ("Paused", "closed", True),
        ("Sleeping", "closed", True),
        ("Poisoned", "closed", True),
        ("Stale", "closed", True),
        ("Pausing", "closed", False),
        ("Updating", "closed", False),
        ("Serving", "open", False),
        ("Failed", "closed", False),
    ],
)
async def test_ctl_waits_for_a_pause_until_nothing_is_in_the_engine(
    admin: httpx.AsyncClient, phase: str, gate: str, paused: bool
) -> None:
    state = (await admin.get("/admin/v1/state")).json() | {"phase": phase, "gate": gate}
    assert is_paused(StateDocument.model_validate(state)) is paused


async def test_ctl_leaves_an_operators_pod_alone(
    admin: httpx.AsyncClient, pod: Pod, tmp_path: Path
) -> None:
    state = (await admin.get("/admin/v1/state")).content
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=state))
    with (
        Ctl("http://pod", "t", transport=transport) as ctl,
        pytest.raises(CtlError, match="patch its RolloutReplica"),
    ):
        ctl.change(lambda d: d)
    with pytest.raises(CtlError, match="no pod runs from"):
        Ctl.of_run_dir(tmp_path / "nobody", "http://pod")
