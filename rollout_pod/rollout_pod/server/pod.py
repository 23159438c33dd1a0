"""What the data port needs to know of the pod that it serves."""

from typing import Protocol

from rollout_pod.engine.base import Engine
from rollout_pod.gate import Gate
from rollout_pod.generation import Elsewhere
from rollout_pod.metrics import PodMetrics
from rollout_pod.protocol import PodPhase, ReadyFacts


class Pod(Protocol):
    """The supervisor, or what a front end knows of it."""

    @property
    def engine(self) -> Engine:
        """What generates."""

    @property
    def gate(self) -> Gate:
        """What every request passes."""

    @property
    def metrics(self) -> PodMetrics:
        """Where requests are counted."""

    @property
    def elsewhere(self) -> Elsewhere | None:
        """The requests of other processes; None where there are none."""

    @property
    def max_model_len(self) -> int:
        """Tokens that the model has room for; 0 before the engine has started."""

    @property
    def phase(self) -> PodPhase:
        """The pod's."""

    @property
    def is_started(self) -> bool:
        """What ``/startupz`` answers."""

    @property
    def is_ready(self) -> bool:
        """What ``/readyz`` answers."""

    def facts(self) -> ReadyFacts:
        """What ``/readyz`` says while it answers 200."""

    def liveness_error(self) -> str | None:
        """Why ``/healthz`` fails."""

    async def metrics_text(self) -> bytes:
        """All metrics of the pod, its engine's included, in Prometheus' text format."""
