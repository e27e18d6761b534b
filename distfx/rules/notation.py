"""The notation of the rule table: how an operator's iteration space maps to its operands.

``n (g c) [s]..., (g k) c _..., (g k) -> n (g k) s...`` is a convolution. Between the commas stand the operands, one
word for each dim:

- ``n`` a factor (an index of the iteration space); ``(g c)`` several factors merged, the major one first;
- ``[s]`` a window: the dim is read around the positions of factor s;
- ``_`` a dim that stays whole;
- ``word...`` repeated for each spatial dim (``s...`` becomes ``d h w``, ``h w`` or ``w``).

A factor that an operand has but the result has not is summed over.

>>> x = parse("n (g c) [s]..., (g k) c _... -> n (g k) s...", rank=2).operands[0]
>>> x[1], x[2]
(DimPattern(factors=('g', 'c'), window=False), DimPattern(factors=('h',), window=True))
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["DimPattern", "Pattern", "parse"]


@dataclass(frozen=True)
class DimPattern:
    """One dim of an operand: its factors, major first (none: it stays whole)."""

    factors: tuple[str, ...]
    window: bool = False


DimPatterns = tuple[DimPattern, ...]


@dataclass(frozen=True)
class Pattern:
    """A parsed rule."""

    operands: tuple[DimPatterns, ...]
    result: DimPatterns


_WORD = re.compile(r"\(([\w ]+)\)|\[(\w+)\]|(\w+)")
SPACE = {0: (), 1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}


def _words(text: str, rank: int) -> DimPatterns:
    words: list[DimPattern] = []
    for token in re.findall(r"\([^)]*\)\S*|\S+", text.strip()):
        repeated = token.endswith("...")
        match = _WORD.fullmatch(token.removesuffix("..."))
        if match is None:
            raise ValueError(f"cannot read {token!r} in rule {text!r}")
        merged, window, single = match.groups()
        names = tuple((merged or window or single).split())
        for name in SPACE[rank] if repeated else ("",):
            factors = tuple(name if repeated and factor == "s" else factor for factor in names)
            words.append(DimPattern(tuple(f for f in factors if f != "_"), bool(window)))
    return tuple(words)


@lru_cache(maxsize=256)
def parse(text: str, rank: int) -> Pattern:
    """Parse a rule for ``rank`` spatial dims."""
    left, right = text.split("->")
    return Pattern(tuple(_words(operand, rank) for operand in left.split(",")), _words(right, rank))
