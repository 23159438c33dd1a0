"""The dev cluster's settings, cache key, build plan and packages."""

from pathlib import Path

import pytest

from devcluster import build
from devcluster.packages import FILES, PROGRAMS, missing_packages
from devcluster.settings import context_allowed, kubernetes_version, load_settings


def test_defaults():
    settings = load_settings({"HOME": "/home/me"})
    assert settings.root == Path("/var/lib/rollout-devcluster")
    assert settings.cache == Path("/home/me/.cache/rollout-devcluster")
    assert settings.kubeconfig == Path("/var/lib/rollout-devcluster/kubeconfig")
    assert settings.data == Path("/var/lib/rollout-devcluster/data")
    assert not settings.external
    assert (settings.go_folder / "go.mod").exists()


def test_overrides():
    settings = load_settings({"DEVCLUSTER_ROOT": "/srv/dev", "XDG_CACHE_HOME": "/c", "HOME": "/h"})
    assert settings.root == Path("/srv/dev")
    assert settings.cache == Path("/c/rollout-devcluster")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"DEVCLUSTER": "maybe"}, "DEVCLUSTER=maybe"),
        ({"DEVCLUSTER": "external"}, "set KUBECONFIG"),
        ({"DEVCLUSTER_ROOT": "state"}, "absolute"),
        ({"DEVCLUSTER_ROOT": "/"}, "folder of its own"),
        ({"DEVCLUSTER_ROOT": "/var"}, "folder of its own"),
        ({"DEVCLUSTER_ROOT": "/var/" + "x" * 80}, "too long"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(environ, words):
    with pytest.raises(ValueError, match=words):
        load_settings(environ)


@pytest.mark.parametrize(
    ("context", "allow", "allowed"),
    [
        ("kind-test", None, True),
        ("k3d-a", None, True),
        ("minikube", None, True),
        ("rollout-dev", None, True),
        ("production", None, False),
        ("production-kind-", None, False),
        ("", None, False),
        ("production", "production", True),
        ("production", "prod", False),
    ],
)
def test_contexts(context, allow, allowed):
    assert context_allowed(context, allow) is allowed


def test_the_kubernetes_version_is_that_of_go_mod():
    folder = load_settings({}).go_folder
    assert kubernetes_version((folder / "go.mod").read_text()).startswith("v1.34.")
    # a replacement or a longer module path is not the requirement
    text = "\tk8s.io/kubernetes/x v9.9.9\n\tk8s.io/kubernetes v1.2.3 // indirect\n"
    assert kubernetes_version(text) == "v1.2.3"
    with pytest.raises(ValueError, match=r"k8s\.io/kubernetes"):
        kubernetes_version("module x\n")


def test_the_cache_key_changes_with_every_input(monkeypatch):
    keys = {build.build_key(b"a", b"b"), build.build_key(b"ab", b""), build.build_key(b"a", b"c")}
    monkeypatch.setattr(build, "COREDNS", "other")
    keys.add(build.build_key(b"a", b"b"))
    monkeypatch.setattr(build, "HELM", "other")
    keys.add(build.build_key(b"a", b"b"))
    assert len(keys) == 5


def test_build_plan():
    kubernetes, helm, coredns = build.build_plan(Path("/out"), "v1.34.4")
    flags = kubernetes.argv[kubernetes.argv.index("-ldflags") + 1].split()
    version = "k8s.io/component-base/version"
    assert f"{version}.gitVersion=v1.34.4" in flags
    assert f"{version}.gitMajor=1" in flags
    assert f"{version}.gitMinor=34" in flags
    assert kubernetes.argv[-3:] == ("-o", "/out/", "tool")
    assert helm.argv[-1] == f"helm.sh/helm/v3/cmd/helm@{build.HELM_VERSION}"
    assert coredns.argv[-1] == f"github.com/coredns/coredns@{build.COREDNS_VERSION}"
    assert dict(helm.env)["GOBIN"] == dict(coredns.env)["GOBIN"] == "/out"


def test_only_missing_packages_are_named():
    assert missing_packages(lambda _: True, lambda _: True) == ()
    assert missing_packages(lambda p: p not in ("ctr", "containerd"), lambda _: True) == (
        "containerd",
    )
    everything = missing_packages(lambda _: False, lambda _: False)
    assert set(everything) == {*PROGRAMS.values(), *FILES.values()}
    assert list(everything) == sorted(everything)
