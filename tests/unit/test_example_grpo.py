"""The pure parts of examples/async_grpo, its stream of groups, and a trainer that learns."""

import asyncio
import itertools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.async_grpo.compare import compare, differences
from examples.async_grpo.grpo import advantages, policy_loss, truncated_ratios
from examples.async_grpo.loop import Limits, Loop
from examples.async_grpo.model import new_model, save_model, score_answers
from examples.async_grpo.plot import plot, sparkline
from examples.async_grpo.record import (
    SMOOTHED,
    Evaluation,
    Record,
    Row,
    as_json,
    seconds_to,
    totals,
    verdict,
)
from examples.async_grpo.replicas import Published, Replicas, RunError
from examples.async_grpo.rollouts import RolloutStream
from examples.async_grpo.samples import Group, batch_of
from examples.async_grpo.staleness import Admission, off_policy, steps_of
from examples.async_grpo.task import (
    ANSWER_LENGTH,
    END,
    FIRST_DIGIT,
    VOCABULARY,
    Prompt,
    chance_reward,
    held_out_prompts,
    is_exact,
    prompt_of,
    reward_of,
    right_answer,
    training_prompts,
)
from examples.async_grpo.trainer import Trained, Trainer, TrainerSettings, learning_rate
from rollout_client import GroupFailed, Rollout
from rollout_client.trainer import Refused
from rollout_pod.protocol import WeightVersionSpan

PROMPT = prompt_of([5, 0, 9, 2, 7])
RIGHT = right_answer(PROMPT)


def span(start: int, end: int, step: int | None, version: str | None = None) -> WeightVersionSpan:
    name = version or ("base" if step is None else f"step-{step}")
    return WeightVersionSpan(version=name, step=step, start=start, end=end)


def rollout(
    tokens: Sequence[int] = RIGHT, *, spans: Sequence[WeightVersionSpan] = (), **more
) -> Rollout:
    return Rollout(
        request_id="r",
        token_ids=tuple(tokens),
        log_probs=more.pop("log_probs", (-1.0,) * len(tokens)),
        weight_versions=tuple(spans) or (span(0, len(tokens), None),),
        attempts=more.pop("attempts", 1),
    )


# the task


def test_only_the_sorted_digits_and_an_end_have_the_full_reward():
    assert (*(FIRST_DIGIT + d for d in (0, 2, 5, 7, 9)), END) == RIGHT
    assert (reward_of(PROMPT, RIGHT), is_exact(PROMPT, RIGHT)) == (1.0, True)


@pytest.mark.parametrize(
    ("answer", "hits"),
    [
        ((), 0),
        (RIGHT[:3], 3),  # an early end loses the rest
        ((*RIGHT[:5], 0), 5),
        ((RIGHT[1], RIGHT[0], *RIGHT[2:]), 4),
        ((END,), 0),
    ],
)
def test_a_position_that_is_wrong_or_missing_costs_its_share(answer, hits):
    assert reward_of(PROMPT, answer) == pytest.approx(hits / ANSWER_LENGTH)
    assert not is_exact(PROMPT, answer)


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=ANSWER_LENGTH))
def test_a_reward_is_a_share_and_one_only_where_it_is_exact(answer):
    reward = reward_of(PROMPT, answer)
    assert 0.0 <= reward <= 1.0
    assert (reward == 1.0) == is_exact(PROMPT, answer)


def test_training_never_shows_a_set_of_digits_that_is_held_out():
    held_out = held_out_prompts(200, seed=3)
    assert len(set(held_out)) == 200
    seen = {frozenset(p) for p in itertools.islice(training_prompts(seed=3), 3000)}
    assert not seen & {frozenset(prompt) for prompt in held_out}
    assert len(seen) > 100
    again = held_out_prompts(200, seed=3)
    assert held_out == again != held_out_prompts(200, seed=4)


def test_chance_is_what_random_tokens_get():
    # without ends it would be 1/16 at each position
    assert 0.03 < chance_reward(seed=1) < 1 / VOCABULARY + 0.01


# advantages, ratios, loss


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16))
def test_advantages_compare_within_the_group(rewards):
    got = advantages(rewards)
    assert sum(got) == pytest.approx(0.0, abs=1e-3)
    ordered = sorted(zip(rewards, got, strict=True))
    assert [a for _, a in ordered] == sorted(got)


def test_advantages_have_unit_spread_and_vanish_where_all_are_equal():
    assert advantages([0.0, 1.0]) == pytest.approx([-1.0, 1.0], abs=1e-3)
    assert advantages([0.7] * 5) == [0.0] * 5


def test_ratios_are_truncated_and_carry_no_gradient():
    ours = torch.tensor([[-1.0, -1.0, -3.0]], requires_grad=True)
    theirs = torch.tensor([[-1.0, -3.0, -1.0]])
    ratios = truncated_ratios(ours, theirs, cap=2.0)
    assert ratios.tolist()[0] == pytest.approx([1.0, 2.0, math.exp(-2)])
    assert not ratios.requires_grad


def test_the_loss_weighs_each_token_by_its_ratio_and_ignores_padding():
    ours = torch.tensor([[-1.0, -2.0], [-1.0, -9.0]], requires_grad=True)
    theirs = torch.tensor([[-1.0, -1.0], [-4.0, 0.0]])
    loss = policy_loss(
        ours,
        torch.zeros(2, 2),
        behaviour=theirs,
        advantage=torch.tensor([[1.0], [-1.0]]),
        mask=torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        cap=2.0,
        entropy_bonus=0.0,
    )
    ratios = [1.0, math.exp(-1), 2.0]
    assert float(loss.value.detach()) == pytest.approx(
        -(-1 * ratios[0] - 2 * ratios[1] + ratios[2]) / 3
    )
    assert (loss.mean_ratio, loss.truncated) == pytest.approx((sum(ratios) / 3, 1 / 3))
    loss.value.backward()
    assert ours.grad is not None
    expected = [-ratios[0] / 3, -ratios[1] / 3, ratios[2] / 3, 0.0]
    assert ours.grad.flatten().tolist() == pytest.approx(expected)


def test_entropy_is_worth_its_bonus():
    def value(bonus: float) -> float:
        zeros, ones = torch.zeros(1, 2), torch.ones(1, 2)
        return float(
            policy_loss(
                zeros, 3 * ones, behaviour=zeros, advantage=zeros[:, :1], mask=ones, cap=2.0,
                entropy_bonus=bonus,
            ).value
        )  # fmt: skip

    assert value(0.0) == 0.0
    assert value(0.5) == pytest.approx(-1.5)


# staleness


def test_each_token_has_the_step_of_its_span():
    assert steps_of([span(0, 2, None), span(2, 5, 3), span(5, 6, 4)]) == [0, 0, 3, 3, 3, 4]
    with pytest.raises(ValueError, match="version 'mine' has no step"):
        steps_of([span(0, 1, None, version="mine")])


def test_the_oldest_token_says_how_far_off_policy_a_rollout_is():
    assert off_policy([3, 5, 4], trained=5) == 2
    assert off_policy([], trained=5) == 0


@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.lists(st.sampled_from(["begin", "train", "drop"]), max_size=200),
)
def test_admission_lets_nothing_begin_that_would_be_too_old_in_order(groups, bound, events):
    admission = Admission(groups, bound)
    trained, waiting, begun_at = 0, 0, []
    for event in events:
        if event == "begin" and admission.may_begin(trained=trained):
            admission.begun += 1
            waiting += 1
            begun_at.append(trained)
        elif event == "train" and waiting >= groups:
            # the batch takes the oldest ones: none of them is behind by more than the bound
            assert min(begun_at[:groups]) >= trained - bound
            del begun_at[:groups]
            waiting -= groups
            trained += 1
        elif event == "drop" and waiting:
            admission.dropped += 1
            waiting -= 1
            begun_at.pop()
    if waiting < groups:  # it never starves the trainer
        assert admission.may_begin(trained=trained)


# batches and the trainer


def test_a_batch_keeps_what_belongs_together():
    mixed = rollout(RIGHT[:3], spans=[span(0, 1, 4), span(1, 3, 5)], log_probs=(-0.1, -0.2, -0.3))
    batch = batch_of([Group(PROMPT, (rollout(), mixed)), Group(PROMPT, (rollout(), rollout()))])
    assert len(batch) == 4
    assert batch.prompts.tolist() == [list(PROMPT)] * 4
    assert batch.answers[1].tolist() == [*RIGHT[:3], 0, 0, 0]
    assert batch.behaviour[1].tolist() == pytest.approx([-0.1, -0.2, -0.3, 0, 0, 0])
    assert batch.steps[1, :3].tolist() == [4, 5, 5]
    assert batch.mask.sum(1).tolist() == [6, 3, 6, 6]
    assert batch.advantage.flatten().tolist() == pytest.approx([1, -1, 0, 0], abs=1e-3)
    picked = batch.pick(torch.tensor([1]))
    assert picked.steps.tolist() == batch.steps[1:2].tolist()


@torch.no_grad()
def sample(model, prompt: Prompt, n: int, dice: torch.Generator, *, step: int) -> Group:
    """What a replica does, without one."""
    prompts = torch.tensor([prompt] * n)
    tokens = torch.zeros(n, 0, dtype=torch.int64)
    for _ in range(ANSWER_LENGTH):
        logits = model(input_ids=torch.cat([prompts, tokens], 1), use_cache=False).logits[:, -1]
        fresh = torch.multinomial(logits.softmax(-1), 1, generator=dice)
        tokens = torch.cat([tokens, fresh], 1)
    scores, _ = score_answers(model, prompts, tokens)
    made = []
    for row, values in zip(tokens.tolist(), scores.tolist(), strict=True):
        end = row.index(END) + 1 if END in row else len(row)
        made.append(rollout(row[:end], log_probs=tuple(values[:end]), spans=[span(0, end, step)]))
    return Group(prompt, tuple(made))


def test_a_trainer_raises_the_reward_and_sees_its_own_log_probs():
    trainer = Trainer(seed=1, settings=replace(TrainerSettings(), warmup_steps=1))
    dice = torch.Generator().manual_seed(1)
    before, rewards = trainer.weights(), []
    for _ in range(12):
        groups = [sample(trainer.model, PROMPT, 32, dice, step=trainer.step) for _ in range(2)]
        rewards.append(sum(sum(g.rewards) for g in groups) / 64)
        told = trainer.train(groups)
        assert told.mismatch is not None
        assert told.mismatch < 1e-4
    assert trainer.step == 12
    assert rewards[-1] > 3 * rewards[0]
    assert any(not torch.equal(before[k], v) for k, v in trainer.weights().items())


def test_weights_that_a_replica_does_not_have_show_as_a_mismatch():
    trainer = Trainer(seed=1, settings=TrainerSettings())
    dice = torch.Generator().manual_seed(1)
    foreign = sample(new_model(seed=2), PROMPT, 8, dice, step=0)
    told = trainer.train([foreign])
    assert told.mismatch is not None
    assert told.mismatch > 0.05
    assert trainer.train([foreign]).mismatch is None  # of step 0 now: nothing to compare


def test_the_learning_rate_rises_and_falls_in_lines():
    settings = TrainerSettings(learning_rate=1.0, warmup_steps=4, decay_steps=100)
    rates = [learning_rate(settings, step) for step in range(200)]
    assert rates[:3] == pytest.approx([0.25, 0.5 * 0.99, 0.75 * 0.98])
    assert rates[50] == pytest.approx(0.5)
    assert min(rates[4:]) == rates[-1] == pytest.approx(0.1)


def test_padding_has_no_influence():
    model = new_model(seed=0)
    prompts, answers = torch.tensor([PROMPT]), torch.tensor([[*RIGHT[:3], 0, 0]])
    padded, _ = score_answers(model, prompts, answers)
    bare, _ = score_answers(model, prompts, answers[:, :3])
    assert torch.allclose(padded[:, :3], bare, atol=1e-6)


# the stream of groups


class FakeClient:
    """Finishes a group when it is told to."""

    def __init__(self) -> None:
        self.step = 0
        self.waiting: list[asyncio.Event] = []
        self.fails = False

    async def generate_group(self, prompt, params, n, **options):
        begun = self.step
        event = asyncio.Event()
        self.waiting.append(event)
        await event.wait()
        if self.fails:
            raise GroupFailed("lost", results=[])
        spans = [span(0, ANSWER_LENGTH, begun)]
        if self.step != begun:
            spans = [span(0, 1, begun), span(1, ANSWER_LENGTH, self.step)]
        return [rollout(spans=spans) for _ in range(n)]

    async def until_waiting(self, count: int) -> None:
        async with asyncio.timeout(2):
            while len(self.waiting) < count:
                await asyncio.sleep(0)

    def finish(self, count: int) -> None:
        for _ in range(count):
            self.waiting.pop(0).set()


def stream_of(client: FakeClient, *, bound: int, in_flight: int = 8) -> RolloutStream:
    return RolloutStream(
        client,  # type: ignore[arg-type]
        training_prompts(seed=0),
        admission=Admission(2, bound),
        group_size=3,
        in_flight=in_flight,
    )


async def test_a_stream_without_staleness_begins_one_batch_at_a_time():
    client = FakeClient()
    stream = stream_of(client, bound=0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.run())
        for step in range(3):
            await client.until_waiting(2)
            await asyncio.sleep(0.01)
            assert len(client.waiting) == 2
            client.finish(2)
            groups = await stream.take(2)
            assert {s for g in groups for s in g.steps} == {step}
            await asyncio.sleep(0.01)
            assert not client.waiting  # nothing is begun while the trainer works
            client.step = step + 1
            await stream.advance(step + 1)
        await client.until_waiting(2)
        await stream.close()
        client.finish(2)
    assert (stream.account.begun, stream.account.finished) == (24, 24)
    assert stream.account.dropped == 0


async def test_what_is_too_old_is_dropped_counted_and_replaced():
    client = FakeClient()
    stream = stream_of(client, bound=1, in_flight=4)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.run())
        await client.until_waiting(4)
        held = client.waiting[:2]
        for event in client.waiting[2:]:
            event.set()
        await stream.take(2)
        client.step = 2
        await stream.advance(2)  # two steps later the first two groups finish, at last
        for event in held:
            event.set()
        taking = tasks.create_task(stream.take(2))
        async with asyncio.timeout(2):
            while stream.account.dropped < 6:
                await asyncio.sleep(0)
        await client.until_waiting(6)
        for event in client.waiting[4:6]:
            event.set()
        groups = await taking
        assert all(g.staleness(trained=2) <= 1 for g in groups)
        await stream.close()
        for event in client.waiting:
            event.set()
    account = stream.account
    assert (account.begun, account.dropped) == (account.finished, 6)
    assert account.mixed == 6  # those that were begun under step 0 and finished under step 2


async def test_a_lost_rollout_ends_the_stream():
    client = FakeClient()
    client.fails = True
    stream = stream_of(client, bound=0)
    running = asyncio.ensure_future(stream.run())
    await client.until_waiting(2)
    client.finish(2)
    with pytest.raises(ExceptionGroup) as failed:
        await running
    assert failed.group_contains(GroupFailed)


# the loop


class Diary:
    """A client, a trainer and replicas that write down what they do."""

    def __init__(self, *, load_s: float = 0.0, train_s: float = 0.0) -> None:
        self.told: list[str] = []
        self.step, self.held = 0, 0
        self._load_s, self._train_s = load_s, train_s

    async def generate_group(self, prompt, params, n, **options):
        self.told.append(f"begin under {self.held}")
        await asyncio.sleep(0.001)
        return [rollout(spans=[span(0, ANSWER_LENGTH, self.held)]) for _ in range(n)]

    def train(self, groups):
        self.told.append(f"train {self.step}")
        time.sleep(self._train_s)
        self.step += 1
        return Trained(
            loss=0, entropy=0, mean_ratio=1, truncated=0, mismatch=None, seconds=self._train_s
        )

    def weights(self):
        return {"step": torch.tensor(self.step)}

    async def deliver(self, step, weights):
        self.told.append(f"load {step}")
        await asyncio.sleep(self._load_s)
        assert int(weights["step"]) == step
        self.held = step
        self.told.append(f"hold {step}")

    async def look(self):
        return [Published("a", paused_s=0.25), Published("b", paused_s=0.75)]

    async def run(self, *, is_sync: bool, steps: int = 4) -> tuple[Record, RolloutStream]:
        record = Record("sync" if is_sync else "async", chance=0.05)
        stream = RolloutStream(
            self,  # type: ignore[arg-type]
            training_prompts(seed=0),
            admission=Admission(2, 0 if is_sync else 2),
            group_size=3,
            in_flight=2,
        )
        loop = Loop(
            self,  # type: ignore[arg-type]
            Replicas([], self.deliver, self.look),
            stream,
            groups_per_step=2,
            is_sync=is_sync,
            record=record,
            on_row=lambda row: None,
        )
        async with asyncio.timeout(20):
            await loop.run(Limits(steps=steps, seconds=20, stop_at=2.0))
        return record, stream


async def test_a_synchronous_run_does_one_thing_at_a_time():
    diary = Diary(load_s=0.01)
    record, _ = await diary.run(is_sync=True, steps=3)
    one = lambda k: [f"begin under {k}"] * 2 + [f"train {k}", f"load {k + 1}", f"hold {k + 1}"]  # noqa: E731 # a table
    assert [t for t in diary.told if t != "begin under 3"] == [*one(0), *one(1), *one(2)]
    assert {row.staleness_max for row in record.rows} == {0}
    assert [row.paused_s for row in record.rows] == [0.5] * 3


async def test_an_asynchronous_run_trains_and_generates_while_weights_travel():
    diary = Diary(load_s=0.05, train_s=0.02)
    record, stream = await diary.run(is_sync=False)
    at = diary.told.index
    for step in range(1, 4):
        assert at(f"train {step}") < at(f"hold {step}")  # it does not wait for the replicas
        assert at(f"hold {step}") < at(f"load {step + 1}")  # but they get one at a time
    assert diary.held == 4  # and it ends only when they hold the last one
    assert any(t.startswith("begin") for t in diary.told[at("load 1") : at("hold 1")])
    assert 0 < max(row.staleness_max for row in record.rows) <= 2
    assert stream.account.begun == stream.account.finished


async def test_replicas_that_refuse_weights_end_the_run():
    class Refusing(Diary):
        async def deliver(self, step, weights):
            raise Refused("no room", target="a")

    with pytest.raises(ExceptionGroup) as failed:
        await Refusing().run(is_sync=False)
    assert failed.group_contains(RunError, match="step 1 did not reach every replica: no room")


# the record


def row(step: int, reward: float, **more) -> Row:
    values = {
        "at": 2.0 * step, "exact": 0.0, "staleness_mean": 1.0, "staleness_max": 2, "resumed": 0.0,
        "mixed": 0.0, "tokens": 100, "seconds": 2.0, "waited_s": 0.5, "train_s": 1.0,
        "publish_s": 0.1, "paused_s": 0.2, "entropy": 1.0, "mean_ratio": 1.0, "truncated": 0.0,
        "mismatch": None,
    }  # fmt: skip
    return Row(step=step, reward=reward, **(values | more))


def learned(rewards: Sequence[float], *, after: float, mode: str = "async") -> Record:
    rows = [row(i + 1, reward) for i, reward in enumerate(rewards)]
    ends = [
        Evaluation(step=step, reward=value, exact=0.0, prompts=8)
        for step, value in ((0, 0.05), (len(rows), after))
    ]
    return Record(mode, chance=0.05, rows=rows, evaluations=ends)


def test_a_run_that_learned_has_nothing_to_say():
    assert verdict(learned([0.05, 0.9], after=0.95), goal=0.9) == []


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (learned([0.05, 0.9], after=0.85), "held-out prompts is 0.850, not 0.9"),
        (learned([0.5, 0.9], after=0.95), "training began at a reward of 0.500"),
        (learned([], after=0.95), "never evaluated after training"),
    ],
)
def test_a_run_that_did_not_says_why(record, why):
    assert any(why in reason for reason in verdict(record, goal=0.9))


def test_the_goal_is_reached_by_the_smoothed_reward():
    lucky = [0.1] * 20 + [1.0] + [0.1] * 20
    assert seconds_to(learned(lucky, after=1).rows, 0.9) is None
    risen = [0.1] * 20 + [1.0] * SMOOTHED
    assert seconds_to(learned(risen, after=1).rows, 1.0) == 2.0 * len(risen)
    assert learned([1.0] * (SMOOTHED - 1), after=1).recent_reward() == 0.0
    assert learned([1.0] * SMOOTHED, after=1).recent_reward() == 1.0


def test_totals_add_up():
    record = learned([0.1] * 4, after=1)
    record.rows[2] = replace(record.rows[2], mismatch=2e-6)
    told = totals(record.rows)
    assert (told["seconds"], told["tokens"], told["tokens_per_s"]) == (8.0, 400, 50.0)
    assert told["trainer_waited_share"] == pytest.approx(4 * 0.6 / 8)
    assert told["paused_share"] == pytest.approx(0.1)
    assert (told["largest_mismatch"], told["steps_with_mismatch_checked"]) == (2e-6, 1)
    assert totals([]) == {"steps": 0}


def test_runs_of_other_settings_are_not_compared():
    assert differences({"settings": {"seed": 1, "n": 2}}, {"settings": {"seed": 2, "n": 2}}) == [
        "seed"
    ]


def test_the_comparison_says_also_where_async_is_worse():
    a = as_json(learned([1.0] * SMOOTHED, after=1), goal=0.9)
    slower = [
        replace(r, at=r.at * 3, seconds=r.seconds * 3) for r in learned([1.0] * 10, after=1).rows
    ]
    s = as_json(replace(learned([], after=1, mode="sync"), rows=slower), goal=0.9)
    told = {what: ratio for what, _, _, ratio in compare(a, s)}
    assert told["seconds until the reward reached the goal"] == "3.00x"
    assert told["tokens/s"] == "3.00x"
    assert {what: ratio for what, _, _, ratio in compare(s, a)}["tokens/s"] == "0.33x"
    never = as_json(learned([0.0] * SMOOTHED, after=1), goal=0.9)
    assert compare(never, s)[0][1:] == ["never", "60.00", "-"]


def test_a_summary_is_json_and_a_plot_is_a_picture(tmp_path: Path):
    dice = Random(0)
    record = learned([dice.random() for _ in range(30)], after=1)
    summary = as_json(record, goal=0.9, settings={"seed": 0})
    assert json.loads(json.dumps(summary))["rows"][3]["step"] == 4
    plot(record, tmp_path / "run.png", goal=0.9)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_sparkline_is_no_wider_than_asked_for():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([i / 99 for i in range(100)], width=8) == "▁▂▃▄▅▆▇█"


def test_vllm_takes_the_checkpoint_for_a_model_that_generates(tmp_path: Path):
    save_model(new_model(seed=0), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] == VOCABULARY
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
