"""Operators that only move elements: pad, crop, slice, concatenate, roll, reshape, permute, expand."""

from __future__ import annotations

import math
from typing import Any

import sympy
from torch.fx import Node

from distfx.ir import ops
from distfx.ir.layout import Window
from distfx.ir.meta import meta
from distfx.ir.nodes import arguments
from distfx.rules.builders import cat, reshape
from distfx.rules.rule import BoundCall, Call, LocalContext, Rule, RuleChoice, aten, unchanged

__all__ = ["CAT", "EXPAND", "FLIP", "PAD", "PERMUTE", "RESHAPE", "ROLL", "RULES", "SELECT", "SLICE"]

_MOVED = "the rows that change their owner"


def _pad_widths(node: Node) -> list[tuple[Any, Any]]:
    """For each dim the width before and after, from the first dim on."""
    ndim = len(meta(node).shape)
    flat: list[Any] = list(arguments(node)["pad"])
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


def _pad_windows(node: Node) -> list[Window | None]:
    return [None if widths == (0, 0) else Window(lo=widths[0], hi=-widths[0]) for widths in _pad_widths(node)]


def _local_pad(context: LocalContext) -> Call:
    x, pad, *rest = context.args
    widths = [(0, 0) if context.is_split(i) else pair for i, pair in enumerate(_pad_widths(context.node))]
    flat = [width for pair in widths[::-1] for width in pair][: len(pad)]
    if all(width == 0 for width in flat):
        return aten.alias.default, (x,), {}
    return aten.pad.default, (x, flat, *rest), dict(context.node.kwargs)


def _check_pad(call: BoundCall) -> str | None:
    if call.spec.mode not in ("reflect", "circular"):
        return None
    source = call.operand(0)
    for dim, (pattern, extent) in enumerate(zip(call.spec.operands[0][1], source, strict=True)):
        if not pattern.window:
            continue
        before = call.number(call.spec.windows[0, pattern.factors[0]].lo)
        width = max(before, call.shape[dim] - extent - before)
        if width > extent - (call.spec.mode == "reflect"):
            return f"pads dim {dim} of extent {extent} by {width} in mode {call.spec.mode}, which is too much"
    return None


PAD = Rule(
    "pad",
    "[a]... -> a...",
    _local_pad,
    windows=_pad_windows,
    mode=lambda node: str(arguments(node)["mode"]),
    fill=lambda node: float(arguments(node)["value"] or 0.0),
    check=_check_pad,
    cost=f"{_MOVED}, in every mode",
)


def _slice_bounds(node: Node) -> tuple[int, Any, Any]:
    """Dim, start and step of a slice, with the start counted from the front."""
    a = arguments(node)
    extent = meta(a["self"]).shape[a["dim"]]
    start: Any = 0 if a["start"] is None else a["start"]
    if start.is_negative if isinstance(start, sympy.Expr) else start < 0:
        start = extent + start
        start = max(0, start) if isinstance(start, int) else start
    return a["dim"] % len(meta(node).shape), start, a["step"]


def _slice_windows(node: Node) -> list[Window]:
    _, start, step = _slice_bounds(node)
    return [Window(lo=-start, hi=start + 1 - step, mul=step)]


def _local_slice(context: LocalContext) -> Call:
    dim, _, step = _slice_bounds(context.node)
    if not context.is_split(dim):
        return unchanged(context)
    if step == 1:
        return aten.alias.default, (context.args[0],), {}
    return aten.slice.Tensor, (context.args[0], dim, 0, 2**63 - 1, step), {}


SLICE = Rule("slice", "... [r]@dim -> ... r@dim", _local_slice, windows=_slice_windows, cost=_MOVED)
SLICE_UNSPLIT = Rule("slice at an unknown start", "... _@dim -> ... _@dim", cost="the sliced dim is gathered")


def _slice(node: Node) -> Rule:
    """A symbolic start may be negative, and then counts from the end."""
    _, start, _ = _slice_bounds(node)
    return SLICE_UNSPLIT if isinstance(start, sympy.Expr) and start.is_nonnegative is not True else SLICE


SELECT = Rule("select", "... _@dim -> ...", cost="the selected dim is gathered if it is split")


def _local_cat(context: LocalContext) -> Call:
    if context.is_split(arguments(context.node)["dim"]):
        return ops.add_blocks, tuple(context.args[0]), {}
    return unchanged(context)


CAT = Rule("cat", local=_local_cat, build=cat, cost=f"along a split dim {_MOVED}")


def _roll_windows(node: Node) -> list[Window]:
    a = arguments(node)
    return [Window(lo=shift, hi=-shift) for shift, _ in zip(a["shifts"], a["dims"], strict=False)]


def _local_roll(context: LocalContext) -> Call:
    a = context.arguments()
    rest = [(s, d) for s, d in zip(a["shifts"], a["dims"], strict=True) if not context.is_split(d)]
    if not rest:
        return aten.alias.default, (context.args[0],), {}
    return aten.roll.default, (context.args[0], [s for s, _ in rest], [d for _, d in rest]), {}


ROLL = Rule("roll", "... [r]@dims -> ... r@dims", _local_roll, windows=_roll_windows, mode="circular", cost=_MOVED)


def _flip_windows(node: Node) -> list[Window]:
    sizes = [meta(node).shape[dim] for dim in arguments(node)["dims"]]
    return [Window(lo=-size, hi=size, mul=-1) for size in sizes]


FLIP = Rule("flip", "... [r]@dims -> ... r@dims", windows=_flip_windows, cost=_MOVED)
PERMUTE = Rule("permute", "r@dims -> r...", cost="nothing")


def _local_sizes(context: LocalContext) -> Call:
    return context.node.target, (context.args[0], context.sizes()), {}


EXPAND = Rule("expand", "=... -> =...", _local_sizes, cost="nothing")


def _check_reshape(call: BoundCall) -> str | None:
    before = math.prod(call.operand(0))
    return None if before == math.prod(call.shape) else f"cannot turn {before} elements into {call.shape}"


RESHAPE = Rule(
    "reshape",
    local=_local_sizes,
    build=reshape,
    check=_check_reshape,
    cost="nothing if the split dim stays the major one",
)

RULES: dict[Any, Rule | RuleChoice] = {
    aten.pad.default: PAD,
    aten.slice.Tensor: RuleChoice(_slice, (SLICE, SLICE_UNSPLIT)),
    aten.select.int: SELECT,
    aten.cat.default: CAT,
    aten.roll.default: ROLL,
    aten.flip.default: FLIP,
    aten.permute.default: PERMUTE,
    aten.expand.default: EXPAND,
    aten.reshape.default: RESHAPE,
}
