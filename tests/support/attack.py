"""What may happen to a pod, as values: documents, requests, disconnects, faults, restarts.

The same operations drive a pod around the fakes (``attacked_pod``) and one around the real engine
(``attacked_process``). What refers to a caller counts from the newest one backwards.
"""

import os
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from rollout_pod.protocol import BASE_VERSION, DesiredDocument, WeightsRef, WeightsSource

VERSIONS = (BASE_VERSION, "step-1", "step-2", "step-3")
OWNER = "o"

LOAD_FAULTS = (
    "load: raises", "load: a rank fails", "load: a rank is silent", "load: another version",
    "load: hangs", "clear refuses", "clear raises", "sleep is unsupported",
)  # fmt: skip
DEADLY_FAULTS = (
    "pause hangs", "pause raises", "resume raises", "publish raises", "load: dies", "start fails",
    "sleep raises", "wake raises", "dies", "hangs",
)  # fmt: skip
AGENT_FAULTS = (
    "stage fails", "stage raises", "stage hangs", "send: untouched", "send: midway", "send raises",
    "send hangs", "loses its sessions", "tell hangs", "tell fails",
)  # fmt: skip


def ref(
    version: str, *, path: str | None = None, step: int | None = None, pushed: bool = False
) -> WeightsRef | None:
    """The version at its place, or a trainer's; None for base."""
    if version == BASE_VERSION:
        return None
    where = {"push": {}} if pushed else {"path": path or f"/w/{version}"}
    source = WeightsSource.model_validate(where)
    return WeightsRef(version=version, step=step, source=source)


@dataclass(frozen=True)
class PutDocument:
    """A new desired document."""

    version: str = BASE_VERSION
    step: int | None = None
    path: str | None = None
    pushed: bool = False
    """A trainer has to bring it."""
    paused: bool = False
    mode: str = "abort"
    timeout_s: float = 60.0
    fallback: str = BASE_VERSION
    fallback_pushed: bool = False
    max_attempts: int = 3
    newer_by: int = 1
    """0: the same generation with other content."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of the document, as it spells them."""

    def document(self, generation: int) -> DesiredDocument:
        """As it is sent."""
        return DesiredDocument.model_validate(
            {
                "owner": OWNER,
                "generation": generation,
                "paused": self.paused,
                "weights": ref(self.version, step=self.step, path=self.path, pushed=self.pushed),
                "fallback": ref(self.fallback, pushed=self.fallback_pushed),
                "interruption": {"mode": self.mode, "timeout_s": self.timeout_s},
                "max_attempts": self.max_attempts,
                "update_timeout_s": 30.0,
                **self.more,
            }
        )


@dataclass(frozen=True)
class DuplicateDocument:
    """The document in force comes again."""


@dataclass(frozen=True)
class StaleDocument:
    """An older one comes late."""

    behind: int = 1


@dataclass(frozen=True)
class OtherOwner:
    """Somebody who does not own the pod sends one."""


@dataclass(frozen=True)
class StalePrecondition:
    """A document with the ``If-Match`` of a state that is over."""


@dataclass(frozen=True)
class StartRequest:
    """One caller more."""

    tokens: int = 20
    stream: bool = False
    waits: bool = False
    """``on_pause: wait``."""
    timeout_s: float = 60.0
    continues: bool = False
    """From the newest partial, if there is one."""


@dataclass(frozen=True)
class StartOpenAI:
    """A caller that knows nothing of pauses."""

    tokens: int = 20
    timeout_s: float = 60.0


@dataclass(frozen=True)
class DuplicateRequest:
    """An id that is alive is used again."""

    caller: int = 0


@dataclass(frozen=True)
class Disconnect:
    """A caller goes away; ``harshly``: its task is cancelled, as a server does that ends."""

    caller: int = 0
    harshly: bool = False


@dataclass(frozen=True)
class CancelOne:
    """``DELETE`` of a caller's request."""

    caller: int = 0


@dataclass(frozen=True)
class EngineFault:
    """The next ``times`` calls of this kind go wrong; ``dies`` and ``hangs`` happen at once."""

    kind: str = "dies"
    times: int = 1


@dataclass(frozen=True)
class AgentFault:
    """The same of the weights agent."""

    kind: str = "stage fails"
    times: int = 1


@dataclass(frozen=True)
class OfferPush:
    """A trainer offers what the pod needs, or ``version``; ``fate`` comes ``after_s``."""

    version: str | None = None
    fate: str = "ok"
    after_s: float = 0.0
    old_boot: bool = False
    """Its session was begun with the container before this one."""


@dataclass(frozen=True)
class OfferAgain:
    """The newest offer comes once more."""

    changed: bool = False
    """With other contents."""


@dataclass(frozen=True)
class Drain:
    """SIGTERM."""


@dataclass(frozen=True)
class Restart:
    """The container is killed and starts again; ``fresh``: on another node, without its files."""

    fresh: bool = False


@dataclass(frozen=True)
class Let:
    """Time passes: turns of the loop, then seconds."""

    turns: int = 1
    seconds: float = 0.0


Operation = (
    PutDocument | DuplicateDocument | StaleDocument | OtherOwner | StalePrecondition
    | StartRequest | StartOpenAI | DuplicateRequest | Disconnect | CancelOne
    | EngineFault | AgentFault | OfferPush | OfferAgain | Drain | Restart | Let
)  # fmt: skip

FATES = ("ok", "ok", "ok", "untouched", "midway", "gives up", "vanishes")
"""Of a trainer: what it sends arrives; it dies before or after the first byte; it ends its session;
nothing is ever heard of it again.
"""

SLEEPS = (
    {"level": 1}, {"level": 2}, {"level": 1, "tags": ["kv_cache"]}, {"level": 2, "tags": ["weights"]},
)  # fmt: skip

_few = st.integers(0, 4)
documents = st.builds(
    PutDocument,
    version=st.sampled_from(VERSIONS),
    step=st.sampled_from([None, None, None, 1, 2]),
    path=st.sampled_from([None, None, None, "/moved"]),
    pushed=st.sampled_from([False, False, True]),
    fallback_pushed=st.sampled_from([False, False, True]),
    paused=st.booleans(),
    mode=st.sampled_from(["abort", "keep", "drain"]),
    timeout_s=st.sampled_from([60.0, 0.3]),
    fallback=st.sampled_from(VERSIONS),
    max_attempts=st.integers(1, 3),
    newer_by=st.sampled_from([1, 1, 1, 0, 5]),
    more=st.sampled_from([*[{}] * 8, *({"sleep": sleep} for sleep in SLEEPS)]),
)
late_documents = st.one_of(
    st.just(DuplicateDocument()),
    st.builds(StaleDocument, st.integers(1, 3)),
    st.just(OtherOwner()),
    st.just(StalePrecondition()),
)
requests = st.builds(
    StartRequest,
    tokens=st.sampled_from([1, 5, 40, 200]),
    stream=st.booleans(),
    waits=st.booleans(),
    timeout_s=st.sampled_from([60.0, 0.5]),
    continues=st.booleans(),
)
openai_requests = st.builds(
    StartOpenAI, tokens=st.sampled_from([5, 60]), timeout_s=st.sampled_from([60.0, 0.5])
)
ends = st.one_of(
    st.builds(Disconnect, _few, st.booleans()),
    st.builds(CancelOne, _few),
    st.builds(DuplicateRequest, _few),
)
load_faults = st.builds(EngineFault, st.sampled_from(LOAD_FAULTS), st.sampled_from([1, 1, 2, 25]))
deadly_faults = st.builds(EngineFault, st.sampled_from(DEADLY_FAULTS), st.sampled_from([1, 1, 2]))
agent_faults = st.builds(AgentFault, st.sampled_from(AGENT_FAULTS), st.sampled_from([1, 1, 2, 5]))
offers = st.builds(
    OfferPush,
    version=st.sampled_from([None, None, None, None, *VERSIONS]),
    fate=st.sampled_from(FATES),
    after_s=st.sampled_from([0.0, 0.0, 0.02, 0.5, 10.0]),
    old_boot=st.sampled_from([False, False, False, False, True]),
)
pushes = st.one_of(offers, offers, offers, st.builds(OfferAgain, st.booleans()))
deaths = st.one_of(st.just(Drain()), st.builds(Restart, st.booleans()))
any_requests = st.one_of(requests, requests, openai_requests)
update_faults = st.one_of(load_faults, agent_faults)
troubles = st.one_of(update_faults, update_faults, deadly_faults, deaths)
lets = st.builds(
    Let,
    turns=st.sampled_from([0, 1, 2, 3, 5, 9, 30]),
    seconds=st.sampled_from([0, 0, 0, 0.02, 0.06, 0.1, 0.3, 3, 3, 30, 200]),
)
moments = st.builds(Let, turns=st.integers(0, 9), seconds=st.sampled_from([0, 0, 0.02, 0.1]))


# no fault that the real engine would have to be patched for
real_faults = st.sampled_from([AgentFault("stage fails"), AgentFault("loses its sessions")])
sequences = st.lists(
    st.one_of(
        documents, documents, late_documents, any_requests, any_requests, any_requests, ends,
        real_faults, lets, lets,
    ),
    min_size=60, max_size=60,
)  # fmt: skip


SAMPLE = 4


def sample() -> list[list[Operation]]:
    """The sequences that the fakes and the real engine get alike; ``ATTACK_SEED`` gives others."""
    found: list[list[Operation]] = []

    @seed(int(os.environ.get("ATTACK_SEED", "1")))
    @settings(
        max_examples=SAMPLE, phases=[Phase.generate], database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(sequences)
    def collect(sequence: list[Operation]) -> None:
        found.append(sequence)

    collect()
    assert len(found) == SAMPLE, "Hypothesis gave fewer than asked for"
    return found
