"""The examples of docs/generate.md do what the page says."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.engine_kit import checkpoint
from tests.support.process import serve_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "generate.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_examples() -> None:
    with serve_process(checkpoint("dense", 0)) as pod:
        pod.start()
        pod.serving("base")
        (curl,) = blocks("console")
        done = subprocess.run(
            ["bash", "-c", curl.removeprefix("$ ").replace("127.0.0.1:8000", pod.data)],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        answer = json.loads(done.stdout)
        assert len(answer["token_ids"]) == len(answer["log_probs"]) <= 16
        (code,) = blocks("python")
        scope: dict[str, object] = {}
        exec(code.replace("127.0.0.1:8000", pod.data), scope)
        whole = pod.generate([1, 2, 3], 64, sampling_params={"max_tokens": 64, "temperature": 0})
        assert scope["rollout"] == whole.token_ids
        fields = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", PAGE, re.M))))
        assert set(answer) - {"request_id"} <= fields
