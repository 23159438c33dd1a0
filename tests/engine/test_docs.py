"""The examples of docs/generate.md do what the page says."""

import json
import re
import subprocess
from pathlib import Path

import httpx
import pytest

from rollout_pod.engine import params
from tests.support.engine_kit import BASE_ARGS, adapter, checkpoint
from tests.support.process import GREEDY, serve_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "generate.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_examples() -> None:
    base = checkpoint("dense", 0)
    lora = ("--enable-lora", "--lora-modules", f"style={adapter(base, 1)}")
    with serve_process(base, engine_args=(*BASE_ARGS, *lora)) as pod:
        pod.start()
        pod.serving("base")
        (curl,) = blocks("console")
        done = subprocess.run(
            ["bash", "-c", curl.removeprefix("$ ").replace("127.0.0.1:8000", pod.data)],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        answer = json.loads(done.stdout)
        assert len(answer["token_ids"]) == len(answer["log_probs"]) <= 16
        scope: dict[str, object] = {}
        for code in blocks("python"):
            exec(code.replace("127.0.0.1:8000", pod.data), scope)
        whole = pod.generate([1, 2, 3], 64, sampling_params={"max_tokens": 64, "temperature": 0})
        assert scope["rollout"] == whole.token_ids
        fields = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", PAGE, re.M))))
        assert set(answer) - {"request_id"} <= fields
        adapted = pod.generate([301, 302, 303], 8, lora="style")
        assert adapted.token_ids != pod.generate([301, 302, 303], 8).token_ids
        asked = {"prompt": [301, 302, 303], "max_tokens": 8, "return_token_ids": True, **GREEDY}
        told = httpx.post(
            f"http://{pod.data}/v1/completions", json=asked | {"model": "style"}, timeout=60
        )
        assert told.json()["choices"][0]["token_ids"] == adapted.token_ids
        refused = httpx.post(
            f"http://{pod.data}/v1/rollout/generate",
            json={"request_id": "r", "prompt_token_ids": [5], "lora": "other"},
        )
        assert refused.status_code == 422
        assert refused.json()["detail"] == "lora: no adapter is called 'other'; known: style"


def test_every_name_of_vllms_class_is_decided() -> None:
    """A new one fails here until somebody allows or refuses it."""
    from vllm.sampling_params import SamplingParams

    theirs = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    ours = params.ALLOWED | params.SET_HERE | params.REFUSED.keys()
    assert theirs <= ours
    section = PAGE[PAGE.index("## Sampling parameters") :]
    rows = re.findall(r"^\| (`.*?) \|", section[: section.index("###")], re.M)
    documented = re.findall(r"`(\w+)`", "\n".join(rows))
    assert len(documented) == len(set(documented))
    assert set(documented) == theirs
    assert ours - theirs == {"best_of"}  # other servers'
