"""``rollout-pod serve --engine NAME``: any installed package may bring the engine."""

import json

import pytest

from rollout_pod.engine import registry
from rollout_pod.engine.base import EngineSettings
from rollout_pod.engine.registry import EngineChoiceError
from tests.support.fakes import fake_tokens
from tests.support.installed import installed_engines
from tests.support.process import ServeProcess, serve_process

ENGINES = {
    "fake": "tests.support.fakes:create",
    "torn": "tests.support.fakes:no_such_function",
    "lost": "a_package_that_is_gone:create",
}
PROMPT = [5, 6, 7]


def test_the_fake_engine_serves_as_any_other(tmp_path) -> None:
    with (
        installed_engines(ENGINES) as env,
        serve_process(tmp_path, "--engine=fake", engine_args=("--any=thing",), env=env) as pod,
    ):
        pod.start()
        state = pod.serving("base")
        assert state.engine is not None and state.engine.name == "fake"
        answer = pod.generate(PROMPT, 8, sampling_params={"max_tokens": 8})
        assert answer.token_ids == fake_tokens("base", PROMPT, 8)
        assert pod.cli("pause").returncode == 0
        assert pod.generate(PROMPT, 8, sampling_params={"max_tokens": 8}).is_cancel
        assert pod.stop() == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nope", "no engine 'nope' is installed; there are: fake, lost, torn, vllm"),
        ("torn", "'torn' is installed as tests.support.fakes:no_such_function, which cannot be"),
        ("lost", "No module named 'a_package_that_is_gone'"),
    ],
)
def test_an_engine_that_cannot_be_had_ends_the_container_with_the_reason(
    tmp_path, name: str, words: str
) -> None:
    with (
        installed_engines(ENGINES) as env,
        serve_process(tmp_path, f"--engine={name}", engine_args=(), env=env) as pod,
    ):
        pod.start()
        assert _end(pod) == 2
        (line,) = [line for line in pod.log.read_text().splitlines() if "not started" in line]
        assert words in json.loads(line)["error"]
        assert "Traceback" not in pod.log.read_text()


def _end(pod: ServeProcess) -> int:
    assert pod.process is not None
    return pod.process.wait(30)


def test_vllm_ships() -> None:
    assert registry.installed()["vllm"].value == "rollout_pod.engine.vllm:create"


def test_where_nothing_is_installed_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    with pytest.raises(EngineChoiceError, match=r"none .* 'rollout_pod.engines'"):
        registry.create("vllm", EngineSettings(model="m"))
