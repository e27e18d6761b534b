"""buckets: group the parameters of a bound graph by the axes over which their gradients are summed."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from distfx.grid import Grid
from distfx.ir.buckets import Bucket, make_buckets
from distfx.ir.gradients import gradient_nodes
from distfx.ir.meta import meta
from distfx.ir.nodes import aten

__all__ = ["gradient_buckets"]


def gradient_buckets(
    graph: Graph,
    trained: Mapping[str, bool],
    grid: Grid,
    dtypes: Mapping[str, torch.dtype] | None = None,
    channels_last: bool = False,
) -> list[Bucket]:
    """The buckets in which the gradients of a graph's parameters are reduced.

    ``dtypes`` overrides the dtypes that parameters had at capture. ``channels_last`` says how weights are stored.
    """
    gradients, new_gradients = [], set()
    with_gradient = gradient_nodes(graph, {}, trained)
    for node in _parameters_in_order_of_use(graph):
        if node not in with_gradient:
            continue
        name = str(node.target)
        if _gets_new_gradient(node):
            new_gradients.add(name)
        axes = tuple(axis for axis in grid.axes if axis in meta(node).layout.varying)
        nbytes = math.prod(meta(node).local_shape) * meta(node).dtype.itemsize
        gradients.append((name, axes, nbytes, (dtypes or {}).get(name, meta(node).dtype)))
    return make_buckets(gradients, new_gradients, channels_last)


def _parameters_in_order_of_use(graph: Graph) -> list[Node]:
    order: dict[Node, None] = {}
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            if operand.op == "get_attr":
                order.setdefault(operand)
    return list(order)


def _gets_new_gradient(parameter: Node) -> bool:
    """Whether nothing else refers to the parameter's gradient, as for the weight of a single convolution."""
    user = next(iter(parameter.users))
    only = len(parameter.users) == 1
    return only and user.target is aten.convolution.default and user.all_input_nodes[1:2] == [parameter]
