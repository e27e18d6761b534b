"""insert: put moves between operators wherever a value is not in the layout that its consumer needs.

in: a planned graph.   out: a new graph. ``meta.layout`` of each node is the layout of its value, and moves are
operators with literal arguments. Consumers share moves: a tensor that was gathered or extended by a halo once serves
all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Graph, GraphModule, Node

from distfx.ir import ops
from distfx.ir.layout import DIM_NAMES, Layout
from distfx.ir.meta import Meta, inherit, meta
from distfx.ir.moves import AllGather, Move, Slice
from distfx.ir.nodes import aten
from distfx.ir.route import Border, route
from distfx.planner.decisions import Decision, Decisions

__all__ = ["insert_moves"]

_WEIGHT_DIMS = {1: "C", 2: "KC", 3: "KCR", 4: "KCRS", 5: "KCRST"}
"""Names of the dims of parameters, by their number."""


def insert_moves(module: GraphModule, decisions: Decisions, outputs: str) -> GraphModule:
    """A copy of the graph with its moves. ``outputs`` is ``"global"`` (replicated on every rank) or ``"local"``."""
    return GraphModule(module, _Inserter(decisions, outputs).run(module.graph))


class _Inserter:
    """Copies a graph and moves each operand into the layout that its consumer needs."""

    def __init__(self, decisions: Decisions, outputs: str) -> None:
        self.decisions, self.outputs = decisions, outputs
        self.graph = Graph()
        self.values: dict[Node, Node] = {}
        """The copy of each node, after the moves that complete its result."""
        self.moved: dict[tuple[Node, Move], Node] = {}
        """The moves inserted so far, by operand."""
        self.unowned: list[Node] = []
        """The moves inserted since the last call of :meth:`_set_owner`."""

    def run(self, graph: Graph) -> Graph:
        parameters = _parameter_layouts(self.decisions)
        for node in graph.nodes:
            if node.op == "placeholder":
                self._insert_input(node)
            elif node.op == "get_attr":
                parameter = self.values[node] = self.graph.node_copy(node)
                meta(parameter).layout = _with_names(parameters.get(node, self.decisions.layouts[node]), is_weight=True)
            elif node.op == "call_function":
                self._insert_operator(node, self.decisions.nodes[node])
            elif node.op == "output":
                self.graph.output(tuple(self._output(value) for value in node.args[0]))
                self.graph.output_node().meta = {}
        return self.graph

    def _insert_input(self, node: Node) -> None:
        copy = self.values[node] = self.graph.node_copy(node)
        meta(copy).layout = _with_names(Layout.replicated(len(Meta.shape.get(node) or ())))
        if Meta.shape.is_set(node):
            self.values[node] = self._to_layout(copy, replace(self.decisions.layouts[node], names=()))
            self._set_owner(copy)

    def _insert_operator(self, node: Node, decision: Decision) -> None:
        operands = {
            operand: self._to_layout(self.values[operand], need, decision.border(index))
            for index, (operand, need) in enumerate(decision.needs)
        }
        copy = self.graph.node_copy(node, lambda operand: operands.get(operand, self.values[operand]))
        meta(copy).layout, meta(copy).decision = _with_names(decision.produced), decision
        meta(copy).needs = tuple((operands[operand].name, need) for operand, need in decision.needs)
        if decision.spec is not None and decision.spec.rule.anchor and decision.algorithm.startswith("stationary"):
            copy._rename(f"{node.name}_{decision.algorithm.replace('-', '_')}")
        self.values[node] = self._to_layout(copy, decision.result) if decision.produced.partial else copy
        self._set_owner(copy)
        if node.target is aten.batch_norm.default and node.args[5]:
            for buffer in node.args[3:5]:
                if isinstance(buffer, Node):
                    self._refresh(self.values[buffer], operands[buffer], copy)
                    self._drop_moves(self.values[buffer])

    def _output(self, value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        copy = self.values[value]
        layout = meta(copy).layout
        is_global = self.outputs == "global"
        moved = self._to_layout(copy, Layout.replicated(len(layout.dims)) if is_global else layout.storage())
        self._set_owner(copy)
        return moved

    # -- moves

    def _to_layout(self, value: Node, need: Layout, border: Border | None = None) -> Node:
        """``value`` in the layout ``need``."""
        for move in route(meta(value).layout, need, meta(value).shape, border):
            value = self._move(value, move)
        return value

    def _move(self, value: Node, move: Move) -> Node:
        """``value`` after ``move``: the node of an earlier consumer if there is one."""
        if (value, move) in self.moved:
            return self.moved[value, move]
        node = self.graph.call_function(ops.inserted(move.op), (value,), move.arguments())
        inherit(node, value, Meta.shape, Meta.dtype)
        meta(node).layout = move.result(meta(value).layout).with_names(meta(value).layout.names)
        meta(node).move = move
        self.moved[value, move] = node
        self.unowned.append(node)
        return node

    def _set_owner(self, owner: Node) -> None:
        """Assign the moves inserted since the last call to the operator that they serve."""
        name = Meta.owner.get(owner) or owner.name  # the owner of a move also owns the moves that follow it
        for node in self.unowned:
            meta(node).owner = name
            inherit(node, owner, Meta.path, Meta.source)
        self.unowned.clear()

    def _drop_moves(self, value: Node) -> None:
        """Let later consumers move ``value`` again, because it was written."""
        for operand, move in [key for key in self.moved if key[0] is value]:
            self._drop_moves(self.moved.pop((operand, move)))

    def _refresh(self, buffer: Node, slice_of_buffer: Node, owner: Node) -> None:
        """After each rank wrote its slice of a replicated buffer, gather the slices of the others."""
        moves: list[Node] = []
        node: Any = slice_of_buffer
        while node is not buffer:
            moves.insert(0, node)
            node = node.args[0]
        slices = [move for node in moves if isinstance(move := meta(node).move, Slice)]
        only_slices = all(node.target in (ops.slice, ops.to_varying, ops.to_replicated) for node in moves)
        assert only_slices and len({move.dim for move in slices}) <= 1, "a written buffer is at most sliced"
        if not slices:
            return
        gather = AllGather(tuple(axis for move in slices for axis in move.axes), slices[0].dim, "replicated")
        refresh = self.graph.call_function(ops.refresh, (buffer,), gather.arguments())
        refresh.meta = dict(buffer.meta)
        meta(refresh).move, meta(refresh).owner = gather, owner.name
        meta(refresh).written_layout = meta(slice_of_buffer).layout


def _parameter_layouts(decisions: Decisions) -> dict[Node, Layout]:
    """The layout of each parameter, varying over the axes over which its gradient must be summed."""
    varying: dict[Node, set[str]] = {}
    for decision in decisions.nodes.values():
        for operand, need in decision.needs:
            if operand.op == "get_attr":
                stored_axes = decisions.layouts[operand].split_axes
                varying.setdefault(operand, set()).update((need.varying | need.split_axes) - stored_axes)
    return {node: replace(decisions.layouts[node], varying=frozenset(axes)) for node, axes in varying.items()}


def _with_names(layout: Layout, *, is_weight: bool = False) -> Layout:
    names = (_WEIGHT_DIMS if is_weight else DIM_NAMES).get(len(layout.dims))
    return layout.with_names(names or [f"d{i}" for i in range(len(layout.dims))])
