"""The CRD and the Python models say the same."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_operator.api import names
from rollout_operator.api.spec import RolloutSpec
from rollout_operator.api.status import ReplicaStatus

FILE = Path(__file__).parents[2] / "crds" / "rolloutreplica.yaml"
CRD = yaml.safe_load(FILE.read_text())
VERSION = CRD["spec"]["versions"][0]
ROOT = VERSION["schema"]["openAPIV3Schema"]["properties"]
MODELS = {"spec": RolloutSpec, "status": ReplicaStatus}
BOUNDS = (
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "maxItems",
    "pattern",
    "enum",
    "minItems",
)


def resolve(node: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """Return a pydantic schema node without references and without "or null"."""
    if "$ref" in node:
        target = defs[node["$ref"].rpartition("/")[2]]
        node = {**target, **{k: v for k, v in node.items() if k != "$ref"}}
    options = [o for o in node.get("anyOf", ()) if o.get("type") != "null"]
    if len(options) == 1:
        rest = {k: v for k, v in node.items() if k != "anyOf"}
        return resolve({**options[0], **rest}, defs)
    if {o.get("type") for o in options} == {"string", "integer"}:
        lengths = {k: v for o in options for k, v in o.items() if k != "type"}
        rest = {k: v for k, v in node.items() if k != "anyOf"}
        return {"type": "int-or-string", **lengths, **rest}
    return node


def of_model(root: str) -> dict[str, dict[str, Any]]:
    """Return what the Python model says of every field, by path."""
    schema = MODELS[root].model_json_schema(by_alias=True)
    found: dict[str, dict[str, Any]] = {}

    def walk(node: dict[str, Any], path: str) -> None:
        node = resolve(node, schema.get("$defs", {}))
        found[path] = facts(node)
        for name, child in node.get("properties", {}).items():
            walk(child, f"{path}.{name}")
        if node.get("type") == "array":
            walk(node["items"], f"{path}[]")

    walk(schema, root)
    return found


def of_crd(root: str) -> dict[str, dict[str, Any]]:
    """Return what the CRD says of every field, by path."""
    found: dict[str, dict[str, Any]] = {}

    def walk(node: dict[str, Any], path: str) -> None:
        if node.get("x-kubernetes-int-or-string"):
            node = {**node, "type": "int-or-string"}
            # the pattern is parse_bytes in Python
            node.pop("pattern", None)
        found[path] = facts(node)
        for name, child in node.get("properties", {}).items():
            walk(child, f"{path}.{name}")
        if node.get("type") == "array":
            walk(node["items"], f"{path}[]")

    walk(ROOT[root], root)
    return found


def facts(node: dict[str, Any]) -> dict[str, Any]:
    return {"type": node.get("type"), **{k: node[k] for k in BOUNDS if k in node}}


@pytest.mark.parametrize("root", ["spec", "status"])
def test_every_field_of_the_crd_is_in_the_model_and_the_other_way_round(root: str):
    crd, model = of_crd(root), of_model(root)
    assert crd.keys() == model.keys()


@pytest.mark.parametrize("root", ["spec", "status"])
def test_types_and_bounds_agree(root: str):
    crd, model = of_crd(root), of_model(root)
    for path, theirs in model.items():
        for key, value in crd[path].items():
            # int32 and uint limits that the CRD has for itself are formats, not bounds
            if key in theirs or key == "type":
                assert theirs.get(key) == value, (path, key)
        for key, value in theirs.items():
            assert crd[path].get(key) == value, (path, key)


def test_defaults_agree():
    by_crd = RolloutSpec.model_validate({"model": "m", **_defaults(ROOT["spec"])})
    assert by_crd == RolloutSpec(model="m")
    # the other way round: what the model fills in, the API server fills in as well
    filled = RolloutSpec(model="m").model_dump(mode="json", by_alias=True, exclude_none=True)
    assert _defaults(ROOT["spec"]) | {"model": "m"} == filled


def _defaults(node: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, child in node["properties"].items():
        if "default" in child:
            nested = _defaults(child) if "properties" in child else child["default"]
            found[name] = nested
    return found


def _nodes(node: Any, path: str = "") -> Any:
    if isinstance(node, dict):
        if "type" in node and isinstance(node["type"], str):
            yield path, node
        for name, child in node.get("properties", {}).items():
            yield from _nodes(child, f"{path}.{name}")
        if "items" in node:
            yield from _nodes(node["items"], f"{path}[]")


def test_every_field_is_described_and_bounded():
    for root in MODELS:
        for path, node in _nodes(ROOT[root], root):
            if not path.endswith("[]"):
                text = node.get("description", "")
                assert text.endswith("."), path
                assert len(text) > 8, path
            if node["type"] == "string" and node.get("format") != "date-time":
                assert "maxLength" in node or "enum" in node, path
            if node["type"] == "array":
                assert "maxItems" in node, path


def test_names_agree():
    spec = CRD["spec"]
    assert spec["group"] == names.GROUP
    assert VERSION["name"] == names.VERSION
    assert spec["names"]["plural"] == names.PLURAL
    assert spec["names"]["kind"] == names.KIND
    assert spec["names"]["shortNames"] == ["rr"]
    assert spec["names"]["categories"] == ["all"]
    assert VERSION["subresources"] == {"status": {}}


def test_printer_columns():
    columns = [(c["name"], c.get("priority", 0)) for c in VERSION["additionalPrinterColumns"]]
    assert columns == [
        ("Ready", 0),
        ("Phase", 0),
        ("Weights", 0),
        ("Target", 0),
        ("Paused", 0),
        ("Age", 0),
        ("Restarts", 1),
        ("Nodes", 1),
        ("Endpoint", 1),
        ("Reason", 1),
    ]
