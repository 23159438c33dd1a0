"""The two files on the pod's own volume that outlive a restart of the container."""

import os
import tempfile
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rollout_pod.protocol import DesiredDocument, WeightsRef
from rollout_pod.supervisor.state import PodState

M = TypeVar("M", bound=BaseModel)


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

    def write_desired(self, document: DesiredDocument) -> None:
        """Keep the accepted document."""
        _write(self._folder / "desired.json", document)

    def read_record(self) -> Record:
        """What was kept last; empty for a new pod."""
        return _read(self._folder / "record.json", Record) or Record()

    def write_record(self, record: Record) -> None:
        """Keep the record."""
        _write(self._folder / "record.json", record)


def _read(path: Path | None, model: type[M]) -> M | None:
    if path is None:
        return None
    try:
        return model.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def _write(path: Path, document: BaseModel) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        # No fsync: it takes as long as a whole cancel, and guards against a loss of power only,
        # after which the document is sent again and the record is made again.
        file.write(document.model_dump_json().encode())
    os.replace(file.name, path)
