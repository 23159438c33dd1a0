"""The OpenAPI documents of both ports, with every error as the problem that it is."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rollout_pod.protocol import (
    PROBLEM_MEDIA_TYPE,
    TOKEN_HEADER,
    GenerateDelta,
    GenerateEnd,
    Problem,
)

SCHEMA_PATH = "/openapi.json"

_REF = "#/components/schemas/{model}"
_MEANINGS = {
    400: "Not valid JSON, or refused by the engine",
    401: "No token, or a wrong one",
    404: "Not found",
    409: "Another one is alive or in force",
    412: "``If-Match`` names an older state",
    413: "The body is too large",
    422: "A field or a parameter is invalid; ``errors`` names each",
    500: "The fault is the pod's",
    502: "The weights agent of this node failed",
    503: "Not now: ask again, here or elsewhere",
    507: "The pod's run folder is full, or cannot be written; nothing has changed",
}


def _event(name: str, model: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model=model.__name__)}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    return {
        "type": "object",
        "required": ["event", "data"],
        "properties": {"event": {"const": name}, "data": data},
    }


STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The tokens of this attempt, or with ``stream`` events that hold them",
        "content": {
            "text/event-stream": {
                "schema": {
                    "description": "Each event: ``delta``, then one ``end`` or ``error``",
                    "oneOf": [
                        _event("delta", GenerateDelta),
                        _event("end", GenerateEnd),
                        _event("error", Problem),
                    ],
                }
            }
        },
    }
}
"""The answer of a rollout, beside its JSON."""


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For ``responses=`` of a route: it may answer a problem with one of these."""
    return {status: _problem(status) for status in statuses}


def _problem(status: int) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model=Problem.__name__)}
    documented: dict[str, Any] = {
        "description": _MEANINGS[status],
        "content": {PROBLEM_MEDIA_TYPE: {"schema": schema}},
    }
    if status == 503:
        documented["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return documented


def schema_of(app: FastAPI, *, needs_token: bool) -> dict[str, Any]:
    """The OpenAPI document of an app whose routes are complete."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    ours: list[Any] = [(model, "serialization") for model in (Problem, GenerateDelta, GenerateEnd)]
    _, definitions = models_json_schema(ours[: 1 if needs_token else None], ref_template=_REF)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(definitions["$defs"])
    if needs_token:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": TOKEN_HEADER},
        }
        document["security"] = [{"bearer": []}, {"header": []}]
    return document
