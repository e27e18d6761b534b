"""Which nodes of a bound graph have a gradient."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node

from distfx.ir import ops
from distfx.ir.meta import Meta
from distfx.ir.nodes import aten

__all__ = ["gradient_nodes"]

_CONSTANT = (
    ops.refresh,
    aten.detach.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
)
"""Operators whose result has no gradient, whatever their operands have."""

_RANDOM = ("rand.default", "randn.default", "rand_like.default", "randn_like.default")
"""Random operators whose result does not depend on the values of their operands."""


def gradient_nodes(graph: Graph, inputs: Mapping[str, bool], trained: Mapping[str, bool]) -> set[Node]:
    """The nodes that depend on a trained tensor and that an output depends on.

    ``inputs`` and ``trained`` say which inputs and parameters require a gradient.
    """
    depends: dict[Node, bool] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            depends[node] = inputs.get(node.name, False)
        elif node.op == "get_attr":
            depends[node] = trained.get(str(node.target), False)
        else:
            depends[node] = _passes_gradients(node) and any(depends[operand] for operand in node.all_input_nodes)
    used: dict[Node, bool] = {}
    for node in reversed(graph.nodes):
        used[node] = node.op == "output" or any(used[user] for user in node.users if _passes_gradients(user))
    return {node for node in depends if depends[node] and used[node]}


def _passes_gradients(node: Node) -> bool:
    if node.target in _CONSTANT or str(node.kwargs.get("operator")) in _RANDOM:
        return False
    dtype = Meta.dtype.get(node)
    return dtype is None or dtype.is_floating_point or dtype.is_complex
