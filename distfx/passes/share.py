"""share: call an operator with several used results once."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node

from distfx.ir import ops
from distfx.ir.meta import Meta, inherit
from distfx.ir.nodes import is_empty

__all__ = ["share_results"]


def share_results(graph: Graph) -> None:
    """An operator several of whose results are wanted is called once."""
    calls: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if isinstance(node.target, ops.OpOutput) and not is_empty(node):
            calls.setdefault((node.target.op, repr((node.args, node.kwargs))), []).append(node)
    for (op, _), nodes in calls.items():
        if len(nodes) < 2:
            continue
        with graph.inserting_before(nodes[0]):
            every = graph.call_function(op, nodes[0].args, dict(nodes[0].kwargs))
        inherit(every, nodes[0], Meta.path, Meta.source)
        for node in nodes:
            part: Any = node.target
            node.target, node.args, node.kwargs = operator.getitem, (every, part.index), {}
