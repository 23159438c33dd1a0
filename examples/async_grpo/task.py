"""The task: sort five different digits. What is right is known: no reward model is needed.

A prompt is five digits and a separator, the answer the same digits in ascending order and an end
token. There is no tokenizer: a digit *is* a token.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random
from typing import Final

END: Final = 1
SEPARATOR: Final = 2
FIRST_DIGIT: Final = 3
DIGITS: Final = 10
VOCABULARY: Final = 16
LENGTH: Final = 5
ANSWER_LENGTH: Final = LENGTH + 1
"""Of a right one, with its end token; also the budget of every answer."""

Prompt = tuple[int, ...]


def prompt_of(digits: Sequence[int]) -> Prompt:
    """The token ids that ask for these digits to be sorted."""
    return (*(FIRST_DIGIT + digit for digit in digits), SEPARATOR)


def right_answer(prompt: Prompt) -> tuple[int, ...]:
    """The only answer with the full reward."""
    return (*sorted(prompt[:-1]), END)


def reward_of(prompt: Prompt, answer: Sequence[int]) -> float:
    """The share of positions that are right: an answer that ends too early loses the rest."""
    right = right_answer(prompt)
    hits = sum(a == b for a, b in zip(answer, right, strict=False))
    return hits / max(len(right), len(answer))


def is_exact(prompt: Prompt, answer: Sequence[int]) -> bool:
    """Every position is right."""
    return tuple(answer) == right_answer(prompt)


def held_out_prompts(count: int, *, seed: int) -> list[Prompt]:
    """Different prompts for the evaluation, of a tenth of all sets of digits."""
    dice, allowed = Random(seed), _held_out_sets(seed)
    found: dict[Prompt, None] = {}
    while len(found) < count:
        prompt = _random_prompt(dice)
        if frozenset(prompt[:-1]) in allowed:
            found[prompt] = None
    return list(found)


def training_prompts(*, seed: int) -> Iterator[Prompt]:
    """Random prompts without end. None has the digits of a prompt that is held out under this
    seed, in whatever order.
    """
    dice, excluded = Random(seed + 1), _held_out_sets(seed)
    while True:
        prompt = _random_prompt(dice)
        if frozenset(prompt[:-1]) not in excluded:
            yield prompt


def _held_out_sets(seed: int) -> set[frozenset[int]]:
    tokens = range(FIRST_DIGIT, FIRST_DIGIT + DIGITS)
    sets = [frozenset(chosen) for chosen in combinations(tokens, LENGTH)]
    return set(Random(seed).sample(sets, len(sets) // 10))


def chance_reward(*, samples: int = 20_000, seed: int = 0) -> float:
    """The mean reward of a caller of random tokens: what a model knows that knows nothing."""
    dice = Random(seed)
    total = 0.0
    for _ in range(samples):
        answer: list[int] = []
        while len(answer) < ANSWER_LENGTH and END not in answer:
            answer.append(dice.randrange(VOCABULARY))
        total += reward_of(_random_prompt(dice), answer)
    return total / samples


def _random_prompt(dice: Random) -> Prompt:
    return prompt_of(dice.sample(range(DIGITS), LENGTH))
