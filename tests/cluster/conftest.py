"""The real cluster that this tier runs on, and a namespace of its own for every test."""

import os
import re
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from devcluster.client import Cluster, connect
from devcluster.settings import Settings, load_settings
from tests.support.devcluster import must

HERE = Path(__file__).parent
# of a test's own body: bringing the cluster up has deadlines of its own
TEST_TIMEOUT_S = 300
NAMESPACE_TIMEOUT_S = 180
FIRST = "test_devcluster_lifecycle.py"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tier; what takes clusters down comes before what shares one."""
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    for item in ours:
        item.add_marker(pytest.mark.cluster)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S, func_only=True))
    others = [item for item in items if not item.path.is_relative_to(HERE)]
    items[:] = [*others, *sorted(ours, key=lambda item: item.path.name != FIRST)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the state of a failed test's namespace into its report."""
    report = yield
    used = getattr(item, "funcargs", {})
    if report.failed and call.when == "call" and "namespace" in used:
        dump = used["cluster"].dump(used["namespace"])
        report.sections.append((f"namespace {used['namespace']}", dump))
    return report


@pytest.fixture(scope="session")
def settings() -> Settings:
    """Which cluster is meant."""
    return load_settings(os.environ)


@pytest.fixture(scope="session")
def found_up(settings: Settings) -> bool:
    """Whether there was a cluster before this session: then it is left alone at the end."""
    return settings.external or settings.marker.exists()


@pytest.fixture(scope="session")
def cluster(settings: Settings, found_up: bool) -> Iterator[Cluster]:
    """The running cluster. That it cannot start is a failure, never a skip."""
    if not settings.external:
        must("up")
    yield connect(settings)
    if not found_up:
        must("down")


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of this test's own, deleted with everything in it."""
    slug = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40].strip("-")
    name = f"{slug}-{uuid.uuid4().hex[:6]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    # the category holds replicas, deployments and pods; the namespace alone would begin with
    # them seconds later
    cluster.kubectl("delete", "all", "--all", "-n", name, "--wait=false")
    cluster.kubectl("delete", "namespace", name, "--wait=false")
    # what matters to the next test is the memory that the pods held
    cluster.wait(
        lambda: not cluster.kubectl("get", "pods", "-n", name, "-o", "name"),
        NAMESPACE_TIMEOUT_S,
        f"the pods of {name} to be gone",
        namespace=name,
    )
