"""Resampling: nearest, linear and cubic interpolation, by size or by factor.

Output position o reads around the input position ``(mul*o + offset) / div``, all integers. With the ratio r = in/out
that is ``o*r`` (nearest), ``(o + 1/2) r - 1/2`` (linear, cubic) or ``o (in-1)/(out-1)`` (aligned corners).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from torch.fx import Node

from distfx.ir import ops
from distfx.ir.layout import Window
from distfx.ir.meta import meta
from distfx.ir.nodes import arguments
from distfx.ir.ops import LocalSize, LocalStart
from distfx.ir.symbolic import Size, maximum
from distfx.rules.rule import Call, LocalContext, Rule, aten, unchanged

__all__ = ["RESAMPLE", "RULES"]

_KINDS = {
    "nearest": (0, 0),
    "nearest-exact": (0, 0),
    "linear": (0, 1),
    "cubic": (1, 2),
}
"""For each kind, the number of positions that are read before and after the one that the output falls on."""


def _kind(node: Node) -> str:
    name = str(node.target)
    if "nearest_exact" in name:
        return "nearest-exact"
    return "nearest" if "nearest" in name else "cubic" if "cubic" in name else "linear"


def _ratio(scale: float | None, before: Size, after: Size) -> tuple[Size, Size]:
    """Input positions for each output position, as a fraction."""
    if scale is None:
        return before, after
    exact = Fraction(1 / scale).limit_denominator(10**6)
    return exact.numerator, exact.denominator


def _windows(node: Node) -> list[Window]:
    a = arguments(node)
    x: Any = node.args[0]
    ndim = len(meta(node).shape) - 2
    scales = a.get("scale_factors") or [None] * ndim
    first, last = _KINDS[_kind(node)]
    result = []
    for i in range(ndim):
        before, after = meta(x).shape[2 + i], meta(node).shape[2 + i]
        mul, div = _ratio(scales[i], before, after)
        offset: Size = 0
        if a.get("align_corners"):
            mul, div = before - 1, maximum(after - 1, 1)
        elif _kind(node) != "nearest":
            mul, div, offset = 2 * mul, 2 * div, mul - div
        # one more on each side, because positions are computed in floating point
        result.append(Window(lo=(first + 1) * div - offset, hi=offset - mul + (last + 2) * div, mul=mul, div=div))
    return result


def _local_resample(context: LocalContext) -> Call:
    node = context.node
    split = context.split_space()
    if not any(split):
        return unchanged(context)
    a = arguments(node)
    options = {
        "kind": _kind(node),
        "align": bool(a.get("align_corners")),
        "scales": list(a.get("scale_factors") or [None] * len(split)),
        "extent": list(meta(context.spec.operands[0][0]).shape[2:]),
        "result": list(meta(node).shape[2:]),
        "first": [[w.lo, w.mul, w.div] if cut else None for w, cut in zip(_windows(node), split, strict=True)],
        "start": context.blocks(LocalStart),
        "size": context.blocks(LocalSize),
    }
    return ops.resample, (context.args[0],), options


RESAMPLE = Rule(
    "resample", "n c [s]... -> n c s...", _local_resample, windows=_windows, cost="space: the rows that blocks read"
)

RULES: dict[Any, Rule] = {
    aten.upsample_nearest1d.vec: RESAMPLE,
    aten.upsample_nearest2d.vec: RESAMPLE,
    aten.upsample_nearest3d.vec: RESAMPLE,
    aten._upsample_nearest_exact1d.vec: RESAMPLE,
    aten._upsample_nearest_exact2d.vec: RESAMPLE,
    aten._upsample_nearest_exact3d.vec: RESAMPLE,
    aten.upsample_linear1d.vec: RESAMPLE,
    aten.upsample_bilinear2d.vec: RESAMPLE,
    aten.upsample_trilinear3d.vec: RESAMPLE,
    aten.upsample_bicubic2d.vec: RESAMPLE,
}
