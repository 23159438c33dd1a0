"""Structured outputs: what is checked before vLLM's own class compiles a grammar.

An engine compiles grammars with one backend, picked by the first one that comes, and a request
whose grammar does not compile there ends in an error. So what xgrammar cannot compile is refused,
unless the engine was started with another backend.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollout_pod.engine.base import InvalidSamplingParams

MAX_CHARS = 1 << 16
MAX_S = 2.0
"""vLLM compiles it again in the event loop, and all other requests wait for it."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")

_NAME = "structured_outputs"


def check(given: Any) -> None:
    """Check names and size of what a caller sent; None is none.

    Raises:
        InvalidSamplingParams: says what is wrong.
    """
    if given is None:
        return
    if not isinstance(given, dict):
        raise _refused(f"must be an object that holds one of {', '.join(KINDS)}")
    unknown = sorted(set(given) - {*KINDS, *OPTIONS})
    if unknown:
        raise _refused(f"{unknown[0]} is unknown; allowed are {', '.join((*KINDS, *OPTIONS))}")
    if sum(given.get(kind) is not None for kind in KINDS) != 1:
        raise _refused(f"must hold one of {', '.join(KINDS)}")
    _check_size(given)


def check_made(made: Any) -> None:
    """Check the size of what vLLM's server made, of ``response_format`` or tools as well; None is
    none.

    Raises:
        InvalidSamplingParams: says what is wrong.
    """
    if made is not None:
        _check_size({name: getattr(made, name, None) for name in (*KINDS, *OPTIONS)})


@contextmanager
def timed(params: Any, *, any_backend: bool = False) -> Iterator[None]:
    """While vLLM's class checks ``params``: refuses a grammar that too long a time or another
    backend would be needed for (``any_backend``: vLLM's server picked it for its own tools).

    Raises:
        InvalidSamplingParams: says what is wrong.
    """
    started = time.monotonic()
    yield
    seconds = time.monotonic() - started
    grammar = params.structured_outputs
    if grammar is None:
        return
    if not any_backend and grammar._backend_was_auto and grammar._backend != "xgrammar":
        raise _refused(
            "xgrammar cannot compile it; another backend can be chosen for the whole engine by "
            "--structured-outputs-config"
        )
    if seconds > MAX_S:
        raise _refused(f"took {seconds:.1f} s to compile, of at most {MAX_S:g}; ask for less")


def _check_size(given: dict[str, Any]) -> None:
    try:
        size = len(json.dumps(given))
    except (ValueError, RecursionError) as error:
        raise _refused(str(error)) from error
    if size > MAX_CHARS:
        raise _refused(f"has {size} characters, of at most {MAX_CHARS}")


def _refused(why: str) -> InvalidSamplingParams:
    return InvalidSamplingParams(_NAME, f"{_NAME}: {why}")
