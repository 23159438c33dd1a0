"""A replica in a world with a clock: what plans say is done, and the operator remembers nothing but
the status.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from rollout_operator.api.conditions import ConditionType
from rollout_operator.api.replica import Replica
from rollout_operator.api.status import Restarts
from rollout_operator.plan.actions import Action, Plan
from rollout_operator.plan.observed import Seen
from rollout_operator.plan.plan import make_plan
from rollout_operator.plan.status import render_status
from tests.support.operator_objects import DEFAULTS, NOW, replica


@dataclass
class PlanWorld(ABC):
    spec: dict[str, Any]
    now: float = NOW
    status: dict[str, Any] = field(default_factory=dict)
    generation: int = 3

    @property
    def replica(self) -> Replica:
        return replica(status=self.status, generation=self.generation, **self.spec)

    @property
    @abstractmethod
    def seen(self) -> Seen:
        """What there is now."""

    @abstractmethod
    def _do(self, action: Action) -> None: ...

    def drained(self) -> bool:
        """What kubelet ends has ended; whether anything did."""
        return False

    def plan(self) -> Plan:
        return make_plan(self.replica, self.seen, self.now, defaults=DEFAULTS)

    def pass_once(self) -> float | None:
        """Do all actions, or write the status; return the wait that the plan asks for."""
        plan = self.plan()
        for action in plan.actions:
            self._do(action)
        if plan.actions:
            return 0.0
        status = render_status(self.replica, self.seen, plan, self.now).dump()
        if status != self.status:
            self.status = status
            return 0.0
        return plan.requeue_after

    def settle(self) -> float | None:
        for _ in range(20):
            wait = self.pass_once()
            if wait != 0.0:
                return wait
        raise AssertionError(f"never at rest: {self.plan()}")

    def run(self, seconds: float) -> None:
        """Let the time pass, as the operator asks to be woken."""
        end = self.now + seconds
        while True:
            wait = self.settle()
            if self.drained():
                continue
            if wait is None or self.now + wait > end:
                self.now = end
                self.settle()
                return
            self.now += wait

    @property
    def restarts(self) -> Restarts:
        found = self.replica.status.restarts
        assert found is not None
        return found

    def reason(self, kind: ConditionType = ConditionType.READY) -> tuple[str, str]:
        found = self.replica.status.condition(kind)
        assert found is not None
        return found.status, found.reason
