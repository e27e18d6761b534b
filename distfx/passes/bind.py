"""bind: replace symbolic sizes by numbers, for one input shape on one rank.

in: a localized graph.   out: a copy with literal numbers. ``meta`` of each node has the concrete global ``shape`` and
this rank's ``local_shape``; ``meta`` of a move also has its ``transfers``, forward and backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from distfx.errors import DistfxError
from distfx.ir.layout import Coords, Layout, Split, Window
from distfx.ir.meta import Meta, meta
from distfx.ir.moves import Exchange, Move, Slice
from distfx.ir.nodes import describe
from distfx.ir.ops import LocalPart, LocalSize
from distfx.ir.symbolic import evaluate, evaluate_number, evaluate_shape
from distfx.passes.inputs import Values
from distfx.rules.rule import BoundCall

if TYPE_CHECKING:
    from distfx.grid import Grid

__all__ = ["bind", "converted_dtypes", "evaluate_layout"]


def bind(
    module: GraphModule,
    values: Values,
    grid: Grid,
    local_inputs: Collection[str] = (),
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> GraphModule:
    """Bind a localized graph at the grid's rank.

    ``local_inputs`` names the inputs that come as this rank's part. ``dtypes`` has the present dtypes of parameters.
    """
    coords = grid.placement()
    for node in module.graph.nodes:  # before any move is bound, which may fail on some ranks only
        if node.op != "output" and Meta.layout.is_set(node) and not Meta.multiple.get(node):
            _check(node, _whole_shape(node, values), values, coords)
    graph = Graph()
    copies: dict[Node, Node] = {}
    parts: set[Node] = set()

    def evaluated(value: Any) -> Any:
        if isinstance(value, LocalSize):
            return int(_evaluate_size(value, values).at(coords))
        if isinstance(value, LocalPart):
            return int(value.at(coords))
        return evaluate_number(value, values) if isinstance(value, sympy.Basic) else value

    for node in module.graph.nodes:
        new = graph.node_copy(node, lambda operand: copies[operand])
        new.args, new.kwargs = map_aggregate(new.args, evaluated), map_aggregate(new.kwargs, evaluated)
        copies[node] = new
        if node.op == "output" or not Meta.layout.is_set(node):
            continue
        if node.op == "placeholder" and node.name in local_inputs:
            parts.add(new)
        if Meta.multiple.get(node):
            continue
        shape = meta(new).shape = _whole_shape(node, values)
        move = Meta.move.get(node)
        if isinstance(move, Move):
            source = new.args[0]
            assert isinstance(source, Node)
            operand = node.args[0]
            if source in parts and isinstance(move, Slice) and len(operand.users) == 1:
                copies[node] = source
                meta(source).layout = meta(node).layout
                meta(source).local_shape = _local(meta(node).layout, shape, grid)
                graph.erase_node(new)
                continue
            if isinstance(move, Exchange):
                move = replace(move, extent=evaluate(move.extent, values), target=_evaluate_split(move.target, values))
            if isinstance(move, Slice):
                move = replace(move, unit=evaluate(move.unit, values))
            layout = Meta.written_layout.get(node) or meta(source).layout
            part = _local(layout, shape, grid) if Meta.written_layout.is_set(node) else meta(source).local_shape
            bound = move.bind(evaluate_layout(layout, values), shape, part, grid)
            meta(new).transfers, meta(new).local_shape, meta(new).move = bound, bound.forward.after, move
            if not any(split.window for split in meta(node).layout.dims):
                meta(new).part_shape = _local(meta(node).layout, shape, grid, values)
        else:
            meta(new).local_shape = _local(meta(node).layout, shape, grid, values)
    _convert_dtypes(graph, dtypes or {})
    return GraphModule(module, graph)


def converted_dtypes(graph: Graph, dtypes: Mapping[str, torch.dtype]) -> dict[torch.dtype, torch.dtype]:
    """What the dtypes of a capture have become if parameters were converted since (``net.half()``)."""
    changed = {}
    for node in graph.find_nodes(op="get_attr"):
        now = dtypes.get(str(node.target), meta(node).dtype)
        if now != meta(node).dtype and now.is_floating_point:
            changed[meta(node).dtype] = now
    return changed


def _convert_dtypes(graph: Graph, dtypes: Mapping[str, torch.dtype]) -> None:
    """Let the nodes follow the dtypes of converted parameters, unless the model itself names a dtype."""
    changed = converted_dtypes(graph, dtypes)
    leaves = (leaf for node in graph.nodes for leaf in pytree.tree_leaves((node.args, node.kwargs)))
    if not changed or any(isinstance(leaf, torch.dtype) for leaf in leaves):
        return
    for node in graph.nodes:
        if Meta.dtype.get(node) in changed:
            meta(node).dtype = changed[meta(node).dtype]


def _whole_shape(node: Node, values: Values) -> tuple[int, ...]:
    return evaluate_shape(meta(node).shape, values) if Meta.shape.get(node) is not None else ()


def _local(layout: Layout, shape: Sequence[int], grid: Grid, values: Values | None = None) -> tuple[int, ...]:
    layout = evaluate_layout(layout, values or {})
    return tuple(int(size) for size in layout.local_shape(shape, grid.placement()))


def _evaluate_split(split: Split, values: Values) -> Split:
    """A split whose granule and window are numbers."""
    window = split.window
    if window is not None:
        window = Window(*(evaluate(size, values) for size in (window.lo, window.hi, window.mul, window.div)))
    return replace(split, unit=evaluate(split.unit, values), window=window)


def _evaluate_size(size: LocalSize, values: Values) -> LocalSize:
    return replace(size, extent=evaluate(size.extent, values), split=_evaluate_split(size.split, values))


def evaluate_layout(layout: Layout, values: Values) -> Layout:
    """A layout whose granules and windows are numbers."""
    return replace(layout, dims=tuple(_evaluate_split(split, values) for split in layout.dims))


# -------------------------------------------------------------------------------------------------- checking


def _check(node: Node, shape: tuple[int, ...], values: Values, coords: Coords) -> None:
    """Shapes that make no sense, and what the row of the operator has to say of them: the same error on all ranks."""
    decision = Meta.decision.get(node)
    empty = math.prod(shape) == 0 and node.op == "call_function" and decision is not None
    if empty or any(size < 0 for size in shape):
        raise DistfxError(f"{_sizes(values)}: the result of {describe(node)} would have shape {shape}")
    if decision is None or decision.spec is None or decision.spec.rule.check is None:
        return
    sized = BoundCall(decision.spec, node, shape, lambda s: evaluate(s, values), lambda s: _smallest(s, values, coords))
    if wrong := decision.spec.rule.check(sized):
        raise DistfxError(f"{_sizes(values)}: {describe(node)} {wrong}")


def _smallest(size: Any, values: Values, coords: Coords) -> int:
    """The least that a size is on any rank."""
    if not isinstance(size, LocalSize):
        return int(evaluate(size, values))
    numbered = _evaluate_size(size, values)
    ranks = {axis: coords[axis][1] for axis in size.split.axes}
    places = itertools.product(*map(range, ranks.values()))
    return min(int(numbered.at({a: (i, ranks[a]) for a, i in zip(ranks, at, strict=True)})) for at in places)


def _sizes(values: Values) -> str:
    return "with " + ", ".join(f"{symbol} = {value}" for symbol, value in values.items()) if values else "here"
