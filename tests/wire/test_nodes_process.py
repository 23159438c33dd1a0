"""``rollout-pod follow`` as a process, up to where an engine would start."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_pod import local
from rollout_pod.nodes.head import GroupSettings
from rollout_pod.nodes.process import FollowSettings, run_follow
from tests.support.node_group import HERE, TOKEN
from tests.support.process import free_port

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def settings(tmp_path: Path) -> FollowSettings:
    (tmp_path / "token").write_text(TOKEN)
    return FollowSettings(
        model="m", engine="vllm", engine_args=(), rank=1, head=f"{HERE}:{free_port()}",
        group=GroupSettings("g", 2, HERE, free_port(), join_timeout_s=30),
        data_address=(HERE, 0), admin_address=(HERE, 0), run_dir=tmp_path / "run",
        shm_dir=tmp_path, host_memory=1 << 20, token_dir=tmp_path, spawns_agent=True,
        drain_timeout_s=1,
    )  # fmt: skip


def test_a_node_whose_weights_agent_cannot_be_kept_ends_when_that_happens(
    settings: FollowSettings, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def keep(*_: object) -> None:
        await asyncio.sleep(0.2)
        raise OSError("no more processes")

    monkeypatch.setattr(local, "keep_agent", keep)
    assert run_follow(settings) == 1
    assert "no more processes" in "".join(capfd.readouterr())


def test_a_node_that_finds_no_head_in_time_ends_with_that(
    settings: FollowSettings, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def keep(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(local, "keep_agent", keep)
    group = GroupSettings("g", 2, HERE, free_port(), join_timeout_s=0.2)
    assert run_follow(replace(settings, group=group)) == 1
    assert "not in group g within 0.2 s" in "".join(capfd.readouterr())
