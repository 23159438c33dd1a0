"""The pod under attack: thousands of interleavings, and docs/invariants.md after each turn.

``ATTACK_EXAMPLES=20000`` runs longer; a failure prints how to reproduce it.
"""

import os
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.support import attack
from tests.support.attacked_pod import AttackedPod

EXAMPLES = int(os.environ.get("ATTACK_EXAMPLES", "200"))
STEPS = 50


class Machine(RuleBasedStateMachine):
    """Each rule does one operation, then lets the pod go on for a while."""

    FRONT_ENDS = 0

    def __init__(self) -> None:
        super().__init__()
        self.pod = AttackedPod(front_ends=self.FRONT_ENDS)
        self.is_broken = False

    def do(self, operation: attack.Operation, let: attack.Let) -> None:
        try:
            self.pod.apply(operation)
            self.pod.apply(let)
        except BaseException:
            self.is_broken = True
            raise

    @rule(operation=attack.documents, let=attack.lets)
    def document(self, operation, let):
        self.do(operation, let)

    @rule(fault=attack.update_faults, operation=attack.documents, let=attack.lets)
    def document_and_fault(self, fault, operation, let):
        self.do(fault, attack.Let(turns=0))
        self.do(operation, let)

    @rule(operation=attack.late_documents, let=attack.lets)
    def late_document(self, operation, let):
        self.do(operation, let)

    @rule(operation=attack.any_requests, let=attack.lets)
    def request(self, operation, let):
        self.do(operation, let)

    @rule(operation=attack.ends, let=attack.lets)
    def end(self, operation, let):
        self.do(operation, let)

    @rule(operation=attack.troubles, let=attack.lets)
    def fault(self, operation, let):
        self.do(operation, let)

    @rule(operation=attack.pushes, let=attack.lets)
    def push(self, operation, let):
        self.do(operation, let)

    @rule(
        operation=attack.documents, first=attack.moments, offer=attack.offers, let=attack.moments,
        then=st.one_of(attack.pushes, attack.documents, attack.deaths, attack.load_faults),
        last=attack.lets,
    )  # fmt: skip
    def pushed_document(self, operation, first, offer, let, then, last):
        """Chance alone seldom meets what is needed."""
        self.do(replace(operation, pushed=True), first)
        self.do(offer, let)
        self.do(then, last)

    @rule(
        operation=attack.documents, callers=st.lists(attack.any_requests, min_size=1, max_size=4),
        moment=attack.moments, then=st.one_of(attack.documents, attack.ends, attack.deaths), let=attack.lets,
    )  # fmt: skip
    def callers_in_flight(self, operation, callers, moment, then, let):
        """Chance alone seldom finds a pod that serves."""
        self.do(replace(operation, paused=False), attack.Let(seconds=3))
        for caller in callers:
            self.do(caller, attack.Let(turns=0))
        self.do(moment, attack.Let(turns=0))
        self.do(then, let)

    def teardown(self) -> None:
        """Faults are over: the newest document comes true, and nothing is left."""
        if self.is_broken:
            self.pod.abandon()
            return
        try:
            unreachable = attack.AgentFault("stage fails", 2)
            self.pod.settle(
                attack.PutDocument("step-1", path="/final/1", paused=True), last=unreachable
            )
            self.pod.settle(attack.PutDocument("base"))
            self.pod.settle(attack.PutDocument("step-3", pushed=True))
            self.pod.settle(attack.PutDocument("step-2", path="/final/2"))
        except BaseException:
            self.pod.abandon()
            raise
        self.pod.close()


class SharedMachine(Machine):
    """The same, where several front ends answer."""

    FRONT_ENDS = 2


@pytest.mark.timeout(max(120, EXAMPLES))
@pytest.mark.parametrize(
    ("machine", "examples"), [(Machine, EXAMPLES), (SharedMachine, EXAMPLES // 4)]
)
def test_whatever_comes_the_invariants_hold_and_the_newest_document_wins(machine, examples) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("front_ends", [0, 2])
@pytest.mark.parametrize("number", range(attack.SAMPLE))
def test_the_same_as_on_the_real_engine(number, front_ends) -> None:
    """tests/engine/test_attack.py does the same operations in the same order."""
    pod = AttackedPod(front_ends=front_ends)
    try:
        for operation in attack.sample()[number]:
            pod.apply(operation)
        pod.settle(attack.PutDocument("step-2"))
        pod.settle(attack.PutDocument("step-1"))
    except BaseException:
        pod.abandon()
        raise
    pod.close()
