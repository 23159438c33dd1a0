"""What one rank says of a load."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self


@dataclass(frozen=True)
class LoadReport:
    """One rank's account of one load.

    ``rank`` is global (data-parallel index x world + rank); ``tensors`` and ``bytes`` are what the
    loader took, ``seconds`` run from the call of ``Receiver.load``; ``error`` is empty if ``ok``.
    ``touched`` is False only if not a byte of the model was changed. ``path`` says how the model
    was loaded (``loader.Path``), ``note`` why not faster and what it left as it was, ``steps`` what
    took how many seconds; ``transport`` and ``mode`` how the bytes came, empty where none did.
    ``manifest`` names what was loaded (``Manifest.mark``): all ranks of an update were given the
    same, by however many senders; it stays on this side of the wire.
    """

    rank: int
    host: str
    ok: bool
    version: str
    tensors: int = 0
    bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    touched: bool = True
    path: str = ""
    note: str = ""
    steps: tuple[tuple[str, float], ...] = ()
    transport: str = ""
    mode: str = ""
    manifest: str = field(default="", compare=False)  # a report is the same without it

    def as_dict(self) -> dict[str, Any]:
        """Only numbers, strings and booleans: fit for msgpack and JSON."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """The reverse of ``as_dict``; unknown keys are ignored.

        Raises:
            ValueError: a required key is missing.
        """
        known = {each.name for each in fields(cls)}
        try:
            return cls(**{key: value for key, value in raw.items() if key in known})
        except TypeError as error:
            raise ValueError(f"not a load report: {error}") from error
