"""kubectl and helm against the dev cluster, for the demo and the tests."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_fixed

from devcluster.build import bin_folder
from devcluster.errors import DevclusterError
from devcluster.external import check_external
from devcluster.settings import Settings

T = TypeVar("T")
LOG_LINES = 60
GROUP = "rollout.dev"


class CommandError(RuntimeError):
    """kubectl or helm failed; ``output`` holds its words, with stdout and stderr."""

    def __init__(self, argv: tuple[str, ...], output: str) -> None:
        super().__init__(f"{' '.join(argv)}\n{output}")
        self.output = output


class WaitTimeoutError(AssertionError):
    """Something did not come true in time."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    kubeconfig: str
    data: Path | None
    """A folder that pods may mount by hostPath, the same path here and there."""
    kubectl_path: str
    helm_path: str
    caches: Mapping[str, str] = field(default_factory=dict)
    """Variables that keep the tools' caches with the cluster, so that they go with it."""

    def environment(self) -> dict[str, str]:
        """Return the environment in which programs work against this cluster."""
        return {**os.environ, "KUBECONFIG": self.kubeconfig, **self.caches}

    def kubectl(self, *arguments: str, input: str | None = None, timeout: float = 60) -> str:
        """Run kubectl and return what it printed.

        Raises:
            CommandError: it failed.
            subprocess.TimeoutExpired: it took longer than ``timeout`` seconds.
        """
        return self._run((self.kubectl_path, *arguments), input, timeout)

    def helm(self, *arguments: str, input: str | None = None, timeout: float = 300) -> str:
        """Run helm and return what it printed; raises as ``kubectl`` does."""
        return self._run((self.helm_path, *arguments), input, timeout)

    def _run(self, argv: tuple[str, ...], stdin: str | None, timeout: float) -> str:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.environment(),
            check=False,
        )
        if done.returncode != 0:
            raise CommandError(argv, done.stdout + done.stderr)
        return done.stdout

    def get(self, kind: str, name: str, namespace: str | None = None) -> dict[str, Any]:
        """Return one object; raises CommandError if it does not exist."""
        place = () if namespace is None else ("-n", namespace)
        found: dict[str, Any] = json.loads(self.kubectl("get", kind, name, *place, "-o", "json"))
        return found

    def wait(
        self,
        predicate: Callable[[], T],
        timeout: float,
        what: str,
        *,
        namespace: str | None = None,
        interval: float = 0.25,
    ) -> T:
        """Call ``predicate`` until it returns something true, and return that. A kubectl that
        fails counts as "not yet".

        Raises:
            WaitTimeoutError: ``timeout`` seconds are over; with ``namespace`` the message shows
                the objects, events and logs there.
        """
        last: list[str] = []

        def ask() -> T | None:
            try:
                value = predicate()
            except CommandError as error:
                last[:] = [str(error)]
                return None
            last[:] = [repr(value)]
            return value

        retrying = Retrying(
            stop=stop_after_delay(timeout),
            wait=wait_fixed(interval),
            retry=retry_if_result(lambda value: not value),
        )
        try:
            found = retrying(ask)
        except RetryError:
            state = "" if namespace is None else f"\n{self.dump(namespace)}"
            seen = last[0] if last else "nothing"
            raise WaitTimeoutError(f"not within {timeout} s: {what}; last: {seen}{state}") from None
        assert found is not None  # noqa: S101 - a result that is not true is tried again
        return found

    def dump(self, namespace: str) -> str:
        """Return what a person needs to see why something in ``namespace`` does not work."""
        sections = [
            self._try("get", "pods,services,secrets,deployments", "-o", "wide", "-n", namespace),
            self._try("get", "events", "-n", namespace, "--sort-by=.lastTimestamp"),
        ]
        if "rolloutreplicas" in self._try("api-resources", f"--api-group={GROUP}", "-o", "name"):
            sections.append(
                self._try("get", f"rolloutreplicas.{GROUP}", "-n", namespace, "-o", "yaml")
            )
        sections.append(self._try("describe", "pods", "-n", namespace))
        for pod in self._try("get", "pods", "-n", namespace, "-o", "name").split():
            if not pod.startswith("pod/"):
                continue
            logs = ("logs", pod, "-n", namespace, "--all-containers", "--prefix")
            sections.append(self._try(*logs, "--ignore-errors", f"--tail={LOG_LINES}"))
            if any(c.get("restartCount") for c in self._containers(pod, namespace)):
                sections.append(
                    self._try(*logs, "--previous", "--ignore-errors", f"--tail={LOG_LINES}")
                )
        return "\n".join(sections)

    def _containers(self, pod: str, namespace: str) -> list[dict[str, Any]]:
        try:
            status = json.loads(self.kubectl("get", pod, "-n", namespace, "-o", "json"))["status"]
        except (CommandError, subprocess.TimeoutExpired):
            return []
        return [
            *status.get("containerStatuses", []),
            *status.get("initContainerStatuses", []),
        ]

    def _try(self, *arguments: str) -> str:
        try:
            output = self.kubectl(*arguments, timeout=30)
        except CommandError as error:
            output = error.output
        except subprocess.TimeoutExpired as error:
            output = str(error)
        return f"$ kubectl {' '.join(arguments)}\n{output}"


def connect(settings: Settings) -> Cluster:
    """Return the cluster of these settings, ours or the user's own.

    Raises:
        DevclusterError: ours is not up, or the user's may not be used.
    """
    if settings.external:
        check_external(settings)
        kubectl, helm = shutil.which("kubectl"), shutil.which("helm")
        if kubectl is None or helm is None:
            raise DevclusterError("DEVCLUSTER=external needs kubectl and helm on PATH")
        data = None if settings.data_env is None else Path(settings.data_env)
        return Cluster(settings.kubeconfig_env or "", data, kubectl, helm)
    if not settings.kubeconfig.exists():
        raise DevclusterError("The dev cluster is not up: run `python -m devcluster up`")
    bins = bin_folder(settings)
    caches = {
        name: str(settings.root / "tools" / name.lower())
        for name in ("KUBECACHEDIR", "HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")
    }
    return Cluster(
        str(settings.kubeconfig), settings.data, str(bins / "kubectl"), str(bins / "helm"), caches
    )
