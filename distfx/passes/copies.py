"""copies: copy the values of a buffer that are read before the graph writes into it.

in: a bound graph.   out: the same graph. Backward may need the values that the buffer had before the write.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from distfx.ir import ops
from distfx.ir.meta import Meta, inherit
from distfx.ir.nodes import aten
from distfx.ir.torch_private import is_mutable

__all__ = ["copy_before_writes"]

_ALIASES = (ops.to_varying, ops.to_replicated, aten.detach.default)
"""Calls that return their operand itself in forward."""


def copy_before_writes(graph: Graph) -> None:
    """Copy a buffer for each call that reads it, if the call's result is last used before the buffer is written."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    for write in list(graph.nodes):
        buffer = _written_buffer(write)
        if buffer is None:
            continue
        aliases = [buffer, *(user for user in buffer.users if user.target in _ALIASES)]
        for source, reader in [(each, user) for each in aliases for user in each.users if user not in aliases]:
            last_use = max(position[use] for use in _uses(reader))
            is_read = _written_buffer(reader) is None and reader.target is not ops.refresh
            if is_read and last_use < position[write]:
                with graph.inserting_before(reader):
                    copy = graph.call_function(torch.clone, (source,))
                inherit(copy, source, Meta.shape, Meta.local_shape, Meta.layout, Meta.dtype, Meta.channels_last)
                position[copy] = position[reader]
                reader.replace_input_with(source, copy)


def _written_buffer(node: Node) -> Node | None:
    """The buffer that a call of the model writes into, or ``None``."""
    target = node.target
    if not is_mutable(target) or not node.args:
        return None
    operand: Any = node.args[0]
    while isinstance(operand, Node) and operand.target in _ALIASES:
        operand = operand.args[0]
    return operand if isinstance(operand, Node) and operand.op == "get_attr" else None


def _uses(node: Node) -> Iterator[Node]:
    """A call, and the calls that read its result if that is a view."""
    yield node
    schema = getattr(node.target, "_schema", None)
    is_view = schema is not None and any(returned.alias_info is not None for returned in schema.returns)
    if is_view or node.target in (ops.slice, aten.reshape.default):
        for user in node.users:
            yield from _uses(user)
