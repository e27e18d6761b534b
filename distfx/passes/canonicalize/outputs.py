"""Calls that return several tensors: each output becomes a separate call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from distfx.ir.meta import meta
from distfx.ir.nodes import arguments, aten
from distfx.ir.ops import OpOutput
from distfx.ir.torch_private import OpOverload, is_mutable
from distfx.passes.canonicalize.calls import replace_call

__all__ = ["rewrite_output"]


def rewrite_output(graph: Graph, node: Node) -> None:
    """Make one output of a call that returns several tensors a separate call."""
    source: Any = node.args[0]
    if not isinstance(source, Node):
        return
    rewrite = _OUTPUTS.get(source.target)
    if rewrite is not None:
        rewrite(node, source)
    elif _is_pure(source.target):
        index: Any = node.args[1]
        replace_call(node, OpOutput(source.target, index), *source.args, **source.kwargs)  # type: ignore[arg-type]


def _is_pure(target: Any) -> bool:
    """Whether an operator may be called again: it has no side effects and draws no random numbers."""
    return (
        isinstance(target, OpOverload)
        and not is_mutable(target)
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def _output_of_split(node: Node, source: Node) -> None:
    """An output of a split is a slice."""
    x: Any = source.args[0]
    index: Any = node.args[1]
    dim: Any = arguments(source)["dim"]
    shapes: Any = meta(source).shape  # of all outputs
    start = sum((shape[dim] for shape in shapes[: index % len(shapes)]), 0)
    replace_call(node, aten.slice.Tensor, x, dim % len(meta(x).shape), start, start + meta(node).shape[dim])


def _output_of_unbind(node: Node, source: Node) -> None:
    """An output of ``unbind`` is a selection."""
    x: Any = source.args[0]
    index: Any = node.args[1]
    dim: Any = arguments(source)["dim"]
    replace_call(node, aten.select.int, x, dim % len(meta(x).shape), index % len(meta(source).shape))


def _output_of_broadcast(node: Node, source: Node) -> None:
    """An output of ``broadcast_tensors`` is an expanded operand."""
    operands: Any = source.args[0]
    index: Any = node.args[1]
    operand, shape = operands[index], meta(node).shape
    if meta(operand).shape == shape:
        replace_call(node, aten.alias.default, operand)
    else:
        replace_call(node, aten.expand.default, operand, list(shape))


_OUTPUTS: Mapping[Any, Callable[[Node, Node], None]] = {
    aten.split.Tensor: _output_of_split,
    aten.split.sizes: _output_of_split,
    aten.split_with_sizes.default: _output_of_split,
    aten.chunk.default: _output_of_split,
    aten.tensor_split.sections: _output_of_split,
    aten.tensor_split.indices: _output_of_split,
    aten.unbind.int: _output_of_unbind,
    aten.broadcast_tensors.default: _output_of_broadcast,
}
