"""The chart's files by themselves; tests/cluster/test_chart.py renders them with helm."""

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "rollout-operator"


def test_the_charts_crd_is_the_crd():
    ours, theirs = (
        (ROOT / "crds" / "rolloutreplica.yaml").read_bytes(),
        (CHART / "files" / "rolloutreplica.yaml").read_bytes(),
    )
    same = ours == theirs
    assert same, "run: cp crds/rolloutreplica.yaml helm/rollout-operator/files/"


def test_versions_agree():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{chart["appVersion"]}"\n' in project


def test_the_schema_knows_every_value_and_refuses_others():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert missing(values, schema) == []
    assert set(schema["properties"]) - {"global"} == set(values)
    for name, part in {"": schema, **schema["properties"]}.items():
        if "properties" in part:
            assert part["additionalProperties"] is False, name


def missing(values: dict, schema: dict, path: str = "") -> list[str]:
    found = []
    for name, value in values.items():
        part = schema.get("properties", {}).get(name)
        if part is None:
            found += [f"{path}{name}"] if "properties" in schema else []
        elif isinstance(value, dict):
            found += missing(value, part, f"{path}{name}.")
    return found


def test_the_schemas_comparison_can_fail():
    schema = {"properties": {"a": {"properties": {"b": {}}}}}
    assert missing({"a": {"b": 1, "c": 2}, "d": 3}, schema) == ["a.c", "d"]


def test_every_variable_of_the_deployment_is_a_setting_of_the_operator():
    from rollout_operator.settings import Settings

    text = (CHART / "templates" / "deployment.yaml").read_text()
    named = {name.lower() for name in re.findall(r"name: ROLLOUT_OPERATOR_(\w+)", text)}
    assert named
    assert named <= set(Settings.model_fields)


@pytest.mark.parametrize(
    "name",
    [
        "replica.yaml",
        "replica-gpu.yaml",
        "replica-url.yaml",
        "replica-push.yaml",
        "async_grpo/replica.yaml",
    ],
)
def test_examples_name_no_field_that_the_crd_lacks(name):
    crd = yaml.safe_load((ROOT / "crds" / "rolloutreplica.yaml").read_text())
    (version,) = crd["spec"]["versions"]
    spec_schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    replica = yaml.safe_load((ROOT / "examples" / name).read_text())
    assert missing(replica["spec"], spec_schema) == []
    assert replica["apiVersion"] == f"{crd['spec']['group']}/{version['name']}"
    assert replica["kind"] == crd["spec"]["names"]["kind"]


@pytest.mark.parametrize("folder", ["operator", "rollout_pod"])
def test_dockerfiles_run_as_the_user_that_the_manifests_name(folder):
    text = (ROOT / folder / "Dockerfile").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    user = values["podSecurityContext"]["runAsUser"]
    assert f"\nUSER {user}:{user}\n" in text
    images = re.findall(r"^(?:ARG BASE=|FROM )(\S+)", text, re.MULTILINE)
    pinned = [image for image in images if not image.startswith("${")]
    assert pinned
    assert all(re.search(r":\d+\.\d+\.\d+", image) for image in pinned)


def test_the_bootstrap_installs_the_uv_that_the_images_build_with():
    text = (ROOT / "scripts" / "bootstrap.py").read_text()
    (version,) = re.findall(r'^UV_VERSION = "(.+)"$', text, re.MULTILINE)
    for folder in ("operator", "rollout_pod"):
        assert f"\nARG UV_VERSION={version}\n" in (ROOT / folder / "Dockerfile").read_text()
