"""insert: wherever a producer's layout differs from what its consumer needs, the moves between them.

in: a graph and its decisions.   out: a new graph in which each node's ``meta["layout"]`` is the layout its value has,
and moves stand as operators with literal arguments. Moves are shared: a tensor gathered or halo-extended once serves
every consumer that needs it so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Graph, GraphModule, Node

from distfx.ir import ops
from distfx.ir.layout import DIM_NAMES, Layout
from distfx.ir.meta import Meta, inherit, meta
from distfx.ir.moves import AllGather, Move, Slice
from distfx.ir.route import Border, route
from distfx.planner.decisions import Decision, Decisions
from distfx.rules.registry import aten

__all__ = ["insert_moves"]


class _Inserter:
    """Copies a graph, moving each operand to where its consumer needs it."""

    def __init__(self, plan: Decisions) -> None:
        self.plan = plan
        self.graph = Graph()
        self.values: dict[Node, Node] = {}
        self.moved: dict[tuple[Node, Move], Node] = {}
        self.unowned: list[Node] = []

    def own(self, owner: Node) -> None:
        """The moves made since the last call belong to ``owner``: the operator they serve or whose result they move."""
        name = Meta.owner.get(owner) or owner.name  # the owner of a move also owns the moves that follow it
        for node in self.unowned:
            meta(node).owner = name
            inherit(node, owner, Meta.path, Meta.source)
        self.unowned.clear()

    def move(self, value: Node, move: Move) -> Node:
        """``value`` after ``move``; the same node for the same move."""
        if (value, move) in self.moved:
            return self.moved[value, move]
        node = self.graph.call_function(ops.inserted(move.op), (value,), move.arguments())
        layout = move.result(meta(value).layout)
        inherit(node, value, Meta.shape, Meta.dtype)
        meta(node).layout = layout.with_names(meta(value).layout.names)
        meta(node).move = move
        self.moved[value, move] = node
        self.unowned.append(node)
        return node

    def forget(self, value: Node) -> None:
        """``value`` was written: what was moved of it before is of no use any more."""
        for known, move in [key for key in self.moved if key[0] is value]:
            self.forget(self.moved.pop((known, move)))

    def bring(self, value: Node, need: Layout, border: Border | None = None) -> Node:
        """``value`` in the layout ``need``."""
        for move in route(meta(value).layout, need, meta(value).shape, border):
            value = self.move(value, move)
        return value


_WEIGHTS = {1: "C", 2: "KC", 3: "KCR", 4: "KCRS", 5: "KCRST"}


def _named(layout: Layout, *, weight: bool = False) -> Layout:
    names = (_WEIGHTS if weight else DIM_NAMES).get(len(layout.dims))
    return layout.with_names(names or [f"d{i}" for i in range(len(layout.dims))])


def parameter_layouts(plan: Decisions) -> dict[Node, Layout]:
    """The layout of each parameter, varying over the axes over which its gradient must be summed."""
    over: dict[Node, set[str]] = {}
    for decision in plan.nodes.values():
        for operand, need in decision.needs:
            if operand.op == "get_attr":
                kept = plan.layouts[operand].split_axes
                over.setdefault(operand, set()).update((need.varying | need.split_axes) - kept)
    return {node: replace(plan.layouts[node], varying=frozenset(axes)) for node, axes in over.items()}


def insert_moves(module: GraphModule, plan: Decisions, outputs: str) -> GraphModule:
    """The graph with its moves. ``outputs`` is ``"global"`` (whole on every rank) or ``"local"``."""
    state = _Inserter(plan)
    parameters = parameter_layouts(plan)
    for node in module.graph.nodes:
        if node.op == "output":
            state.graph.output(tuple(_output(state, value, outputs) for value in node.args[0]))
            state.graph.output_node().meta = {}
            break
        if node.op == "placeholder":
            new = state.graph.node_copy(node)
            meta(new).layout = _named(Layout.replicated(len(Meta.shape.get(node) or ())))
            state.values[node] = new
            if Meta.shape.is_set(node):
                target = replace(plan.layouts[node], names=())
                state.values[node] = state.bring(new, target)
                state.own(new)
            continue
        if node.op == "get_attr":
            new = state.graph.node_copy(node)
            layout = parameters.get(node, plan.layouts[node])
            meta(new).layout = _named(layout, weight=True)
            state.values[node] = new
            continue
        _operator(state, node, plan.nodes[node])
    return GraphModule(module, state.graph)


def _operator(state: _Inserter, node: Node, decision: Decision) -> None:
    operands: dict[Node, Node] = {}
    for number, (operand, need) in enumerate(decision.needs):
        operands[operand] = state.bring(state.values[operand], need, decision.border(number))
    new = state.graph.node_copy(node, lambda operand: operands.get(operand, state.values[operand]))
    meta(new).layout, meta(new).decision = _named(decision.produced), decision
    meta(new).needs = tuple((operands[operand].name, need) for operand, need in decision.needs)
    if decision.spec is not None and decision.spec.rule.anchor and decision.algorithm.startswith("stationary"):
        new._rename(f"{node.name}_{decision.algorithm.replace('-', '_')}")
    state.values[node] = state.bring(new, decision.result) if decision.produced.partial else new
    state.own(new)
    if node.target is aten.batch_norm.default and node.args[5]:
        for buffer in node.args[3:5]:
            if isinstance(buffer, Node):
                _refresh(state, state.values[buffer], operands[buffer], new)
                state.forget(state.values[buffer])


def _refresh(state: _Inserter, buffer: Node, part: Node, owner: Node) -> None:
    """After a buffer was written through slices of it, its replicas need the other slices."""
    moves: list[Node] = []
    place: Any = part
    while place is not buffer:
        moves.insert(0, place)
        place = place.args[0]
    slices = [move for node in moves if isinstance(move := meta(node).move, Slice)]
    same = all(node.target in (ops.slice, ops.to_varying, ops.to_replicated) for node in moves)
    assert same and len({move.dim for move in slices}) <= 1, "a buffer that is written is at most sliced"
    if not slices:
        return
    gather = AllGather(tuple(axis for move in slices for axis in move.axes), slices[0].dim, "replicated")
    node = state.graph.call_function(ops.refresh, (buffer,), gather.arguments())
    node.meta = dict(buffer.meta)
    meta(node).move, meta(node).owner, meta(node).written_layout = gather, owner.name, meta(part).layout


def _output(state: _Inserter, value: Any, outputs: str) -> Any:
    if not isinstance(value, Node):
        return value
    new = state.values[value]
    layout = meta(new).layout
    target = Layout.replicated(len(layout.dims)) if outputs == "global" else layout.storage()
    moved = state.bring(new, target)
    state.own(new)
    return moved
