"""Losses in parts: what each element or position contributes, then a sum over all of them, and a global denominator.

A mean over a sharded batch is a sum divided by a *global* count: of elements, of positions that are not ignored, of
their weights. Written so, the rows of pointwise operators and of sums do the rest, and the large tensors stay split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from distfx.ir import ops
from distfx.ir.meta import meta
from distfx.ir.nodes import arguments, aten
from distfx.rules.pointwise import ELEMENTWISE_LOSSES

__all__ = ["split_loss"]

NONE, MEAN, SUM = 0, 1, 2


class _Builder:
    """Calls before a node, with its place in the model."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node

    def __call__(
        self, target: Any, *args: Any, shape: Sequence[Any], dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Node:
        with self.graph.inserting_before(self.node):
            made = self.graph.call_function(target, args, kwargs)
        made.meta = dict(self.node.meta)
        meta(made).shape = tuple(shape)
        if dtype is not None:
            meta(made).dtype = dtype
        return made

    def finish(self, target: Any, *args: Any) -> None:
        """The node itself becomes this call."""
        self.node.target, self.node.args, self.node.kwargs = target, args, {}


def split_loss(graph: Graph, node: Node) -> bool:
    """Rewrite a loss into its parts; whether ``node`` was one."""
    if node.target in ELEMENTWISE_LOSSES:
        _elementwise(graph, node)
    elif node.target is aten.cross_entropy_loss.default:
        _cross_entropy(graph, node)
    elif node.target in (aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default):
        a = arguments(node)
        x = a["self"]
        _reduce_classes(_Builder(graph, node), x, a["target"], a["weight"], a["reduction"], a["ignore_index"], 0.0)
    else:
        return False
    return True


def _elementwise(graph: Graph, node: Node) -> None:
    a = arguments(node)
    reduction = a.get("reduction", MEAN)
    if reduction == NONE:
        return
    order = [argument.name for argument in node.target._schema.arguments if not argument.kwarg_only]  # type: ignore[union-attr]
    values = [NONE if name == "reduction" else a.get(name) for name in order]
    extra = {key: value for key, value in a.items() if key not in order}
    operands = [meta(value).shape for value in values if isinstance(value, Node)]
    each = _Builder(graph, node)(node.target, *values, shape=_broadcast(operands), **extra)
    node.target, node.args, node.kwargs = (aten.mean if reduction == MEAN else aten.sum).default, (each,), {}


def _broadcast(shapes: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    rank = max(len(shape) for shape in shapes)
    result = []
    for i in range(rank):
        sizes = [shape[i - rank + len(shape)] for shape in shapes if i - rank + len(shape) >= 0]
        result.append(next((size for size in sizes if size != 1), 1))
    return tuple(result)


def _cross_entropy(graph: Graph, node: Node) -> None:
    a = arguments(node)
    x, target, weight = a["self"], a["target"], a["weight"]
    make = _Builder(graph, node)
    shape = meta(x).shape
    dim = 1 if len(shape) > 1 else 0
    logs = make(aten.log_softmax.int, x, dim, shape=shape)
    if not meta(target).dtype.is_floating_point:
        _reduce_classes(make, logs, target, weight, a["reduction"], a["ignore_index"], a["label_smoothing"])
        return
    classes, smoothing = shape[dim], a["label_smoothing"]
    if smoothing:
        target = make(aten.mul.Tensor, target, 1 - smoothing, shape=shape)
        target = make(aten.add.Tensor, target, smoothing / classes, shape=shape)
    each = make(aten.mul.Tensor, logs, target, shape=shape)
    if weight is not None:
        each = make(aten.mul.Tensor, each, _along(make, weight, dim, len(shape)), shape=shape)
    each = make(aten.neg.default, each, shape=shape)
    if a["reduction"] == NONE:
        make.finish(aten.sum.dim_IntList, each, [dim])
        return
    if a["reduction"] == SUM:
        make.finish(aten.sum.default, each)
        return
    total = make(aten.sum.default, each, shape=())
    count: Any = 1
    for i, size in enumerate(shape):
        count = count * (size if i != dim else 1)
    make.finish(aten.div.Tensor, total, count)


def _along(make: _Builder, weight: Node, dim: int, rank: int) -> Node:
    """Weights of classes, to multiply a tensor whose ``dim`` has the classes."""
    shape = [meta(weight).shape[0] if i == dim else 1 for i in range(rank)]
    return make(aten.reshape.default, weight, shape, shape=shape)


def _reduce_classes(
    make: _Builder, logs: Node, target: Node, weight: Node | None, reduction: int, ignored: int, smoothing: float
) -> None:
    """The loss of class indices: minus the logarithm of each target's probability, weighted, ignored ones left out."""
    shape, where = meta(logs).shape, meta(target).shape
    dim = 1 if len(shape) > 1 else 0
    weights = make(ops.class_weights, target, weight, ignored, shape=where) if weight is not None else None
    absent = make(aten.eq.Scalar, target, ignored, shape=where, dtype=torch.bool)
    present = make(aten.logical_not.default, absent, shape=where, dtype=torch.bool)
    counted = weights or make(aten.to.dtype, present, meta(make.node).dtype, shape=where)
    each = make(ops.pick_class, logs, target, ignored, shape=where)
    each = make(aten.mul.Tensor, make(aten.neg.default, each, shape=where), counted, shape=where)
    if smoothing:
        every = logs
        if weight is not None:
            every = make(aten.mul.Tensor, logs, _along(make, weight, dim, len(shape)), shape=shape)
        spread = make(aten.sum.dim_IntList, every, [dim], shape=where)
        spread = make(aten.mul.Tensor, spread, -smoothing / shape[dim], shape=where)
        spread = make(aten.masked_fill.Scalar, spread, absent, 0.0, shape=where)
        each = make(aten.mul.Tensor, each, 1 - smoothing, shape=where)
        each = make(aten.add.Tensor, each, spread, shape=where)
    if reduction == NONE:
        make.finish(aten.alias.default, each)
    elif reduction == SUM:
        make.finish(aten.sum.default, each)
    else:
        total = make(aten.sum.default, each, shape=())
        make.finish(aten.div.Tensor, total, make(aten.sum.default, counted, shape=()))
