"""Sizes that are integers now or expressions in the model's own symbols (``N``, ``H``, ``W``): one small algebra.

Everything in distfx that speaks of a size accepts both. Expressions are sympy; ``torch.export`` brings its own
``FloorDiv``, which is used throughout so that captured sizes and derived ones cancel. This file is the only one
that touches torch's private sympy helpers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import sympy
import torch
from sympy.printing.precedence import PRECEDENCE
from sympy.printing.str import StrPrinter
from torch.utils._sympy.functions import FloorDiv

Size: TypeAlias = int | sympy.Expr

__all__ = [
    "Size",
    "ceildiv",
    "evaluate",
    "evaluate_number",
    "evaluate_shape",
    "floordiv",
    "maximum",
    "minimum",
    "parse_size",
    "product",
    "show",
    "size_of",
]


def floordiv(a: Size, b: Size) -> Size:
    """``a // b``.

    >>> floordiv(7, 2), floordiv(sympy.Symbol("H", integer=True), 1)
    (3, H)
    """
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    return FloorDiv(sympy.sympify(a), sympy.sympify(b))


def ceildiv(a: Size, b: Size) -> Size:
    """``a / b`` rounded up."""
    return floordiv(a + b - 1, b)


def minimum(a: Size, b: Size) -> Size:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else sympy.Min(a, b)


def maximum(a: Size, b: Size) -> Size:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else sympy.Max(a, b)


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; 1 for none."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return result


def size_of(value: Any) -> Size:
    """The int or expression behind an int, a ``torch.SymInt`` or a sympy number."""
    if isinstance(value, torch.SymInt):
        value = value.node.expr
    if isinstance(value, sympy.Integer):
        return int(value)
    return value


class _Printer(StrPrinter):
    """As sympy prints, but floor divisions with no more parentheses than they need."""

    printmethod = "_distfx_str"

    def _print_FloorDiv(self, expr: sympy.Expr) -> str:
        base, divisor = (self.parenthesize(part, PRECEDENCE["Mul"] + 1) for part in expr.args)
        return f"{base}//{divisor}"


@functools.lru_cache(maxsize=4096)
def show(size: Size) -> str:
    """A size for readers.

    >>> H = sympy.Symbol("H", integer=True, positive=True)
    >>> show(floordiv(H - 1, 2) + 1), show(3 * floordiv(H, 2)), show(7)
    ('((H - 1)//2) + 1', '3*(H//2)', '7')
    """
    return str(size) if isinstance(size, int) else str(_Printer().doprint(size))


def parse_size(text: str) -> Size:
    """The size that ``str`` of it printed: symbols are positive whole numbers.

    >>> parse_size("12"), parse_size("H*W")
    (12, H*W)
    """
    names = {name: sympy.Symbol(name, integer=True, positive=True) for name in re.findall(r"[A-Za-z]\w*", text)}
    return size_of(sympy.sympify(text, locals=names))


def evaluate(size: Size, values: Mapping[sympy.Symbol, int]) -> int:
    """The number that ``size`` becomes when the symbols take ``values``."""
    if isinstance(size, int):
        return size
    result = size.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
    if not result.is_number:
        raise ValueError(f"size {size} still depends on {sorted(map(str, result.free_symbols))}")
    return int(result)


def evaluate_number(value: Any, values: Mapping[sympy.Symbol, int]) -> Any:
    """A size, a fraction or a condition of sizes as an argument of a call: an int, a float or a bool.

    >>> H = sympy.Symbol("H", integer=True, positive=True)
    >>> evaluate_number(H / 2, {H: 3}), evaluate_number(H + 1, {H: 3}), evaluate_number(H > 2, {H: 3})
    (1.5, 4, True)
    """
    result = value.xreplace({symbol: sympy.Integer(number) for symbol, number in values.items()})
    if result in (sympy.true, sympy.false):
        return bool(result)
    return int(result) if result.is_integer else float(result)


def evaluate_shape(shape: Iterable[Size], values: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
    return tuple(evaluate(size, values) for size in shape)
