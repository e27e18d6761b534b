"""Pooling."""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from distfx import ops
from distfx.layout import Window
from distfx.ops import LocalSize, LocalStart
from distfx.passes.nodes import arguments
from distfx.passes.rule import Call, Row, Site, aten

__all__ = ["AVG_POOL", "MAX_POOL", "ROWS"]


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

ROWS: dict[Any, Row] = {
    aten.max_pool1d.default: MAX_POOL,
    aten.max_pool2d.default: MAX_POOL,
    aten.max_pool3d.default: MAX_POOL,
    aten.avg_pool1d.default: AVG_POOL,
    aten.avg_pool2d.default: AVG_POOL,
    aten.avg_pool3d.default: AVG_POOL,
}
