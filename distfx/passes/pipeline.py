"""The way of a model through the passes: from a capture to a symbolic, localised, verified graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch.fx import Graph, GraphModule, Node

from distfx.errors import DistfxError
from distfx.ir import ops
from distfx.ir.layout import Layout
from distfx.ir.nodes import aten
from distfx.passes.capture.export import Capture, is_impure
from distfx.passes.insert import insert_moves, split_bias
from distfx.passes.localize import localise
from distfx.passes.plan import Decisions, Pins, decide
from distfx.passes.verify import verify

__all__ = ["Compiled", "PassRecord", "compile_capture"]


@dataclass(frozen=True)
class PassRecord:
    """What one pass did."""

    name: str
    seconds: float
    nodes: int
    changed: int

    def __str__(self) -> str:
        return f"{self.name}: {self.nodes} nodes, {self.changed:+d}, {self.seconds * 1e3:.1f} ms"


@dataclass
class Compiled:
    """A model rewritten for a grid, for every shape."""

    capture: Capture
    module: GraphModule
    decisions: Decisions
    passes: list[PassRecord] = field(default_factory=list)

    @cached_property
    def random(self) -> bool:
        """Whether it draws random numbers."""
        return any(node.target in (ops.dropout, ops.draw) for node in self.module.graph.nodes)

    @cached_property
    def stored(self) -> dict[str, Layout]:
        """How each parameter and buffer is stored."""
        nodes = self.module.graph.find_nodes(op="get_attr")
        return {str(node.target): node.meta["layout"].settled() for node in nodes}


def compile_capture(
    capture: Capture,
    sizes: Mapping[str, int],
    pins: Pins,
    outputs: str,
    stored: Mapping[str, Layout] | None = None,
    statistics: frozenset[str] | None = None,
) -> Compiled:
    """Run all symbolic passes. ``stored``: parameters whose layout another graph has fixed; ``statistics``: the axes
    over which batch norms are computed, if not over all."""
    original = capture  # it may be planned again, for other sizes
    capture = replace(original, module=_copy(original.module))
    for node in capture.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        node.meta["statistics"] = statistics
    records: list[PassRecord] = []
    known = dict(stored or {})

    def run(name: str, action: Callable[[], GraphModule]) -> GraphModule:
        before = len(capture.graph.nodes) if not records else records[-1].nodes
        clock = time.perf_counter()
        module = action()
        verify(module, name)
        count = len(module.graph.nodes)
        records.append(PassRecord(name, time.perf_counter() - clock, count, count - before))
        return module

    decisions = Decisions()

    def plan() -> GraphModule:
        nonlocal decisions
        decisions = decide(capture.graph, sizes, capture.hints, pins, known, capture.mutated)
        _check_axes(decisions, sizes)
        split_bias(capture.module, decisions, dict(sizes), known)
        for node, decision in decisions.nodes.items():
            node.meta["decision"] = decision
        return capture.module

    verify(capture.module, "capture")
    run("plan", plan)
    module = run("insert", lambda: insert_moves(capture.module, decisions, outputs))
    module = run("localise", lambda: localise(module, sizes))
    module.graph.eliminate_dead_code(_keep)
    module.recompile()
    return Compiled(original, module, decisions, records)


def _copy(module: GraphModule) -> GraphModule:
    graph, values = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
    return GraphModule(module, graph)


def _keep(node: Node) -> bool:
    """Moves into which nothing leads are dropped; everything that writes stays."""
    return is_impure(node) or getattr(node, "target", None) in (ops.refresh, ops.batch_norm)


def _check_axes(decisions: Decisions, sizes: Mapping[str, int]) -> None:
    """Every axis of the grid must be of use to some operator."""
    meaning = {"n": "samples", "c": "channels or filters", "d": "a depth dim", "h": "a height dim", "w": "a width dim"}
    for axis in sizes:
        if axis not in decisions.usable and not (axis[0] == "c" and {"c0", "c1"} & decisions.usable):
            raise DistfxError(
                f"nothing in this model can use the grid's axis {axis} ({meaning[axis[0]]}): no convolution or linear "
                f"layer has it. Spatial dims are named from the last: w, before it h, before it d. "
                f"Remove {axis}={sizes[axis]} from the grid."
            )
