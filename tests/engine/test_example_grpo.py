"""A few steps of examples/async_grpo with two real replicas: the trainer's arithmetic is the judge."""

import asyncio
from pathlib import Path

import pytest
import torch

from examples.async_grpo.local import local_replicas
from examples.async_grpo.loop import Limits, Loop, evaluate
from examples.async_grpo.model import new_model, save_model, score_answers
from examples.async_grpo.record import Record
from examples.async_grpo.rollouts import RolloutStream
from examples.async_grpo.samples import Group
from examples.async_grpo.staleness import Admission, steps_of
from examples.async_grpo.task import held_out_prompts, training_prompts
from examples.async_grpo.trainer import Trained, Trainer, TrainerSettings
from rollout_client import RolloutClient

pytestmark = [pytest.mark.engine, pytest.mark.timeout(280)]

STEPS = 5
GROUPS = 4
BOUND = 2
ROUNDING = 2e-4
"""Between two ways to compute a log-prob in float32."""


class Notebook(Trainer):
    """Keeps all groups and all weights."""

    def __init__(self) -> None:
        super().__init__(seed=0, settings=TrainerSettings())
        self.groups: list[list[Group]] = []
        self.versions = [self.weights()]

    def train(self, groups: list[Group]) -> Trained:  # type: ignore[override]
        told = super().train(groups)
        self.groups.append(list(groups))
        self.versions.append(self.weights())
        return told


@torch.no_grad()
def worst_log_prob(group: Group, versions: list[dict[str, torch.Tensor]]) -> float:
    """The largest difference between a returned log-prob and that of the version it names."""
    model, worst = new_model(seed=1), 0.0
    for rollout in group.rollouts:
        steps = torch.tensor(steps_of(rollout.weight_versions))
        returned = torch.tensor(rollout.log_probs)
        for step in set(steps.tolist()):
            model.load_state_dict(versions[step])
            ours, _ = score_answers(
                model, torch.tensor([group.prompt]), torch.tensor([rollout.token_ids])
            )
            worst = max(worst, float((ours[0] - returned)[steps == step].abs().max()))
    return worst


async def test_weights_move_versions_are_honoured_and_nothing_is_lost(tmp_path: Path) -> None:
    trainer = Notebook()
    model = tmp_path / "base"
    save_model(trainer.model, model)
    record = Record("async", chance=0.05)
    held_out = held_out_prompts(32, seed=0)
    async with (
        local_replicas(model, tmp_path) as replicas,
        RolloutClient(replicas.endpoints, max_concurrency=64) as client,
    ):
        stream = RolloutStream(
            client,
            training_prompts(seed=0),
            admission=Admission(GROUPS, BOUND),
            group_size=8,
            in_flight=2 * GROUPS,
        )
        loop = Loop(
            trainer, replicas, stream, groups_per_step=GROUPS, is_sync=False, record=record,
            on_row=lambda row: None,
        )  # fmt: skip
        async with asyncio.timeout(120):
            await loop.run(Limits(steps=STEPS, seconds=100, stop_at=2.0))
        # every replica holds the last step, and only that
        last = await evaluate(client, held_out, step=STEPS, version=f"step-{STEPS}")
        assert last.prompts == len(held_out)

    assert trainer.step == len(record.rows) == STEPS
    # weights move, all of them
    moved = [
        n for n, t in trainer.versions[0].items() if not torch.equal(t, trainer.versions[-1][n])
    ]
    assert len(moved) == len(trainer.versions[0])
    # nothing is lost: all that was begun has finished, whole
    account = stream.account
    assert account.begun == account.finished >= STEPS * GROUPS * 8
    groups = [group for batch in trainer.groups for group in batch]
    assert len({id(group) for group in groups}) == STEPS * GROUPS
    for rollout in (r for group in groups for r in group.rollouts):
        assert rollout.finish_reason in ("stop", "length")
        assert len(rollout.token_ids) == len(rollout.log_probs)
        assert sum(s.end - s.start for s in rollout.weight_versions) == len(rollout.token_ids)
    # the bound holds for every token of every batch
    for step, batch in enumerate(trainer.groups):
        assert all(0 <= group.staleness(trained=step) <= BOUND for group in batch)
    assert {s for group in groups for s in group.steps} > {0}
    # each log-prob is that of the version which its span names, and of no other
    worst = max(worst_log_prob(group, trainer.versions) for group in groups)
    assert worst < ROUNDING
    shifted = [*trainer.versions[1:], trainer.versions[0]]
    assert max(worst_log_prob(group, shifted) for group in groups) > 10 * ROUNDING
