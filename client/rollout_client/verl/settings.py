"""What the trainer's configuration says of our replicas, and which of them is verl's nth: pure.

It stands in ``actor_rollout_ref.rollout.custom.rollout_replica``, verl's place for such things.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal
from uuid import uuid4

from rollout_client.trainer import PodTarget, ReplicaTarget

KEY: Final = "rollout_replica"
"""The name of the rollout, and of its settings."""
WHERE: Final = f"actor_rollout_ref.rollout.custom.{KEY}"


class SettingsError(ValueError):
    """The configuration is wrong; names the field and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod that no operator owns."""

    data: str
    """The URL of its data port."""
    admin: str
    run_dir: Path


@dataclass(frozen=True, kw_only=True)
class Place:
    """One replica: where it generates, and how it is steered."""

    data_url: str
    target: ReplicaTarget | PodTarget


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Read from the configuration by ``parse``."""

    replicas: tuple[str, ...] = ()
    """RolloutReplicas, by verl's replica rank. Empty: that of the pod that a worker runs in."""
    namespace: str | None = None
    pods: tuple[Pod, ...] = ()
    """Instead of ``replicas``, where there is no operator; by verl's replica rank."""
    data_url: str = "http://{name}.{namespace}.svc:8000"
    """Of a RolloutReplica's Service."""
    sleep_level: Literal[1, 2] = 2
    """Of a hybrid replica: 2 drops the weights, which verl sends again before it generates."""
    deadline_s: float = 3600.0
    """For one call of ``generate``."""
    control_timeout_s: float = 600.0
    """For one pause, resume, sleep, wake or update."""
    max_concurrency: int = 1024
    """Requests of one replica on the wire at once."""
    max_seconds_to_reject: float = 5.0
    """How long a request that is parked in a pod may take to learn that it is rejected."""
    version: str = "step-{step}"
    """The name of a version; ``{step}`` is verl's ``global_steps``."""
    keep: Literal["nothing", "copy"] = "nothing"
    """What a trainer's worker keeps of the last version: ``copy`` is sent again to a pod that was
    restarted, and takes host memory for a whole model."""
    transport: Literal["auto", "shared_memory", "cuda_ipc"] = "auto"
    receivers: str | None = None
    """Of standalone replicas: the Ray resource of the node in the replica's pod, with ``{name}`` or
    ``{rank}``. None: no weights can be sent to them."""
    receiver_gpus: float = 1.0
    """GPUs of that node that the receiver takes from Ray."""

    def version_of(self, step: int | None) -> str:
        """The name of the version of a step; one that was never used where verl names no step."""
        return self.version.format(step=step) if step is not None else f"update-{uuid4().hex}"

    def receiver(self, rank: int) -> str | None:
        """The Ray resource of verl's replica ``rank``."""
        if self.receivers is None:
            return None
        name = _nth("replicas", self.replicas, rank) if self.replicas else ""
        return self.receivers.format(name=name, rank=rank)

    def place(self, rank: int, home: ReplicaTarget | None = None) -> Place:
        """Verl's replica ``rank``.

        Args:
            rank: verl's replica rank.
            home: the pod that the trainer's workers of this replica run in.

        Raises:
            SettingsError: nothing says which one it is, or two things do.
        """
        if self.pods:
            pod = _nth("pods", self.pods, rank)
            target = PodTarget.of_run_dir(pod.run_dir, pod.admin)
            return Place(data_url=pod.data, target=target)
        if self.replicas:
            name = _nth("replicas", self.replicas, rank)
            if home is not None and home.name != name:
                raise SettingsError(
                    f"{WHERE}.replicas.{rank}: {name!r}, but the workers of verl's replica {rank} "
                    f"run in a pod of {home.name!r}; leave `replicas` out: then each replica is "
                    "the one that its workers run in"
                )
        elif home is not None:
            name = home.name
        else:
            raise SettingsError(
                f"{WHERE}: nothing says which RolloutReplica verl's replica {rank} is: set "
                "`replicas` (names) or `pods` (without an operator), or run the workers in the "
                "pods of RolloutReplicas"
            )
        namespace = self.namespace or (home.namespace if home is not None else None)
        url = self.data_url
        if not namespace:
            # a name alone is that of the namespace that we run in
            url = url.replace(".{namespace}.svc", "")
        return Place(
            data_url=url.format(name=name, namespace=namespace),
            target=ReplicaTarget(
                name=name,
                namespace=namespace or None,
                run_dir=home.run_dir if home is not None else None,
            ),
        )


def home_of(environ: Mapping[str, str]) -> ReplicaTarget | None:
    """The replica whose pod a process runs in, by its variables; None elsewhere."""
    try:
        return ReplicaTarget.here(environ)
    except ValueError:
        return None


def _nth(name: str, values: tuple[Any, ...], rank: int) -> Any:
    if rank >= len(values):
        raise SettingsError(
            f"{WHERE}.{name}: names {len(values)}, and verl makes at least {rank + 1} replicas "
            "(n_gpus_per_node x nnodes / tensor, pipeline and data parallel size)"
        )
    return values[rank]
