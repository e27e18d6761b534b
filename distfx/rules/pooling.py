"""Pooling: windows of fixed size, adaptive windows, and whole planes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch.fx import Node

from distfx.ir import ops
from distfx.ir.layout import Window
from distfx.ir.meta import meta
from distfx.ir.nodes import arguments, operator_of
from distfx.ir.ops import LocalSize, LocalStart
from distfx.rules.reduction import local_mean, reduce_inside
from distfx.rules.rule import Call, LocalContext, Rule, RuleChoice, aten, unchanged

__all__ = ["ADAPTIVE", "AVG_POOL", "MAX_POOL", "RULES"]


def _pool_arguments(node: Node) -> dict[str, Any]:
    """The arguments of a pooling call; kernel, stride, padding and dilation as one number for each spatial dim."""
    values = arguments(node)
    ndim = len(meta(node).shape) - 2

    def each(name: str, default: Any) -> list[int]:
        value = values.get(name)
        sizes: list[int] = list(value) if isinstance(value, list | tuple) else [value]  # type: ignore[list-item]
        sizes = sizes if value not in (None, []) else list(default)
        return sizes * ndim if len(sizes) == 1 else sizes

    values["kernel_size"] = each("kernel_size", [1])
    values["stride"] = each("stride", values["kernel_size"])
    values["padding"] = each("padding", [0])
    values["dilation"] = each("dilation", [1])
    return values


def _pool_windows(node: Node) -> list[Window]:
    a = _pool_arguments(node)
    sizes = zip(a["kernel_size"], a["stride"], a["padding"], a["dilation"], strict=True)
    return [Window(lo=p, hi=d * (k - 1) + 1 - s - p, mul=s) for k, s, p, d in sizes]


def _local_max_pool(context: LocalContext) -> Call:
    a = _pool_arguments(context.node)
    padding = [0 if cut else p for cut, p in zip(context.split_space(), a["padding"], strict=True)]
    return (
        context.node.target,
        (context.args[0], a["kernel_size"], a["stride"], padding, a["dilation"], a["ceil_mode"]),
        {},
    )


def _local_avg_pool(context: LocalContext) -> Call:
    a = _pool_arguments(context.node)
    split, x = context.split_space(), context.args[0]
    padding = [0 if cut else p for cut, p in zip(split, a["padding"], strict=True)]
    include, override, ceil = a["count_include_pad"], a.get("divisor_override"), a["ceil_mode"]
    uniform = override is not None or (not ceil and (include or not any(a["padding"])))
    if uniform or not any(split):
        call = (x, a["kernel_size"], a["stride"], padding, ceil, include)
        return context.node.target, call if len(split) == 1 else (*call, override), {}
    blocks = {"split": split, "start": context.blocks(LocalStart), "size": context.blocks(LocalSize)}
    extent = list(meta(context.spec.operands[0][0]).shape[2:])
    return ops.avg_pool, (x, a["kernel_size"], a["stride"], a["padding"], include), blocks | {"extent": extent}


MAX_POOL = Rule(
    "max pooling",
    "n c [s]... -> n c s...",
    _local_max_pool,
    windows=_pool_windows,
    fill=-math.inf,
    cost="space: halos where windows cross",
)
AVG_POOL = Rule(
    "average pooling",
    "n c [s]... -> n c s...",
    _local_avg_pool,
    windows=_pool_windows,
    cost="space: halos where windows cross",
)


def _local_max_index(context: LocalContext) -> Call:
    """Indices are positions in the global plane; a part starts where its first window starts."""
    split = context.split_space()
    if not any(split):
        return unchanged(context)
    a = _pool_arguments(context.node)
    padding = [0 if cut else p for cut, p in zip(split, a["padding"], strict=True)]
    first = [
        LocalStart(size, part, stride, -p) if cut else 0
        for size, part, stride, p, cut in zip(
            meta(context.node).shape[2:], context.layout.dims[2:], a["stride"], a["padding"], split, strict=True
        )
    ]
    extent = list(meta(context.spec.operands[0][0]).shape[2:])
    options = {"extent": extent, "first": first, "size": context.blocks(LocalSize)}
    call = (context.args[0], a["kernel_size"], a["stride"], padding, a["dilation"], a["ceil_mode"])
    return ops.max_pool_index, call, options


MAX_INDEX = replace(MAX_POOL, name="indices of max pooling", local=_local_max_index, cost="as max pooling")


def _with_indices(node: Node) -> Rule | None:
    assert isinstance(node.target, ops.OpOutput)
    return MAX_POOL if node.target.index == 0 else MAX_INDEX


# -------------------------------------------------------------------------------- windows that vary by position


def _adaptive_kind(node: Node) -> str:
    if "avg" in str(operator_of(node)):
        return "avg"
    return "max" if isinstance(node.target, ops.OpOutput) and node.target.index == 0 else "index"


def _adaptive_windows(node: Node) -> list[Window]:
    """Output o reads ``[floor(o E / R), ceil((o+1) E / R))`` of E inputs for R outputs."""
    x: Any = node.args[0]
    pairs = zip(meta(x).shape[2:], meta(node).shape[2:], strict=True)
    return [Window(hi=after - 1, mul=before, div=after) for before, after in pairs]


def _local_adaptive(context: LocalContext) -> Call:
    shape = meta(context.node).shape
    if not any(context.split_space()):
        return unchanged(context)
    options = {
        "kind": _adaptive_kind(context.node),
        "extent": list(meta(context.spec.operands[0][0]).shape[2:]),
        "result": list(shape[2:]),
        "start": context.blocks(LocalStart),
        "size": context.blocks(LocalSize),
    }
    return ops.adaptive_pool, (context.args[0],), options


ADAPTIVE = Rule(
    "adaptive pooling",
    "n c [s]... -> n c s...",
    _local_adaptive,
    windows=_adaptive_windows,
    cost="space: halos where windows cross",
)


def _pooled(node: Node) -> list[int]:
    return list(range(2, len(meta(node).shape)))


def _extreme_kind(node: Node) -> str:
    return "max" if _adaptive_kind(node) == "max" else "argmax"


GLOBAL_AVG = Rule(
    "global average pooling",
    "n c s... -> n c _...",
    local_mean(_pooled),
    cost="an allreduce of a value per sample and channel",
)
GLOBAL_MAX = Rule(
    "global max pooling",
    "n c s!... -> n c _...",
    reduce_inside(_extreme_kind, _pooled),
    cost="an allreduce of a value and one of an index per sample and channel",
)


def _adaptive(node: Node) -> Rule:
    """Adaptive pooling to a single value is a mean or a maximum; otherwise its windows vary."""
    if any(meta(node).shape[dim] != 1 for dim in _pooled(node)):
        return ADAPTIVE
    return GLOBAL_AVG if _adaptive_kind(node) == "avg" else GLOBAL_MAX


WITH_INDICES = RuleChoice(_with_indices, (MAX_POOL, MAX_INDEX))
ADAPTIVE_AVG = RuleChoice(_adaptive, (GLOBAL_AVG, ADAPTIVE))
ADAPTIVE_MAX = RuleChoice(_adaptive, (GLOBAL_MAX, ADAPTIVE))


# ------------------------------------------------------------------------------------------ space is not split

UNPOOL = Rule(
    "max unpooling",
    "n c _..., n c _... -> n c _...",
    cost="space is gathered, because indices point anywhere",
)
FRACTIONAL = Rule(
    "fractional pooling",
    "n c _..., n c _ -> n c _...",
    cost="space is gathered",
)

RULES: dict[Any, Rule | RuleChoice] = {
    aten.max_pool1d.default: MAX_POOL,
    aten.max_pool2d.default: MAX_POOL,
    aten.max_pool3d.default: MAX_POOL,
    aten.max_pool1d_with_indices.default: WITH_INDICES,
    aten.max_pool2d_with_indices.default: WITH_INDICES,
    aten.max_pool3d_with_indices.default: WITH_INDICES,
    aten.avg_pool1d.default: AVG_POOL,
    aten.avg_pool2d.default: AVG_POOL,
    aten.avg_pool3d.default: AVG_POOL,
    aten.adaptive_avg_pool1d.default: ADAPTIVE_AVG,
    aten.adaptive_avg_pool2d.default: ADAPTIVE_AVG,
    aten.adaptive_avg_pool3d.default: ADAPTIVE_AVG,
    aten.adaptive_max_pool1d.default: ADAPTIVE_MAX,
    aten.adaptive_max_pool2d.default: ADAPTIVE_MAX,
    aten.adaptive_max_pool3d.default: ADAPTIVE_MAX,
    aten.max_unpool2d.default: UNPOOL,
    aten.max_unpool3d.default: UNPOOL,
    aten.fractional_max_pool2d.default: FRACTIONAL,
    aten.fractional_max_pool3d.default: FRACTIONAL,
}
