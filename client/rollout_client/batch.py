"""Many rollouts at once, with a progress bar for people."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rollout_client.errors import RolloutError
from rollout_client.rollout import Rollout

Result = Rollout | RolloutError
Generate = Callable[..., Coroutine[Any, Any, Rollout]]


async def gather_batch(
    generate: Generate,
    prompts: Sequence[Any],
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    request_ids: Sequence[str] | None,
    progress: bool,
    options: Mapping[str, Any],
) -> list[Result]:
    """See ``RolloutClient.generate_batch``."""
    if isinstance(sampling_params, Mapping):
        sampling_params = [sampling_params] * len(prompts)
    ids: Sequence[str | None] = [None] * len(prompts) if request_ids is None else request_ids
    for name, given in (("sampling_params", sampling_params), ("request_ids", ids)):
        if len(given) != len(prompts):
            raise ValueError(f"{name}: {len(given)} for {len(prompts)} prompts")
    with _bar(len(prompts)) if progress else _silence() as told:

        async def one(prompt: Any, params: Mapping[str, Any], request_id: str | None) -> Result:
            result: Result
            try:
                result = await generate(prompt, params, request_id, **options)
            except RolloutError as error:
                result = error
            told(result)
            return result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(one(*item))
                    for item in zip(prompts, sampling_params, ids, strict=True)
                ]
        except ExceptionGroup as errors:
            # what is left are wrong arguments and faults of the caller's own callbacks
            raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


@contextmanager
def _silence() -> Iterator[Callable[[Result], None]]:
    yield lambda result: None


@contextmanager
def _bar(total: int) -> Iterator[Callable[[Result], None]]:
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
    except ImportError as error:
        raise ImportError(
            "progress=True needs rich: pip install 'rollout-replica[rich]'"
        ) from error
    columns = (
        TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens  {task.fields[resumed]} resumed  "
                   "{task.fields[failed]} failed"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    counts: dict[str, Any] = {"tokens": 0, "resumed": 0, "failed": 0}
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("rollouts", total=total, **counts)

        def told(result: Result) -> None:
            rollout = result.partial if isinstance(result, RolloutError) else result
            counts["tokens"] += len(rollout.token_ids)
            counts["resumed"] += rollout.attempts > 1
            counts["failed"] += result is not rollout
            bar.update(task, advance=1, **counts)

        yield told
