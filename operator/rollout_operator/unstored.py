"""What Kopf keeps of each object for handlers that tell changes apart. We have none: keep nothing.

Of a restart with thousands of replicas, half of the time went into copies that nobody read.
"""

from collections.abc import Iterable
from typing import Any, Self, cast

import kopf


class NoDiffBase(kopf.DiffBaseStorage):
    """Remembers no object as it was handled last."""

    def build(
        self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None
    ) -> kopf.BodyEssence:
        """Return an empty essence instead of a copy of the object."""
        return cast("kopf.BodyEssence", {})

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        """Return that nothing was remembered."""
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Write nothing."""


class NoProgress(kopf.ProgressStorage):
    """Remembers no handler's progress."""

    def fetch(self, *, key: Any, body: kopf.Body) -> None:
        """Return that there is none."""

    def store(self, *, key: Any, record: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """Write nothing."""

    def purge(self, *, key: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """Write nothing."""

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: str | None) -> None:
        """Write nothing."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """Return it as it is: it is empty."""
        return essence


class NoMemo:
    """One for all objects."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self
