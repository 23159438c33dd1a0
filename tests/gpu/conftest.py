"""Importing vLLM and its dependencies warns; nothing of it is ours to mend."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in str(item.path):
            for ignored in (
                "ignore::DeprecationWarning",
                "ignore::FutureWarning",
                "ignore::UserWarning:torch.*",
                "ignore::UserWarning:vllm.*",
            ):
                item.add_marker(pytest.mark.filterwarnings(ignored))
