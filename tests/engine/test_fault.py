"""A step that fails, and a device that an idle engine does not know to be broken."""

import pytest

from tests.support.engine_kit import BASE_ARGS, checkpoint
from tests.support.fault_checks import (
    an_idle_pod_finds_out_and_ends,
    callers_are_answered_and_the_pod_ends,
    faulty_pod,
)
from tests.support.faulty_engine import ON_CPU

pytestmark = [pytest.mark.engine, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    "check", [callers_are_answered_and_the_pod_ends, an_idle_pod_finds_out_and_ends]
)
def test_a_fault_ends_the_container(check) -> None:
    with faulty_pod(checkpoint("dense", 0), BASE_ARGS) as pod:
        check(pod, ON_CPU)
