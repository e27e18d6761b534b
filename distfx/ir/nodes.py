"""Helpers that read nodes of a graph."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from distfx.ir.meta import Meta, meta
from distfx.ir.ops import OpOutput
from distfx.ir.torch_private import OpOverload, schema_of

__all__ = ["arguments", "aten", "describe", "is_empty", "operator_of"]

aten = torch.ops.aten


def operator_of(node: Node) -> Any:
    """The operator that a node calls, also if the node keeps only one of its outputs."""
    return node.target.op if isinstance(node.target, OpOutput) else node.target


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an ATen call by name, defaults included."""
    target = operator_of(node)
    assert isinstance(target, OpOverload)
    schema = schema_of(target).arguments
    values = {argument.name: value for argument, value in zip(schema, node.args, strict=False)} | dict(node.kwargs)
    return {a.name: values.get(a.name, a.default_value if a.has_default_value() else None) for a in schema}


def describe(node: Node) -> str:
    """The name, the module path and the source line of a node, for messages to users."""
    path, source = Meta.path.get(node), Meta.source.get(node)
    where = f" in {path}" if path else ""
    line = f" ({source[0]}:{source[1]}: {source[2]})" if source else ""
    return f"{node.name}{where}{line}"


def is_empty(node: Node) -> bool:
    """Whether ATen may reject a bound call because its output, or an operand it contracts, is empty on this rank."""
    if not Meta.refuses_empty.get(node) or not Meta.local_shape.is_set(node):
        return False
    shapes = [meta(node).local_shape]
    if meta(node).is_product:
        shapes += [meta(operand).local_shape for operand in node.all_input_nodes]
    return any(math.prod(shape) == 0 for shape in shapes)
