"""The trainer: takes groups of rollouts, makes the next step of the weights."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from examples.async_grpo.grpo import policy_loss
from examples.async_grpo.model import new_model, score_answers
from examples.async_grpo.samples import Batch, Group, batch_of


@dataclass(frozen=True)
class TrainerSettings:
    """What was found by trying on a few seeds."""

    learning_rate: float = 1e-3
    warmup_steps: int = 10
    decay_steps: int = 200
    """The learning rate falls in a line, to a tenth at this step."""
    minibatches: int = 2
    """Updates of the optimizer in a step."""
    ratio_cap: float = 2.0
    entropy_bonus: float = 0.15
    """Of one nat, in standard deviations of a group's reward."""
    clip_gradient: float = 1.0


@dataclass(frozen=True)
class Trained:
    """One step's account."""

    loss: float
    entropy: float
    mean_ratio: float
    truncated: float
    mismatch: float | None
    """The largest difference between a log-prob that a replica returned and ours, over tokens that
    the present weights sampled; None where there was none. More than rounding means that a replica
    served other weights than it said."""
    seconds: float


def learning_rate(settings: TrainerSettings, step: int) -> float:
    """Up in a line, then down in a line."""
    up = (step + 1) / settings.warmup_steps
    down = max(0.1, 1.0 - step / settings.decay_steps)
    return settings.learning_rate * min(1.0, up) * down


class Trainer:
    """The policy and its optimizer. Not safe for threads: one step at a time.

    Args:
        seed: Equal seeds make equal first weights.
        settings: See there.
        threads: CPU cores.
    """

    def __init__(self, *, seed: int, settings: TrainerSettings, threads: int = 1) -> None:
        self._threads = threads
        self.model = new_model(seed=seed)
        self.step = 0
        self._settings = settings
        self._dice = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def weights(self) -> dict[str, Tensor]:
        """A copy of the present weights, by their names in a checkpoint."""
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def train(self, groups: Sequence[Group]) -> Trained:
        """Make the next step of the weights. Blocks; releases the GIL most of the time."""
        began = time.perf_counter()
        torch.set_num_threads(self._threads)  # here: OpenMP has a number for each calling thread
        batch = batch_of(groups)
        for options in self._optimizer.param_groups:
            options["lr"] = learning_rate(self._settings, self.step)
        order = torch.randperm(len(batch), generator=self._dice)
        told = [
            self._update(batch.pick(rows), is_first=i == 0)
            for i, rows in enumerate(order.chunk(self._settings.minibatches))
        ]
        self.step += 1
        return Trained(
            loss=fmean(t.loss for t in told),
            entropy=fmean(t.entropy for t in told),
            mean_ratio=fmean(t.mean_ratio for t in told),
            truncated=fmean(t.truncated for t in told),
            mismatch=told[0].mismatch,
            seconds=time.perf_counter() - began,
        )

    def _update(self, batch: Batch, *, is_first: bool) -> Trained:
        log_probs, entropy = score_answers(self.model, batch.prompts, batch.answers)
        loss = policy_loss(
            log_probs, entropy,
            behaviour=batch.behaviour, advantage=batch.advantage, mask=batch.mask,
            cap=self._settings.ratio_cap, entropy_bonus=self._settings.entropy_bonus,
        )  # fmt: skip
        self._optimizer.zero_grad()
        loss.value.backward()  # type: ignore[no-untyped-call]  # torch's own
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.clip_gradient)
        self._optimizer.step()
        return Trained(
            loss=float(loss.value.detach()),
            entropy=float(((entropy * batch.mask).sum() / batch.mask.sum()).detach()),
            mean_ratio=loss.mean_ratio,
            truncated=loss.truncated,
            mismatch=self._mismatch(batch, log_probs.detach()) if is_first else None,
            seconds=0.0,
        )

    def _mismatch(self, batch: Batch, log_probs: Tensor) -> float | None:
        ours = (batch.mask > 0) & (batch.steps == self.step)
        if not ours.any():
            return None
        return float((log_probs - batch.behaviour)[ours].abs().max())
