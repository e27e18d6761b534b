"""Decisions: the strategy chosen for each operator, and the layouts that follow from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from distfx.ir.layout import Layout, Split, is_channel_axis
from distfx.ir.meta import meta
from distfx.ir.route import Border
from distfx.rules.rule import OpSpec

__all__ = ["ALGORITHMS", "Assignment", "Decision", "Decisions", "Pins", "storage_layout"]

Assignment = dict[str, tuple[str, ...]]
"""The axes of each factor, major first."""

ALGORITHMS = ("auto", "stationary-x", "stationary-y", "stationary-w", "replicated")
"""What a user can pin."""

Pins = Mapping[str, str]
"""Algorithms that the user has fixed, by module path; paths may be globs."""


@dataclass(frozen=True)
class Decision:
    """The strategy of one operator."""

    algorithm: str
    """The name of the strategy, for convolutions, linear layers and fallbacks; else empty."""
    axes: Mapping[str, tuple[str, ...]]
    """The axes of each factor."""
    needs: tuple[tuple[Node, Layout], ...]
    """The operands and the layouts that the operator needs them in."""
    produced: Layout
    """The layout of the result as the local operator produces it; it may be a partial sum."""
    result: Layout
    """The layout of the result once its partial sums are completed."""
    spec: OpSpec | None = None
    fallback: bool = False
    """Whether every rank runs the operator on whole tensors because no rule applies."""

    def border(self, operand: int) -> Border:
        """What the windows of an operand, by its index, read beyond the ends of a dim."""
        if self.spec is None:
            return Border({})
        node, patterns = self.spec.node, self.spec.operands[operand][1]
        dim_of = {pattern.factors[0]: dim for dim, pattern in enumerate(self.spec.result) if pattern.factors}
        extents = {
            dim: meta(node).shape[dim_of[pattern.factors[0]]] for dim, pattern in enumerate(patterns) if pattern.window
        }
        return Border(extents, self.spec.mode, self.spec.fill)


@dataclass
class Decisions:
    """The decisions for a whole graph."""

    nodes: dict[Node, Decision] = field(default_factory=dict)
    """By operator, in graph order."""
    layouts: dict[Node, Layout] = field(default_factory=dict)
    """By node: of inputs as first used, of parameters as stored, of results as completed."""
    usable: set[str] = field(default_factory=set)
    """The axes that some operator can use."""
    trained: set[Node] = field(default_factory=set)
    """The nodes that have a gradient even if the inputs have none."""
    computed: dict[Node, None] = field(default_factory=dict)
    """The nodes computed from parameters alone, such as standardized weights, in graph order."""

    def store(self, decision: Decision, mesh_axes: Sequence[str], fixed: Collection[str]) -> None:
        """Store parameters in the shards that ``decision`` needs, unless an earlier decision has split them.

        ``fixed`` names the parameters whose layout cannot be chosen any more.
        """
        for operand, need in decision.needs:
            is_free = operand.op == "get_attr" and str(operand.target) not in fixed
            if is_free and need.split_axes and not self.layouts[operand].split_axes:
                self.layouts[operand] = storage_layout(need, mesh_axes)

    @property
    def fallbacks(self) -> list[Node]:
        """The operators that fall back to replicated execution because no rule applies."""
        return [node for node, decision in self.nodes.items() if decision.fallback]


def storage_layout(need: Layout, mesh_axes: Sequence[str]) -> Layout:
    """The layout in which to store a parameter that is needed in ``need``.

    It is split only as far as an ordinary DTensor shard can be: by channel axes, in mesh order, in units of one.
    """
    dims = []
    for split in need.dims:
        axes: list[str] = []
        for axis in split.axes if split.unit == 1 else ():
            if not is_channel_axis(axis) or (axes and mesh_axes.index(axis) < mesh_axes.index(axes[-1])):
                break
            axes.append(axis)
        dims.append(Split(tuple(axes)))
    return Layout(tuple(dims))
