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
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from distfx.errors import DistfxError
from distfx.ir.layout import Coords, Layout, Split, Window
from distfx.ir.meta import Meta, meta
from distfx.ir.moves import Exchange, Slice
from distfx.ir.nodes import describe
from distfx.ir.ops import LocalPart, LocalSize
from distfx.ir.symbolic import evaluate, evaluate_number, evaluate_shape
from distfx.ir.torch_private import tree_leaves
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
    for node in module.graph.nodes:  # before any move is bound, which may fail on some ranks only
        if node.op != "output" and Meta.layout.is_set(node) and not Meta.multiple.get(node):
            _check(node, _global_shape(node, values), values, grid.placement())
    graph = _Binder(values, grid, frozenset(local_inputs)).run(module.graph)
    _convert_dtypes(graph, dtypes or {})
    return GraphModule(module, graph)


class _Binder:
    """Copies a graph and evaluates its sizes."""

    def __init__(self, values: Values, grid: Grid, local_inputs: frozenset[str]) -> None:
        self.values, self.grid, self.local_inputs = values, grid, local_inputs
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}

    def run(self, graph: Graph) -> Graph:
        for node in graph.nodes:
            copy = self.copies[node] = self.graph.node_copy(node, lambda operand: self.copies[operand])
            copy.args = map_aggregate(copy.args, self._argument)
            copy.kwargs = map_aggregate(copy.kwargs, self._argument)
            if node.op == "output" or not Meta.layout.is_set(node) or Meta.multiple.get(node):
                continue
            meta(copy).shape = _global_shape(node, self.values)
            if not Meta.move.is_set(node):
                meta(copy).local_shape = self._local_shape(meta(node).layout, meta(copy).shape)
            elif self._is_done_by_caller(node, copy):
                self._skip(node, copy)
            else:
                self._bind_move(node, copy)
        return self.graph

    def _argument(self, value: Any) -> Any:
        if isinstance(value, LocalSize):
            return int(_evaluate_size(value, self.values).at(self.grid.placement()))
        if isinstance(value, LocalPart):
            return int(value.at(self.grid.placement()))
        return evaluate_number(value, self.values) if isinstance(value, sympy.Basic) else value

    def _local_shape(self, layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
        layout = evaluate_layout(layout, self.values)
        return tuple(int(size) for size in layout.local_shape(shape, self.grid.placement()))

    def _is_done_by_caller(self, node: Node, copy: Node) -> bool:
        """Whether a slice takes this rank's part of an input that comes as this part."""
        source = copy.args[0]
        assert isinstance(source, Node)
        is_local = source.op == "placeholder" and source.name in self.local_inputs
        return is_local and isinstance(meta(node).move, Slice) and len(node.all_input_nodes[0].users) == 1

    def _skip(self, node: Node, copy: Node) -> None:
        """Leave out a slice, whose operand already has its layout."""
        source = self.copies[node] = copy.all_input_nodes[0]
        meta(source).layout = meta(node).layout
        meta(source).local_shape = self._local_shape(meta(node).layout, meta(copy).shape)
        self.graph.erase_node(copy)

    def _bind_move(self, node: Node, copy: Node) -> None:
        values, shape, move = self.values, meta(copy).shape, meta(node).move
        source = copy.all_input_nodes[0]
        if isinstance(move, Exchange):
            move = replace(move, extent=evaluate(move.extent, values), target=_evaluate_split(move.target, values))
        if isinstance(move, Slice):
            move = replace(move, unit=evaluate(move.unit, values))
        written = Meta.written_layout.get(node)
        layout = written or meta(source).layout
        local_shape = meta(source).local_shape if written is None else self._local_shape(layout, shape)
        transfers = move.bind(evaluate_layout(layout, values), shape, local_shape, self.grid)
        meta(copy).transfers, meta(copy).local_shape, meta(copy).move = transfers, transfers.forward.after, move
        if not any(split.window for split in meta(node).layout.dims):
            meta(copy).part_shape = self._local_shape(meta(node).layout, shape)


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
    leaves = (leaf for node in graph.nodes for leaf in tree_leaves((node.args, node.kwargs)))
    if not changed or any(isinstance(leaf, torch.dtype) for leaf in leaves):
        return
    for node in graph.nodes:
        if Meta.dtype.get(node) in changed:
            meta(node).dtype = changed[meta(node).dtype]


def _global_shape(node: Node, values: Values) -> tuple[int, ...]:
    return evaluate_shape(Meta.shape.get(node) or (), values)


def _evaluate_split(split: Split, values: Values) -> Split:
    """A split whose unit and window are numbers."""
    window = split.window
    if window is not None:
        window = Window(*(evaluate(size, values) for size in (window.lo, window.hi, window.mul, window.div)))
    return replace(split, unit=evaluate(split.unit, values), window=window)


def _evaluate_size(size: LocalSize, values: Values) -> LocalSize:
    return replace(size, extent=evaluate(size.extent, values), split=_evaluate_split(size.split, values))


def evaluate_layout(layout: Layout, values: Values) -> Layout:
    """A layout whose units and windows are numbers."""
    return replace(layout, dims=tuple(_evaluate_split(split, values) for split in layout.dims))


# -------------------------------------------------------------------------------------------------- checking


def _check(node: Node, shape: tuple[int, ...], values: Values, coords: Coords) -> None:
    """Raise if the operator cannot take these sizes: the same error on all ranks."""
    decision = Meta.decision.get(node)
    is_empty = math.prod(shape) == 0 and node.op == "call_function" and decision is not None
    if is_empty or any(size < 0 for size in shape):
        raise DistfxError(f"{_show(values)}: the result of {describe(node)} would have shape {shape}")
    if decision is None or decision.spec is None or decision.spec.rule.check is None:
        return
    call = BoundCall(decision.spec, node, shape, lambda s: evaluate(s, values), lambda s: _smallest(s, values, coords))
    if problem := decision.spec.rule.check(call):
        raise DistfxError(f"{_show(values)}: {describe(node)} {problem}")


def _smallest(size: Any, values: Values, coords: Coords) -> int:
    """The smallest value of a size on any rank."""
    if not isinstance(size, LocalSize):
        return int(evaluate(size, values))
    local_size = _evaluate_size(size, values)
    ranks = {axis: coords[axis][1] for axis in size.split.axes}
    places = itertools.product(*map(range, ranks.values()))
    return min(int(local_size.at({a: (i, ranks[a]) for a, i in zip(ranks, at, strict=True)})) for at in places)


def _show(values: Values) -> str:
    return "with " + ", ".join(f"{symbol} = {value}" for symbol, value in values.items()) if values else "here"
