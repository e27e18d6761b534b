"""Inserting and replacing calls of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, Node

from distfx.ir.meta import meta
from distfx.ir.nodes import aten

__all__ = ["END", "Rewrite", "duplicate_operands", "insert_call", "replace_call"]

Rewrite = Callable[[Graph, Node], None]
"""Rewrites a call in place."""

END = 2**63 - 1
"""The end of a slice that reaches the end of its dim."""


def insert_call(graph: Graph, node: Node, target: Any, args: tuple[Any, ...], shape: Sequence[Any]) -> Node:
    """Insert a call before ``node`` with the same provenance and dtype."""
    with graph.inserting_before(node):
        call = graph.call_function(target, args)
    call.meta = dict(node.meta)
    meta(call).shape = tuple(shape)
    return call


def replace_call(node: Node, target: Any, *args: Any, **kwargs: Any) -> None:
    """Make the node a call of ``target``."""
    node.target, node.args, node.kwargs = target, args, kwargs


def duplicate_operands(graph: Graph, node: Node) -> None:
    """Insert an alias for each repeated operand, because each use may need another layout."""
    seen: set[Node] = set()

    def distinct(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [distinct(item) for item in value]
        if not isinstance(value, Node):
            return value
        if value in seen:
            return insert_call(graph, node, aten.alias.default, (value,), meta(value).shape)
        seen.add(value)
        return value

    node.args = tuple(distinct(value) for value in node.args)
