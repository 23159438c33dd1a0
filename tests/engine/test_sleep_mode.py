"""Which engines can sleep, decided by vLLM's own words on its platform. No engine is started."""

from types import SimpleNamespace

import pytest

from rollout_pod.engine import arguments, sleep_mode
from tests.support.engine_kit import checkpoint, settings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

CUDA = SimpleNamespace(
    is_cpu=lambda: False, is_cuda=lambda: True, is_sleep_mode_available=lambda: True
)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", CUDA)
    monkeypatch.setattr("vllm.device_allocator.cumem.cumem_available", True)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("can", "args", "enabled"),
    [(True, (), True), (True, ("--no-enable-sleep-mode",), False), (False, (), False)],
)
def test_sleep_mode_is_on_where_it_can_be_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, can: bool, args: tuple[str, ...], enabled: bool
) -> None:
    monkeypatch.setattr(arguments, "can_sleep", lambda: can)
    with settings(checkpoint("dense", 0), *args) as given:
        assert arguments.parse(given)[0].enable_sleep_mode is enabled


def test_a_cpu_is_not_told_to() -> None:
    assert not sleep_mode.can_sleep()
    # but goes through the motions
    assert sleep_mode.sleep_refusal(SimpleNamespace(enable_sleep_mode=False)) is None


@pytest.mark.usefixtures("on_cuda")
def test_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sleep_mode.can_sleep()
    assert sleep_mode.sleep_refusal(SimpleNamespace(enable_sleep_mode=True)) is None
    refusal = sleep_mode.sleep_refusal(SimpleNamespace(enable_sleep_mode=False))
    assert refusal and "--no-enable-sleep-mode" in refusal
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    assert not sleep_mode.can_sleep()
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setattr("vllm.device_allocator.cumem.cumem_available", False)
    assert not sleep_mode.can_sleep()


@pytest.mark.parametrize(
    ("before", "after", "count", "words"),
    [(10, 30, 20, ""), (30, 30, 0, "no more free memory"), (30, 10, 0, "no more free"),
     (None, None, 0, "CPU")],
)  # fmt: skip
def test_what_was_released_is_what_was_measured(
    before: int | None, after: int | None, count: int, words: str
) -> None:
    report = sleep_mode.released(before, after)
    assert report.bytes == count and words in report.message and bool(words) == bool(report.message)
