"""Label selectors by equality: the API server applies them to lists, we to single objects."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


class _Wants(Enum):
    EQUAL = auto()
    OTHER = auto()
    PRESENT = auto()
    ABSENT = auto()


@dataclass(frozen=True, kw_only=True)
class Selector:
    """``key=value``, ``key!=value``, ``key`` and ``!key``, joined by commas; empty: everything."""

    text: str
    _parts: tuple[tuple[_Wants, str, str], ...]

    @classmethod
    def parse(cls, text: str) -> "Selector":
        """Read a selector.

        Raises:
            ValueError: it is written in another way (``in`` and ``notin`` are not known here).
        """
        parts = [_part(part.strip()) for part in text.split(",")] if text.strip() else []
        return cls(text=",".join(part.strip() for part in text.split(",")), _parts=tuple(parts))

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Tell whether an object with these labels is meant."""
        return all(_holds(wants, labels.get(key), value) for wants, key, value in self._parts)


def _holds(wants: _Wants, found: str | None, value: str) -> bool:
    match wants:
        case _Wants.EQUAL:
            return found == value
        case _Wants.OTHER:
            # as Kubernetes has it: what lacks the label is another
            return found != value
        case _Wants.PRESENT:
            return found is not None
        case _Wants.ABSENT:
            return found is None


def _part(text: str) -> tuple[_Wants, str, str]:
    for sign, wants in (("!=", _Wants.OTHER), ("==", _Wants.EQUAL), ("=", _Wants.EQUAL)):
        key, found, value = text.partition(sign)
        if found:
            return wants, _name(key, text), _name(value, text, empty=True)
    if text.startswith("!"):
        return _Wants.ABSENT, _name(text[1:], text), ""
    return _Wants.PRESENT, _name(text, text), ""


def _name(text: str, whole: str, *, empty: bool = False) -> str:
    name = text.strip()
    allowed = set("-._/").union("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
    if (not name and not empty) or not allowed.issuperset(name):
        raise ValueError(
            f"{whole!r} is no part of a label selector: write key=value, key!=value, key or !key"
        )
    return name
