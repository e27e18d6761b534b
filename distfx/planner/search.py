"""The search: choose a strategy for every operator.

The search is greedy, in graph order. For convolutions and linear layers it weighs every legal assignment of factors to
axes by estimated cost. Every other operator follows the layout of one of its operands.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import sympy
from torch.fx import Graph, Node

from distfx.errors import DistfxError
from distfx.ir.layout import Layout
from distfx.ir.meta import Meta, meta
from distfx.ir.nodes import aten, describe
from distfx.planner.cost import strategy_cost
from distfx.planner.decisions import Assignment, Decision, Decisions, Pins, storage_layout
from distfx.planner.strategies import (
    algorithm_name,
    anchor_strategies,
    complete_sums,
    follow_layout,
    input_layout,
    project,
    without_windows,
)
from distfx.rules.registry import draws, spec_of
from distfx.rules.rule import OpSpec

__all__ = ["search"]


def search(
    graph: Graph,
    sizes: Mapping[str, int],
    hints: Mapping[sympy.Symbol, int],
    pins: Pins,
    stored: Mapping[str, Layout],
    written: Collection[str] = (),
) -> Decisions:
    """Decide for every operator of a captured graph.

    Args:
        graph: the captured graph.
        sizes: the sizes of the grid's axes.
        hints: the sizes of the input for which costs are estimated.
        pins: the strategies that the user has fixed.
        stored: the parameters whose layout another graph has fixed.
        written: the buffers that the graph writes as a whole, which must therefore be stored replicated.
    """
    return _Search(sizes, hints, pins, stored, frozenset((*stored, *written))).run(graph)


@dataclass
class _Search:
    sizes: Mapping[str, int]
    hints: Mapping[sympy.Symbol, int]
    pins: Pins
    stored: Mapping[str, Layout]
    fixed: frozenset[str]
    """The parameters and buffers whose layout cannot be chosen."""
    decisions: Decisions = field(default_factory=Decisions)
    anchors: list[Node] = field(default_factory=list)
    """The convolutions and linear layers."""
    matched_pins: set[str] = field(default_factory=set)

    def run(self, graph: Graph) -> Decisions:
        decisions = self.decisions
        inputs = [meta(node).shape for node in graph.find_nodes(op="placeholder") if Meta.shape.is_set(node)]
        for node in graph.nodes:
            if node.op == "placeholder":
                decisions.layouts[node] = input_layout(Meta.shape.get(node) or (), self.sizes, self.hints, inputs)
            elif node.op == "get_attr":
                decisions.layouts[node] = self.stored.get(str(node.target)) or Layout.replicated(len(meta(node).shape))
                decisions.trained.add(node)
            elif node.op == "call_function":
                self._visit(node)
        self._split_computed_weights()
        self._align_running_statistics()
        self._check_pins()
        return decisions

    def _visit(self, node: Node) -> None:
        decisions, operands = self.decisions, node.all_input_nodes
        decision = self._decide(node, spec_of(node))
        decisions.nodes[node], decisions.layouts[node] = decision, decision.result
        if any(operand in decisions.trained for operand in operands):
            decisions.trained.add(node)
        if operands and all(operand.op == "get_attr" or operand in decisions.computed for operand in operands):
            decisions.computed[node] = None
        decisions.store(decision, list(self.sizes), self.fixed)

    def _decide(self, node: Node, spec: OpSpec | None) -> Decision:
        """The cheapest legal strategy of one operator."""
        if spec is None:
            return self._fall_back(node)
        best: tuple[float, Decision] | None = None
        for name, candidate, assignment in self._candidates(node, spec):
            projected = project(candidate, assignment, self.sizes)
            if projected is None:
                continue
            needs, produced = projected
            self.decisions.usable |= {axis for axes in assignment.values() for axis in axes}
            algorithm = algorithm_name(name, assignment) if spec.rule.anchor else ""
            result = complete_sums(candidate, produced)
            decision = Decision(algorithm, assignment, needs, produced, result, candidate)
            cost = strategy_cost(decision, self.decisions, self.sizes, self.hints, self.stored)
            if best is None or cost < best[0]:
                best = (cost, decision)
        return best[1] if best else self._fall_back(node)

    def _candidates(self, node: Node, spec: OpSpec) -> list[tuple[str, OpSpec, Assignment]]:
        layouts = self.decisions.layouts
        if spec.rule.anchor:
            self.anchors.append(node)
            self.decisions.usable |= {axis for axis in self.sizes if axis in spec.extents}
            return list(anchor_strategies(spec, layouts, self.sizes, self._pin(node), self.hints))
        candidates = [
            ("", *follow_layout(spec, index, layouts[operand], self.sizes))
            for index, (operand, _) in enumerate(spec.operands)
            if operand.op != "get_attr"
        ] or [("", spec, {})]
        unwindowed = ((name, other, without_windows(other, assignment)) for name, other, assignment in candidates)
        return candidates + [fewer for fewer, full in zip(unwindowed, candidates, strict=True) if fewer[2] != full[2]]

    def _fall_back(self, node: Node) -> Decision:
        """Gather the operands and run the operator on every rank."""
        if draws(node):
            raise DistfxError(
                f"{describe(node)}: {node.target} draws random numbers, but has no rule that makes replicas draw the "
                "same ones. Draw them outside of the model and pass them as an input."
            )
        layouts = self.decisions.layouts
        operands = node.all_input_nodes
        needs = tuple((operand, Layout.replicated(len(layouts[operand].dims))) for operand in operands)
        result = Layout.replicated(0 if Meta.multiple.get(node) else len(Meta.shape.get(node) or ()))
        gathers = any(layouts[operand].split_axes for operand in operands)
        return Decision("fallback" if gathers else "", {}, needs, result, result, None, fallback=gathers)

    # -- pins

    def _pin(self, node: Node) -> str:
        for pattern, algorithm in self.pins.items():
            if fnmatch.fnmatchcase(Meta.path.get(node) or node.name, pattern):
                self.matched_pins.add(pattern)
                return algorithm
        return "auto"

    def _check_pins(self) -> None:
        missed = [pattern for pattern in self.pins if pattern not in self.matched_pins and pattern != "*"]
        if missed:
            layers = [str(Meta.path.get(node)) for node in self.anchors]
            raise DistfxError(
                f"strategy names {missed[0]!r}, which matches no convolution or linear layer. The model has: "
                + ", ".join(layers[:12])
                + (", ..." if len(layers) > 12 else "")
            )

    # -- corrections that need the decisions of later operators

    def _split_computed_weights(self) -> None:
        """Compute weights that depend on parameters alone in the shards that all their users need.

        Until now they were planned replicated, because their users come later in the graph.
        """
        decisions = self.decisions
        for node in reversed(decisions.computed):
            spec = decisions.nodes[node].spec
            if spec is None or not node.users.keys() <= decisions.nodes.keys():
                continue
            needs = [need for user in node.users for operand, need in decisions.nodes[user].needs if operand is node]
            layouts = {storage_layout(need, list(self.sizes)) for need in needs}
            if len(layouts) != 1:
                continue
            (layout,) = layouts
            dims = zip(spec.result, layout.dims, strict=True)
            assignment = {pattern.factors[0]: split.axes for pattern, split in dims if split.axes and pattern.factors}
            projected = project(spec, assignment, self.sizes) if assignment else None
            if projected is None or projected[1] != layout:
                continue
            if any(split.window for _, need in projected[0] for split in need.dims):
                continue
            self._revise(node, assignment, projected[0], layout)
            decisions.store(decisions.nodes[node], list(self.sizes), self.fixed)

    def _align_running_statistics(self) -> None:
        """Let every batch norm write into slices of its running statistics.

        If another call has split the statistics differently, they are stored replicated. If another graph has fixed
        their layout already, this batch norm splits its channels as they are split.
        """
        for node, decision in self.decisions.nodes.items():
            spec = decision.spec
            if node.target is not aten.batch_norm.default or spec is None:
                continue
            for operand, need in decision.needs:
                stored = self.decisions.layouts[operand]
                if operand not in node.args[3:5] or _contains_slice(stored, need):
                    continue
                if operand.op == "get_attr" and str(operand.target) not in self.stored:
                    self.decisions.layouts[operand] = Layout.replicated(1)
                    continue
                (channel,) = spec.result[1].factors
                assignment = dict(decision.axes) | {channel: stored.dims[0].axes}
                projected = project(spec, assignment, self.sizes)
                assert projected is not None, "a batch norm can be split along its channels"
                self._revise(node, assignment, *projected)
                break

    def _revise(
        self, node: Node, assignment: Assignment, needs: tuple[tuple[Node, Layout], ...], result: Layout
    ) -> None:
        decision = self.decisions.nodes[node]
        self.decisions.nodes[node] = replace(decision, axes=assignment, needs=needs, produced=result, result=result)
        self.decisions.layouts[node] = result


def _contains_slice(stored: Layout, need: Layout) -> bool:
    """Whether each rank's slice of a 1-D tensor is contained in its stored shard."""
    (stored_split,), (needed_split,) = stored.dims, need.dims
    return needed_split.axes[: len(stored_split.axes)] == stored_split.axes
