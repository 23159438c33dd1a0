"""A replica on the dev cluster to measure, taken away afterwards."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from devcluster.client import connect
from devcluster.settings import load_settings
from examples.tiny_models import make
from tests.support.devcluster import must
from tests.support.replica import Replica, install_operator


@contextmanager
def measured_replica() -> Iterator[Replica]:
    """The cluster (brought up if it is not), the chart, and examples/replica.yaml serving base."""
    settings = load_settings(os.environ)
    if not settings.external:
        must("up")
    cluster = connect(settings)
    if cluster.data is None:
        raise SystemExit("name a folder that the nodes share in DEVCLUSTER_DATA")
    name = f"bench-{uuid.uuid4().hex[:6]}"
    folder = cluster.data / name
    for seed, version in enumerate(("base", "step-1", "step-2")):
        make(folder / version, seed=seed)
    cluster.kubectl("create", "namespace", name)
    try:
        install_operator(cluster, name)
        replica = Replica(cluster, name, folder)
        replica.apply()
        replica.serving("base")
        yield replica
    finally:
        cluster.kubectl("delete", "all", "--all", "-n", name, "--wait=false")
        cluster.kubectl("delete", "namespace", name, "--wait=false")
        shutil.rmtree(folder)
