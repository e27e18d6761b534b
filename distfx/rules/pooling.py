"""Pooling."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch.fx import Node

from distfx.ir import ops
from distfx.ir.layout import Window
from distfx.ir.nodes import arguments, operator_of
from distfx.ir.ops import LocalSize, LocalStart
from distfx.rules.reduction import local_mean, reduce_inside, reduction
from distfx.rules.row import Call, Choice, Row, Site, Spec, aten, dims_spec, unchanged

__all__ = ["ADAPTIVE", "AVG_POOL", "MAX_POOL", "ROWS"]


def _pool_arguments(node: Node) -> dict[str, Any]:
    """Kernel, stride, padding and dilation of a pooling call for each spatial dim, with the rest by name."""
    values = arguments(node)
    rank = len(node.meta["shape"]) - 2

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


def _local_max_pool(site: Site) -> Call:
    a = _pool_arguments(site.node)
    padding = [0 if cut else p for cut, p in zip(site.split_space(), a["padding"], strict=True)]
    return site.node.target, (site.args[0], a["kernel_size"], a["stride"], padding, a["dilation"], a["ceil_mode"]), {}


def _local_avg_pool(site: Site) -> Call:
    a = _pool_arguments(site.node)
    split, x = site.split_space(), site.args[0]
    padding = [0 if cut else p for cut, p in zip(split, a["padding"], strict=True)]
    include, override, ceil = a["count_include_pad"], a.get("divisor_override"), a["ceil_mode"]
    uniform = override is not None or (not ceil and (include or not any(a["padding"])))
    if uniform or not any(split):
        call = (x, a["kernel_size"], a["stride"], padding, ceil, include)
        return site.node.target, call if len(split) == 1 else (*call, override), {}
    blocks = {"split": split, "start": site.blocks(LocalStart), "size": site.blocks(LocalSize)}
    extent = list(site.spec.operands[0][0].meta["shape"][2:])
    return ops.avg_pool, (x, a["kernel_size"], a["stride"], a["padding"], include), blocks | {"extent": extent}


MAX_POOL = Row(
    "max pooling",
    "n c [s]... -> n c s...",
    _local_max_pool,
    windows=_pool_windows,
    fill=-math.inf,
    cost="space: halos where windows cross",
)
AVG_POOL = Row(
    "average pooling",
    "n c [s]... -> n c s...",
    _local_avg_pool,
    windows=_pool_windows,
    cost="space: halos where windows cross",
)


def _local_max_index(site: Site) -> Call:
    """Indices are positions in the whole plane; a part starts where its first window does."""
    split = site.split_space()
    if not any(split):
        return unchanged(site)
    a = _pool_arguments(site.node)
    padding = [0 if cut else p for cut, p in zip(split, a["padding"], strict=True)]
    first = [
        LocalStart(size, part, stride, -p) if cut else 0
        for size, part, stride, p, cut in zip(
            site.node.meta["shape"][2:], site.layout.dims[2:], a["stride"], a["padding"], split, strict=True
        )
    ]
    extent = list(site.spec.operands[0][0].meta["shape"][2:])
    words = {"extent": extent, "first": first, "size": site.blocks(LocalSize)}
    call = (site.args[0], a["kernel_size"], a["stride"], padding, a["dilation"], a["ceil_mode"])
    return ops.max_pool_index, call, words


MAX_INDEX = replace(MAX_POOL, name="indices of max pooling", local=_local_max_index, cost="as max pooling")


def _with_indices(node: Node) -> Row | None:
    assert isinstance(node.target, ops.Nth)
    return MAX_POOL if node.target.index == 0 else MAX_INDEX


# -------------------------------------------------------------------------------- windows that vary by position


def _adaptive_rank(node: Node) -> int:
    """How many dims an adaptive pooling pools: a batch may be missing."""
    return next(rank for rank in (1, 2, 3) if f"pool{rank}d" in str(operator_of(node)))


def _adaptive_kind(node: Node) -> str:
    if "avg" in str(operator_of(node)):
        return "avg"
    return "max" if isinstance(node.target, ops.Nth) and node.target.index == 0 else "index"


def _adaptive_spec(row: Row, node: Node) -> Spec | None:
    """Output o reads ``[floor(o E / R), ceil((o+1) E / R))``."""
    x: Any = node.args[0]
    shape = node.meta["shape"]
    every = list(range(len(shape)))
    pooled = every[len(shape) - _adaptive_rank(node) :]
    windows = {(0, i): Window(hi=shape[i] - 1, mul=x.meta["shape"][i], div=shape[i]) for i in pooled}
    return dims_spec(row, node, [(x, every)], every, windows)


def _local_adaptive(site: Site) -> Call:
    shape = site.node.meta["shape"]
    first = len(shape) - _adaptive_rank(site.node)
    if not any(split.axes for split in site.layout.dims[first:]):
        return unchanged(site)
    words = {
        "kind": _adaptive_kind(site.node),
        "extent": list(site.spec.operands[0][0].meta["shape"][first:]),
        "result": list(shape[first:]),
        "start": site.blocks(LocalStart, first),
        "size": site.blocks(LocalSize, first),
    }
    return ops.adaptive_pool, (site.args[0],), words


ADAPTIVE = Row(
    "adaptive pooling",
    "n c [s]... -> n c s...",
    _local_adaptive,
    build=_adaptive_spec,
    cost="space: halos where windows cross",
)


def _pooled(node: Node) -> list[int]:
    rank = len(node.meta["shape"])
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


def _adaptive(node: Node) -> Row:
    """To a single value it is a mean or a greatest element; to others its windows vary."""
    if any(node.meta["shape"][dim] != 1 for dim in _pooled(node)):
        return ADAPTIVE
    return GLOBAL_AVG if _adaptive_kind(node) == "avg" else GLOBAL_MAX


WITH_INDICES = Choice(_with_indices, (MAX_POOL, MAX_INDEX))
ADAPTIVE_AVG = Choice(_adaptive, (GLOBAL_AVG, ADAPTIVE))
ADAPTIVE_MAX = Choice(_adaptive, (GLOBAL_MAX, ADAPTIVE))


# ----------------------------------------------------------------------------------------- space stays whole

UNPOOL = Row(
    "max unpooling",
    "n c _..., n c _... -> n c _...",
    unchanged,
    tensors=(0, 1),
    cost="space is gathered: indices point anywhere",
)
FRACTIONAL = Row(
    "fractional pooling",
    "n c _..., n c _ -> n c _...",
    unchanged,
    tensors=(0, 3),
    cost="space is gathered",
)

ROWS: dict[Any, Row | Choice] = {
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
