"""The pipeline: every pass after capture, by name and in order.

``COMPILE`` runs once for each captured graph and leaves sizes symbolic. ``BIND`` runs once for each input shape on each
rank, and ends with a graph that can be called. Each pass is timed, recorded and verified
(:mod:`distfx.passes.verify`); ``print_readable(after=...)`` shows the graph after any of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from distfx.grid import Grid
from distfx.ir import ops
from distfx.ir.buckets import Bucket
from distfx.ir.layout import Layout
from distfx.ir.meta import meta
from distfx.ir.nodes import aten
from distfx.passes.bind import bind
from distfx.passes.buckets import gradient_buckets
from distfx.passes.capture.export import Capture, is_impure
from distfx.passes.copies import copy_before_writes
from distfx.passes.formats import assign_memory_formats
from distfx.passes.fuse import fuse_halos
from distfx.passes.insert import insert_moves
from distfx.passes.link import link
from distfx.passes.localize import localize
from distfx.passes.plan import plan
from distfx.passes.reuse import reuse_buffers
from distfx.passes.share import share_results
from distfx.passes.split_bias import split_bias
from distfx.passes.verify import verify
from distfx.planner.decisions import Decisions, Pins
from distfx.report.plan import Plan
from distfx.report.predict import make_plan

__all__ = [
    "BIND",
    "COMPILE",
    "BoundGraph",
    "Compiled",
    "Options",
    "Pass",
    "PassRecord",
    "bind_graph",
    "compile_graph",
    "plan_at",
]

C = TypeVar("C")


@dataclass(frozen=True)
class PassRecord:
    """What one pass did."""

    name: str
    seconds: float
    nodes: int
    changed: int

    def __str__(self) -> str:
        return f"{self.name}: {self.nodes} nodes, {self.changed:+d}, {self.seconds * 1e3:.1f} ms"


@dataclass(frozen=True)
class Pass(Generic[C]):
    """A step from a graph to a graph. The context carries what the passes of one list share."""

    name: str
    run: Callable[[GraphModule, C], GraphModule]


def _run(module: GraphModule, context: C, passes: Sequence[Pass[C]]) -> tuple[GraphModule, list[PassRecord]]:
    records: list[PassRecord] = []
    for each in passes:
        before, clock = len(module.graph.nodes), time.perf_counter()
        module = each.run(module, context)
        verify(module, each.name)
        count = len(module.graph.nodes)
        records.append(PassRecord(each.name, time.perf_counter() - clock, count, count - before))
    return module, records


def _until(passes: Sequence[Pass[C]], after: str | None) -> Sequence[Pass[C]]:
    names = [each.name for each in passes]
    return passes if after is None else passes[: names.index(after) + 1]


def _in_place(action: Callable[[Graph, C], None]) -> Callable[[GraphModule, C], GraphModule]:
    """A pass that changes the graph itself."""

    def run(module: GraphModule, context: C) -> GraphModule:
        action(module.graph, context)
        return module

    return run


# --------------------------------------------------------------------------------------------------- compile


@dataclass(frozen=True)
class Options:
    """What decides how a captured graph is rewritten, besides the graph."""

    axes: Mapping[str, int]
    """The grid's axes and their sizes."""
    pins: Pins = field(default_factory=dict)
    outputs: str = "global"
    statistics_axes: frozenset[str] | None = None
    """The axes over which batch norms compute their statistics; ``None`` for all."""


@dataclass
class _Compilation:
    """The context of the compile passes."""

    capture: Capture
    options: Options
    stored: Mapping[str, Layout]
    decisions: Decisions = field(default_factory=Decisions)


def _plan(module: GraphModule, context: _Compilation) -> GraphModule:
    for node in module.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        meta(node).statistics_axes = context.options.statistics_axes
    capture = replace(context.capture, module=module)
    context.decisions = plan(capture, context.options.axes, context.options.pins, context.stored)
    return module


def _prune(graph: Graph, context: _Compilation) -> None:
    """Drop calls whose results nothing reads. Calls that write stay."""
    graph.eliminate_dead_code(lambda node: is_impure(node) or node.target in (ops.refresh, ops.batch_norm))


COMPILE: tuple[Pass[_Compilation], ...] = (
    Pass("plan", _plan),
    Pass("split_bias", _in_place(lambda graph, c: split_bias(graph, c.decisions, c.options.axes, c.stored))),
    Pass("insert", lambda module, c: insert_moves(module, c.decisions, c.options.outputs)),
    Pass("localize", _in_place(lambda graph, c: localize(graph, c.options.axes))),
    Pass("prune", _in_place(_prune)),
)


@dataclass
class Compiled:
    """A captured graph rewritten for a grid, valid for every shape that satisfies the capture's guards."""

    capture: Capture
    options: Options
    stored: Mapping[str, Layout]
    """The parameters whose layout was fixed before this graph was compiled."""
    module: GraphModule
    decisions: Decisions
    passes: list[PassRecord]

    @cached_property
    def is_random(self) -> bool:
        """Whether the graph draws random numbers."""
        return any(node.target in (ops.dropout, ops.draw) for node in self.module.graph.nodes)

    @cached_property
    def parameter_layouts(self) -> dict[str, Layout]:
        """How each parameter and buffer is stored."""
        nodes = self.module.graph.find_nodes(op="get_attr")
        return {str(node.target): meta(node).layout.storage() for node in nodes}

    def after(self, name: str) -> GraphModule:
        """The graph after the compile pass ``name``: the passes up to it run again."""
        context = _Compilation(self.capture, self.options, self.stored)
        return _run(_copy(self.capture.module), context, _until(COMPILE, name))[0]


def compile_graph(capture: Capture, options: Options, stored: Mapping[str, Layout] | None = None) -> Compiled:
    """Rewrite a captured graph for a grid. ``stored`` has the parameters whose layout another graph has fixed."""
    context = _Compilation(capture, options, dict(stored or {}))
    verify(capture.module, "capture")
    module, records = _run(_copy(capture.module), context, COMPILE)
    module.recompile()
    return Compiled(capture, options, context.stored, module, context.decisions, records)


def _copy(module: GraphModule) -> GraphModule:
    """A copy of the graph: the capture may be compiled again, for other sizes."""
    graph, values = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
    return GraphModule(module, graph)


# ------------------------------------------------------------------------------------------------------ bind


@dataclass
class BoundGraph:
    """A compiled graph bound to one input shape on one rank; also the context of the bind passes."""

    compiled: Compiled
    grid: Grid
    values: Mapping[sympy.Symbol, int]
    """The sizes of the input."""
    trained: Mapping[str, bool]
    """Which parameters require a gradient."""
    inputs: Mapping[str, bool] = field(default_factory=dict)
    """Which inputs require a gradient."""
    local_inputs: Collection[str] = ()
    """The inputs that come as this rank's part."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The present dtypes of parameters, which may have been converted since capture."""
    channels_last: bool = False
    """Whether an input or a parameter is stored channels last on any rank."""
    # What the passes add:
    buckets: list[Bucket] = field(default_factory=list)
    plan: Plan | None = None
    module: GraphModule | None = None
    passes: list[PassRecord] = field(default_factory=list)

    def after(self, name: str) -> GraphModule:
        """The graph after the bind pass ``name``: the passes up to it run again. Nothing is communicated."""
        return _run(self.compiled.module, replace(self), _until(BIND, name))[0]


def _buckets(graph: Graph, context: BoundGraph) -> None:
    context.buckets = gradient_buckets(graph, context.trained, context.grid, context.dtypes, context.channels_last)


def _predict(graph: Graph, context: BoundGraph) -> None:
    context.plan = make_plan(
        context.compiled.module.graph,
        graph,
        context.grid,
        training=context.compiled.capture.training,
        sizes=context.values,
        inputs=context.inputs,
        trained=context.trained,
        buckets=context.buckets,
    )


BIND: tuple[Pass[BoundGraph], ...] = (
    Pass("bind", lambda module, c: bind(module, dict(c.values), c.grid, c.local_inputs, c.dtypes)),
    Pass("buckets", _in_place(_buckets)),
    Pass("predict", _in_place(_predict)),
    Pass("formats", _in_place(lambda graph, c: assign_memory_formats(graph, c.channels_last, c.grid))),
    Pass("copies", _in_place(lambda graph, c: copy_before_writes(graph))),
    Pass("share", _in_place(lambda graph, c: share_results(graph))),
    Pass("fuse", _in_place(lambda graph, c: fuse_halos(graph))),
    Pass("reuse", _in_place(lambda graph, c: reuse_buffers(graph))),
    Pass("link", lambda module, c: link(module.graph, c.grid, c.buckets)),
)


def bind_graph(
    compiled: Compiled,
    grid: Grid,
    values: Mapping[sympy.Symbol, int],
    trained: Mapping[str, bool],
    *,
    until: str | None = None,
    **context: Any,
) -> BoundGraph:
    """Bind a graph to one input shape on the grid's rank; with ``until``, run the passes up to that one only.

    ``context`` has further fields of :class:`BoundGraph`.
    """
    bound = BoundGraph(compiled, grid, values, trained, **context)
    bound.module, bound.passes = _run(compiled.module, bound, _until(BIND, until))
    return bound


def plan_at(compiled: Compiled, grid: Grid, values: Mapping[sympy.Symbol, int], trained: Mapping[str, bool]) -> Plan:
    """The plan of a graph at one input shape, without processes."""
    bound = bind_graph(compiled, grid, values, trained, until="predict")
    assert bound.plan is not None
    return bound.plan
