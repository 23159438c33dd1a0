"""The arithmetic of GRPO with rollouts of older weights: advantages, ratios, loss. Pure.

All tensors are float32 of shape ``[rollouts, tokens]``; ``mask`` is 1 where a rollout has a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch
from torch import Tensor

_SMALL = 1e-4


def advantages(rewards: Sequence[float]) -> list[float]:
    """How much better each rollout of one group is than the group: ``(r - mean) / std``.

    A group whose rewards are all the same teaches nothing: all zeros.
    """
    mean, spread = fmean(rewards), pstdev(rewards)
    return [(reward - mean) / (spread + _SMALL) if spread else 0.0 for reward in rewards]


def truncated_ratios(log_probs: Tensor, behaviour: Tensor, *, cap: float) -> Tensor:
    """Importance weights ``min(pi / mu, cap)`` of each token, without a gradient.

    ``behaviour`` holds the log-probs that the replicas returned: each under the weights that
    sampled this very token, also where a rollout was cut and continued under newer ones.
    """
    return torch.exp(log_probs.detach() - behaviour).clamp(max=cap)


@dataclass(frozen=True)
class Loss:
    """``value`` has a gradient; the rest is for the record."""

    value: Tensor
    mean_ratio: float
    truncated: float
    """Share of the tokens whose ratio was over the cap."""


def policy_loss(
    log_probs: Tensor,
    entropy: Tensor,
    *,
    behaviour: Tensor,
    advantage: Tensor,
    mask: Tensor,
    cap: float,
    entropy_bonus: float,
) -> Loss:
    """The policy gradient with truncated importance sampling, averaged over all tokens.

    Args:
        log_probs: Of the sampled tokens, under the weights that are trained.
        entropy: Of the distributions that they would be sampled from now.
        behaviour: The log-probs that came with the tokens.
        advantage: Of each rollout, ``[rollouts, 1]``.
        mask: 1 for a token, 0 for padding.
        cap: Of a ratio.
        entropy_bonus: How much an entropy of 1 nat is worth.
    """
    count = mask.sum()
    ratios = truncated_ratios(log_probs, behaviour, cap=cap)
    gain = (ratios * advantage * log_probs * mask).sum() / count
    value = -gain - entropy_bonus * (entropy * mask).sum() / count
    return Loss(
        value=value,
        mean_ratio=float((ratios * mask).sum() / count),
        truncated=float(((ratios >= cap) * mask).sum() / count),
    )
