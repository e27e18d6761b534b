"""Pooling."""

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
from distfx.rules.reduction import local_mean, reduce_inside, reduction
from distfx.rules.rule import Call, LocalContext, OpSpec, Rule, RuleChoice, aten, spec_from_dims, unchanged

__all__ = ["ADAPTIVE", "AVG_POOL", "MAX_POOL", "RULES"]


def _pool_arguments(node: Node) -> dict[str, Any]:
    """Kernel, stride, padding and dilation of a pooling call for each spatial dim, with the rest by name."""
    values = arguments(node)
    rank = len(meta(node).shape) - 2

    def each(name: str, default: Any) -> list[int]:
        value = values.get(name)
        listed: list[int] = list(value) if isinstance(value, list | tuple) else [value]  # type: ignore[list-item]
        listed = listed if value not in (None, []) else list(default)
        return listed * rank if len(listed) == 1 else listed

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
    """Indices are positions in the whole plane; a part starts where its first window does."""
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
    words = {"extent": extent, "first": first, "size": context.blocks(LocalSize)}
    call = (context.args[0], a["kernel_size"], a["stride"], padding, a["dilation"], a["ceil_mode"])
    return ops.max_pool_index, call, words


MAX_INDEX = replace(MAX_POOL, name="indices of max pooling", local=_local_max_index, cost="as max pooling")


def _with_indices(node: Node) -> Rule | None:
    assert isinstance(node.target, ops.OpOutput)
    return MAX_POOL if node.target.index == 0 else MAX_INDEX


# -------------------------------------------------------------------------------- windows that vary by position


def _adaptive_rank(node: Node) -> int:
    """How many dims an adaptive pooling pools: a batch may be missing."""
    return next(rank for rank in (1, 2, 3) if f"pool{rank}d" in str(operator_of(node)))


def _adaptive_kind(node: Node) -> str:
    if "avg" in str(operator_of(node)):
        return "avg"
    return "max" if isinstance(node.target, ops.OpOutput) and node.target.index == 0 else "index"


def _adaptive_spec(rule: Rule, node: Node) -> OpSpec | None:
    """Output o reads ``[floor(o E / R), ceil((o+1) E / R))``."""
    x: Any = node.args[0]
    shape = meta(node).shape
    every = list(range(len(shape)))
    pooled = every[len(shape) - _adaptive_rank(node) :]
    windows = {(0, i): Window(hi=shape[i] - 1, mul=meta(x).shape[i], div=shape[i]) for i in pooled}
    return spec_from_dims(rule, node, [(x, every)], every, windows)


def _local_adaptive(context: LocalContext) -> Call:
    shape = meta(context.node).shape
    first = len(shape) - _adaptive_rank(context.node)
    if not any(split.axes for split in context.layout.dims[first:]):
        return unchanged(context)
    words = {
        "kind": _adaptive_kind(context.node),
        "extent": list(meta(context.spec.operands[0][0]).shape[first:]),
        "result": list(shape[first:]),
        "start": context.blocks(LocalStart, first),
        "size": context.blocks(LocalSize, first),
    }
    return ops.adaptive_pool, (context.args[0],), words


ADAPTIVE = Rule(
    "adaptive pooling",
    "n c [s]... -> n c s...",
    _local_adaptive,
    build=_adaptive_spec,
    cost="space: halos where windows cross",
)


def _pooled(node: Node) -> list[int]:
    rank = len(meta(node).shape)
    return list(range(rank - _adaptive_rank(node), rank))


def _greatest(node: Node) -> str:
    return "max" if _adaptive_kind(node) == "max" else "argmax"


GLOBAL_AVG = reduction(
    "global average pooling",
    "n c s... -> n c _...",
    _pooled,
    local=local_mean(_pooled),
    cost="an allreduce of a value per sample and channel",
)
GLOBAL_MAX = reduction(
    "global max pooling",
    "n c s... -> n c _...",
    _pooled,
    local=reduce_inside(_greatest, _pooled),
    inside=True,
    cost="an allreduce of a value and one of an index per sample and channel",
)


def _adaptive(node: Node) -> Rule:
    """To a single value it is a mean or a greatest element; to others its windows vary."""
    if any(meta(node).shape[dim] != 1 for dim in _pooled(node)):
        return ADAPTIVE
    return GLOBAL_AVG if _adaptive_kind(node) == "avg" else GLOBAL_MAX


WITH_INDICES = RuleChoice(_with_indices, (MAX_POOL, MAX_INDEX))
ADAPTIVE_AVG = RuleChoice(_adaptive, (GLOBAL_AVG, ADAPTIVE))
ADAPTIVE_MAX = RuleChoice(_adaptive, (GLOBAL_MAX, ADAPTIVE))


# ----------------------------------------------------------------------------------------- space stays whole

UNPOOL = Rule(
    "max unpooling",
    "n c _..., n c _... -> n c _...",
    unchanged,
    tensors=(0, 1),
    cost="space is gathered: indices point anywhere",
)
FRACTIONAL = Rule(
    "fractional pooling",
    "n c _..., n c _ -> n c _...",
    unchanged,
    tensors=(0, 3),
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
