"""A rewritten graph as a person would explain it."""

from __future__ import annotations

import os
from typing import Any

import sympy
from torch.fx import GraphModule, Node

from distfx.ir.meta import Meta
from distfx.ir.symbolic import show
from distfx.ir.torch_private import OpOverload

__all__ = ["readable"]


def readable(module: GraphModule, title: str) -> str:
    """The graph as code: the user's source lines as headings, values with their layouts, moves with their arguments."""
    lines = [title]
    parameters = [node for node in module.graph.nodes if node.op == "get_attr"]
    if parameters:
        width = max(len(str(node.target)) for node in parameters)
        lines.append("    # parameters and buffers: how they are stored; each(...): where their gradients are summed")
        for node in parameters:
            lines.append(f"    {node.target!s:{width}}  # {_layout(node)}   {_shape(node)}")
    heading = None
    for node in module.graph.nodes:
        if node.op in ("get_attr", "output"):
            continue
        if node.op == "placeholder":
            lines += ["", f"    {node.name}: input  # {_layout(node)}   {_shape(node)}"]
            continue
        where = _where(node)
        if where and where != heading:
            lines += ["", f"    # {where}"]
            heading = where
        lines.append(f"    {node.name} = {_call(node)}  # {_notes(node)}")
    output = module.graph.output_node()
    lines += ["", f"    return {', '.join(str(value) for value in output.args[0])}"]  # type: ignore[union-attr]
    return "\n".join(lines)


def _where(node: Node) -> str:
    source, path = Meta.source.get(node), Meta.path.get(node)
    if not source:
        return str(path or "")
    return f"{os.path.basename(source[0])}:{source[1]}{f' [{path}]' if path else ''}: {source[2]}"


def _shape(node: Node) -> str:
    shape = Meta.shape.get(node)
    return f"({', '.join(map(show, shape))})" if shape is not None else ""


def _notes(node: Node) -> str:
    notes = f"{_layout(node)}   {_shape(node)}"
    decision = Meta.decision.get(node)
    if decision is None or Meta.move.is_set(node):
        return notes
    named = decision.fallback or (decision.spec is not None and decision.spec.rule.anchor)
    return f"{notes}   {decision.algorithm}" if named else notes


def _call(node: Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        name = str(target).removesuffix(".default")
    else:
        name = f"distfx.{getattr(target, '__name__', target)}"
    words = [_literal(arg) for arg in node.args] + [f"{key}={_literal(value)}" for key, value in node.kwargs.items()]
    return f"{name}({', '.join(words)})"


def _literal(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(_literal(item) for item in value)}]"
    return show(value) if isinstance(value, sympy.Expr) else repr(value)


def _layout(node: Node) -> str:
    layout = Meta.layout.get(node)
    return "" if layout is None else str(layout)
