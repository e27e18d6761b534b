"""Specs of operators whose dims a pattern cannot express: reshape, einsum, cat, and indexing by tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx import Node

from distfx.ir.layout import Window
from distfx.ir.meta import meta
from distfx.ir.nodes import arguments
from distfx.ir.symbolic import Size, product, size_of
from distfx.rules.notation import DimPattern, DimPatterns
from distfx.rules.rule import OpSpec, Rule

__all__ = ["cat", "einsum", "index", "reshape"]


def _spec(
    rule: Rule,
    node: Node,
    operands: Sequence[tuple[Node, Sequence[str]]],
    result: Sequence[str],
    windows: Mapping[tuple[int, str], Window] | None = None,
) -> OpSpec:
    """A spec with one factor for each dim, or ``""`` for a dim that is not split. A dim of one broadcasts."""
    extents: dict[str, Size] = {}
    for tensor, factors in [(node, result), *operands]:
        for factor, size in zip(factors, meta(tensor).shape, strict=True):
            extents[factor] = size if extents.get(factor, 1) == 1 else extents[factor]

    def dims(index: int | None, tensor: Node, factors: Sequence[str]) -> DimPatterns:
        pairs = zip(factors, meta(tensor).shape, strict=True)
        return tuple(
            DimPattern((), False)
            if not factor or (size == 1 and extents[factor] != 1 and (index, factor) not in (windows or {}))
            else DimPattern((factor,), (index, factor) in (windows or {}))
            for factor, size in pairs
        )

    return OpSpec(
        rule,
        node,
        tuple((tensor, dims(i, tensor, factors)) for i, (tensor, factors) in enumerate(operands)),
        dims(None, node, result),
        {factor: size for factor, size in extents.items() if factor},
        windows or {},
    )


def einsum(rule: Rule, node: Node) -> OpSpec | None:
    """One factor for each letter of the equation. Letters that the result lacks are summed over."""
    equation: Any = node.args[0]
    tensors: Any = node.args[1]
    operands, result = _einsum_letters(equation, [len(meta(tensor).shape) for tensor in tensors])
    if any(len(set(letters)) < len(letters) for letters in operands):
        return None  # a diagonal
    return _spec(rule, node, list(zip(tensors, operands, strict=True)), result)


def _einsum_letters(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, with letters in place of the ellipsis."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    widest = max([ndim - len(t.replace("...", "")) for t, ndim in zip(terms, ranks, strict=True) if "..." in t] or [0])
    unnamed = [c for c in map(chr, range(0xE000, 0xE000 + widest))]  # letters that no equation has

    def expand(term: str, ndim: int) -> str:
        return term.replace("...", "".join(unnamed[widest - (ndim - len(term) + 3) :])) if "..." in term else term

    operands = [expand(term, ndim) for term, ndim in zip(terms, ranks, strict=True)]
    if arrow:
        return operands, right.replace("...", "".join(unnamed))
    once = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
    return operands, "".join(unnamed) + "".join(once)


def cat(rule: Rule, node: Node) -> OpSpec | None:
    """Along a split dim each operand contributes its part of the block and zeros elsewhere; the parts are added."""
    a = arguments(node)
    operands, ndim = a["tensors"], len(meta(node).shape)
    if any(len(meta(operand).shape) != ndim for operand in operands):
        return None
    factors = [f"d{i}" for i in range(ndim)]
    dim = a["dim"] % ndim
    if len(set(operands)) < len(operands) or len(operands) == 1:
        factors[dim] = ""
        return _spec(rule, node, [(operand, factors) for operand in dict.fromkeys(operands)], factors)
    windows, offset = {}, 0
    for number, operand in enumerate(operands):
        windows[number, factors[dim]] = Window(lo=offset, hi=-offset)
        offset = offset + meta(operand).shape[dim]
    return _spec(rule, node, [(operand, factors) for operand in operands], factors, windows)


def index(rule: Rule, node: Node) -> OpSpec | None:
    """``x[:, i, j]``: the indexed dims are not split. The dims of the indices take the place of the first of them."""
    x: Any = node.args[0]
    indices: Any = node.args[1]
    indexed = [i for i, each in enumerate(indices) if each is not None]
    tensors = [indices[i] for i in indexed]
    if any(meta(tensor).dtype == torch.bool for tensor in tensors):
        return None
    factors = ["" if i in indexed else f"d{i}" for i in range(len(meta(x).shape))]
    kept = [factor for factor in factors if factor]
    added = [""] * (len(meta(node).shape) - len(kept))
    first = indexed[0] if indexed == list(range(indexed[0], indexed[0] + len(indexed))) else 0
    operands: list[tuple[Node, Sequence[str]]] = [(x, factors)]
    operands += [(tensor, [""] * len(meta(tensor).shape)) for tensor in dict.fromkeys(tensors)]
    return _spec(rule, node, operands, [*kept[:first], *added, *kept[first:]])


# --------------------------------------------------------------------------------------------------- reshape


def reshape(rule: Rule, node: Node) -> OpSpec | None:
    """Runs of dims with equal products correspond. In each run both sides have the same factors, the major first."""
    x: Any = node.args[0]
    source, result, extents = _common_factors(tuple(meta(x).shape), tuple(meta(node).shape))
    return OpSpec(rule, node, ((x, source),), result, extents)


@lru_cache(maxsize=4096)
def _common_factors(
    before: tuple[Size, ...], after: tuple[Size, ...]
) -> tuple[DimPatterns, DimPatterns, dict[str, Size]]:
    """The factors of both shapes, and their extents."""
    source, result = [DimPattern(())] * len(before), [DimPattern(())] * len(after)
    extents: dict[str, Size] = {}
    for number, (left, right) in enumerate(_runs(before, after)):
        rest = {side: [sizes[i] for i in dims] for side, (sizes, dims) in enumerate(((before, left), (after, right)))}
        while rest[0] and rest[1]:
            a, b = rest[0][0], rest[1][0]
            step = a if _divides(a, b) else b if _divides(b, a) else None
            if step is None:
                break  # the remaining dims of the run are not split
            name = f"f{number}_{len(extents)}"
            extents[name] = step
            for side, patterns, dims in ((0, source, left), (1, result, right)):
                dim = dims[len(dims) - len(rest[side])]
                patterns[dim] = DimPattern((*patterns[dim].factors, name))
                quotient = size_of(sympy.sympify(rest[side][0]) / step)
                rest[side] = [quotient, *rest[side][1:]] if quotient != 1 else rest[side][1:]
        for side, patterns, dims in ((0, source, left), (1, result, right)):
            for i, size in enumerate(rest[side]):  # a minor part that has no counterpart
                dim = dims[len(dims) - len(rest[side]) + i]
                if patterns[dim].factors:
                    name = f"r{number}_{side}_{i}"
                    extents[name] = size
                    patterns[dim] = DimPattern((*patterns[dim].factors, name))
    return tuple(source), tuple(result), extents


def _same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for all values of their symbols. A few numbers are tried first to save time."""
    if a == b or (isinstance(a, int) and isinstance(b, int)):
        return a == b
    difference = sympy.sympify(a) - b
    symbols = sorted(difference.free_symbols, key=str)
    for first in (64, 96, 37):
        if difference.xreplace({symbol: sympy.Integer(first + 32 * i) for i, symbol in enumerate(symbols)}) != 0:
            return False
    return bool(sympy.expand(difference) == 0 or sympy.simplify(difference) == 0)


def _divides(a: Size, b: Size) -> bool:
    """Whether ``b`` is known to be a multiple of ``a``."""
    return bool((sympy.sympify(b) / a).is_integer)


def _runs(before: Sequence[Size], after: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    """Pairs of runs of dims whose extents have the same product, without dims of extent one."""
    left = [i for i, size in enumerate(before) if size != 1]
    right = [i for i, size in enumerate(after) if size != 1]
    runs: list[tuple[list[int], list[int]]] = []
    while left and right:
        take, give = [left.pop(0)], [right.pop(0)]
        while not _same(product(before[i] for i in take), product(after[i] for i in give)):
            quotient = sympy.sympify(product(after[i] for i in give)) / product(before[i] for i in take)
            grow_left = bool(quotient > 1) if quotient.is_number else quotient.as_numer_denom()[1] == 1
            if grow_left and left:
                take.append(left.pop(0))
            elif right:
                give.append(right.pop(0))
            elif left:
                take.append(left.pop(0))
            else:
                return runs
        runs.append((take, give))
    return runs
