"""Who of a group is there. Pure: told the time, and decides nothing but that."""

from dataclasses import dataclass, field

from rollout_pod.protocol import NodeBeat


class WrongGroup(Exception):
    """The node belongs to another incarnation of the replica."""


class RankTaken(Exception):
    """The engine has started with another process in this place."""


class UnknownRank(Exception):
    """The group has no such place."""


@dataclass(frozen=True)
class Member:
    """A node that has joined."""

    rank: int
    boot_id: str
    url: str
    heard_at: float


@dataclass
class Muster:
    """Of the head.

    Before the group is sealed the newest process of a rank is the one that counts; from then on no
    other can take its place: the engine's ranks would not know it.
    """

    group: str
    count: int
    """Of all nodes, the head included."""
    silence_s: float
    """A node that is not heard for longer is not there."""
    sealed: bool = False
    _members: dict[int, Member] = field(default_factory=dict)

    def hear(self, beat: NodeBeat, now: float) -> None:
        """A node says that it is there.

        Raises:
            WrongGroup, UnknownRank, RankTaken: it is not counted.
        """
        if beat.group != self.group:
            raise WrongGroup(f"this head leads group {self.group}, not {beat.group}")
        if not 1 <= beat.rank < self.count:
            raise UnknownRank(f"the group has nodes 1 to {self.count - 1}, no {beat.rank}")
        known = self._members.get(beat.rank)
        if self.sealed and (known is None or known.boot_id != beat.boot_id):
            raise RankTaken(f"the engine has started with another process as node {beat.rank}")
        self._members[beat.rank] = Member(beat.rank, beat.boot_id, beat.url, now)

    def missing(self, now: float) -> tuple[int, ...]:
        """The nodes that are not there."""
        return tuple(
            rank
            for rank in range(1, self.count)
            if rank not in self._members or now - self._members[rank].heard_at > self.silence_s
        )

    def seal(self, now: float) -> bool:
        """Close the group if all are there; whether it is closed."""
        self.sealed = self.sealed or not self.missing(now)
        return self.sealed

    def lost(self, now: float) -> str | None:
        """Of a sealed group: who is not there any more, in words; None while all are."""
        missing = self.missing(now) if self.sealed else ()
        return f"{named(missing)} not heard for {self.silence_s:g} s" if missing else None

    def members(self) -> tuple[Member, ...]:
        """Those that have joined, by rank."""
        return tuple(self._members[rank] for rank in sorted(self._members))


def named(ranks: tuple[int, ...]) -> str:
    """``node 1 was``, ``nodes 1, 2 were``."""
    numbers = ", ".join(map(str, ranks))
    return f"node {numbers} was" if len(ranks) == 1 else f"nodes {numbers} were"
