"""verl's sampling parameters as ours, and our rollouts as its ``TokenOutput``: pure."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollout_client.rollout import Rollout
from rollout_pod.protocol import FinishReason, TokenLogProb

COMPLETED: Final = "completed"
ABORTED: Final = "aborted"


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What the configuration of verl's rollout says of every request."""

    prompt_length: int
    response_length: int
    max_model_len: int | None = None
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    seed: int | None = None
    """None: requests that name none have none."""
    routed_experts: bool = False


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of a pod, and what of its answer verl wants."""

    sampling_params: Mapping[str, Any]
    fields: Mapping[str, Any]
    log_probs: bool
    prompt_log_probs: int | None


def translate(
    sampling_params: Mapping[str, Any],
    *,
    prompt_len: int,
    defaults: Defaults,
    images: Sequence[Any] | None = None,
    priority: int = 0,
) -> Asked:
    """Say in our words what verl asks for. What it was given is not changed.

    Args:
        sampling_params: vLLM's names, and SGLang's ``max_new_tokens``; ``logprobs`` is a flag.
        prompt_len: tokens of the prompt, with those that an earlier attempt generated.
        defaults: for what it does not name.
        images: PIL images, or URLs.
        priority: vLLM's.

    Raises:
        ValueError: no room is left behind the prompt, or an image is none.
    """
    params = dict(sampling_params)
    asked = params.pop("max_new_tokens", None)
    asked = params.pop("max_tokens", asked)
    if asked is None:
        whole = defaults.prompt_length + defaults.response_length
        asked = min(defaults.response_length, whole - prompt_len)
    if defaults.max_model_len is not None:
        room = defaults.max_model_len - prompt_len
        if room < 1:
            raise ValueError(
                f"prompt_ids: {prompt_len} tokens leave no room in max_model_len "
                f"{defaults.max_model_len}; shorten the prompt, or raise it"
            )
        asked = min(asked, room)
    log_probs = bool(params.pop("logprobs", False))
    params.setdefault("repetition_penalty", defaults.repetition_penalty)
    params.setdefault("ignore_eos", defaults.ignore_eos)
    if defaults.seed is not None:
        params.setdefault("seed", defaults.seed)
    fields: dict[str, Any] = {}
    if images:
        urls = [_url(i, image) for i, image in enumerate(images)]
        fields["multi_modal_data"] = {"image": urls}
    if priority:
        fields["priority"] = priority
    if defaults.routed_experts:
        fields["return_routed_experts"] = True
    return Asked(
        sampling_params={**params, "max_tokens": max(1, asked)},
        fields=fields,
        log_probs=log_probs,
        prompt_log_probs=params.get("prompt_logprobs"),
    )


def output_fields(rollout: Rollout, asked: Asked) -> dict[str, Any]:
    """The fields of verl's ``TokenOutput``.

    ``global_steps`` is the step of the version that sampled the first token: where weights changed
    in the middle, the staleness that verl computes of it is never too low.
    """
    steps = [span.step for span in rollout.weight_versions if span.step is not None]
    extra: dict[str, Any] = {
        "global_steps": steps[0] if steps else None,
        "min_global_steps": min(steps, default=None),
        "max_global_steps": max(steps, default=None),
        "weight_versions": [span.model_dump() for span in rollout.weight_versions],
    }
    if asked.prompt_log_probs is not None and rollout.prompt_log_probs is not None:
        k = asked.prompt_log_probs
        ids, log_probs = _prompt_log_probs(rollout.prompt_log_probs, k)
        extra |= {"prompt_ids": ids, "prompt_logprobs": log_probs}
    return {
        "token_ids": list(rollout.token_ids),
        "log_probs": list(rollout.log_probs) if asked.log_probs else None,
        "routed_experts": _experts(rollout),
        "stop_reason": _stop_reason(rollout.finish_reason),
        "extra_fields": extra,
    }


def _stop_reason(reason: FinishReason | None) -> str:
    match reason:
        case None | FinishReason.ABORT:
            return ABORTED
        case FinishReason.STOP | FinishReason.LENGTH:
            return COMPLETED
        case other:
            return other.value


def _prompt_log_probs(
    entries: Sequence[Sequence[TokenLogProb] | None], k: int
) -> tuple[list[list[int | None]], list[list[float | None]]]:
    """For each token of the prompt the k most likely ones at the position behind it, most likely
    first; with k 0 that of the token that stands there. The last one has no position: zeros.
    """
    ids: list[list[int | None]] = []
    log_probs: list[list[float | None]] = []
    for entry in entries[1:]:
        found = list(entry or ())
        if k == 0:
            row = found[:1]
        else:
            by_rank = {e.rank: e for e in found}
            row = [by_rank[rank] for rank in range(1, k + 1) if rank in by_rank]
        lacking = [None] * (max(k, 1) - len(row))
        ids.append([e.token_id for e in row] + lacking)
        log_probs.append([e.log_prob for e in row] + lacking)
    ids.append([0] * max(k, 1))
    log_probs.append([0.0] * max(k, 1))
    return ids, log_probs


def _experts(rollout: Rollout) -> Any:
    """An array ``[tokens, layers, experts per token]``; None where none were asked for."""
    found = rollout.routed_experts
    if found is None:
        return None
    import numpy as np

    raw = np.frombuffer(base64.b64decode(found.data), dtype=found.dtype)
    return raw.reshape(found.shape)


def _url(index: int, image: Any) -> str:
    if isinstance(image, str):
        return image
    if not hasattr(image, "save"):
        raise ValueError(f"image_data.{index}: {type(image).__name__} is no PIL image and no URL")
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
