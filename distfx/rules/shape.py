"""Operators that only move elements: pad, crop, slice, concatenate, roll, reshape, permute, expand."""

from __future__ import annotations

import math
from typing import Any

import sympy
from torch.fx import Node

from distfx.ir import ops
from distfx.ir.layout import Window
from distfx.ir.meta import meta
from distfx.ir.symbolic import Size, product, size_of
from distfx.rules.notation import DimPattern
from distfx.rules.rule import BoundCall, Call, LocalContext, OpSpec, Rule, aten, spec_from_dims, unchanged

__all__ = ["CAT", "EXPAND", "FLIP", "PAD", "PERMUTE", "RESHAPE", "ROLL", "RULES", "SELECT", "SLICE"]


def _pad_widths(node: Node) -> list[tuple[Any, Any]]:
    """For each dim the width before and after, from the first dim on."""
    rank = len(meta(node).shape)
    flat: list[Any] = list(node.args[1])  # type: ignore[arg-type]
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def _pad_spec(rule: Rule, node: Node) -> OpSpec | None:
    x: Any = node.args[0]
    widths = _pad_widths(node)
    every = list(range(len(widths)))
    windows = {(0, i): Window(lo=lo, hi=-lo) for i, (lo, hi) in enumerate(widths) if (lo, hi) != (0, 0)}
    mode = str(node.args[2]) if len(node.args) > 2 else "constant"
    value: Any = node.args[3] if len(node.args) > 3 else None
    return spec_from_dims(rule, node, [(x, every)], every, windows, mode, float(value or 0.0))


def _local_pad(context: LocalContext) -> Call:
    args = context.args
    widths = [(0, 0) if context.axes.get(f"d{i}") else pair for i, pair in enumerate(_pad_widths(context.node))]
    flat = [width for pair in widths[::-1] for width in pair][: len(args[1])]
    if all(width == 0 for width in flat):
        return aten.alias.default, (args[0],), {}
    return aten.pad.default, (args[0], flat, *args[2:]), {}


def _check_pad(call: BoundCall) -> str | None:
    if call.spec.mode not in ("reflect", "circular"):
        return None
    source = call.operand(0)
    for (_, factor), window in call.spec.windows.items():
        dim, before = int(factor[1:]), call.number(window.lo)
        width = max(before, call.shape[dim] - source[dim] - before)
        if width > source[dim] - (call.spec.mode == "reflect"):
            return f"pads dim {dim} of extent {source[dim]} by {width} in mode {call.spec.mode}, which is too much"
    return None


PAD = Rule(
    "pad",
    "... -> ...",
    _local_pad,
    build=_pad_spec,
    check=_check_pad,
    cost="the rows that change their owner, in every mode",
)


def _slice_bounds(node: Node) -> tuple[int, Any, Any]:
    """Dim, start and step of a slice, start counted from the front."""
    args = [*node.args, *(None,) * (5 - len(node.args))]
    x: Any = args[0]
    dim: Any = args[1] or 0
    dim %= len(meta(x).shape)
    start: Any = 0 if args[2] is None else args[2]
    extent = meta(x).shape[dim]
    if start.is_negative if isinstance(start, sympy.Expr) else start < 0:
        start = extent + start
        start = max(0, start) if isinstance(start, int) else start
    return dim, start, 1 if args[4] is None else args[4]


def _slice_spec(rule: Rule, node: Node) -> OpSpec | None:
    x: Any = node.args[0]
    dim, start, step = _slice_bounds(node)
    every = list(range(len(meta(node).shape)))
    if isinstance(start, sympy.Expr) and start.is_nonnegative is not True:
        whole = [None if i == dim else i for i in every]
        return spec_from_dims(rule, node, [(x, whole)], whole)
    return spec_from_dims(rule, node, [(x, every)], every, {(0, dim): Window(lo=-start, hi=start + 1 - step, mul=step)})


def _local_slice(context: LocalContext) -> Call:
    dim, _, step = _slice_bounds(context.node)
    if not context.axes.get(f"d{dim}"):
        return unchanged(context)
    if step == 1:
        return aten.alias.default, (context.args[0],), {}
    return aten.slice.Tensor, (context.args[0], dim, 0, 2**63 - 1, step), {}


SLICE = Rule("slice", "... [d] ... -> ... d ...", _local_slice, build=_slice_spec, cost="what changes its owner")


def _select_spec(rule: Rule, node: Node) -> OpSpec | None:
    x: Any = node.args[0]
    rank = len(meta(x).shape)
    dim: Any = node.args[1]
    source = [None if i == dim % rank else i for i in range(rank)]
    return spec_from_dims(rule, node, [(x, source)], [i for i in source if i is not None])


SELECT = Rule("select", "... _ ... -> ...", unchanged, build=_select_spec, cost="the selected dim is gathered")


def _cat_spec(rule: Rule, node: Node) -> OpSpec | None:
    """Along a split dim every operand gives the block's part of it and zeros elsewhere; they are added."""
    operands: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    rank = len(meta(node).shape)
    if any(len(meta(x).shape) != rank for x in operands):
        return None
    dim %= rank
    every: list[int | None] = list(range(rank))
    if len(set(operands)) < len(operands) or len(operands) == 1:
        whole: list[int | None] = [None if i == dim else i for i in every]
        return spec_from_dims(rule, node, [(x, whole) for x in dict.fromkeys(operands)], whole)
    windows, offset = {}, 0
    for number, x in enumerate(operands):
        windows[number, dim] = Window(lo=offset, hi=-offset)
        offset = offset + meta(x).shape[dim]
    return spec_from_dims(rule, node, [(x, every) for x in operands], every, windows)


def _local_cat(context: LocalContext) -> Call:
    dim: Any = context.args[1] if len(context.args) > 1 else context.node.kwargs.get("dim", 0)
    if context.axes.get(f"d{dim % len(meta(context.node).shape)}"):
        return ops.add_blocks, tuple(context.args[0]), {}
    return unchanged(context)


CAT = Rule(
    "cat", "... [d] ..., ... -> ... d ...", _local_cat, build=_cat_spec, cost="along a split dim what changes its owner"
)


def _roll_spec(rule: Rule, node: Node) -> OpSpec | None:
    x: Any = node.args[0]
    shifts: Any = node.args[1]
    dims: Any = node.args[2] if len(node.args) > 2 else []
    if not dims or len(set(dims)) != len(dims):
        return None
    rank = len(meta(node).shape)
    windows = {(0, d % rank): Window(lo=s, hi=-s) for s, d in zip(shifts, dims, strict=True)}
    return spec_from_dims(rule, node, [(x, list(range(rank)))], list(range(rank)), windows, "circular")


def _local_roll(context: LocalContext) -> Call:
    rank = len(meta(context.node).shape)
    kept = [
        (s, d) for s, d in zip(context.args[1], context.args[2], strict=True) if not context.axes.get(f"d{d % rank}")
    ]
    if not kept:
        return aten.alias.default, (context.args[0],), {}
    return aten.roll.default, (context.args[0], [s for s, _ in kept], [d for _, d in kept]), {}


ROLL = Rule("roll", "... [d] ... -> ... d ...", _local_roll, build=_roll_spec, cost="what changes its owner")


def _flip_spec(rule: Rule, node: Node) -> OpSpec | None:
    x: Any = node.args[0]
    dims: Any = node.args[1]
    rank = len(meta(node).shape)
    sizes = {d % rank: meta(node).shape[d % rank] for d in dims}
    windows = {(0, d): Window(lo=-size, hi=size, mul=-1) for d, size in sizes.items()}
    return spec_from_dims(rule, node, [(x, list(range(rank)))], list(range(rank)), windows)


FLIP = Rule("flip", "... [d] ... -> ... d ...", unchanged, build=_flip_spec, cost="what changes its owner")


def _permute_spec(rule: Rule, node: Node) -> OpSpec | None:
    x: Any = node.args[0]
    dims: Any = node.args[1]
    rank = len(meta(node).shape)
    return spec_from_dims(rule, node, [(x, list(range(rank)))], [d % rank for d in dims])


PERMUTE = Rule("permute", "a b ... -> b a ...", unchanged, build=_permute_spec, cost="nothing")


def _expand_spec(rule: Rule, node: Node) -> OpSpec | None:
    x: Any = node.args[0]
    before, after = meta(x).shape, meta(node).shape
    first = len(after) - len(before)
    same = [first + i if size == after[first + i] else None for i, size in enumerate(before)]
    return spec_from_dims(rule, node, [(x, same)], [i if i in same else None for i in range(len(after))])


def _local_sizes(context: LocalContext) -> Call:
    return context.node.target, (context.args[0], context.sizes()), {}


EXPAND = Rule("expand", "... -> ... _", _local_sizes, build=_expand_spec, cost="nothing")


def _same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal whatever the symbols are. That they differ a few numbers tell, in less time."""
    if a == b or (isinstance(a, int) and isinstance(b, int)):
        return a == b
    difference = sympy.sympify(a) - b
    symbols = sorted(difference.free_symbols, key=str)
    for first in (64, 96, 37):
        if difference.xreplace({symbol: sympy.Integer(first + 32 * i) for i, symbol in enumerate(symbols)}) != 0:
            return False
    return bool(sympy.expand(difference) == 0 or sympy.simplify(difference) == 0)


def _reshape_spec(rule: Rule, node: Node) -> OpSpec | None:
    """Runs of dims with equal products correspond; in each both sides are made of the same factors, major first."""
    x: Any = node.args[0]
    before, after = list(meta(x).shape), list(meta(node).shape)
    source, result = [DimPattern(())] * len(before), [DimPattern(())] * len(after)
    extents: dict[str, Size] = {}
    for number, (left, right) in enumerate(_runs(before, after)):
        rest = {side: [sizes[i] for i in dims] for side, (sizes, dims) in enumerate(((before, left), (after, right)))}
        while rest[0] and rest[1]:
            a, b = rest[0][0], rest[1][0]
            step = a if _divides(a, b) else b if _divides(b, a) else None
            if step is None:
                break  # what is left of the run stays whole
            name = f"f{number}_{len(extents)}"
            extents[name] = step
            for side, words, dims in ((0, source, left), (1, result, right)):
                dim = dims[len(dims) - len(rest[side])]
                words[dim] = DimPattern((*words[dim].factors, name))
                quotient = size_of(sympy.sympify(rest[side][0]) / step)
                rest[side] = [quotient, *rest[side][1:]] if quotient != 1 else rest[side][1:]
        for side, words, dims in ((0, source, left), (1, result, right)):
            for i, size in enumerate(rest[side]):  # a minor part that has no counterpart
                dim = dims[len(dims) - len(rest[side]) + i]
                if words[dim].factors:
                    name = f"r{number}_{side}_{i}"
                    extents[name] = size
                    words[dim] = DimPattern((*words[dim].factors, name))
    return OpSpec(rule, node, ((x, tuple(source)),), tuple(result), extents)


def _divides(a: Size, b: Size) -> bool:
    """Whether ``b`` is known to be a multiple of ``a``."""
    return bool((sympy.sympify(b) / a).is_integer)


def _runs(before: list[Size], after: list[Size]) -> list[tuple[list[int], list[int]]]:
    """Pairs of runs of dims whose extents have the same product, dims of one left out."""
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


def _check_reshape(call: BoundCall) -> str | None:
    before = math.prod(call.operand(0))
    return None if before == math.prod(call.shape) else f"cannot turn {before} elements into {call.shape}"


RESHAPE = Rule(
    "reshape",
    "... -> ...",
    _local_sizes,
    build=_reshape_spec,
    check=_check_reshape,
    cost="nothing where the split dim stays major",
)

RULES: dict[Any, Rule] = {
    aten.pad.default: PAD,
    aten.slice.Tensor: SLICE,
    aten.select.int: SELECT,
    aten.cat.default: CAT,
    aten.roll.default: ROLL,
    aten.flip.default: FLIP,
    aten.permute.default: PERMUTE,
    aten.expand.default: EXPAND,
    aten.reshape.default: RESHAPE,
}
