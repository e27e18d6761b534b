"""Sizes: integers, or expressions in the symbols of the model's input (``N``, ``H``, ``W``).

All of distfx accepts both wherever it takes a size. Expressions are those of sympy, with torch's ``FloorDiv`` as the
floor division: captured sizes contain it, and sizes derived from them cancel only if they use the same function. This
is the only module that imports torch's private sympy functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import sympy
import torch
from sympy.printing.precedence import PRECEDENCE
from sympy.printing.str import StrPrinter
from torch.utils._sympy.functions import (
    CeilToInt,
    FloatTrueDiv,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    Mod,
    PythonMod,
    RoundToInt,
    ToFloat,
    TruncToInt,
)

from distfx.errors import DistfxError
from distfx.ir.expressions import Expression, Number, Symbol, excerpt, parse_expression

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
    return FloorDiv(sympy.sympify(a, strict=True), sympy.sympify(b, strict=True))


def ceildiv(a: Size, b: Size) -> Size:
    """``a / b``, rounded up."""
    return floordiv(a + b - 1, b)


def minimum(a: Size, b: Size) -> Size:
    """The smaller of two sizes."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else sympy.Min(a, b)


def maximum(a: Size, b: Size) -> Size:
    """The larger of two sizes."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else sympy.Max(a, b)


def product(sizes: Iterable[Size]) -> Size:
    """The product of ``sizes``, or 1 if there are none."""
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
    """Sympy's printer, with fewer parentheses around floor divisions than torch prints."""

    printmethod = "_distfx_str"

    def _print_FloorDiv(self, expr: sympy.Expr) -> str:
        base, divisor = (self.parenthesize(part, PRECEDENCE["Pow"] + 1) for part in expr.args)
        return f"{base}//{divisor}"


@functools.lru_cache(maxsize=4096)
def show(size: Size) -> str:
    """A size as text, as a person would write it. :func:`parse_size` is the inverse.

    >>> H = sympy.Symbol("H", integer=True, positive=True)
    >>> show(floordiv(H - 1, 2) + 1), show(3 * floordiv(H, 2)), show(7)
    ('((H - 1)//2) + 1', '3*(H//2)', '7')
    """
    return str(size) if isinstance(size, int) else str(_Printer().doprint(size))


def _checked(value: sympy.Expr, text: str) -> sympy.Expr:
    """``value``, unless a coefficient in it is undefined or does not fit into 64 bits."""
    for term in sympy.Add.make_args(value):
        number = term.as_coeff_Mul()[0]
        if not number.is_finite or (number.is_Rational and max(abs(number.p), number.q) >= 2**63):
            raise DistfxError(f"cannot read size {excerpt(text)}: a number in it does not fit into 64 bits")
    return value


def _lazy(function: Callable[..., Any]) -> Callable[..., sympy.Expr]:
    """``function``, evaluated if all operands are numbers.

    Otherwise the call stays as written. Printed sizes are simplified already, and to simplify a hostile one may take
    sympy minutes.
    """
    return lambda *operands: function(*operands, evaluate=all(operand.is_Number for operand in operands))


def _mod(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """Torch's ``Mod``, which is defined for operands that are not negative, continued as Python does."""
    return PythonMod(a, b) if a.is_Number and b.is_Number else Mod(a, b, evaluate=False)


_floordiv, _modulo = _lazy(FloorDiv), _lazy(PythonMod)
_minimum, _maximum = _lazy(sympy.Min), _lazy(sympy.Max)

_OPERATORS: dict[str, Callable[..., sympy.Expr]] = {
    "+": sympy.Add,
    "*": sympy.Mul,
    "-": lambda a: -a,
    "/": lambda a: 1 / a,
    "//": _floordiv,
    "%": _modulo,
    "**": lambda a, b: a**b,
}

_FUNCTIONS: dict[str, tuple[int | None, Callable[..., sympy.Expr]]] = {
    "floor": (1, _lazy(sympy.floor)),
    "ceil": (1, _lazy(sympy.ceiling)),
    "ceiling": (1, _lazy(sympy.ceiling)),
    "min": (None, _minimum),
    "max": (None, _maximum),
    "Min": (None, _minimum),
    "Max": (None, _maximum),
    "Mod": (2, _mod),
    "PythonMod": (2, _modulo),
    "FloorDiv": (2, _floordiv),
    "CleanDiv": (2, _floordiv),
    "CeilDiv": (2, lambda a, b: _floordiv(a + b - 1, b)),
    "ToFloat": (1, _lazy(ToFloat)),
    "IntTrueDiv": (2, _lazy(IntTrueDiv)),
    "FloatTrueDiv": (2, _lazy(FloatTrueDiv)),
    "TruncToInt": (1, _lazy(TruncToInt)),
    "FloorToInt": (1, _lazy(FloorToInt)),
    "CeilToInt": (1, _lazy(CeilToInt)),
    "RoundToInt": (1, _lazy(RoundToInt)),
}
"""The functions that printed sizes call, torch's included: number of arguments (``None``: any) and meaning."""

_ARITY = {name: count for name, (count, _) in _FUNCTIONS.items()}
_DIVISIONS = ("/", "//", "%", "Mod", "PythonMod", "FloorDiv", "CleanDiv", "CeilDiv", "IntTrueDiv", "FloatTrueDiv")


def parse_size(text: str) -> Size:
    """The size that ``text`` describes: the inverse of ``str`` and :func:`show`.

    Symbols are positive integers. :mod:`distfx.ir.expressions` has the grammar; nothing is executed, whatever the text.

    >>> parse_size("12"), parse_size("H*W"), parse_size("2*((H - 1)//2) + min(W, 7)")
    (12, H*W, 2*(((H - 1)//2)) + Min(7, W))
    """

    def build(tree: Expression) -> sympy.Expr:
        if isinstance(tree, Symbol):
            return sympy.Symbol(tree.name, integer=True, positive=True)
        if isinstance(tree, Number):
            return sympy.Integer(tree.value) if isinstance(tree.value, int) else sympy.Float(tree.value)
        operands = [build(operand) for operand in tree.operands]
        if tree.name in _DIVISIONS or (tree.name == "**" and operands[1].is_negative):
            divisor = operands[0] if tree.name == "**" else operands[-1]
            if divisor.is_Number and divisor.is_zero:
                raise DistfxError(f"cannot read size {excerpt(text)}: {tree.name!r} divides by zero")
        function = _OPERATORS[tree.name] if tree.name in _OPERATORS else _FUNCTIONS[tree.name][1]
        return _checked(function(*operands), text)

    size = build(parse_expression(text, _ARITY))
    if size.is_number and not size.is_Integer:
        raise DistfxError(f"size {excerpt(text)} is {size}, which is not an integer: use // to divide")
    return size_of(size)


def evaluate(size: Size, values: Mapping[sympy.Symbol, int]) -> int:
    """The value of ``size`` for these ``values`` of its symbols."""
    if isinstance(size, int):
        return size
    result = size.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
    if not result.is_number:
        symbols = ", ".join(sorted(map(str, result.free_symbols)))
        raise ValueError(f"the value of size {size} is unknown because {symbols} has no value")
    return int(result)


def evaluate_number(value: Any, values: Mapping[sympy.Symbol, int]) -> Any:
    """The value of a size, a fraction or a condition, as an int, a float or a bool.

    >>> H = sympy.Symbol("H", integer=True, positive=True)
    >>> evaluate_number(H / 2, {H: 3}), evaluate_number(H + 1, {H: 3}), evaluate_number(H > 2, {H: 3})
    (1.5, 4, True)
    """
    result = value.xreplace({symbol: sympy.Integer(number) for symbol, number in values.items()})
    if result in (sympy.true, sympy.false):
        return bool(result)
    return int(result) if result.is_integer else float(result)


def evaluate_shape(shape: Iterable[Size], values: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
    """The value of each size of a shape."""
    return tuple(evaluate(size, values) for size in shape)
