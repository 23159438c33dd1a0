"""What the fuzz tests share: the ports' OpenAPI documents as fuzzers, and what no answer may hold.

The cases are the same in every run; with ``FUZZ_AT_RANDOM`` set in the environment they are new.
"""

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CheckContext
from schemathesis.config import SchemathesisConfig

from rollout_pod.server.admin_app import make_admin_app
from rollout_pod.server.auth import Tokens
from rollout_pod.server.data_app import make_data_app
from rollout_pod.server.schema import schema_of
from rollout_pod.supervisor.store import Store
from rollout_pod.supervisor.supervisor import Supervisor
from tests.support.fakes import FakeAgent, FakeEngine

ROOT = Path(__file__).resolve().parents[2]

GENERATE = "POST /v1/rollout/generate"

quick = settings(deadline=None, suppress_health_check=list(HealthCheck))


def fuzzer(document: Mapping[str, Any], *, examples: int, valid_only: bool = False) -> Any:
    """All checks of schemathesis but one: valid data may be refused by the engine, which knows
    more of it than a document can say.
    """
    config = {
        "checks": {
            "positive_data_acceptance": {"enabled": False},
            "negative_data_rejection": {"enabled": not valid_only},
        },
        "generation": {
            "mode": "positive" if valid_only else "all",
            "max-examples": examples,
            "deterministic": not os.environ.get("FUZZ_AT_RANDOM"),
            "with-security-parameters": False,  # the test gives the token, or none
        },
    }
    return schemathesis.openapi.from_dict(
        dict(document), config=SchemathesisConfig.from_dict(config)
    )


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the data port and of the admin port: they need no pod that runs."""
    with tempfile.TemporaryDirectory() as folder:
        supervisor = Supervisor(FakeEngine(), FakeAgent(), Store(Path(folder)))
    data = schema_of(make_data_app(supervisor), needs_token=False)
    admin = schema_of(make_admin_app(supervisor, Tokens(Path(folder))), needs_token=True)
    return data, admin


def close_to_valid(
    document: Mapping[str, Any], *, sampling: Mapping[str, Any], vocab_size: int
) -> dict[str, Any]:
    """Only ``GENERATE``, with short prompts of about this vocabulary and known sampling parameters,
    so that most cases reach the engine.
    """
    path = GENERATE.split()[1]
    request = document["components"]["schemas"]["GenerateRequest"]
    tokens = {
        "type": "array", "minItems": 1, "maxItems": 40,
        "items": {"type": "integer", "minimum": 0, "maximum": vocab_size},
    }  # fmt: skip
    properties = request["properties"] | {
        "prompt_token_ids": tokens,
        "generated_token_ids": tokens | {"minItems": 0},
        "sampling_params": {
            "type": "object", "properties": dict(sampling), "additionalProperties": False,
        },
    }  # fmt: skip
    schemas = document["components"]["schemas"] | {
        "GenerateRequest": request | {"properties": properties}
    }
    return dict(document) | {
        "paths": {path: document["paths"][path]},
        "components": document["components"] | {"schemas": schemas},
    }


def shown(answer: Any, secrets: Iterable[str]) -> list[str]:
    """What of the pod's inside an answer shows."""
    inside = [*secrets, "Traceback (most recent call last)", str(ROOT), sys.prefix, "site-packages"]
    told = answer.content.decode(errors="replace") + str(dict(answer.headers))
    return [word for word in inside if word in told]


def no_leak(secrets: Sequence[str]) -> Any:
    """``shown``, as a check."""

    def check_leak(ctx: CheckContext, response: Any, case: schemathesis.Case) -> None:
        assert not shown(response, secrets)

    return check_leak
