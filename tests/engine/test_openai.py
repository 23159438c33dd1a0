"""The OpenAI routes of a real pod, for agents that know nothing of pauses and updates."""

import itertools
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from safetensors.torch import load_file, save_file

from rollout_pod.engine import arguments
from rollout_pod.engine.base import EngineOutput, EngineSettings, EngineStartError
from tests.support.engine_kit import BASE_ARGS, checkpoint, reference
from tests.support.process import ServeProcess, serve_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LONG = 1500


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Of whole words: vLLM answers the end of a prompt that ends within a character."""
    dice = random.Random(seed)
    return [[dice.randrange(300, 1024) for _ in range(24)] for _ in range(count)]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def pod() -> Iterator[ServeProcess]:
    args = (*BASE_ARGS, "--enable-auto-tool-choice", "--tool-call-parser=hermes")
    with serve_process(checkpoint("dense", 0), engine_args=args) as pod:
        pod.start()
        pod.serving("base")
        yield pod


@pytest.fixture(scope="module")
def client(pod: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{pod.data}/v1", api_key="none", timeout=120) as client:
        yield client


def model(pod: ServeProcess) -> str:
    return str(pod.model)


def ask(pod: ServeProcess, **more: Any) -> dict[str, Any]:
    body = {
        "model": model(pod), "prompt": prompts(1)[0], "temperature": 0, "max_tokens": LONG,
        "ignore_eos": True, **more,
    }  # fmt: skip
    answer = httpx.post(f"http://{pod.data}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def stream(pod: ServeProcess, path: str = "/v1/completions", **more: Any) -> list[dict[str, Any]]:
    body = {"temperature": 0, "max_tokens": LONG, "ignore_eos": True, "stream": True, **more}
    if "messages" not in body:
        body.setdefault("prompt", prompts(1)[0])
    with httpx.stream("POST", f"http://{pod.data}{path}", json=body, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        *data, done = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in data]


def cut(pod: ServeProcess, asking: Callable[[], Any], *commands: tuple[str, ...]) -> Any:
    """The answer of a request in whose middle these commands were given."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(asking)
        for command in commands:
            deadline = time.monotonic() + 30
            # a pod that is paused has nothing unfinished, and is told to go on
            while not pod.metric("rollout_unfinished ") and command != ("resume",):
                assert not future.done() and time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.2)
            assert not future.done(), "it was over before it was cut"
            done = pod.cli(*command)
            assert done.returncode == 0, done.stderr
        return future.result(90)


PAUSE = (("pause",), ("resume",))


def idle(pod: ServeProcess) -> None:
    deadline = time.monotonic() + 10
    while pod.metric("rollout_unfinished ") or pod.metric("rollout_parked "):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_models_and_tokens(pod: ServeProcess, client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [m.id for m in listed] == [model(pod)]
    assert listed[0].model_dump()["weight_version"] == "base"
    url = f"http://{pod.data}"
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": "hé w300"}).json()["tokens"]
    back = httpx.post(f"{url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert back == "hé w300"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/chat/completions/batch", "/pause",
        "/collective_rpc", "/docs", "/tokenizer_info", "/invocations", "/inference/v1/generate",
        "/sleep", "/v1/load_lora_adapter", "/health", "/version",
    ],
)  # fmt: skip
def test_nothing_else(pod: ServeProcess, path: str) -> None:
    for method in ("GET", "POST"):
        answer = httpx.request(method, f"http://{pod.data}{path}", json={})
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


def test_a_pause_changes_nothing(pod: ServeProcess) -> None:
    whole = ask(pod, logprobs=3, echo=True, return_token_ids=True)
    parts = cut(pod, lambda: ask(pod, logprobs=3, echo=True, return_token_ids=True), *PAUSE * 2)
    for answer in (whole, parts):
        assert answer["usage"] == {
            "prompt_tokens": 24, "completion_tokens": LONG, "total_tokens": 24 + LONG,
            "prompt_tokens_details": None, "completion_tokens_details": None,
        }  # fmt: skip
        assert answer["weight_versions"] == [
            {"version": "base", "step": None, "start": 0, "end": LONG, "choice": 0}
        ]
    (one,), (two,) = whole["choices"], parts["choices"]
    assert one["finish_reason"] == two["finish_reason"] == "length"
    for name in ("token_ids", "text", "prompt_token_ids"):
        assert one[name] == two[name], name
    for name in ("tokens", "text_offset"):
        assert one["logprobs"][name] == two["logprobs"][name], name
    first, second = one["logprobs"]["token_logprobs"], two["logprobs"]["token_logprobs"]
    assert len(first) == 24 + LONG and first[0] is second[0] is None
    assert second[1:] == pytest.approx(first[1:], abs=1e-3)


def test_a_pause_changes_nothing_of_a_stream(pod: ServeProcess) -> None:
    whole = ask(pod)["choices"][0]["text"]
    options = {"include_usage": True}
    *chunks, usage = cut(pod, lambda: stream(pod, stream_options=options), *PAUSE)
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == LONG
    for last in (chunks[-1], usage):
        assert [(s["version"], s["end"]) for s in last["weight_versions"]] == [("base", LONG)]


def test_several_sequences_at_once(pod: ServeProcess) -> None:
    # greedy, without the name: vLLM refuses several greedy sequences
    asked = {"prompt": prompts(2), "n": 2, "temperature": 1, "top_k": 1, "max_tokens": 700}
    whole = ask(pod, **asked)
    parts = cut(pod, lambda: ask(pod, **asked), *PAUSE)
    assert [c["text"] for c in parts["choices"]] == [c["text"] for c in whole["choices"]]
    assert [s["choice"] for s in parts["weight_versions"]] == [0, 1, 2, 3]
    assert parts["usage"]["completion_tokens"] == 4 * 700
    chunks = cut(pod, lambda: stream(pod, **asked), *PAUSE)
    for number, choice in enumerate(whole["choices"]):
        mine = [c for c in chunks if c["choices"][0]["index"] == number]
        assert "".join(c["choices"][0]["text"] for c in mine) == choice["text"]
        assert [s["choice"] for s in mine[-1]["weight_versions"]] == [number]


def test_a_stop_string_after_the_cut(pod: ServeProcess) -> None:
    text = ask(pod)["choices"][0]["text"]
    # the first that begins late, over the border of two tokens
    stop = next(
        text[i : i + 6]
        for i in range(len(text) * 3 // 4, len(text))
        if text.find(text[i : i + 6]) == i
    )
    expected = text[: text.index(stop)]
    for answer in (ask(pod, stop=[stop]), cut(pod, lambda: ask(pod, stop=[stop]), *PAUSE)):
        choice = answer["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert choice["text"] == expected
        assert answer["weight_versions"][-1]["end"] == answer["usage"]["completion_tokens"]
    idle(pod)


def test_an_update_in_the_middle(pod: ServeProcess) -> None:
    """Every token is the greedy one of the version that its span names."""
    prompt = prompts(1, seed=4)[0]
    update = ("update", "step-1", f"--path={checkpoint('dense', 1)}")
    answer = cut(pod, lambda: ask(pod, prompt=prompt, return_token_ids=True, logprobs=0), update)
    try:
        choice = answer["choices"][0]
        tokens, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        assert (choice["finish_reason"], len(tokens)) == ("length", LONG)
        old, new = answer["weight_versions"]
        assert (old["version"], new["version"]) == ("base", "step-1")
        assert (old["start"], old["end"], new["end"]) == (0, new["start"], LONG)
        for span, seed in ((old, 0), (new, 1)):
            part = slice(span["start"], span["end"])
            output = EngineOutput(tuple(tokens[part]), tuple(values[part]), "length")
            history = prompt + tokens[: span["start"]]
            assert reference(checkpoint("dense", seed)).agrees(history, output)
    finally:
        assert pod.cli("update", "base").returncode == 0
    chunks = cut(pod, lambda: stream(pod, prompt=prompt), update)
    assert [s["version"] for s in chunks[-1]["weight_versions"]] == ["base", "step-1"]
    assert pod.cli("update", "base").returncode == 0


def test_an_update_that_keeps_requests(pod: ServeProcess) -> None:
    pod.interrupt("keep")
    update = ("update", "step-1", f"--path={checkpoint('dense', 1)}")
    try:
        chunks = cut(pod, lambda: stream(pod, stream_options={"include_usage": True}), update)
        spans = chunks[-1]["weight_versions"]
        assert [s["version"] for s in spans] == ["base", "step-1"]
        assert (spans[0]["end"], spans[1]["end"]) == (spans[1]["start"], LONG)
        assert chunks[-1]["usage"]["completion_tokens"] == LONG
    finally:
        pod.interrupt("abort")
        assert pod.cli("update", "base").returncode == 0


def test_the_openai_package(pod: ServeProcess, client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "w300 w301"}]
    more: Any = {"ignore_eos": True}

    def chat(**options: Any) -> Any:
        return client.chat.completions.create(
            model=model(pod), messages=messages, temperature=0, max_tokens=LONG, logprobs=True,
            top_logprobs=2, extra_body=more, **options,
        )  # fmt: skip

    whole = chat()
    parts = cut(pod, chat, *PAUSE)
    assert parts.choices[0].message.content == whole.choices[0].message.content
    one, two = (c.choices[0].logprobs.content for c in (whole, parts))
    assert len(one) == LONG and [t.token for t in one] == [t.token for t in two]
    assert parts.weight_versions[0]["end"] == LONG

    def streamed() -> Any:
        return list(chat(stream=True, tools=TOOLS, stream_options={"include_usage": True}))

    chunks = cut(pod, streamed, *PAUSE)
    with_tools = chat(tools=TOOLS)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == with_tools.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == LONG
    assert chunks[-1].weight_versions[0]["end"] == LONG


@pytest.mark.parametrize("streams", [False, True])
def test_a_grammar_starts_anew(pod: ServeProcess, streams: bool) -> None:
    asked = {"ignore_eos": False, "structured_outputs": {"regex": "<[ab]{700}>"}}

    def answer() -> str:
        if streams:
            return "".join(c["choices"][0]["text"] for c in stream(pod, **asked))
        return str(ask(pod, **asked)["choices"][0]["text"])

    assert re.fullmatch("<[ab]{700}>", cut(pod, answer, *PAUSE))


def test_a_tool_call(pod: ServeProcess, client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "look_up"}}
    answer = client.chat.completions.create(
        model=model(pod), messages=[{"role": "user", "content": "w9"}], tools=TOOLS,
        tool_choice=tool, temperature=1, seed=1, max_tokens=1000,
    )  # fmt: skip
    calls = answer.choices[0].message.tool_calls
    assert calls and calls[0].function.name == "look_up"


def test_an_agent_loop_sees_complete_answers(pod: ServeProcess, client: openai.OpenAI) -> None:
    """Chat, tool call, tool result, chat: with pauses and updates during the turns and between."""
    words = ["red", "green", "blue"]
    many = {"type": "array", "minItems": 150, "maxItems": 150, "items": {"enum": words}}
    parameters = {
        "type": "object", "properties": {"words": many}, "required": ["words"],
        "additionalProperties": False,
    }  # fmt: skip
    function = {"name": "look_up", "strict": True, "parameters": parameters}
    tools: Any = [{"type": "function", "function": function}]
    blanks = httpx.post(f"http://{pod.data}/tokenize", json={"prompt": " \t\r\n"}).json()["tokens"]
    few_blanks = {str(token): -100.0 for token in blanks}  # the grammar allows any number of them
    update = ("update", "step-1", f"--path={checkpoint('dense', 1)}")
    back = ("update", "base")
    messages: list[Any] = [{"role": "user", "content": "w300 w301"}]

    def turn(streams: bool, **options: Any) -> tuple[str, list[tuple[str, str]], str, list[Any]]:
        """Text, tool calls, finish reason and spans."""
        answer = client.chat.completions.create(
            model=model(pod), messages=messages, temperature=0, stream=streams, tools=tools,
            **options,
        )  # fmt: skip
        if not streams:
            choice = answer.choices[0]
            calls = [
                (c.function.name, c.function.arguments) for c in choice.message.tool_calls or []
            ]
            return choice.message.content or "", calls, choice.finish_reason, answer.weight_versions
        text, name, arguments, reason, spans = "", "", "", "", []
        for chunk in answer:
            choice = chunk.choices[0]
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                name = name or call.function.name or ""
                arguments += call.function.arguments or ""
            if choice.finish_reason:
                reason, spans = choice.finish_reason, chunk.weight_versions
        return text, [(name, arguments)] if name else [], reason, spans

    def calling(streams: bool) -> Any:
        choice = {"type": "function", "function": {"name": "look_up"}}
        return turn(streams, tool_choice=choice, max_tokens=1900, logit_bias=few_blanks)

    def telling(streams: bool) -> Any:
        return turn(streams, tool_choice="none", max_tokens=LONG, extra_body={"ignore_eos": True})

    try:
        for streams, commands in ((False, PAUSE), (True, (back,))):
            _, calls, reason, spans = cut(pod, partial(calling, streams), *PAUSE)
            ((name, arguments),) = calls
            assert name == "look_up" and reason in ("tool_calls", "stop")
            found = json.loads(arguments)["words"]
            assert len(found) == 150 and set(found) <= set(words)
            assert spans[0]["start"] == 0 and spans[-1]["end"] > 150
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
                ]},
                {"role": "tool", "tool_call_id": "c1", "content": "w302"},
            ]  # fmt: skip
            for command in PAUSE if streams else (update,):  # between the turns
                assert pod.cli(*command).returncode == 0
            text, calls, reason, spans = cut(pod, partial(telling, streams), *commands)
            assert (calls, reason) == ([], "length")
            assert text and [spans[0]["start"], spans[-1]["end"]] == [0, LONG]
            assert all(a["end"] == b["start"] for a, b in itertools.pairwise(spans))
            assert [s["version"] for s in spans] == (["step-1", "base"] if streams else ["step-1"])
            shown = client.models.list().data[0].model_dump()["weight_version"]
            assert shown == ("base" if streams else "step-1")
            messages.append({"role": "assistant", "content": "w303"})
            messages.append({"role": "user", "content": "w304"})
    finally:
        assert pod.cli("update", "base").returncode == 0
    idle(pod)


def test_log_probs_that_are_no_numbers(pod: ServeProcess, tmp_path: Path) -> None:
    """As the pod's own route: nothing from that token on; here vLLM's server says it."""
    folder = tmp_path / "nan"
    shutil.copytree(checkpoint("dense", 1), folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"].fill_(float("nan"))
            save_file(tensors, file)
    assert pod.cli("update", "nan", f"--path={folder}").returncode == 0
    body = {"prompt": prompts(1)[0], "max_tokens": 20, "logprobs": 1, "ignore_eos": True}
    url = f"http://{pod.data}/v1/completions"
    try:
        answer = httpx.post(url, json=body, timeout=60)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "Internal server error"
        first, *_ = stream(pod, **body)
        assert first["error"]["code"] == 500
        idle(pod)
    finally:
        assert pod.cli("update", "base").returncode == 0
    assert ask(pod, max_tokens=5)["usage"]["completion_tokens"] == 5


def test_partials_and_deadlines(pod: ServeProcess) -> None:
    url, body = f"http://{pod.data}/v1/completions", {"prompt": prompts(1)[0], "max_tokens": LONG}
    headers = {"X-Rollout-On-Pause": "return"}
    more = {"ignore_eos": True, "temperature": 0, "logprobs": 1}

    def asking() -> httpx.Response:
        return httpx.post(url, json=body | more, headers=headers, timeout=60)

    partial = cut(pod, asking, ("pause",)).json()
    try:
        assert partial["choices"][0]["finish_reason"] == "abort"
        assert 0 < partial["usage"]["completion_tokens"] < LONG
        refused = asking().json()
        assert refused["choices"][0]["finish_reason"] == "abort"
        assert refused["usage"]["completion_tokens"] == 0
        for streams in (False, True):
            late = httpx.post(
                url, json=body | {"stream": streams}, headers={"X-Rollout-Timeout-S": "0.2"}
            )
            assert (late.status_code, late.json()["code"]) == (503, "gate_closed")
            assert late.headers["retry-after"]
    finally:
        assert pod.cli("resume").returncode == 0
    idle(pod)


@pytest.mark.parametrize("streams", [False, True])
def test_a_reader_that_goes_leaves_nothing(pod: ServeProcess, streams: bool) -> None:
    idle(pod)
    body = {"prompt": prompts(1)[0], "max_tokens": 1900, "ignore_eos": True, "stream": streams}
    url = f"http://{pod.data}/v1/completions"
    if streams:
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            lines = answer.iter_lines()  # kept: it closes the connection when it goes
            assert '"text":' in next(lines)
            assert pod.metric("rollout_unfinished ") == 1
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=0.3)
    idle(pod)
    # and one that waits at the gate
    assert pod.cli("pause").returncode == 0
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=0.3)
    idle(pod)
    assert pod.cli("resume").returncode == 0
    assert ask(pod, max_tokens=5)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        ({"model": "another"}, 404),
        ({"prompt": [5, 1 << 20]}, 400),
        ({"prompt": [1] * 3000}, 400),
        ({"temperature": -1}, 400),
        ({"logit_bias": {"99999": 1.0}}, 400),
        ({"stop_token_ids": [-1]}, 400),
        ({"allowed_token_ids": [1 << 30]}, 400),
        ({"logprobs": 1000}, 400),
        ({"structured_outputs": ""}, 400),
        ({"structured_outputs": [1]}, 400),
    ],
)
def test_bad_input(pod: ServeProcess, bad: dict[str, Any], status: int) -> None:
    body = {"prompt": prompts(1)[0], "max_tokens": 4, **bad}
    answer = httpx.post(f"http://{pod.data}/v1/completions", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert ask(pod, max_tokens=5)["usage"]["completion_tokens"] == 5


def test_without_a_tokenizer() -> None:
    args = (*BASE_ARGS, "--skip-tokenizer-init")
    with serve_process(checkpoint("dense", 0), engine_args=args) as pod:
        pod.start()
        pod.serving("base")
        answer = httpx.post(f"http://{pod.data}/v1/completions", json={"prompt": [5]})
        assert (answer.status_code, answer.json()["code"]) == (501, "not_supported")
        assert "--skip-tokenizer-init" in answer.json()["detail"]
        assert len(pod.generate(prompts(1)[0], 5).token_ids) == 5


def test_the_example_of_the_page(pod: ServeProcess, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "openai.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code.replace("127.0.0.1:8000", pod.data), scope)
    scope["client"].close()
    count = scope["answer"].usage.completion_tokens  # it is sampled, and may end before 32
    assert 0 < count <= 32
    assert capsys.readouterr().out == f"tokens 0 to {count}: base\n"


@pytest.mark.parametrize(
    "option",
    ["--port=1", "--api-key=x", "--middleware=x.y", "--enable-scale-out", "--tool-server=demo"],
)
def test_options_of_a_server_that_does_not_run(option: str) -> None:
    with pytest.raises(EngineStartError, match=option.split("=")[0]):
        arguments.parse(EngineSettings(model=str(checkpoint("dense", 0)), args=[option]))


def test_a_parser_is_needed_for_automatic_tools() -> None:
    with pytest.raises(EngineStartError, match="--tool-call-parser"):
        arguments.parse(
            EngineSettings(model=str(checkpoint("dense", 0)), args=["--enable-auto-tool-choice"])
        )
