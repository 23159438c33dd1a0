"""A kernel reads out of bounds: the device refuses everything until the process ends."""

from pathlib import Path

import pytest

from tests.support.fault_checks import (
    an_idle_pod_finds_out_and_ends,
    callers_are_answered_and_the_pod_ends,
    faulty_pod,
)
from tests.support.gpu_kit import ENGINE_ARGS, make_versions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_versions(tmp_path_factory.mktemp("fault"), "dense") / "base"


@pytest.mark.parametrize(
    "check", [callers_are_answered_and_the_pod_ends, an_idle_pod_finds_out_and_ends]
)
def test_a_faulted_device_ends_the_container(base: Path, check) -> None:
    with faulty_pod(base, ENGINE_ARGS) as pod:
        check(pod, "CUDA error")
