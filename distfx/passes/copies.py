"""copies: copy buffers that are read before the graph writes into them, because backward may need the old values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from distfx.ir import ops
from distfx.ir.meta import Meta, inherit
from distfx.ir.nodes import aten

__all__ = ["copy_before_writes"]


def copy_before_writes(graph: Graph) -> None:
    """What is read of a buffer before the graph writes into it is a copy: backward may need it as it was."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        buffer = _written(node)
        if buffer is None:
            continue
        same = [buffer, *(user for user in buffer.users if user.target in _ITSELF)]
        for source, reader in [(each, user) for each in same for user in each.users if user not in same]:
            last = max(place[use] for use in _uses(reader))
            if last < place[node] and _written(reader) is None and reader.target is not ops.refresh:
                with graph.inserting_before(reader):
                    copy = graph.call_function(torch.clone, (source,))
                inherit(copy, source, Meta.shape, Meta.local_shape, Meta.layout, Meta.dtype)
                place[copy] = place[reader]
                reader.replace_input_with(source, copy)


def _written(node: Node) -> Node | None:
    """The buffer into which a call of the model writes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable or not node.args:
        return None
    place: Any = node.args[0]
    while isinstance(place, Node) and place.target in _ITSELF:
        place = place.args[0]
    return place if isinstance(place, Node) and place.op == "get_attr" else None


_ITSELF = (ops.to_varying, ops.to_replicated, aten.detach.default)
"""What gives the very tensor, going forward."""


def _uses(node: Node) -> Iterator[Node]:
    """A call, and those that read what it reads by way of the view that it gives."""
    yield node
    schema = getattr(node.target, "_schema", None)
    views = schema is not None and any(given.alias_info is not None for given in schema.returns)
    if views or node.target in (ops.slice, aten.reshape.default):
        for user in node.users:
            yield from _uses(user)
