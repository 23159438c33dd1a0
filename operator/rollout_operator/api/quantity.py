"""Kubernetes quantities (``256Mi``, ``1.5G``, ``1e9``) as whole bytes."""

import re
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache
from typing import Final

_FACTORS: Final = {
    "": Decimal(1),
    **{f"{letter}i": Decimal(1024) ** (n + 1) for n, letter in enumerate("KMGTPE")},
    **{letter: Decimal(1000) ** (n + 1) for n, letter in enumerate("kMGTPE")},
    "m": Decimal("0.001"),
}
_QUANTITY: Final = re.compile(
    r"(?P<number>\d+(?:\.\d*)?|\.\d+)(?P<suffix>[eE][+-]?\d{1,2}|[KMGTPE]i|[kMGTPEm]?)", re.ASCII
)


def parse_bytes(quantity: str | int) -> int:
    """Return ``quantity`` in bytes, rounded up as Kubernetes does.

    Raises:
        ValueError: it is no quantity, or negative.
    """
    return _parsed(str(quantity))


# few are ever different, and each task that counts with decimals keeps a context of its own
@lru_cache(maxsize=256)
def _parsed(quantity: str) -> int:
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        raise ValueError(f"{quantity!r} is no quantity: write for example 256Mi, 40Gi or 1e9")
    number, suffix = Decimal(match["number"]), match["suffix"]
    factor = _FACTORS[suffix] if suffix in _FACTORS else Decimal(10) ** int(suffix[1:])
    return int((number * factor).to_integral_value(rounding=ROUND_CEILING))
