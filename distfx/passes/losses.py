"""Losses become element-wise terms, a sum over them, and a global denominator.

A mean over a sharded batch is a sum divided by a *global* count: of elements, of positions that are not ignored, or of
their weights. In this form the rules of element-wise operators and of sums apply, and the large tensors stay sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from distfx.ir import ops
from distfx.ir.meta import meta
from distfx.ir.nodes import arguments, aten
from distfx.ir.torch_private import schema_of
from distfx.rules.pointwise import ELEMENTWISE_LOSSES

__all__ = ["LOSSES"]

NONE, MEAN, SUM = 0, 1, 2
"""The values of ATen's argument ``reduction``."""


class _Builder:
    """Inserts calls before the node of a loss, with the same provenance."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node

    def __call__(
        self, target: Any, *args: Any, shape: Sequence[Any], dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Node:
        with self.graph.inserting_before(self.node):
            call = self.graph.call_function(target, args, kwargs)
        call.meta = dict(self.node.meta)
        meta(call).shape = tuple(shape)
        if dtype is not None:
            meta(call).dtype = dtype
        return call

    def finish(self, target: Any, *args: Any) -> None:
        """Make the node of the loss itself this call."""
        self.node.target, self.node.args, self.node.kwargs = target, args, {}


def _elementwise_loss(graph: Graph, node: Node) -> None:
    """The loss without reduction, then its mean or sum."""
    a = arguments(node)
    reduction = a.get("reduction", MEAN)
    if reduction == NONE:
        return
    names = [argument.name for argument in schema_of(node.target).arguments if not argument.kwarg_only]
    values = [NONE if name == "reduction" else a.get(name) for name in names]
    keywords = {key: value for key, value in a.items() if key not in names}
    shapes = [meta(value).shape for value in values if isinstance(value, Node)]
    call = _Builder(graph, node)
    losses = call(node.target, *values, shape=_broadcast(shapes), **keywords)
    call.finish((aten.mean if reduction == MEAN else aten.sum).default, losses)


def _broadcast(shapes: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    rank = max(len(shape) for shape in shapes)
    padded = [(*[1] * (rank - len(shape)), *shape) for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def _cross_entropy(graph: Graph, node: Node) -> None:
    a = arguments(node)
    call = _Builder(graph, node)
    shape = meta(a["self"]).shape
    logs = call(aten.log_softmax.int, a["self"], _class_dim(shape), shape=shape)
    loss = _probability_loss if meta(a["target"]).dtype.is_floating_point else _index_loss
    loss(call, logs, a | {"smoothing": a["label_smoothing"]})


def _nll_loss(graph: Graph, node: Node) -> None:
    a = arguments(node)
    _index_loss(_Builder(graph, node), a["self"], a | {"smoothing": 0.0})


def _class_dim(shape: Sequence[Any]) -> int:
    """The dim of the classes: the second, or the only one."""
    return 1 if len(shape) > 1 else 0


def _align_weight(call: _Builder, weight: Node, dim: int, rank: int) -> Node:
    """Reshape the weights of the classes to multiply a tensor with the classes along ``dim``."""
    shape = [meta(weight).shape[0] if i == dim else 1 for i in range(rank)]
    return call(aten.reshape.default, weight, shape, shape=shape)


def _probability_loss(call: _Builder, logs: Node, a: Mapping[str, Any]) -> None:
    """The cross entropy with class probabilities as target."""
    shape = meta(logs).shape
    dim = _class_dim(shape)
    target, weight, smoothing = a["target"], a["weight"], a["smoothing"]
    if smoothing:
        target = call(aten.mul.Tensor, target, 1 - smoothing, shape=shape)
        target = call(aten.add.Tensor, target, smoothing / shape[dim], shape=shape)
    terms = call(aten.mul.Tensor, logs, target, shape=shape)
    if weight is not None:
        terms = call(aten.mul.Tensor, terms, _align_weight(call, weight, dim, len(shape)), shape=shape)
    terms = call(aten.neg.default, terms, shape=shape)
    if a["reduction"] == NONE:
        call.finish(aten.sum.dim_IntList, terms, [dim])
    elif a["reduction"] == SUM:
        call.finish(aten.sum.default, terms)
    else:
        total = call(aten.sum.default, terms, shape=())
        call.finish(aten.div.Tensor, total, math.prod(size for i, size in enumerate(shape) if i != dim))


def _index_loss(call: _Builder, logs: Node, a: Mapping[str, Any]) -> None:
    """The loss with class indices as target: the weighted negative log-probability of each target not ignored."""
    target, weight, ignored, smoothing = a["target"], a["weight"], a["ignore_index"], a["smoothing"]
    shape, positions = meta(logs).shape, meta(target).shape
    dim = _class_dim(shape)
    weights = call(ops.class_weights, target, weight, ignored, shape=positions) if weight is not None else None
    is_ignored = call(aten.eq.Scalar, target, ignored, shape=positions, dtype=torch.bool)
    is_counted = call(aten.logical_not.default, is_ignored, shape=positions, dtype=torch.bool)
    counts = weights or call(aten.to.dtype, is_counted, meta(call.node).dtype, shape=positions)
    terms = call(ops.pick_class, logs, target, ignored, shape=positions)
    terms = call(aten.mul.Tensor, call(aten.neg.default, terms, shape=positions), counts, shape=positions)
    if smoothing:
        weighted = logs
        if weight is not None:
            weighted = call(aten.mul.Tensor, logs, _align_weight(call, weight, dim, len(shape)), shape=shape)
        spread = call(aten.sum.dim_IntList, weighted, [dim], shape=positions)
        spread = call(aten.mul.Tensor, spread, -smoothing / shape[dim], shape=positions)
        spread = call(aten.masked_fill.Scalar, spread, is_ignored, 0.0, shape=positions)
        terms = call(aten.mul.Tensor, terms, 1 - smoothing, shape=positions)
        terms = call(aten.add.Tensor, terms, spread, shape=positions)
    if a["reduction"] == NONE:
        call.finish(aten.alias.default, terms)
    elif a["reduction"] == SUM:
        call.finish(aten.sum.default, terms)
    else:
        total = call(aten.sum.default, terms, shape=())
        call.finish(aten.div.Tensor, total, call(aten.sum.default, counts, shape=()))


LOSSES: Mapping[Any, Callable[[Graph, Node], None]] = {
    **dict.fromkeys(ELEMENTWISE_LOSSES, _elementwise_loss),
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss_nd.default: _nll_loss,
    aten.nll_loss.default: _nll_loss,
    aten.nll_loss2d.default: _nll_loss,
}
"""For each loss the function that rewrites its calls."""
