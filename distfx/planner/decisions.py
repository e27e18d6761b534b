"""Decisions: the strategy chosen for each operator, and the layouts that follow from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from distfx.ir.layout import Layout, Split, is_channel_axis
from distfx.ir.meta import meta
from distfx.ir.route import Border
from distfx.rules.rule import OpSpec

Assignment = dict[str, tuple[str, ...]]
"""The axes of each factor, major first."""


ALGORITHMS = ("auto", "stationary-x", "stationary-y", "stationary-w", "replicated")


Pins = Mapping[str, str]


def storage_layout(need: Layout, mesh_axes: Sequence[str]) -> Layout:
    """How a parameter is stored that is needed so: as far as it is an ordinary DTensor shard of channels."""
    dims = []
    for split in need.dims:
        kept: list[str] = []
        for axis in split.axes if split.unit == 1 else ():
            if not is_channel_axis(axis) or (kept and mesh_axes.index(axis) < mesh_axes.index(kept[-1])):
                break
            kept.append(axis)
        dims.append(Split(tuple(kept)))
    return Layout(tuple(dims))


@dataclass(frozen=True)
class Decision:
    """What becomes of one node: the layouts it needs its operands in, and the one of its result."""

    algorithm: str
    axes: Mapping[str, tuple[str, ...]]
    needs: tuple[tuple[Node, Layout], ...]
    produced: Layout
    result: Layout
    spec: OpSpec | None = None
    fallback: bool = False
    """Whether it runs whole on every rank because no rule applies."""

    def border(self, operand: int) -> Border:
        """What the windows of an operand, by its number, need to know."""
        if self.spec is None:
            return Border({})
        node, words = self.spec.node, self.spec.operands[operand][1]
        where = {word.factors[0]: dim for dim, word in enumerate(self.spec.result) if word.factors}
        extents = {i: meta(node).shape[where[w.factors[0]]] for i, w in enumerate(words) if w.window}
        return Border(extents, self.spec.mode, self.spec.fill)


@dataclass
class Decisions:
    """The plan of a graph: a decision for each operator, the layouts of inputs and parameters."""

    nodes: dict[Node, Decision] = field(default_factory=dict)
    layouts: dict[Node, Layout] = field(default_factory=dict)
    usable: set[str] = field(default_factory=set)
    """The axes that some operator can use."""
    trained: set[Node] = field(default_factory=set)
    """The nodes that have a gradient, if the inputs have none."""
    computed: dict[Node, None] = field(default_factory=dict)
    """The nodes that are made of parameters alone (standardised weights), in order."""

    def store(self, decision: Decision, sizes: Mapping[str, int], fixed: Collection[str]) -> None:
        """Parameters that a decision needs split are stored so, if nothing else was decided before."""
        for operand, need in decision.needs:
            free = operand.op == "get_attr" and str(operand.target) not in fixed
            if free and need.split_axes and not self.layouts[operand].split_axes:
                self.layouts[operand] = storage_layout(need, list(sizes))

    @property
    def fallbacks(self) -> list[Node]:
        """The nodes that run whole for want of a rule."""
        return [node for node, decision in self.nodes.items() if decision.fallback]
