"""Run by .venv-verl's Python (scripts/verl_env.py): ``tests/run.py verl`` does so."""

import warnings

import pytest

with warnings.catch_warnings():
    # verl, Ray and what they import warn of each other; nothing of it is ours to mend
    warnings.simplefilter("ignore")
    try:
        import verl.workers.rollout.llm_server  # noqa: F401
    except ModuleNotFoundError as error:
        raise pytest.UsageError(
            f"tests/verl: no {error.name} here; run them by `python tests/run.py verl`"
        ) from None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/verl/" in str(item.path):
            for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))
