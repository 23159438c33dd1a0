"""Groups of finished rollouts, and the tensors that a trainer makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from examples.async_grpo.grpo import advantages
from examples.async_grpo.staleness import off_policy, steps_of
from examples.async_grpo.task import Prompt, is_exact, reward_of
from rollout_client import Rollout


@dataclass(frozen=True)
class Group:
    """All rollouts of one prompt."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> list[float]:
        """One for each rollout."""
        return [reward_of(self.prompt, rollout.token_ids) for rollout in self.rollouts]

    @property
    def exact(self) -> int:
        """How many rollouts are right in every position."""
        return sum(is_exact(self.prompt, rollout.token_ids) for rollout in self.rollouts)

    @property
    def tokens(self) -> int:
        """Of all rollouts."""
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    @property
    def steps(self) -> list[int]:
        """The step of each token of all rollouts."""
        return list(chain.from_iterable(steps_of(r.weight_versions) for r in self.rollouts))

    def staleness(self, *, trained: int) -> int:
        """Of its oldest token, in steps."""
        return off_policy(self.steps, trained=trained)


@dataclass(frozen=True)
class Batch:
    """What one step trains on. Tensors are ``[rollouts, tokens]``, padded on the right."""

    prompts: Tensor
    """int64 ``[rollouts, prompt]``."""
    answers: Tensor
    """int64; 0 where there is no token."""
    behaviour: Tensor
    """float32: the log-probs that came with the tokens."""
    steps: Tensor
    """int64: the step of the weights that sampled the token."""
    mask: Tensor
    """float32: 1 where there is a token."""
    advantage: Tensor
    """float32 ``[rollouts, 1]``."""

    def pick(self, rows: Tensor) -> "Batch":
        """These rollouts of it."""
        return Batch(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.prompts)


def batch_of(groups: Sequence[Group]) -> Batch:
    """Tensors of these groups; their prompts are all of one length."""
    rollouts = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    width = max(len(rollout.token_ids) for _, rollout in rollouts)

    def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        table = torch.zeros(len(rows), width, dtype=dtype)
        for i, row in enumerate(rows):
            table[i, : len(row)] = torch.tensor(row, dtype=dtype)
        return table

    return Batch(
        prompts=torch.tensor([prompt for prompt, _ in rollouts]),
        answers=padded([r.token_ids for _, r in rollouts], torch.int64),
        behaviour=padded([r.log_probs for _, r in rollouts], torch.float32),
        steps=padded([steps_of(r.weight_versions) for _, r in rollouts], torch.int64),
        mask=padded([[1.0] * len(r.token_ids) for _, r in rollouts], torch.float32),
        advantage=torch.tensor([a for group in groups for a in advantages(group.rewards)])[:, None],
    )
