"""verify: check the invariants of a graph after each pass. A failure is a defect of distfx.

Each check maps a node to a complaint or ``None``. The table ``CHECKS`` lists the checks of each pass.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule, Node

from distfx.ir import ops
from distfx.ir.layout import Layout
from distfx.ir.meta import Meta, meta
from distfx.ir.moves import Move
from distfx.ir.nodes import aten
from distfx.passes.capture.mutation import written_buffer

__all__ = ["CHECKS", "verify"]


def _has_shape(node: Node) -> str | None:
    if node.op == "output" or Meta.multiple.is_set(node) or isinstance(Meta.shape.get(node), tuple):
        return None
    return None if node.op == "placeholder" else "has no shape"  # an input that is not a tensor has none


def _is_functional(node: Node) -> str | None:
    """Only buffers are written."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable or node.target is aten.batch_norm.default:
        return None
    return None if written_buffer(node.args[0]) is not None else "writes into a tensor that is not a buffer"


def _is_decided(node: Node) -> str | None:
    """The node has a decision, for the operands that it reads."""
    if node.op != "call_function":
        return None
    decision = Meta.decision.get(node)
    if decision is None:
        return "has no decision"
    stray = [operand.name for operand, _ in decision.needs if operand not in node.all_input_nodes]
    return f"was decided for {stray}, which it does not read" if stray else None


def _has_layout(node: Node) -> str | None:
    if node.op == "output" or isinstance(Meta.layout.get(node), Layout):
        return None
    return "has no layout"


def _ndim_fits(node: Node) -> str | None:
    layout, shape = Meta.layout.get(node), Meta.shape.get(node)
    if layout is None or shape is None or Meta.multiple.get(node) or len(layout.dims) == len(shape):
        return None
    return f"has layout {layout} but shape {shape}"


def _move_is_typed(node: Node) -> str | None:
    move = Meta.move.get(node)
    if not isinstance(move, Move) or Meta.written_layout.is_set(node):
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    expected = move.result(meta(source).layout)
    return None if expected == meta(node).layout else f"says {meta(node).layout}, but {move} returns {expected}"


def _operands_are_as_needed(node: Node) -> str | None:
    layouts = {operand.name: meta(operand).layout for operand in node.all_input_nodes}
    needs = Meta.needs.get(node) or ()
    for name, need in needs:
        if layouts.get(name) != need:
            return f"needs {name} in {need}, but has it in {layouts.get(name)}"
    if Meta.needs.is_set(node) and set(layouts) != {name for name, _ in needs}:
        return f"has operands {sorted(layouts)}, but was planned for {sorted(name for name, _ in needs)}"
    return None


def _no_stray_sums(node: Node) -> str | None:
    """A partial sum may only go into the move that completes it."""
    for operand in node.all_input_nodes:
        if meta(operand).layout.partial and not isinstance(Meta.move.get(node), Move):
            return f"uses the partial sum {operand.name} ({meta(operand).layout})"
    return None


def _parts_fit(node: Node) -> str | None:
    """The result of a move has the shape of this rank's part by its layout."""
    actual, expected = Meta.local_shape.get(node), Meta.part_shape.get(node)
    if expected is None or actual == expected:
        return None
    return f"returns {actual}, but this rank's part is {expected}"


def _has_local_shape(node: Node) -> str | None:
    if node.op == "output" or Meta.multiple.get(node) or not Meta.layout.is_set(node) or Meta.local_shape.is_set(node):
        return None
    return "has no local shape"


def _has_format(node: Node) -> str | None:
    return None if Meta.channels_last.is_set(node) else "has no memory format"


def _writes_are_private(node: Node) -> str | None:
    """An operand that is overwritten has no other reader."""
    if node.target not in (ops.add_into, ops.activate_in_place):
        return None
    written = node.args[0]
    readers = list(written.users) if isinstance(written, Node) else []
    return None if readers == [node] else f"overwrites {written}, which is read by {readers}"


def _halos_have_transfers(node: Node) -> str | None:
    fused = node.target is ops.halo_convolution
    return "has no transfers" if fused and not Meta.transfers.is_set(node) else None


def _is_linked(node: Node) -> str | None:
    if node.op == "get_attr":
        return "reads a parameter that no bucket provides"
    return "has no kernel" if ops.is_inserted(node.target) else None


Check = Callable[[Node], str | None]
_GRAPH: tuple[Check, ...] = (_has_shape, _is_functional)
_TYPED: tuple[Check, ...] = (_has_layout, _ndim_fits, _move_is_typed, _operands_are_as_needed, _no_stray_sums)
_BOUND: tuple[Check, ...] = (_has_local_shape, _parts_fit)
CHECKS: dict[str, tuple[Check, ...]] = {
    "capture": _GRAPH,
    "plan": (*_GRAPH, _is_decided),
    "split_bias": (*_GRAPH, _is_decided),
    "insert": _TYPED,
    "localize": _TYPED,
    "prune": _TYPED,
    "bind": (_has_layout, *_BOUND),
    "buckets": _BOUND,
    "predict": _BOUND,
    "formats": (*_BOUND, _has_format),
    "copies": _BOUND,
    "share": _BOUND,
    "fuse": (*_BOUND, _halos_have_transfers),
    "reuse": (*_BOUND, _writes_are_private),
    "link": (_is_linked,),
}


def verify(module: GraphModule, after: str) -> None:
    """Raise ``AssertionError`` with the first complaint about any node."""
    module.graph.lint()
    for node in module.graph.nodes:
        for check in CHECKS[after]:
            complaint = check(node)
            assert complaint is None, f"after pass {after}: {node.format_node()} {complaint}"
