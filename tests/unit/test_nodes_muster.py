"""Who of a group is there: nobody is counted twice, late, or from another group."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_pod.nodes.muster import Muster, RankTaken, UnknownRank, WrongGroup
from rollout_pod.protocol import NodeBeat

SILENCE_S = 30.0


def beat(rank: int = 1, boot: str = "a", group: str = "g") -> NodeBeat:
    return NodeBeat(group=group, rank=rank, boot_id=boot, url=f"http://{boot}")


def muster(count: int = 2) -> Muster:
    return Muster("g", count, SILENCE_S)


@pytest.mark.parametrize(
    ("told", "error", "words"),
    [
        (beat(group="other"), WrongGroup, "leads group g, not other"),
        (beat(rank=2), UnknownRank, "nodes 1 to 1, no 2"),
    ],
)
def test_who_does_not_belong_is_not_counted(
    told: NodeBeat, error: type[Exception], words: str
) -> None:
    group = muster()
    with pytest.raises(error, match=words):
        group.hear(told, 0.0)
    assert not group.seal(0.0)
    assert group.members() == ()


def test_before_it_is_sealed_the_newest_process_counts() -> None:
    group = muster(3)
    group.hear(beat(boot="first"), 0.0)
    group.hear(beat(boot="second"), 1.0)
    group.hear(beat(boot="second"), 2.0)
    assert [member.boot_id for member in group.members()] == ["second"]
    assert group.missing(2.0) == (2,)
    assert not group.seal(2.0)


def test_one_that_fell_silent_before_the_others_came_is_waited_for() -> None:
    group = muster(3)
    group.hear(beat(1), 0.0)
    group.hear(beat(2), SILENCE_S + 1)
    assert group.missing(SILENCE_S + 1) == (1,)
    assert not group.seal(SILENCE_S + 1)
    group.hear(beat(1), SILENCE_S + 2)
    assert group.seal(SILENCE_S + 2)


def test_once_sealed_no_other_process_takes_a_place() -> None:
    group = muster()
    group.hear(beat(boot="a"), 0.0)
    assert group.seal(0.0)
    with pytest.raises(RankTaken, match="another process as node 1"):
        group.hear(beat(boot="b"), 1.0)
    group.hear(beat(boot="a"), 1.0)
    assert [member.boot_id for member in group.members()] == ["a"]


def test_a_loss_is_one_of_a_sealed_group() -> None:
    group = muster(3)
    assert group.lost(1e6) is None
    group.hear(beat(1), 0.0)
    group.hear(beat(2), 0.0)
    assert group.seal(0.0)
    group.hear(beat(2), SILENCE_S)
    assert group.lost(SILENCE_S) is None
    assert group.lost(SILENCE_S + 1) == "node 1 was not heard for 30 s"
    assert group.lost(3 * SILENCE_S) == "nodes 1, 2 were not heard for 30 s"


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4),
            st.sampled_from("ab"),
            st.sampled_from(["g", "old"]),
            st.floats(0, 40),
        ),
        max_size=40,
    )
)
def test_whatever_comes_the_sealed_group_is_one_process_a_rank(
    told: list[tuple[int, str, str, float]],
) -> None:
    group, now, sealed = muster(4), 0.0, {}
    for rank, boot, name, later in told:
        now += later
        known = dict(sealed)
        try:
            group.hear(beat(rank, boot, name), now)
        except (WrongGroup, UnknownRank, RankTaken):
            pass
        else:
            assert name == "g"
            assert rank < 4
            assert not known or known[rank] == boot
        was = group.sealed
        if group.seal(now):
            present = {member.rank: member for member in group.members()}
            assert sorted(present) == [1, 2, 3]
            if not was:
                assert all(now - member.heard_at <= SILENCE_S for member in present.values())
            sealed = {rank: member.boot_id for rank, member in present.items()}
            assert not known or sealed == known
