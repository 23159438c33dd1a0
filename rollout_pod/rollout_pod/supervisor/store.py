"""The two files on the pod's own volume that outlive a restart of the container."""

import errno
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rollout_pod.protocol import DesiredDocument, WeightsRef
from rollout_pod.supervisor.state import PodState

M = TypeVar("M", bound=BaseModel)

_FULL: Final = {errno.ENOSPC, errno.EDQUOT}


class StoreError(Exception):
    """The run folder cannot be written; the message names it, the cause and the remedy."""


class Record(BaseModel):
    """What the pod remembers of its own past."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    last_committed: WeightsRef | None = None
    rejected: WeightsRef | None = None
    rejected_message: str | None = None
    load_failures: tuple[tuple[WeightsRef, int], ...] = ()


def record_of(state: PodState) -> Record:
    """What of a state outlives the process."""
    return Record(
        last_committed=state.last_committed,
        rejected=state.rejected,
        rejected_message=state.rejected_message,
        load_failures=state.load_failures,
    )


class Store:
    """Reads and writes ``desired.json`` and ``record.json``, each atomically.

    A file that cannot be read counts as absent: the operator or the client sends the document
    again, and without a record nothing is served that nobody asked for.
    """

    def __init__(self, folder: Path, *, first_desired: Path | None = None) -> None:
        self._folder = folder
        self._first_desired = first_desired

    def read_desired(self) -> DesiredDocument | None:
        """The newest accepted document; else the one the pod was created with."""
        for path in (self._folder / "desired.json", self._first_desired):
            document = _read(path, DesiredDocument)
            if document is not None:
                return document
        return None

    def write_desired(self, document: DesiredDocument, record: Record | None = None) -> None:
        """Keep the accepted document, and with it the record, if it changes the record.

        Raises:
            StoreError: the folder is full, or cannot be written; what was kept before is kept.
        """
        # The record first: if only that is kept, a version is tried once more than it needed. With
        # only the document, one that was asked for again would stay rejected.
        records = {"record.json": record} if record is not None else {}
        _write(self._folder, {**records, "desired.json": document})

    def read_record(self) -> Record:
        """What was kept last; empty for a new pod."""
        return _read(self._folder / "record.json", Record) or Record()

    def write_record(self, record: Record) -> None:
        """Keep the record.

        Raises:
            StoreError: the folder is full, or cannot be written; what was kept before is kept.
        """
        _write(self._folder, {"record.json": record})


def _read(path: Path | None, model: type[M]) -> M | None:
    if path is None:
        return None
    try:
        return model.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def _write(folder: Path, documents: Mapping[str, BaseModel]) -> None:
    drafts: list[tuple[str, Path]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, document in documents.items():
            with tempfile.NamedTemporaryFile(dir=folder, prefix=name, delete=False) as file:
                drafts.append((file.name, folder / name))
                # No fsync: it takes as long as a whole cancel, and guards against a loss of power
                # only, after which the document is sent again and the record is made again.
                file.write(document.model_dump_json().encode())
        # only now: a disk that is full is so before anything was replaced
        for draft, path in drafts:
            os.replace(draft, path)
    except OSError as error:
        raise StoreError(_explain(folder, error)) from error
    finally:
        for draft, _ in drafts:
            with suppress(OSError):  # mostly gone: it has become the file itself
                os.unlink(draft)


def _explain(folder: Path, error: OSError) -> str:
    remedy = (
        "free space there, or give the pod more ephemeral-storage"
        if error.errno in _FULL
        else "name one that this process may write to"
    )
    return f"run folder {folder}: {error.strerror or error}; {remedy}"
