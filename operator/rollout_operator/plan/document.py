"""Renders the desired document."""

from rollout_operator.api.quantity import parse_bytes
from rollout_operator.api.replica import Replica
from rollout_operator.api.spec import VERSION_PLACEHOLDER, RolloutSpec, Transport
from rollout_operator.api.status import LastCommitted
from rollout_pod.protocol import (
    BASE_VERSION,
    DesiredDocument,
    Interruption,
    InterruptionMode,
    WeightsRef,
    WeightsSource,
)

_TRANSPORTS = {
    Transport.AUTO: "auto",
    Transport.SHARED_MEMORY: "shared_memory",
    Transport.CUDA_IPC: "cuda_ipc",
}


def render_document(replica: Replica, spec: RolloutSpec) -> DesiredDocument:
    """Return all that is asked of the replica's head pod."""
    return DesiredDocument.model_validate(
        {
            "owner": replica.uid,
            "generation": replica.generation,
            "paused": spec.paused,
            "weights": wanted_weights(spec),
            "fallback": _fallback(replica.status.last_committed),
            "interruption": Interruption(
                mode=InterruptionMode(spec.interruption.mode.lower()),
                timeout_s=spec.interruption.timeout_seconds,
            ),
            "sleep": spec.sleep.model_dump() if spec.sleep else None,
            "bucket_bytes": parse_bytes(spec.weights.bucket_size),
            "update_timeout_s": spec.weights.timeout_seconds,
            "max_attempts": spec.weights.max_attempts,
            "transport": _TRANSPORTS[spec.weights.transport],
        }
    )


def wanted_version(spec: RolloutSpec) -> str:
    """Return the name of the version that is asked for."""
    return spec.weight_version or BASE_VERSION


def wanted_weights(spec: RolloutSpec) -> WeightsRef | None:
    """Return the version that is asked for; None for the model's own checkpoint."""
    if spec.weight_version is None:
        return None
    source = spec.weights.source
    named = source.model_dump(include={"path", "url", "push"}, exclude_none=True) if source else {}
    if len(named) != 1:
        # the CRD refuses this, too
        raise ValueError("spec.weightVersion needs path, url or push in spec.weights.source")
    filled = {
        kind: value.replace(VERSION_PLACEHOLDER, spec.weight_version)
        if isinstance(value, str)
        else value
        for kind, value in named.items()
    }
    return WeightsRef(
        version=spec.weight_version,
        step=spec.weight_step,
        source=WeightsSource.model_validate(filled),
    )


def _fallback(last: LastCommitted | None) -> WeightsRef | None:
    if last is None:
        return None
    if last.version == BASE_VERSION:
        return WeightsRef(version=BASE_VERSION)
    try:
        source = WeightsSource.model_validate(
            last.source.model_dump(exclude_none=True) if last.source else None
        )
    except ValueError:  # written by another version of the operator
        return None
    return WeightsRef(version=last.version, step=last.step, source=source)
