"""The cost of a strategy, in bytes: what a rank sends, plus arithmetic and moves converted to bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import sympy

from distfx.ir.layout import Layout
from distfx.ir.meta import meta
from distfx.ir.route import estimate, route
from distfx.ir.symbolic import evaluate, evaluate_shape
from distfx.planner.decisions import Decision, Decisions, storage_layout

__all__ = ["FLOPS_PER_BYTE", "LATENCY_BYTES", "strategy_cost"]

FLOPS_PER_BYTE = 100.0
"""How many operations a rank computes in the time it takes to send a byte."""
LATENCY_BYTES = 2000.0
"""How many bytes a rank sends in the time that one more move costs."""
ITEMSIZE = 4
OPERATIONS_PER_MULTIPLICATION = 6
"""Operations per multiplication: a multiplication and an addition, forward and for each of two gradients."""


def strategy_cost(
    decision: Decision,
    decisions: Decisions,
    sizes: Mapping[str, int],
    hints: Mapping[sympy.Symbol, int],
    stored: Mapping[str, Layout],
) -> float:
    """The estimated cost of a decision, forward and backward.

    ``decisions`` has the decisions for all earlier operators; ``sizes`` are the sizes of the grid's axes; ``hints`` the
    sizes of the input; ``stored`` has the parameters whose layout is fixed.
    """
    spec = decision.spec
    assert spec is not None
    elements, moves = 0.0, 0
    for index, (operand, need) in enumerate(decision.needs):
        shape = evaluate_shape(meta(operand).shape, hints)
        if operand.op == "get_attr" or operand in decisions.computed:
            layout = stored.get(str(operand.target)) or storage_layout(need, list(sizes))
            elements += _gradient_reduction(need, layout, shape, sizes)
            continue
        chain = route(decisions.layouts[operand], need, shape, decision.border(index))
        elements += estimate(chain, decisions.layouts[operand], shape, sizes, backward=operand in decisions.trained)
        moves += len(chain)
    shape = evaluate_shape(meta(spec.node).shape, hints)
    if decision.produced.partial:
        chain = route(decision.produced, decision.result, shape)
        elements += estimate(chain, decision.produced, shape, sizes)
        moves += len(chain)
    if not spec.rule.anchor:  # axes that are lost here will split the tensor again later; the adjoint is a gather
        before = {axis for operand, _ in decision.needs for axis in decisions.layouts[operand].split_axes}
        lost = _ranks(before - {axis for axes in decision.axes.values() for axis in axes}, sizes)
        elements += math.prod(shape) * (1 - 1 / lost)
    flops = OPERATIONS_PER_MULTIPLICATION * _multiplications(decision, sizes, hints)
    return ITEMSIZE * elements + flops / FLOPS_PER_BYTE + LATENCY_BYTES * moves


def _gradient_reduction(need: Layout, stored: Layout, shape: tuple[int, ...], sizes: Mapping[str, int]) -> float:
    """Elements that a rank sends to sum the gradient of a parameter."""
    ranks = _ranks(need.varying | (need.split_axes - stored.split_axes), sizes)
    local = math.prod(shape) / _ranks(stored.split_axes, sizes)
    return 2 * (ranks - 1) / ranks * local


def _multiplications(decision: Decision, sizes: Mapping[str, int], hints: Mapping[sympy.Symbol, int]) -> float:
    """Multiplications of the rank with the largest part."""
    spec = decision.spec
    assert spec is not None
    count = float(math.prod(max(1, evaluate(size, hints)) for size in spec.extents.values()))
    if spec.rule.anchor:
        count *= math.prod(evaluate_shape(meta(spec.operands[1][0]).shape[2:], hints))  # the taps
    for factor, axes in decision.axes.items():
        extent = max(1, evaluate(spec.extents[factor], hints))
        count *= -(-extent // _ranks(axes, sizes)) / extent
    return count


def _ranks(axes: Collection[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)
