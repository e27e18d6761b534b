"""share: make one call of an operator whose results are used in several places.

in: a bound graph, where each used result of an operator is a separate call (:class:`~distfx.ir.ops.OpOutput`).
out: the same graph with one call and an item for each result.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node

from distfx.ir import ops
from distfx.ir.meta import Meta, inherit
from distfx.ir.nodes import is_empty

__all__ = ["share_results"]


def share_results(graph: Graph) -> None:
    """Replace calls that differ only in the result they keep by one call and ``getitem``."""
    calls: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if isinstance(node.target, ops.OpOutput) and not is_empty(node):
            calls.setdefault((node.target.op, repr((node.args, node.kwargs))), []).append(node)
    for (op, _), nodes in calls.items():
        if len(nodes) < 2:
            continue
        with graph.inserting_before(nodes[0]):
            shared = graph.call_function(op, nodes[0].args, dict(nodes[0].kwargs))
        inherit(shared, nodes[0], Meta.path, Meta.source, Meta.autocast, Meta.channels_last)
        for node in nodes:
            output: Any = node.target
            node.target, node.args, node.kwargs = operator.getitem, (shared, output.index), {}
