"""Merges a person's pod template with what the operator must have."""

import posixpath
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

JsonObject = dict[str, Any]


class TemplateError(ValueError):
    """The template has the wrong shape; the text names the field."""


def pod_template(template: Mapping[str, Any]) -> tuple[JsonObject, JsonObject, JsonObject]:
    """Return copies of the template's labels, annotations and pod spec.

    Raises:
        TemplateError: it is no PodTemplateSpec.
    """
    unknown = sorted(template.keys() - {"metadata", "spec"})
    if unknown:
        raise TemplateError(f"template.{unknown[0]}: unknown field; metadata and spec are known")
    meta = _object(template.get("metadata"), "template.metadata")
    unknown = sorted(
        key for key in meta.keys() - {"labels", "annotations"} if meta[key] is not None
    )
    if unknown:
        raise TemplateError(
            f"template.metadata.{unknown[0]}: not supported; labels and annotations are"
        )
    spec = deepcopy(_object(template.get("spec"), "template.spec"))
    for field in ("containers", "initContainers", "volumes"):
        spec[field] = named(spec.get(field), f"template.spec.{field}")
    return (
        dict(_object(meta.get("labels"), "template.metadata.labels")),
        dict(_object(meta.get("annotations"), "template.metadata.annotations")),
        spec,
    )


def named(items: Any, where: str) -> list[JsonObject]:
    """Return a list of objects that have names (None: an empty one).

    Raises:
        TemplateError: it is something else.
    """
    for index, item in enumerate(_list(items, where)):
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise TemplateError(f"{where}[{index}].name: required")
    return list(items or ())


def take(items: list[JsonObject], name: str) -> JsonObject:
    """Return the first entry of that name; an empty one if there is none."""
    return next((item for item in items if item["name"] == name), {"name": name})


def put(items: list[JsonObject], entry: JsonObject) -> list[JsonObject]:
    """Return ``items`` with ``entry`` in the place of the one of its name, else in front."""
    if any(item["name"] == entry["name"] for item in items):
        return [entry if item["name"] == entry["name"] else item for item in items]
    return [entry, *items]


def same_path(path: str) -> str:
    """Return the one way to write ``path`` inside a container, as kubelet understands it."""
    return posixpath.normpath("/" + path.lstrip("/"))


def override(
    theirs: Any,
    ours: Sequence[JsonObject],
    *,
    key: str,
    where: str,
    alike: Callable[[Any], Any] = lambda value: value,
) -> list[JsonObject]:
    """Return our entries and then theirs whose ``key`` none of ours has.

    ``alike`` maps the ways to write a key to one of them.

    Raises:
        TemplateError: ``theirs`` is no list of objects, or the key of one is of another type.
    """
    taken = {alike(item[key]) for item in ours}
    wanted, words = (int, "a whole number") if key == "containerPort" else (str, "a string")
    rest = []
    for index, item in enumerate(_list(theirs, where)):
        if not isinstance(item, dict):
            raise TemplateError(f"{where}[{index}]: an object is expected")
        if not isinstance(item.get(key), wanted):
            raise TemplateError(f"{where}[{index}].{key}: {words} is expected")
        if alike(item[key]) not in taken:
            rest.append(item)
    return [*ours, *rest]


def defaulted(theirs: Any, ours: Mapping[str, Any], where: str) -> JsonObject:
    """Return an object with our fields, of which theirs overrule the equally named.

    Raises:
        TemplateError: ``theirs`` is no object.
    """
    return {**ours, **_object(theirs, where)}


def _object(value: Any, where: str) -> JsonObject:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TemplateError(f"{where}: an object is expected")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise TemplateError(f"{where}: a list is expected")
    return value
