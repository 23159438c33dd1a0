"""Which replicas an adapter steers, and over which socket it sends bytes to them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rollout_pod.protocol import ADMIN_PORT


@dataclass(frozen=True, kw_only=True)
class ReplicaTarget:
    """A RolloutReplica: it is controlled by patching it (extra ``kube``).

    Needs the rights ``get``, ``watch`` and ``patch`` on it.
    """

    name: str
    namespace: str | None = None
    """That of the kubeconfig's context or of the pod we run in, where it is None."""
    run_dir: Path | None = None
    """The run folder of its pod, where this process shares it: over a socket in there go the
    bytes. None: nothing can be pushed, and versions come from ``spec.weights.source``."""

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """The replica whose pod this process runs in (a container of ``spec.template``).

        Raises:
            ValueError: the operator's variables are not set.
        """
        try:
            return cls(
                name=environ["ROLLOUT_REPLICA"],
                namespace=environ["ROLLOUT_NAMESPACE"],
                run_dir=Path(environ["ROLLOUT_RUN_DIR"]),
            )
        except KeyError as error:
            raise ValueError(
                f"{error.args[0]} is not set: this process runs in no pod of a RolloutReplica; "
                "name one: ReplicaTarget(name=...)"
            ) from None


@dataclass(frozen=True, kw_only=True)
class SelectorTarget:
    """All RolloutReplicas with these labels, looked up anew by every call.

    Needs the right ``list``, too.
    """

    selector: str = ""
    """Such as ``app=math,tier!=canary``; empty for all."""
    namespace: str | None = None


@dataclass(frozen=True, kw_only=True)
class PodTarget:
    """A pod that no operator owns (``rollout-pod serve``), by its admin port.

    One that an operator owns is refused: whatever it is told directly would be taken back.
    """

    url: str
    """Such as ``http://127.0.0.1:8001``."""
    token: str | Path = field(repr=False)
    """The admin port's, or the file that holds it, which is read anew when the pod restarts."""
    run_dir: Path | None = None
    """Its run folder; None where nothing is pushed."""

    @classmethod
    def of_run_dir(cls, run_dir: Path | str, url: str = f"http://127.0.0.1:{ADMIN_PORT}") -> Self:
        """The pod that ``rollout-pod serve --run-dir`` runs on this machine."""
        folder = Path(run_dir)
        return cls(url=url, token=folder / "admin" / "token", run_dir=folder)


Target = ReplicaTarget | SelectorTarget | PodTarget
