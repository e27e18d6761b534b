"""split_bias: where a move completes a sum over channels, add the bias after it, once, as a separate operator.

in: a planned graph.   out: the same graph with ``ops.add_bias`` after such convolutions and linear layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.fx import Graph, Node

from distfx.ir import ops
from distfx.ir.layout import Layout
from distfx.ir.meta import meta
from distfx.ir.nodes import aten
from distfx.planner.decisions import Decision, Decisions, storage_layout
from distfx.planner.strategies import follow_layout, project
from distfx.rules.registry import spec_of

__all__ = ["split_bias"]


def split_bias(graph: Graph, decisions: Decisions, axes: Mapping[str, int], stored: Mapping[str, Layout]) -> None:
    """Take the bias out of every call whose result is a partial sum, and decide for the new operators."""
    replaced: dict[Node, Node] = {}
    for node, decision in list(decisions.nodes.items()):
        decision = decisions.nodes[node] = _with_operands(decision, replaced)
        spec = decision.spec
        if not decision.produced.partial or spec is None or not spec.rule.anchor or node.args[2:3] in ((), (None,)):
            continue
        bias = node.args[2]
        assert isinstance(bias, Node)
        node.args = (*node.args[:2], None, *node.args[3:])
        with graph.inserting_after(node):
            added = graph.call_function(ops.add_bias)
        node.replace_all_uses_with(added)
        added.args, added.kwargs = (node, bias), {"dim": 1 if node.target is aten.convolution.default else -1}
        added.meta = dict(node.meta)
        kept = tuple((operand, need) for operand, need in decision.needs if operand is not bias)
        decisions.nodes[node] = replace(decision, needs=kept, spec=replace(spec, operands=spec.operands[: len(kept)]))
        bias_spec = spec_of(added)
        assert bias_spec is not None
        bias_spec, assignment = follow_layout(bias_spec, 0, decision.result, axes)
        projected = project(bias_spec, assignment, axes)
        assert projected is not None
        needs, result = projected
        decisions.nodes[added] = Decision("", assignment, needs, result, result, bias_spec)
        decisions.layouts[added] = result
        replaced[node] = added
        if str(bias.target) not in stored:
            decisions.layouts[bias] = storage_layout(needs[1][1], list(axes))
    order = {node: i for i, node in enumerate(graph.nodes)}
    decisions.nodes = dict(sorted(decisions.nodes.items(), key=lambda item: order[item[0]]))
    for node, decision in decisions.nodes.items():
        meta(node).decision = decision


def _with_operands(decision: Decision, replaced: dict[Node, Node]) -> Decision:
    """The decision with some operands replaced."""
    if not replaced.keys() & {operand for operand, _ in decision.needs}:
        return decision
    needs = tuple((replaced.get(operand, operand), need) for operand, need in decision.needs)
    spec = decision.spec
    if spec is not None:
        spec = replace(
            spec, operands=tuple((replaced.get(operand, operand), patterns) for operand, patterns in spec.operands)
        )
    return replace(decision, needs=needs, spec=spec)
