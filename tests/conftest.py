"""What holds for the tests of every tier."""

from collections import Counter

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse two tests of one id: of those, pytest-xdist runs one and says nothing."""
    twice = sorted(node_id for node_id, n in Counter(i.nodeid for i in items).items() if n > 1)
    if twice:
        raise pytest.UsageError(f"several tests have the same id: {', '.join(twice)}")
