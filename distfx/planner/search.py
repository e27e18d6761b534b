"""The search: choose a strategy for every operator.

The search is greedy, in graph order. For convolutions and linear layers it weighs every legal assignment of factors to
axes by estimated cost. Every other operator follows the layout of one of its operands.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import replace

import sympy
from torch.fx import Graph, Node

from distfx.errors import DistfxError
from distfx.ir.layout import Layout
from distfx.ir.meta import Meta, meta
from distfx.ir.nodes import aten, describe
from distfx.planner.cost import strategy_cost
from distfx.planner.decisions import Decision, Decisions, Pins, storage_layout
from distfx.planner.strategies import (
    algorithm_name,
    anchor_strategies,
    complete_sums,
    follow_layout,
    natural_layout,
    project,
    without_windows,
)
from distfx.rules.registry import draws, spec_of


def decide(
    graph: Graph,
    sizes: Mapping[str, int],
    hints: Mapping[sympy.Symbol, int],
    pins: Pins,
    stored: Mapping[str, Layout] | None = None,
    written: frozenset[str] = frozenset(),
) -> Decisions:
    """Choose for every operator. ``sizes`` are the grid's axes; ``stored`` the parameters whose layout is fixed;
    ``written`` the buffers that are written as a whole, and so must be stored whole."""
    plan = Decisions()
    stored = stored or {}
    matched: set[str] = set()
    inputs = [meta(node).shape for node in graph.find_nodes(op="placeholder") if Meta.shape.is_set(node)]
    for node in graph.nodes:
        if node.op == "placeholder":
            shape = Meta.shape.get(node) or ()
            plan.layouts[node] = natural_layout(shape, sizes, hints, inputs)
        elif node.op == "get_attr":
            shape = meta(node).shape
            plan.layouts[node] = stored.get(str(node.target)) or Layout.replicated(len(shape))
            plan.trained.add(node)
        elif node.op == "call_function":
            pin = _pin(node, pins, matched)
            decision = _decide_node(node, plan, sizes, hints, pin, stored)
            plan.nodes[node] = decision
            plan.layouts[node] = decision.result
            if any(operand in plan.trained for operand in node.all_input_nodes):
                plan.trained.add(node)
            made_of = node.all_input_nodes
            if made_of and all(operand.op == "get_attr" or operand in plan.computed for operand in made_of):
                plan.computed[node] = None
            plan.store(decision, sizes, {*stored, *written})
    _split_computed(plan, sizes, {*stored, *written})
    _settle_statistics(plan, sizes, stored)
    _check_pins(graph, pins, matched)
    return plan


def _settle_statistics(plan: Decisions, sizes: Mapping[str, int], fixed: Collection[str]) -> None:
    """A batch norm writes into slices of its running statistics. Where another call has split them otherwise, they are
    stored whole; where another graph has stored them so already, this batch norm is computed as they are split.
    """
    for node, decision in plan.nodes.items():
        if node.target is not aten.batch_norm.default or decision.spec is None:
            continue
        for operand, need in decision.needs:
            stored = plan.layouts[operand]
            if operand not in node.args[3:5] or _is_slice(need, stored):
                continue
            if operand.op == "get_attr" and str(operand.target) not in fixed:
                plan.layouts[operand] = Layout.replicated(1)
                continue
            (channel,) = decision.spec.result[1].factors
            axes = dict(decision.axes) | {channel: stored.dims[0].axes}
            projected = project(decision.spec, axes, sizes)
            assert projected is not None, "a batch norm can be split along its channels"
            plan.nodes[node] = replace(
                decision, axes=axes, needs=projected[0], produced=projected[1], result=projected[1]
            )
            plan.layouts[node] = projected[1]
            break


def _is_slice(part: Layout, whole: Layout) -> bool:
    """Of vectors: whether ranks find theirs in what they have."""
    (mine,), (held,) = part.dims, whole.dims
    return mine.axes[: len(held.axes)] == held.axes


def _split_computed(plan: Decisions, sizes: Mapping[str, int], fixed: Collection[str]) -> None:
    """Weights that are computed are computed in the shards that all their users need, and stored so, as others are.

    Until now they were planned whole: what they are made of is found before who uses them.
    """
    for node in reversed(plan.computed):
        decision = plan.nodes[node]
        if decision.spec is None or not node.users.keys() <= plan.nodes.keys():
            continue
        needs = [need for user in node.users for operand, need in plan.nodes[user].needs if operand is node]
        wanted = {storage_layout(need, list(sizes)) for need in needs}
        if len(wanted) != 1:
            continue
        (layout,) = wanted
        words = zip(decision.spec.result, layout.dims, strict=True)
        axes = {word.factors[0]: split.axes for word, split in words if split.axes and word.factors}
        projected = project(decision.spec, axes, sizes) if axes else None
        if projected is None or projected[1] != layout:
            continue
        if any(split.window for _, need in projected[0] for split in need.dims):
            continue
        plan.nodes[node] = replace(decision, axes=axes, needs=projected[0], produced=layout, result=layout)
        plan.layouts[node] = layout
        plan.store(plan.nodes[node], sizes, fixed)


def _pin(node: Node, pins: Pins, matched: set[str]) -> str:
    spec = spec_of(node)
    if spec is None or not spec.rule.anchor:
        return "auto"
    for pattern, algorithm in pins.items():
        if fnmatch.fnmatchcase(Meta.path.get(node) or node.name, pattern):
            matched.add(pattern)
            return algorithm
    return "auto"


def _check_pins(graph: Graph, pins: Pins, matched: set[str]) -> None:
    missed = [pattern for pattern in pins if pattern not in matched and pattern != "*"]
    if missed:
        layers = [
            Meta.path.get(n)
            for n in graph.nodes
            if (s := spec_of(n) if n.op == "call_function" else None) and s.rule.anchor
        ]
        raise DistfxError(
            f"strategy names {missed[0]!r}, which matches no convolution or linear layer. Those of this model are: "
            + ", ".join(str(layer) for layer in layers[:12])
            + (", ..." if len(layers) > 12 else "")
        )


def _decide_node(
    node: Node,
    plan: Decisions,
    sizes: Mapping[str, int],
    hints: Mapping[sympy.Symbol, int],
    pin: str,
    stored: Mapping[str, Layout],
) -> Decision:
    spec = spec_of(node)
    layouts = plan.layouts
    if spec is None:
        return _whole(node, layouts)
    if spec.rule.anchor:
        plan.usable |= {axis for axis in sizes if axis in spec.extents}
        candidates = list(anchor_strategies(spec, layouts, sizes, pin, hints))
    else:
        candidates = [
            ("", *follow_layout(spec, i, layouts[operand], sizes))
            for i, (operand, _) in enumerate(spec.operands)
            if operand.op != "get_attr"
        ]
        candidates = candidates or [("", spec, {})]
        candidates += [("", s, lean) for _, s, axes in candidates if (lean := without_windows(s, axes)) != axes]
    best: tuple[float, Decision] | None = None
    for name, spec, axes in candidates:
        projected = project(spec, axes, sizes)
        if projected is None:
            continue
        plan.usable |= {axis for group in axes.values() for axis in group}
        needs, produced = projected
        decision = Decision(
            algorithm_name(name, axes) if spec.rule.anchor else "",
            axes,
            needs,
            produced,
            complete_sums(spec, produced),
            spec,
        )
        cost = strategy_cost(decision, plan, sizes, hints, stored)
        if best is None or cost < best[0]:
            best = (cost, decision)
    return best[1] if best else _whole(node, layouts)


def _whole(node: Node, layouts: Mapping[Node, Layout]) -> Decision:
    """Gather the operands and run the operator on every rank."""
    if draws(node):
        raise DistfxError(
            f"{describe(node)}: {node.target} draws random numbers, and has no rule yet by which ranks would draw the "
            "same ones where they must. Draw outside of the model and give the numbers as an input."
        )
    needs = tuple((operand, Layout.replicated(len(layouts[operand].dims))) for operand in node.all_input_nodes)
    shape = Meta.shape.get(node) or ()
    rank = 0 if Meta.multiple.get(node) else len(shape)
    result = Layout.replicated(rank)
    splits = any(layouts[operand].split_axes for operand, _ in needs)
    return Decision("fallback" if splits else "", {}, needs, result, result, None, fallback=splits)
