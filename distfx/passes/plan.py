"""plan: choose a strategy for every operator.

in: a captured graph.   out: the same graph with a :class:`~distfx.planner.decisions.Decision` in ``meta.decision`` of
every call. The layouts of inputs and parameters are in the returned :class:`~distfx.planner.decisions.Decisions`.
"""

from __future__ import annotations

from collections.abc import Mapping

from distfx.errors import DistfxError
from distfx.ir.layout import Layout
from distfx.ir.meta import meta
from distfx.passes.capture.export import Capture
from distfx.planner.decisions import Decisions, Pins
from distfx.planner.search import search

__all__ = ["plan"]

_MEANING = {"n": "samples", "c": "channels or filters", "d": "a depth dim", "h": "a height dim", "w": "a width dim"}


def plan(capture: Capture, axes: Mapping[str, int], pins: Pins, stored: Mapping[str, Layout]) -> Decisions:
    """Decide for every operator of ``capture``. ``stored`` has the parameters whose layout another graph has fixed."""
    decisions = search(capture.graph, axes, capture.hints, pins, stored, capture.mutated)
    _check_axes(decisions, axes)
    for node, decision in decisions.nodes.items():
        meta(node).decision = decision
    return decisions


def _check_axes(decisions: Decisions, axes: Mapping[str, int]) -> None:
    """Raise if no operator can use an axis of the grid."""
    for axis in axes:
        if axis not in decisions.usable and not (axis[0] == "c" and {"c0", "c1"} & decisions.usable):
            raise DistfxError(
                f"nothing in this model can use the grid's axis {axis} ({_MEANING[axis[0]]}): no convolution or linear "
                f"layer has it. Spatial dims are named from the last: w, before it h, before it d. "
                f"Remove {axis}={axes[axis]} from the grid."
            )
