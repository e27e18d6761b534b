"""verify: what must hold of every rewritten graph, checked after each pass. A failure is a defect of distfx.

Each check is a function from a node to a complaint, or ``None``; the table below lists them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule, Node

from distfx.layout import Layout
from distfx.moves import Move

__all__ = ["CHECKS", "verify"]


def _has_layout(node: Node) -> str | None:
    if node.op == "output" or isinstance(node.meta.get("layout"), Layout):
        return None
    return "has no layout"


def _rank_fits(node: Node) -> str | None:
    layout, shape = node.meta.get("layout"), node.meta.get("shape")
    if layout is None or shape is None or node.meta.get("many") or len(layout.dims) == len(shape):
        return None
    return f"has layout {layout} but shape {shape}"


def _move_is_typed(node: Node) -> str | None:
    move = node.meta.get("move")
    if not isinstance(move, Move) or "part" in node.meta:
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    expected = move.result(source.meta["layout"])
    return None if expected == node.meta["layout"] else f"says {node.meta['layout']}, but {move} gives {expected}"


def _operands_are_as_needed(node: Node) -> str | None:
    have = {operand.name: operand.meta["layout"] for operand in node.all_input_nodes}
    needs = node.meta.get("needs", ())
    for name, need in needs:
        if have.get(name) != need:
            return f"needs {name} in {need}, but has it in {have.get(name)}"
    if "needs" in node.meta and set(have) != {name for name, _ in needs}:
        return f"has operands {sorted(have)}, but was planned for {sorted(name for name, _ in needs)}"
    return None


def _no_stray_sums(node: Node) -> str | None:
    """A partial sum may only go into the move that completes it."""
    for operand in node.all_input_nodes:
        if operand.meta["layout"].partial and not isinstance(node.meta.get("move"), Move):
            return f"uses the partial sum {operand.name} ({operand.meta['layout']})"
    return None


CHECKS: tuple[Callable[[Node], str | None], ...] = (
    _has_layout,
    _rank_fits,
    _move_is_typed,
    _operands_are_as_needed,
    _no_stray_sums,
)


def verify(module: GraphModule, after: str) -> None:
    """Raise ``AssertionError`` with the first complaint about any node."""
    module.graph.lint()
    for node in module.graph.nodes:
        for check in CHECKS:
            complaint = check(node)
            assert complaint is None, f"after pass {after}: {node.format_node()} {complaint}"
