"""Element-wise operators and reductions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from distfx.ir.meta import meta
from distfx.ir.nodes import arguments, aten
from distfx.passes.canonicalize.calls import END, insert_call, replace_call

__all__ = ["count_nonzero", "difference", "dropout", "glu", "norm", "rrelu", "type_as"]


def glu(graph: Graph, node: Node) -> None:
    """One half times the sigmoid of the other."""
    dim: Any = arguments(node)["dim"]
    shape = meta(node).shape
    size = shape[dim]
    halves = [(node.args[0], dim % len(shape), start, start + size) for start in (0, size)]
    value, gate = (insert_call(graph, node, aten.slice.Tensor, half, shape) for half in halves)
    replace_call(node, aten.mul.Tensor, value, insert_call(graph, node, aten.sigmoid.default, (gate,), shape))


def rrelu(graph: Graph, node: Node) -> None:
    """Without training the slope is the mean of its bounds."""
    values = arguments(node)
    if not values["training"]:
        replace_call(node, aten.leaky_relu.default, node.args[0], (values["lower"] + values["upper"]) / 2)


def dropout(graph: Graph, node: Node) -> None:
    """Without training, or with p = 0, dropout is the identity."""
    if not node.args[2] or node.args[1] == 0:
        node.target, node.args = aten.alias.default, (node.args[0],)


def type_as(graph: Graph, node: Node) -> None:
    node.target, node.args = aten.to.dtype, (node.args[0], meta(node).dtype)


def norm(graph: Graph, node: Node) -> None:
    """All vector norms are ``linalg_vector_norm``; those of infinite order are extremes of absolute values."""
    a = arguments(node)
    x, order, dims = node.args[0], a["ord"] if "ord" in a else a["p"], a.get("dim")
    keepdim, dtype = bool(a.get("keepdim")), a.get("dtype")
    order = 2.0 if order is None else float(order)
    if isinstance(dims, int):
        dims = [dims]
    assert isinstance(x, Node)
    if math.isinf(order) and dtype is None:
        target = aten.amax.default if order > 0 else aten.amin.default
        magnitude = insert_call(graph, node, aten.abs.default, (x,), meta(x).shape)
        replace_call(node, target, magnitude, [] if dims is None else list(dims), keepdim)
    else:
        replace_call(node, aten.linalg_vector_norm.default, x, order, dims, keepdim)
        node.kwargs = {} if dtype is None else {"dtype": dtype}


def count_nonzero(graph: Graph, node: Node) -> None:
    x: Any = node.args[0]
    is_nonzero = insert_call(graph, node, aten.ne.Scalar, (x, 0), meta(x).shape)
    meta(is_nonzero).dtype = torch.bool
    replace_call(node, aten.sum.dim_IntList, is_nonzero, arguments(node).get("dim"))


def difference(graph: Graph, node: Node) -> None:
    """Repeated differences of neighbours along a dim: the later minus the earlier."""
    values = arguments(node)
    if values["prepend"] is not None or values["append"] is not None or meta(node).dtype is torch.bool:
        return
    x: Any = node.args[0]
    dim = values["dim"] % len(meta(x).shape)
    for order in range(1, values["n"] + 1):
        shape = [size - 1 if i == dim else size for i, size in enumerate(meta(x).shape)]
        later = insert_call(graph, node, aten.slice.Tensor, (x, dim, 1, END), shape)
        earlier = insert_call(graph, node, aten.slice.Tensor, (x, dim, 0, meta(x).shape[dim] - 1), shape)
        if order == values["n"]:
            replace_call(node, aten.sub.Tensor, later, earlier)
        else:
            x = insert_call(graph, node, aten.sub.Tensor, (later, earlier), shape)
