"""The cost of a strategy: estimated bytes, arithmetic and messages, in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import sympy

from distfx.ir.layout import Layout
from distfx.ir.meta import meta
from distfx.ir.route import estimate, route
from distfx.ir.symbolic import evaluate, evaluate_shape
from distfx.planner.decisions import Decision, Decisions, storage_layout

FLOPS_PER_BYTE = 100.0
"""What a rank computes in the time in which it sends a byte: the price of idle ranks against communication."""


LATENCY_BYTES = 2000.0
"""What a rank sends in the time that one more message costs."""


def strategy_cost(
    decision: Decision,
    plan: Decisions,
    sizes: Mapping[str, int],
    hints: Mapping[sympy.Symbol, int],
    stored: Mapping[str, Layout],
) -> float:
    """About the bytes a rank sends for it, forward and backward, and its arithmetic in their measure."""
    spec = decision.spec
    assert spec is not None
    sent, moves = 0.0, 0
    for number, (operand, need) in enumerate(decision.needs):
        shape = evaluate_shape(meta(operand).shape, hints)
        if operand.op == "get_attr" or operand in plan.computed:
            kept = stored.get(str(operand.target)) or storage_layout(need, list(sizes))
            over = math.prod(sizes[axis] for axis in need.varying | (need.split_axes - kept.split_axes))
            local = math.prod(shape) / math.prod(sizes[axis] for axis in kept.split_axes)
            sent += 2 * (over - 1) / over * local
            continue
        chain = route(plan.layouts[operand], need, shape, decision.border(number))
        sent += estimate(chain, plan.layouts[operand], shape, sizes, backward=operand in plan.trained)
        moves += len(chain)
    shape = evaluate_shape(meta(spec.node).shape, hints)
    if decision.produced.partial:
        after = route(decision.produced, decision.result, shape)
        sent += estimate(after, decision.produced, shape, sizes)
        moves += len(after)
    if not spec.rule.anchor:  # what is whole here will be split again, whose adjoint is a gather
        held = {axis for operand, _ in decision.needs for axis in plan.layouts[operand].split_axes}
        lost = math.prod(sizes[axis] for axis in held - {axis for group in decision.axes.values() for axis in group})
        sent += math.prod(shape) * (1 - 1 / lost)
    work = float(math.prod(max(1, evaluate(size, hints)) for size in spec.extents.values()))
    if spec.rule.anchor:
        work *= math.prod(meta(spec.operands[1][0]).shape[2:])  # the kernel
    for factor, group in decision.axes.items():
        ranks = math.prod(sizes[axis] for axis in group)
        extent = max(1, evaluate(spec.extents[factor], hints))
        work *= -(-extent // ranks) / extent
    return 4 * sent + 6 * work / FLOPS_PER_BYTE + LATENCY_BYTES * moves
