"""Reductions: sums and means may leave partial sums; softmax needs its dim whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from distfx import ops
from distfx.passes.rule import Call, Row, Site, Spec, aten, dims_spec, unchanged
from distfx.symbolic import product

__all__ = ["GLOBAL_POOL", "MEAN", "ROWS", "SOFTMAX", "SUM"]


def _reduced(node: Node) -> Sequence[int]:
    """The dims a reduction runs over: its second argument, or all."""
    x: Any = node.args[0]
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    rank = len(x.meta["shape"])
    if dims is None or dims == [] or isinstance(dims, bool):
        return range(rank)
    return sorted(d % rank for d in ([dims] if isinstance(dims, int) else dims)) if rank else []


def _spatial(node: Node) -> Sequence[int]:
    return range(2, len(node.meta["shape"]))


def _reduction(dims: Callable[[Node], Sequence[int]], partial: bool) -> Callable[[Row, Node], Spec | None]:
    """A reduction over ``dims``, kept as ones or dropped; ``partial``: they may be split, leaving a partial sum."""

    def build(row: Row, node: Node) -> Spec | None:
        x: Any = node.args[0]
        rank, over = len(x.meta["shape"]), set(dims(node))
        keeps = len(node.meta["shape"]) == rank
        result = [None if i in over else i for i in range(rank) if keeps or i not in over]
        source = [i if partial or i not in over else None for i in range(rank)]
        return dims_spec(row, node, [(x, source)], result)

    return build


def _local_mean(dims: Callable[[Node], Sequence[int]]) -> Callable[[Site], Call]:
    def local(site: Site) -> Call:
        if not site.layout.partial:
            return unchanged(site)
        shape = site.spec.operands[0][0].meta["shape"]
        over = list(dims(site.node))
        words = {"keepdim": len(site.node.meta["shape"]) == len(shape), "count": product(shape[dim] for dim in over)}
        dtype = {key: value for key, value in site.node.kwargs.items() if key == "dtype"}
        return ops.mean, (site.args[0], over), words | dtype

    return local


MEAN = Row(
    "mean", "... -> ...", _local_mean(_reduced), build=_reduction(_reduced, True), cost="an allreduce of the result"
)
SUM = Row("sum", "... -> ...", unchanged, build=_reduction(_reduced, True), cost="an allreduce of the result")
GLOBAL_POOL = Row(
    "global average pooling",
    "n c s... -> n c _...",
    _local_mean(_spatial),
    build=_reduction(_spatial, True),
    cost="an allreduce of a value per sample and channel",
)
WHOLE = Row(
    "other reductions", "... -> ...", unchanged, build=_reduction(_reduced, False), cost="the reduced dims are gathered"
)


def _adaptive(node: Node) -> Row | None:
    """Adaptive pooling of a batch to a single value is a mean; to others its windows vary."""
    shape = node.meta["shape"]
    batched = f"avg_pool{len(shape) - 2}d" in str(node.target)
    return GLOBAL_POOL if batched and all(size == 1 for size in shape[2:]) else None


def _softmax_spec(row: Row, node: Node) -> Spec | None:
    x: Any = node.args[0]
    rank = len(node.meta["shape"])
    dim: Any = node.args[1]
    words = [i if i != dim % max(rank, 1) else None for i in range(rank)]
    return dims_spec(row, node, [(x, words)], words)


SOFTMAX = Row(
    "softmax", "... _ -> ... _", unchanged, build=_softmax_spec, cost="nothing where its dim is whole, else a gather"
)
CUMULATIVE = replace(SOFTMAX, name="cumulative", cost="as softmax")

ROWS: dict[Any, Row | Callable[[Node], Row | None]] = {
    aten.adaptive_avg_pool1d.default: _adaptive,
    aten.adaptive_avg_pool2d.default: _adaptive,
    aten.adaptive_avg_pool3d.default: _adaptive,
    aten.mean.dim: MEAN,
    aten.mean.default: MEAN,
    aten.sum.dim_IntList: SUM,
    aten.sum.default: SUM,
    aten.amax.default: WHOLE,
    aten.amin.default: WHOLE,
    aten.argmax.default: WHOLE,
    aten.argmin.default: WHOLE,
    aten.logsumexp.default: WHOLE,
    aten.var.correction: WHOLE,
    aten.var.dim: WHOLE,
    aten.std.correction: WHOLE,
    aten.std.dim: WHOLE,
    aten.softmax.int: SOFTMAX,
    aten.log_softmax.int: SOFTMAX,
    aten._softmax.default: SOFTMAX,
    aten._log_softmax.default: SOFTMAX,
    aten.cumsum.default: CUMULATIVE,
    aten.cumprod.default: CUMULATIVE,
}
