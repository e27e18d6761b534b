"""Check a rule against the plain operator, in one process.

:func:`check_rule` tries every legal assignment of an operator's factors to the axes of a few small grids. For each it
cuts the operands into the parts that the layouts prescribe, runs the localized call of every rank, assembles the parts
of the result, and compares values and gradients with those of the plain operator in float64. Ranks whose kernels
communicate run as threads, with an allreduce in memory.

>>> import torch
>>> print(check_rule(torch.ops.aten.softmax.int, (torch.randn(4, 5), 1), grids=["c2"]))
aten.softmax.int: 2 assignments checked
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from distfx.grid import Grid, Segment
from distfx.ir.exchange import PADDING, source_positions
from distfx.ir.layout import Coords, Layout
from distfx.ir.meta import meta
from distfx.ir.ops import OpOutput, is_inserted
from distfx.ir.route import Border
from distfx.ir.torch_private import schema_of, tree_flatten, tree_leaves, tree_unflatten
from distfx.passes.bind import bind
from distfx.passes.link import KERNELS, link
from distfx.passes.localize import localize
from distfx.planner.decisions import Assignment, Decision
from distfx.planner.strategies import project
from distfx.rules.registry import draws, overload_of, spec_of
from distfx.rules.rule import OpSpec
from distfx.runtime.autograd.gradients import Gradients

__all__ = ["RuleReport", "check_rule"]

GRIDS = ("n2", "c3", "n2c2")
UNDEFINED = {torch.ops.aten.new_empty.default}
"""Operators whose results have no defined values."""
TIMEOUT = 60.0
"""Seconds that a simulated rank waits for the others."""


@dataclass(frozen=True)
class RuleReport:
    """What :func:`check_rule` tried."""

    operator: str
    rules: tuple[str, ...]
    """The names of the rules that were used, one for each result that has a rule."""
    assignments: tuple[str, ...]
    """The assignments of factors to axes, such as ``"h/n k/c on n2c2"``."""

    def __str__(self) -> str:
        count = len(self.assignments)
        return f"{self.operator}: {count} assignment{'s' * (count != 1)} checked"


def check_rule(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    grids: Sequence[str] = GRIDS,
    no_grad: Collection[str] = (),
    tolerance: float = 1e-10,
) -> RuleReport:
    """Compare every legal way to split a call of ``op`` with the plain call, forward and backward.

    Args:
        op: The operator, as for :func:`distfx.register_rule`.
        args: Its arguments. Floating-point tensors are converted to float64, and their gradients are compared. Choose
            extents that are not multiples of the grid's axes to check uneven parts, too.
        kwargs: Its keyword arguments.
        grids: The grids to try. Axes named ``c`` cut dims as ``torch.chunk`` does, all others into balanced parts.
        no_grad: The names of floating-point arguments without a gradient, such as running statistics.
        tolerance: The largest accepted error, relative to the largest element of the plain result (or to 1).

    Raises:
        AssertionError: A part differs, or a rank fails. The message names the assignment and the rank. Also raised if
            no rule fits the call, or if no assignment is legal.

    The results of random operators are compared by shape and between replicas only.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small, and ranks may be threads
    try:
        return _check_all(
            _PlainCall(op if is_inserted(op) else overload_of(op), args, kwargs or {}, no_grad), grids, tolerance
        )
    finally:
        torch.set_num_threads(threads)


def _check_all(call: _PlainCall, grids: Sequence[str], tolerance: float) -> RuleReport:
    rules: list[str] = []
    assignments: dict[str, None] = {}
    for index in range(len(call.results)):
        spec = spec_of(call.node(index)[1])
        if spec is None:
            continue
        rules.append(spec.rule.name)
        for grid in map(Grid.parse_abstract, grids):
            factors = [factor for factor, extent in spec.extents.items() if extent != 1]
            for assignment in _assignments(factors, list(grid.axes)):
                if _is_legal(spec, assignment, grid.axes):
                    assignments[_Check(call, index, grid, assignment).run(tolerance)] = None
    if not rules:
        raise AssertionError(f"{call.name}: no rule fits this call")
    if not assignments:
        raise AssertionError(f"{call.name}: rule {rules[0]!r} splits no dim of this call")
    return RuleReport(call.name, tuple(rules), tuple(assignments))


def _is_legal(spec: OpSpec, assignment: Assignment, axes: Mapping[str, int]) -> bool:
    """Whether an assignment is legal. A bias is not part of a partial sum: ``split_bias`` makes it another operator."""
    projected = project(spec, assignment, axes)
    has_bias = spec.rule.anchor and len(spec.operands) > 2
    return projected is not None and not (has_bias and projected[1].partial)


def _assignments(factors: Sequence[str], axes: Sequence[str]) -> Iterator[Assignment]:
    """Every way to put all axes on factors; axes that share a factor in every order."""
    for choice in itertools.product(factors, repeat=len(axes)):
        groups: dict[str, list[str]] = {}
        for axis, factor in zip(axes, choice, strict=True):
            groups.setdefault(factor, []).append(axis)
        for orders in itertools.product(*(itertools.permutations(group) for group in groups.values())):
            yield dict(zip(groups, orders, strict=True))


class _PlainCall:
    """The call in one process: its results, and the gradients of its operands for random gradients of the results."""

    def __init__(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], no_grad: Collection[str]) -> None:
        self.op = op
        self.name = getattr(op, "__name__", str(op)) if is_inserted(op) else str(op)
        leaves, self.structure = tree_flatten((tuple(args), dict(kwargs)))
        names = [] if is_inserted(op) else [argument.name for argument in schema_of(op).arguments]
        named = dict(zip(names, args, strict=False)) | dict(kwargs)
        constants = [leaf for name in no_grad for leaf in tree_leaves(named[name])]
        has_grad = [not any(leaf is constant for constant in constants) for leaf in leaves]
        self.has_grad = [
            flag and leaf.is_floating_point()
            for leaf, flag in zip(leaves, has_grad, strict=True)
            if isinstance(leaf, Tensor)
        ]
        """For each operand, whether its gradient is compared."""
        self.leaves = [self._widen(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.written = self._copies()
        """The operands after the call, which may have written into them (running statistics)."""
        inputs = iter(self.written)
        values = [next(inputs) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        positional, named = tree_unflatten(values, self.structure)
        results = (KERNELS[op] if is_inserted(op) else op)(*positional, **named)
        self.is_multiple = not isinstance(results, Tensor)
        self.results: tuple[Tensor, ...] = tuple(results) if self.is_multiple else (results,)
        generator = torch.Generator().manual_seed(0)
        self.gradients = [torch.randn(r.shape, dtype=torch.float64, generator=generator) for r in self.results]

    @staticmethod
    def _widen(tensor: Tensor) -> Tensor:
        return tensor.detach().to(torch.float64 if tensor.is_floating_point() else tensor.dtype)

    def _copies(self) -> list[Tensor]:
        return [tensor.clone().requires_grad_(flag) for tensor, flag in zip(self.tensors, self.has_grad, strict=True)]

    def is_differentiable(self, index: int) -> bool:
        return self.results[index].requires_grad and self.results[index].is_floating_point()

    def operand_gradients(self, index: int) -> list[Tensor]:
        """The gradient of each operand for a result; zeros if there is none."""
        result, inputs = self.results[index], [t for t in self.written if t.requires_grad]
        grads = iter(
            torch.autograd.grad(result, inputs, self.gradients[index], allow_unused=True, retain_graph=True)
            if self.is_differentiable(index)
            else [None] * len(inputs)
        )
        each = [next(grads) if tensor.requires_grad else None for tensor in self.written]
        return [torch.zeros_like(t) if g is None else g for g, t in zip(each, self.written, strict=True)]

    def node(self, index: int) -> tuple[Graph, Node]:
        """A graph with the call, one placeholder for each tensor, and the node of the call."""
        graph = Graph()
        nodes: list[Any] = []
        for number, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Tensor):
                nodes.append(leaf)
                continue
            nodes.append(graph.placeholder(f"operand{number}"))
            meta(nodes[-1]).shape, meta(nodes[-1]).dtype = tuple(leaf.shape), leaf.dtype
        args, kwargs = tree_unflatten(nodes, self.structure)
        node = graph.call_function(OpOutput(self.op, index) if self.is_multiple else self.op, args, kwargs)
        meta(node).shape, meta(node).dtype = tuple(self.results[index].shape), self.results[index].dtype
        graph.output((node,))
        return graph, node


@dataclass(frozen=True)
class _RankRun:
    """A simulated rank's part of the result, the gradients of its operands, and the operands after the call."""

    result: Tensor
    gradients: Sequence[Tensor]
    operands: Sequence[Tensor]


class _Check:
    """One result of a call under one assignment, on all ranks of a grid."""

    def __init__(self, call: _PlainCall, index: int, grid: Grid, assignment: Assignment) -> None:
        self.call, self.index, self.assignment = call, index, assignment
        self.graph, self.node = call.node(index)
        self.is_random = not is_inserted(call.op) and draws(self.node)
        spec = spec_of(self.node)
        assert spec is not None
        projected = project(spec, assignment, grid.axes)
        assert projected is not None
        needs, self.produced = projected
        self.decision = Decision("", assignment, needs, self.produced, self.produced, spec)
        self.operands = self.graph.find_nodes(op="placeholder")
        layouts = dict(needs)
        self.layouts = [layouts.get(node, Layout.replicated(len(meta(node).shape))) for node in self.operands]
        borders = {operand: self.decision.border(i) for i, (operand, _) in enumerate(needs)}
        self.borders = [borders.get(operand, Border({})) for operand in self.operands]
        self.size = grid.size
        self.rendezvous = _Rendezvous()
        self.grids = [_SimulatedGrid.simulate(grid, rank, self.rendezvous) for rank in range(grid.size)]
        axes = " ".join(f"{f}/{a[0] if len(a) == 1 else '(' + ','.join(a) + ')'}" for f, a in assignment.items())
        self.text = f"{axes} on {''.join(f'{axis}{size}' for axis, size in grid.axes.items())}"

    def run(self, tolerance: float) -> str:
        """Compare. Returns the description of the assignment."""
        programs = self._compile()
        runs = self._on_all_ranks(lambda rank: self._run_rank(rank, programs[rank]))
        self._compare_results([run.result for run in runs], tolerance)
        if self.has_gradients:
            self._compare_gradients([run.gradients for run in runs], tolerance)
        self._compare_written([run.operands for run in runs], tolerance)
        return self.text

    @property
    def has_gradients(self) -> bool:
        return self.call.is_differentiable(self.index) and not self.is_random

    def _compile(self) -> list[GraphModule]:
        """Each rank's call, by the passes that compile a model."""
        for operand, layout in zip(self.operands, self.layouts, strict=True):
            meta(operand).layout = layout
        meta(self.node).layout, meta(self.node).decision = self.produced, self.decision
        localize(self.graph, self.grids[0].axes)
        module = GraphModule(torch.nn.Module(), self.graph)
        programs = []
        for rank, grid in enumerate(self.grids):
            bound = bind(module, {}, grid)
            for number, placeholder in enumerate(bound.graph.find_nodes(op="placeholder")):
                meta(placeholder).local_shape = tuple(self._part(number, rank).shape)
            for node in bound.graph.nodes:
                meta(node).channels_last = False
            programs.append(link(bound.graph, grid, []))
        return programs

    def _run_rank(self, rank: int, program: GraphModule) -> _RankRun:
        operands = [self._part(number, rank) for number in range(len(self.operands))]
        operands = [part.requires_grad_(flag) for part, flag in zip(operands, self.call.has_grad, strict=True)]
        (result,) = program(Gradients({}, [], 0), *operands)
        grads: list[Tensor | None] = [None] * len(operands)
        if self.has_gradients:
            leaves = [part for part in operands if part.requires_grad]
            bounds = self.produced.bounds(self.call.results[self.index].shape, self._coords(rank))
            grad = self.call.gradients[self.index][tuple(slice(int(lo), int(hi)) for lo, hi in bounds)]
            if grad.shape != result.shape:
                raise AssertionError(f"the result has shape {tuple(result.shape)}, not {tuple(grad.shape)}")
            gradients = iter(torch.autograd.grad(result, leaves, grad, allow_unused=True))
            grads = [next(gradients) if part.requires_grad else None for part in operands]
        each = [torch.zeros_like(p) if g is None else g for p, g in zip(operands, grads, strict=True)]
        return _RankRun(result.detach(), each, operands)

    # -- parts of operands

    def _coords(self, rank: int) -> Coords:
        return self.grids[rank].placement()

    def _positions(self, number: int, rank: int) -> list[np.ndarray[Any, Any]]:
        """For each dim of an operand, the positions that a rank needs; ``PADDING`` for the border."""
        layout, border, shape = self.layouts[number], self.borders[number], self.call.tensors[number].shape
        positions = []
        for dim, (split, extent) in enumerate(zip(layout.dims, shape, strict=True)):
            target = extent if split.window is None else int(border.extents[dim])
            lo, hi = split.bounds(target, self._coords(rank))
            if split.window is not None:
                lo, hi = split.window.need(lo, hi)
            positions.append(source_positions(int(lo), int(hi), extent, border.mode))
        return positions

    def _part(self, number: int, rank: int) -> Tensor:
        """A rank's part of an operand, with its halo."""
        part, border = self.call.tensors[number].clone(), self.borders[number]
        fill = border.fill if part.is_floating_point() else max(border.fill, torch.iinfo(torch.int32).min)
        for dim, positions in enumerate(self._positions(number, rank)):
            places = torch.from_numpy(positions)
            part = part.index_select(dim, places.clamp(min=0)) if part.shape[dim] else part
            part = part.index_fill(dim, (places == PADDING).nonzero().flatten(), fill)
        return part

    def _add_back(self, total: Tensor, number: int, rank: int, part: Tensor) -> None:
        """The adjoint of :meth:`_part`: add a gradient of the part to the gradient of the operand."""
        for dim, positions in reversed(list(enumerate(self._positions(number, rank)))):
            places = torch.from_numpy(positions)
            inside = (places != PADDING).nonzero().flatten()
            shape = [*part.shape[:dim], total.shape[dim], *part.shape[dim + 1 :]]
            part = part.new_zeros(shape).index_add_(dim, places[inside], part.index_select(dim, inside))
        total += part

    # -- comparison

    def _compare_results(self, parts: Sequence[Tensor], tolerance: float) -> None:
        """Add partial sums, and compare each part with that of the plain result."""
        plain = self.call.results[self.index].detach()
        sums: dict[tuple[int, ...], Tensor] = {}
        for rank, part in enumerate(parts):
            coords = self._coords(rank)
            key = tuple(int(at) for axis, (at, _) in coords.items() if axis not in self.produced.partial)
            sums[key] = sums[key] + part if key in sums else part
        drawn: dict[Any, Tensor] = {}
        for rank in range(self.size):
            coords = self._coords(rank)
            key = tuple(int(at) for axis, (at, _) in coords.items() if axis not in self.produced.partial)
            bounds = tuple((int(lo), int(hi)) for lo, hi in self.produced.bounds(plain.shape, coords))
            expected = plain[tuple(slice(lo, hi) for lo, hi in bounds)]
            if self.is_random:
                expected = drawn.setdefault(bounds, sums[key])
            elif self.call.op in UNDEFINED:
                expected = sums[key]
            self._compare(f"rank {rank}: the result", sums[key], expected, plain, tolerance)

    def _compare_gradients(self, parts: Sequence[Sequence[Tensor]], tolerance: float) -> None:
        for number, expected in enumerate(self.call.operand_gradients(self.index)):
            if not self.call.has_grad[number]:
                continue
            total = torch.zeros_like(expected)
            for rank in range(self.size):
                self._add_back(total, number, rank, parts[rank][number])
            self._compare(f"the gradient of operand {number}", total, expected, expected, tolerance)

    def _compare_written(self, parts: Sequence[Sequence[Tensor]], tolerance: float) -> None:
        """Compare operands that the plain call wrote into."""
        for number, (before, after) in enumerate(zip(self.call.tensors, self.call.written, strict=True)):
            if torch.equal(before, after):
                continue
            for rank in range(self.size):
                bounds = self.layouts[number].bounds(before.shape, self._coords(rank))
                expected = after.detach()[tuple(slice(int(lo), int(hi)) for lo, hi in bounds)]
                self._compare(
                    f"rank {rank}: operand {number} after the call", parts[rank][number], expected, after, tolerance
                )

    def _compare(self, what: str, actual: Tensor, expected: Tensor, plain: Tensor, tolerance: float) -> None:
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            kinds = [f"shape {tuple(t.shape)} and dtype {t.dtype}" for t in (actual, expected)]
            self._fail(f"{what} has {kinds[0]}, not {kinds[1]}")
        limit = 0.0
        if plain.is_floating_point():
            finite = plain.detach()[plain.isfinite()].abs()
            limit = tolerance * max(1.0, float(finite.max()) if finite.numel() else 0.0)
        if not torch.allclose(actual.detach(), expected, rtol=0.0, atol=limit, equal_nan=True):
            error = (actual.detach().double() - expected.detach().double()).abs().max()
            self._fail(f"{what} differs by {float(error):.1e}, more than {limit:.1e}")

    def _fail(self, problem: str, cause: BaseException | None = None) -> None:
        rule = self.decision.spec.rule if self.decision.spec else None
        raise AssertionError(
            f"{self.call.name}, rule {rule.name if rule else ''!r}, {self.text}, result {self.index}: {problem}"
        ) from cause

    # -- ranks

    def _on_all_ranks(self, run: Callable[[int], _RankRun]) -> list[_RankRun]:
        """The results of all ranks: one after another, or as threads if their kernels communicate."""
        results: dict[int, _RankRun] = {}
        errors: dict[int, BaseException] = {}

        def work(rank: int) -> None:
            try:
                results[rank] = run(rank)
            except BaseException as error:
                errors[rank] = error
                self.rendezvous.abort()

        if self.rendezvous.is_used:
            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            for rank in range(self.size):
                work(rank)
        causes = {r: e for r, e in errors.items() if not isinstance(e, threading.BrokenBarrierError)} or errors
        for rank, error in causes.items():
            self._fail(f"rank {rank}: {type(error).__name__}: {error}", error)
        return [results[rank] for rank in range(self.size)]


# ------------------------------------------------------------------------------------- communication in memory


class _Rendezvous:
    """The place where simulated ranks meet: one barrier and one list of values for each set of members."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, ...], tuple[threading.Barrier, list[Tensor | None]]] = {}

    @property
    def is_used(self) -> bool:
        return bool(self.places)

    def open(self, members: tuple[int, ...]) -> None:
        self.places.setdefault(members, (threading.Barrier(len(members)), [None] * len(members)))

    def reduce(self, members: tuple[int, ...], index: int, tensor: Tensor, function: Callable[..., Tensor]) -> None:
        """Allreduce ``tensor`` in place."""
        barrier, values = self.places[members]
        values[index] = tensor.clone()
        barrier.wait(TIMEOUT)
        result = torch.stack([value for value in values if value is not None])
        barrier.wait(TIMEOUT)
        tensor.copy_(function(result, 0))

    def abort(self) -> None:
        for barrier, _ in self.places.values():
            barrier.abort()


_REDUCTIONS = ((dist.ReduceOp.SUM, torch.sum), (dist.ReduceOp.MAX, torch.amax), (dist.ReduceOp.MIN, torch.amin))


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class _ThreadGroup(dist.ProcessGroup):
    """A process group whose ranks are threads. It has the one collective that kernels call."""

    def __init__(self, rendezvous: _Rendezvous, members: tuple[int, ...], index: int) -> None:
        super().__init__(index, len(members))  # type: ignore[call-arg]
        self.rendezvous, self.members, self.index = rendezvous, members, index

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        for tensor in tensors:
            reduce = next(function for op, function in _REDUCTIONS if options.reduceOp == op)
            self.rendezvous.reduce(self.members, self.index, tensor, reduce)
        return _Done()


class _SimulatedGrid(Grid):
    """A grid whose segments meet in a :class:`_Rendezvous`."""

    rendezvous: _Rendezvous

    @classmethod
    def simulate(cls, grid: Grid, rank: int, rendezvous: _Rendezvous) -> _SimulatedGrid:
        simulated = cls._make(dict(grid.axes), rank, None)
        assert isinstance(simulated, _SimulatedGrid)
        simulated.rendezvous = rendezvous
        return simulated

    def segment(self, axes: tuple[str, ...]) -> Segment:
        members = self.members(axes)
        index = members.index(self.rank)
        if len(members) == 1:
            return Segment(axes, members, index)
        self.rendezvous.open(members)
        return Segment(axes, members, index, _ThreadGroup(self.rendezvous, members, index))
