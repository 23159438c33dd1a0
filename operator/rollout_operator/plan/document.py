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

_TRANSPORTS = {Transport.AUTO: "auto", Transport.SHARED_MEMORY: "shared_memory"}


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
    if source is None or (source.path is None) == (source.url is None):
        # the CRD refuses this, too
        raise ValueError("spec.weightVersion needs path or url in spec.weights.source")
    place = "path" if source.path else "url"
    where = str(source.path or source.url).replace(VERSION_PLACEHOLDER, spec.weight_version)
    return WeightsRef(
        version=spec.weight_version,
        step=spec.weight_step,
        source=WeightsSource.model_validate({place: where}),
    )


def _fallback(last: LastCommitted | None) -> WeightsRef | None:
    if last is None:
        return None
    if last.version == BASE_VERSION:
        return WeightsRef(version=BASE_VERSION)
    try:
        source = WeightsSource.model_validate(last.source, from_attributes=True)
    except ValueError:  # written by another version of the operator
        return None
    return WeightsRef(version=last.version, step=last.step, source=source)
