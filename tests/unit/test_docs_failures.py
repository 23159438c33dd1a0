"""docs/failures.md and the code know the same reasons, under the same conditions."""

from collections.abc import Iterator

import pytest

from rollout_operator.api.conditions import ConditionType, Reason
from rollout_operator.api.replica import Replica
from rollout_operator.plan.observed import Seen
from rollout_operator.plan.plan import make_plan
from rollout_operator.plan.status import render_status
from tests.support.docs import FOLDER
from tests.support.operator_objects import DEFAULTS, NOW
from tests.unit.test_operator_status import CASES


def rows() -> Iterator[tuple[str, str, str, str]]:
    for line in (FOLDER / "failures.md").read_text().splitlines():
        if line.startswith("| `"):
            condition, reason, why, what = (cell.strip() for cell in line.strip("|").split("|"))
            yield condition, reason.strip("`"), why, what


ROWS = list(rows())


def test_every_reason_has_one_row_and_every_row_is_a_reason():
    assert sorted(reason for _, reason, _, _ in ROWS) == sorted(reason.value for reason in Reason)


def test_every_row_says_why_and_what_to_do():
    for condition, reason, why, what in ROWS:
        kind = condition.strip("`").partition("=")[0]
        assert kind in list(ConditionType), reason
        assert why.endswith(".") and what.endswith("."), reason


@pytest.mark.parametrize(("wanted", "what"), [c[1:3] for c in CASES], ids=[c[0] for c in CASES])
def test_a_reason_comes_under_the_condition_of_its_row(wanted: Replica, what: Seen):
    plan = make_plan(wanted, what, NOW, defaults=DEFAULTS)
    conditions = {c.type: c for c in render_status(wanted, what, plan, NOW).conditions}
    reason = conditions["Ready"].reason
    (row,) = [condition for condition, name, _, _ in ROWS if name == reason]
    shown = [f"`{kind}={c.status}`" for kind, c in conditions.items() if c.reason == reason]
    assert any(condition in row for condition in shown), (reason, row, shown)
