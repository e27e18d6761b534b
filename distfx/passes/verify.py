"""verify: what must hold of a graph, checked after each pass. A failure is a defect of distfx.

Each check is a function from a node to a complaint, or ``None``; the table below lists them, for each pass.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule, Node

from distfx.ir.layout import Layout
from distfx.ir.moves import Move
from distfx.ir.nodes import aten
from distfx.passes.capture.mutation import written_whole

__all__ = ["CHECKS", "verify"]


def _has_shape(node: Node) -> str | None:
    if node.op == "output" or "many" in node.meta or isinstance(node.meta.get("shape"), tuple):
        return None
    return None if node.op == "placeholder" else "has no shape"  # one that is no tensor has none


def _is_functional(node: Node) -> str | None:
    """Buffers alone are written."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable or node.target is aten.batch_norm.default:
        return None
    return None if written_whole(node.args[0]) is not None else "writes into a tensor that is no buffer"


def _is_decided(node: Node) -> str | None:
    """By the plan; what it was decided for is what the node has."""
    if node.op != "call_function":
        return None
    decision = node.meta.get("decision")
    if decision is None:
        return "has no decision"
    stray = [operand.name for operand, _ in decision.needs if operand not in node.all_input_nodes]
    return f"was decided for {stray}, which it does not read" if stray else None


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


def _parts_fit(node: Node) -> str | None:
    """What a move gives on this rank is its part by the layout."""
    have, want = node.meta.get("local"), node.meta.get("own")
    return None if want is None or tuple(have or ()) == want else f"gives {have}, but this rank's part is {want}"


Check = Callable[[Node], str | None]
_GRAPH: tuple[Check, ...] = (_has_shape, _is_functional)
_TYPED: tuple[Check, ...] = (_has_layout, _rank_fits, _move_is_typed, _operands_are_as_needed, _no_stray_sums)
CHECKS: dict[str, tuple[Check, ...]] = {
    "capture": _GRAPH,
    "plan": (*_GRAPH, _is_decided),
    "insert": _TYPED,
    "localise": _TYPED,
    "bind": (_has_layout, _parts_fit),
}


def verify(module: GraphModule, after: str) -> None:
    """Raise ``AssertionError`` with the first complaint about any node."""
    module.graph.lint()
    for node in module.graph.nodes:
        for check in CHECKS[after]:
            complaint = check(node)
            assert complaint is None, f"after pass {after}: {node.format_node()} {complaint}"
