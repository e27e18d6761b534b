"""Operators that only move elements: pad, crop, slice, concatenate, roll, reshape, permute, expand."""

from __future__ import annotations

import math
from typing import Any

import sympy
from torch.fx import Node

from distfx.ir import ops
from distfx.ir.layout import Window
from distfx.ir.symbolic import Size, product, size_of
from distfx.rules.notation import Word
from distfx.rules.row import Call, Row, Site, Sized, Spec, aten, dims_spec, unchanged

__all__ = ["CAT", "EXPAND", "FLIP", "PAD", "PERMUTE", "RESHAPE", "ROLL", "ROWS", "SELECT", "SLICE"]


def _pad_widths(node: Node) -> list[tuple[Any, Any]]:
    """For each dim the width before and after, from the first dim on."""
    rank = len(node.meta["shape"])
    flat: list[Any] = list(node.args[1])  # type: ignore[arg-type]
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def _pad_spec(row: Row, node: Node) -> Spec | None:
    x: Any = node.args[0]
    widths = _pad_widths(node)
    every = list(range(len(widths)))
    windows = {(0, i): Window(lo=lo, hi=-lo) for i, (lo, hi) in enumerate(widths) if (lo, hi) != (0, 0)}
    mode = str(node.args[2]) if len(node.args) > 2 else "constant"
    value: Any = node.args[3] if len(node.args) > 3 else None
    return dims_spec(row, node, [(x, every)], every, windows, mode, float(value or 0.0))


def _local_pad(site: Site) -> Call:
    args = site.args
    widths = [(0, 0) if site.axes.get(f"d{i}") else pair for i, pair in enumerate(_pad_widths(site.node))]
    flat = [width for pair in widths[::-1] for width in pair][: len(args[1])]
    if all(width == 0 for width in flat):
        return aten.alias.default, (args[0],), {}
    return aten.pad.default, (args[0], flat, *args[2:]), {}


def _check_pad(call: Sized) -> str | None:
    if call.spec.mode not in ("reflect", "circular"):
        return None
    source = call.operand(0)
    for (_, factor), window in call.spec.windows.items():
        dim, before = int(factor[1:]), call.number(window.lo)
        width = max(before, call.shape[dim] - source[dim] - before)
        if width > source[dim] - (call.spec.mode == "reflect"):
            return f"pads dim {dim} of extent {source[dim]} by {width} in mode {call.spec.mode}, which is too much"
    return None


PAD = Row(
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
    dim %= len(x.meta["shape"])
    start: Any = 0 if args[2] is None else args[2]
    extent = x.meta["shape"][dim]
    if start.is_negative if isinstance(start, sympy.Expr) else start < 0:
        start = extent + start
        start = max(0, start) if isinstance(start, int) else start
    return dim, start, 1 if args[4] is None else args[4]


def _slice_spec(row: Row, node: Node) -> Spec | None:
    x: Any = node.args[0]
    dim, start, step = _slice_bounds(node)
    every = list(range(len(node.meta["shape"])))
    if isinstance(start, sympy.Expr) and start.is_nonnegative is not True:
        whole = [None if i == dim else i for i in every]
        return dims_spec(row, node, [(x, whole)], whole)
    return dims_spec(row, node, [(x, every)], every, {(0, dim): Window(lo=-start, hi=start + 1 - step, mul=step)})


def _local_slice(site: Site) -> Call:
    dim, _, step = _slice_bounds(site.node)
    if not site.axes.get(f"d{dim}"):
        return unchanged(site)
    if step == 1:
        return aten.alias.default, (site.args[0],), {}
    return aten.slice.Tensor, (site.args[0], dim, 0, 2**63 - 1, step), {}


SLICE = Row("slice", "... [d] ... -> ... d ...", _local_slice, build=_slice_spec, cost="what changes its owner")


def _select_spec(row: Row, node: Node) -> Spec | None:
    x: Any = node.args[0]
    rank = len(x.meta["shape"])
    dim: Any = node.args[1]
    source = [None if i == dim % rank else i for i in range(rank)]
    return dims_spec(row, node, [(x, source)], [i for i in source if i is not None])


SELECT = Row("select", "... _ ... -> ...", unchanged, build=_select_spec, cost="the selected dim is gathered")


def _cat_spec(row: Row, node: Node) -> Spec | None:
    """Along a split dim every operand gives the block's part of it and zeros elsewhere; they are added."""
    operands: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    rank = len(node.meta["shape"])
    if any(len(x.meta["shape"]) != rank for x in operands):
        return None
    dim %= rank
    every: list[int | None] = list(range(rank))
    if len(set(operands)) < len(operands) or len(operands) == 1:
        whole: list[int | None] = [None if i == dim else i for i in every]
        return dims_spec(row, node, [(x, whole) for x in dict.fromkeys(operands)], whole)
    windows, offset = {}, 0
    for number, x in enumerate(operands):
        windows[number, dim] = Window(lo=offset, hi=-offset)
        offset = offset + x.meta["shape"][dim]
    return dims_spec(row, node, [(x, every) for x in operands], every, windows)


def _local_cat(site: Site) -> Call:
    dim: Any = site.args[1] if len(site.args) > 1 else site.node.kwargs.get("dim", 0)
    if site.axes.get(f"d{dim % len(site.node.meta['shape'])}"):
        return ops.add_blocks, tuple(site.args[0]), {}
    return unchanged(site)


CAT = Row(
    "cat", "... [d] ..., ... -> ... d ...", _local_cat, build=_cat_spec, cost="along a split dim what changes its owner"
)


def _roll_spec(row: Row, node: Node) -> Spec | None:
    x: Any = node.args[0]
    shifts: Any = node.args[1]
    dims: Any = node.args[2] if len(node.args) > 2 else []
    if not dims or len(set(dims)) != len(dims):
        return None
    rank = len(node.meta["shape"])
    windows = {(0, d % rank): Window(lo=s, hi=-s) for s, d in zip(shifts, dims, strict=True)}
    return dims_spec(row, node, [(x, list(range(rank)))], list(range(rank)), windows, "circular")


def _local_roll(site: Site) -> Call:
    rank = len(site.node.meta["shape"])
    kept = [(s, d) for s, d in zip(site.args[1], site.args[2], strict=True) if not site.axes.get(f"d{d % rank}")]
    if not kept:
        return aten.alias.default, (site.args[0],), {}
    return aten.roll.default, (site.args[0], [s for s, _ in kept], [d for _, d in kept]), {}


ROLL = Row("roll", "... [d] ... -> ... d ...", _local_roll, build=_roll_spec, cost="what changes its owner")


def _flip_spec(row: Row, node: Node) -> Spec | None:
    x: Any = node.args[0]
    dims: Any = node.args[1]
    rank = len(node.meta["shape"])
    sizes = {d % rank: node.meta["shape"][d % rank] for d in dims}
    windows = {(0, d): Window(lo=-size, hi=size, mul=-1) for d, size in sizes.items()}
    return dims_spec(row, node, [(x, list(range(rank)))], list(range(rank)), windows)


FLIP = Row("flip", "... [d] ... -> ... d ...", unchanged, build=_flip_spec, cost="what changes its owner")


def _permute_spec(row: Row, node: Node) -> Spec | None:
    x: Any = node.args[0]
    dims: Any = node.args[1]
    rank = len(node.meta["shape"])
    return dims_spec(row, node, [(x, list(range(rank)))], [d % rank for d in dims])


PERMUTE = Row("permute", "a b ... -> b a ...", unchanged, build=_permute_spec, cost="nothing")


def _expand_spec(row: Row, node: Node) -> Spec | None:
    x: Any = node.args[0]
    before, after = x.meta["shape"], node.meta["shape"]
    first = len(after) - len(before)
    same = [first + i if size == after[first + i] else None for i, size in enumerate(before)]
    return dims_spec(row, node, [(x, same)], [i if i in same else None for i in range(len(after))])


def _local_sizes(site: Site) -> Call:
    return site.node.target, (site.args[0], site.sizes()), {}


EXPAND = Row("expand", "... -> ... _", _local_sizes, build=_expand_spec, cost="nothing")


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


def _reshape_spec(row: Row, node: Node) -> Spec | None:
    """Runs of dims with equal products correspond; in each both sides are made of the same factors, major first."""
    x: Any = node.args[0]
    before, after = list(x.meta["shape"]), list(node.meta["shape"])
    source, result = [Word(())] * len(before), [Word(())] * len(after)
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
                words[dim] = Word((*words[dim].factors, name))
                quotient = size_of(sympy.sympify(rest[side][0]) / step)
                rest[side] = [quotient, *rest[side][1:]] if quotient != 1 else rest[side][1:]
        for side, words, dims in ((0, source, left), (1, result, right)):
            for i, size in enumerate(rest[side]):  # a minor part that has no counterpart
                dim = dims[len(dims) - len(rest[side]) + i]
                if words[dim].factors:
                    name = f"r{number}_{side}_{i}"
                    extents[name] = size
                    words[dim] = Word((*words[dim].factors, name))
    return Spec(row, node, ((x, tuple(source)),), tuple(result), extents)


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


def _check_reshape(call: Sized) -> str | None:
    before = math.prod(call.operand(0))
    return None if before == math.prod(call.shape) else f"cannot turn {before} elements into {call.shape}"


RESHAPE = Row(
    "reshape",
    "... -> ...",
    _local_sizes,
    build=_reshape_spec,
    check=_check_reshape,
    cost="nothing where the split dim stays major",
)

ROWS: dict[Any, Row] = {
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
