"""Moves on real ranks: their values, and the adjoint test <Fx, y> == <x, F'y> for each of them.

All data are small integers, so every comparison is exact in every dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.exact import ranks_of
from support.ranks import run
from torch import Tensor

import distfx
from distfx.grid import Grid
from distfx.ir.layout import Layout, Split, Window
from distfx.ir.moves import (
    AllGather,
    AllReduce,
    AllToAll,
    BoundMove,
    Exchange,
    Move,
    ReduceScatter,
    Slice,
    ToReplicated,
    ToVarying,
)
from distfx.runtime.autograd import transfers
from distfx.runtime.autograd.moves import RunMove, begin, finish

# ------------------------------------------------------------------------------ tensors in a layout, on a rank


def numbers(shape: tuple[int, ...], *seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small integers, the same on every rank for the same seed."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def coordinate(grid: Grid, axes: frozenset[str], rank: int | None = None) -> tuple[int, ...]:
    """A rank's coordinates along ``axes``, in grid order."""
    place = grid.placement(rank)
    return tuple(int(place[axis][0]) for axis in grid.axes if axis in axes)


def part(whole: Tensor, layout: Layout, grid: Grid, border: dict[int, tuple[int, str, float]] | None = None) -> Tensor:
    """This rank's part of a whole tensor. ``border`` has the target's extent, mode and fill of each windowed dim."""
    for dim, split in enumerate(layout.dims):
        extent = whole.shape[dim]
        blocks, mode, fill = (border or {}).get(dim, (extent, "constant", 0.0))
        lo, hi = split.bounds(blocks, grid.placement())
        lo, hi = (split.window or Window()).need(lo, hi)
        sources = [_source(i, extent, mode) for i in range(int(lo), int(hi))]
        window = whole.index_select(dim, torch.tensor([max(s, 0) for s in sources], dtype=torch.int64))
        window.index_fill_(dim, torch.tensor([i for i, s in enumerate(sources) if s < 0], dtype=torch.int64), fill)
        whole = window
    return whole


def _source(position: int, extent: int, mode: str) -> int:
    """The position that padding reads; -1 if it fills with a constant."""
    if 0 <= position < extent:
        return position
    mirrored = -position if position < 0 else 2 * (extent - 1) - position
    clamped = min(max(position, 0), extent - 1)
    return {"constant": -1, "circular": position % extent, "replicate": clamped, "reflect": mirrored}[mode]


def whole_value(
    partial: frozenset[str], shape: tuple[int, ...], grid: Grid, seed: int, kept: frozenset[str] = frozenset()
) -> Tensor:
    """The sum of the summands over the axes ``partial``, except over the axes ``kept``: this rank's summand there."""
    ranks = [r for r in range(grid.size) if coordinate(grid, kept, r) == coordinate(grid, kept)]
    coordinates = {coordinate(grid, partial, rank) for rank in ranks}
    return torch.stack([numbers(shape, seed, *each) for each in coordinates]).sum(0)


def value(layout: Layout, shape: tuple[int, ...], grid: Grid, seed: int) -> Tensor:
    """This rank's part of a tensor in ``layout``. Partial sums differ along their axes."""
    return part(whole_value(layout.partial, shape, grid, seed, layout.partial), layout, grid)


def cotangent(like: Tensor, layout: Layout, grid: Grid, seed: int) -> Tensor:
    """A gradient of a tensor in ``layout``. It differs between parts, and between ranks along varying axes."""
    axes = layout.split_axes | layout.varying
    return numbers(tuple(like.shape), seed, *coordinate(grid, axes))


def replicated(layout: Layout, grid: Grid) -> frozenset[str]:
    """The axes along which a tensor is replicated and used in the same way."""
    return frozenset(grid.axes) - layout.split_axes - layout.partial - layout.varying


def inner(x: Tensor, grad: Tensor, layout: Layout, grid: Grid) -> float:
    """The inner product of a tensor in ``layout`` with its gradient, over the whole grid.

    The ranks' products are added along axes that split the tensor, and along partial and varying axes, where one of the
    two is a sum over the axis and the other the same everywhere. Along replicated axes one rank counts.
    """
    is_counted = not any(coordinate(grid, replicated(layout, grid)))
    total = (x.double() * grad.double()).sum() if is_counted else torch.zeros((), dtype=torch.float64)
    if grid.size > 1:
        dist.all_reduce(total)
    return float(total)


def same_along(x: Tensor, axes: frozenset[str], grid: Grid) -> bool:
    """Whether ``x`` is the same on all ranks of the segment along ``axes``."""
    along = tuple(axis for axis in grid.axes if axis in axes)
    if not along:
        return True
    tensors: list[Any] = [None] * grid.size
    dist.all_gather_object(tensors, x.detach())
    return all(torch.equal(tensors[rank], x) for rank in grid.members(along))


# ----------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """A move of a tensor of global ``shape`` in ``layout`` on ``grid``."""

    grid: str
    layout: str
    shape: tuple[int, ...]
    move: Move

    def __str__(self) -> str:
        return f"{self.grid} {self.layout} {self.shape} {self.move}"


def halo(
    axes: tuple[str, ...], dim: int, window: str, extent: int, mode: str = "constant", fill: float = 0.0
) -> Exchange:
    return Exchange(axes, dim, Split(axes, 1, Window.parse(window)), extent, mode, fill)


def repartition(axes: tuple[str, ...], dim: int, extent: int, order: tuple[str, ...] = (), unit: int = 1) -> Exchange:
    """An exchange to another order of the same axes, or to another unit."""
    return Exchange(axes, dim, Split(order or axes, unit), extent)


def _cases() -> list[Case]:
    cases = []
    for grid, axis in (("c2", "c"), ("c3", "c"), ("h2", "h"), ("n4", "n")):
        p = int(grid[1])
        for extent in (2 * p, 2 * p + 1, 1, 0):  # even, uneven, empty on some, empty
            shape = (extent, 3)
            for to in ("varying", "replicated"):
                cases.append(Case(grid, f"A/{axis} B", shape, AllGather((axis,), 0, to)))
            cases.append(Case(grid, f"A B sum({axis})", shape, ReduceScatter((axis,), 0)))
            cases.append(Case(grid, "A B", shape, Slice((axis,), 0)))
            cases.append(Case(grid, f"A B each({axis})", shape, Slice((axis,), 0, "varying")))
            cases.append(Case(grid, f"A/{axis} B", (extent, 5), AllToAll((axis,), 0, 1)))
        for to in ("replicated", "varying"):
            cases.append(Case(grid, f"A B sum({axis})", (3, 5), AllReduce((axis,), to)))
        cases.append(Case(grid, "A B", (3, 5), ToVarying((axis,))))
        cases.append(Case(grid, f"A B each({axis})", (3, 5), ToReplicated((axis,))))
        cases.append(Case(grid, f"A B C/{axis} D", (2, 0, 5, 3), AllGather((axis,), 2)))  # no elements
        cases.append(Case(grid, f"A B C/{axis} D", (2, 0, 5, 3), halo((axis,), 2, "a-1:b+1", 5)))
    for grid in ("h2", "h3", "h4"):
        x = "N C H/h W"
        for window, extent, blocks in (
            ("a-1:b+1", 9, 9),  # 3 taps
            ("2a-3:2b+2", 14, 7),  # 7 taps, stride 2
            ("a-5:b+5", 7, 7),  # wider than the neighbour
            ("a-9:b+9", 3, 3),  # over empty shards
            ("(a-1:b+2)/2", 6, 12),  # transposed, stride 2
            ("a+2:b+2", 9, 5),  # a crop
            ("3a:3b-2", 10, 4),  # stride wider than the kernel
            ("a-1:b+1", 2, 2),  # fewer rows than ranks
            ("a:b", 9, 9),  # no halo
            ("a+1:b-1", 12, 12),  # less than the own part
        ):
            cases.append(Case(grid, x, (2, 3, extent, 4), halo(("h",), 2, window, blocks)))
        for mode in ("circular", "replicate", "reflect"):
            for extent, width in ((9, 1), (5, 4), (7, 3)):
                move = halo(("h",), 2, f"a-{width}:b-{width}", extent + 2 * width, mode)
                cases.append(Case(grid, x, (2, 1, extent, 3), move))
        cases.append(Case(grid, x, (1, 2, 6, 2), repartition(("h",), 2, 6, unit=3)))
    for grid in ("c2x2", "c2x3", "c3x2"):
        for extent in (12, 7, 5, 2):
            shape = (2, extent, 2)
            for one, two in (("c0", "c1"), ("c1", "c0")):
                both = f"N C/({one},{two}) W"
                cases.append(Case(grid, both, shape, repartition((one, two), 1, extent, (two, one))))
                cases.append(Case(grid, both, shape, AllGather((one, two), 1)))
                cases.append(Case(grid, both, shape, AllGather((two,), 1)))
                cases.append(Case(grid, both, shape, AllGather((two,), 1, "replicated")))
                cases.append(Case(grid, f"N C sum({one},{two})", (2, extent, 2)[:2], ReduceScatter((one, two), 1)))
                cases.append(Case(grid, f"N C/{one} W sum({two})", shape, ReduceScatter((two,), 1)))
                cases.append(Case(grid, f"N C/{one} W each({two})", shape, Slice((two,), 1, "varying")))
                cases.append(Case(grid, f"N C/{one} W", shape, Slice((two,), 1)))
                cases.append(Case(grid, f"N C/{one} W/{two}", shape, AllToAll((two,), 2, 1)))
                cases.append(Case(grid, both, shape, AllToAll((two,), 1, 0)))
    for grid in ("n2h2", "n2c2h2"):
        cases += [
            Case(grid, "N C H W sum(n,h)", (2, 3, 2, 2), AllReduce(("n", "h"))),
            Case(grid, "N C H W sum(n,h)", (2, 3, 2, 2), AllReduce(("n", "h"), "varying")),
            Case(grid, "N C H W sum(n,h)", (2, 3, 2, 2), AllReduce(("h",))),
            Case(grid, "N C", (2, 3), ToVarying(("h", "n"))),
            Case(grid, "N C each(n,h)", (2, 3), ToReplicated(("n", "h"))),
            Case(grid, "N C each(n,h)", (2, 3), ToReplicated(("h",))),
            Case(grid, "N/n C H/h W", (3, 2, 5, 3), halo(("h",), 2, "a-2:b+2", 5)),
            Case(grid, "N/n C H/h W", (3, 2, 5, 3), AllGather(("n",), 0)),
            Case(grid, "N/(n,h) C", (5, 2), AllGather(("n", "h"), 0, "replicated")),
            Case(grid, "N/(h,n) C", (5, 2), AllGather(("h", "n"), 0)),
            Case(grid, "N C sum(h,n)", (5, 2), ReduceScatter(("h", "n"), 0)),
        ]
    cases += [
        Case("n2c2h2", "N/n C/c H/h W", (3, 5, 7, 2), AllGather(("c",), 1)),
        Case("n2c2h2", "N/n C H/h W sum(c)", (3, 5, 7, 2), ReduceScatter(("c",), 1)),
        Case("n2c2h2", "N/n C/c H/h W", (3, 5, 7, 2), halo(("h",), 2, "a-2:b+2", 7)),
        Case("n2c2h2", "N/n C/c H/h W", (3, 5, 7, 2), AllToAll(("h",), 2, 1)),
        Case("n2h3", "N/n C H/h W", (3, 2, 11, 2), halo(("h",), 2, "2a-3:2b+2", 6)),
        Case("h2w3", "N C H/h W/w", (1, 2, 5, 7), halo(("w",), 3, "a-3:b+3", 7)),
        Case("h2w2", "N C H/h{a-1:b+1} W/w", (1, 2, 5, 5), halo(("w",), 3, "a-1:b+1", 5)),
    ]
    return cases


CASES = _cases()


def bound(case: Case, grid: Grid, local: tuple[int, ...], channels_last: bool = False) -> tuple[BoundMove, RunMove]:
    move = case.move.bind(Layout.parse(case.layout), case.shape, local, grid)
    return move, RunMove(move, grid.segment(case.move.axes), "node", channels_last=channels_last)


def border_of(case: Case) -> dict[int, tuple[int, str, float]]:
    move = case.move
    borders = {i: (case.shape[i], "constant", 0.0) for i, s in enumerate(Layout.parse(case.layout).dims) if s.window}
    if isinstance(move, Exchange):
        assert isinstance(move.extent, int)
        borders[move.dim] = (move.extent, move.mode, move.fill)
    return borders


def check_move(case: Case) -> dict[str, Any]:
    """The values of a move on one rank, its adjoint, and the ledger's figures."""
    grid = Grid.parse(case.grid)
    layout = Layout.parse(case.layout)
    result = case.move.result(layout)
    x = value(layout, case.shape, grid, 1)
    move, run_move = bound(case, grid, tuple(x.shape))
    before = x.clone()
    x.requires_grad_(True)
    with distfx.record_comm() as ledger:
        y = run_move(x)
        grad = cotangent(y, result, grid, 2)
        grad_before = grad.clone()
        y.backward(grad)
    assert x.grad is not None
    assert torch.equal(x.detach(), before) and torch.equal(grad, grad_before), "a move modified its operand"
    assert tuple(x.shape) == move.forward.before == move.backward.after
    assert tuple(y.shape) == move.forward.after == move.backward.before
    whole = whole_value(layout.partial, case.shape, grid, 1, result.partial)
    expected = part(whole, result, grid, border_of(case))
    size = x.element_size()
    return {
        "value": y.shape == expected.shape and torch.equal(y, expected),
        "inner": (inner(y.detach(), grad, result, grid), inner(x.detach(), x.grad, layout, grid)),
        "gradient is the same where it must be": same_along(x.grad, replicated(layout, grid) | layout.partial, grid),
        "result is the same where it must be": same_along(y, replicated(result, grid) | result.varying, grid),
        "bytes": [
            (ledger.bytes(phase="forward"), move.forward.sent_bytes(size)),
            (ledger.bytes(phase="backward"), move.backward.sent_bytes(size)),
        ],
        "messages": [
            (ledger.messages(phase="forward"), move.forward.messages),
            (ledger.messages(phase="backward"), move.backward.messages),
        ],
        "sizes": (x.numel() * size, y.numel() * size),
        "axes": {row.axis for row in ledger.rows},
    }


@pytest.mark.parametrize(
    ("world", "case"), [(ranks_of(case.grid), case) for case in CASES], ids=[str(case) for case in CASES]
)
def test_adjoint(world: int, case: Case) -> None:
    results = run(world, check_move, case)
    for rank, result in enumerate(results):
        assert result["value"], f"rank {rank}: the value is wrong"
        forward, backward = result["inner"]
        assert forward == backward, f"<Fx, y> is {forward}, <x, F'y> is {backward}"
        assert result["gradient is the same where it must be"], rank
        assert result["result is the same where it must be"], rank
        for have, want in (*result["bytes"], *result["messages"]):
            assert have == want, f"rank {rank}: the ledger has {have}, the transfer {want}"
        assert result["axes"] <= {"*".join(case.move.axes)}


NATIVE = [
    *(Case("c3", "N C/c H W", (2, 6, 2, 3), AllGather(("c",), 1, to)) for to in ("varying", "replicated")),
    Case("c3", "N C H W sum(c)", (2, 6, 2, 3), ReduceScatter(("c",), 1)),
    Case("c3", "N C H W", (2, 6, 2, 3), Slice(("c",), 1)),
    Case("c3", "N C/c H W", (2, 8, 2, 3), AllGather(("c",), 1)),  # uneven: point-to-point messages
    Case("c2x2", "N C/(c1,c0) W", (2, 8, 2), AllGather(("c1", "c0"), 1)),  # not in rank order
    Case("n2h2", "N/n C H/h W", (4, 2, 6, 3), AllGather(("h",), 2)),
    Case("h3", "N C H/h W", (2, 2, 3, 3), halo(("h",), 2, "a-1:b+1", 3)),  # the middle rank needs all rows
    Case("h3", "N C H/h W", (2, 2, 6, 3), halo(("h",), 2, "a-2:b+2", 6)),
    Case("h3", "N C H/h W", (2, 2, 6, 3), repartition(("h",), 2, 6)),
]


def check_native(case: Case, formats: bool) -> dict[str, Any]:
    """The values of a move, or its memory formats, on a backend with a native gather and reduce-scatter."""
    with patch.object(transfers, "has_native_gather", lambda *_: True):
        return check_formats(case, torch.float64) if formats else check_move(case)


@pytest.mark.parametrize(
    ("world", "case"), [(ranks_of(case.grid), case) for case in NATIVE], ids=[str(case) for case in NATIVE]
)
def test_native_gathers(world: int, case: Case) -> None:
    """All members of a segment choose the same implementation: one that gathers would wait for ever for the others."""
    for result in run(world, check_native, case, False, timeout=60):
        assert result["value"] and result["inner"][0] == result["inner"][1]
        assert result["gradient is the same where it must be"] and result["result is the same where it must be"]
    if len(case.shape) == 4 and not isinstance(case.move, Slice):
        for outcome in run(world, check_native, case, True):
            assert all(right for right, _ in outcome.values()), outcome
            assert outcome["channels_last, last"][1], "the result is not channels_last"


# ------------------------------------------------------------------------------------------------- the ledger


RING = [
    # grid, layout, shape, move, elements sent by all ranks in total, forward and backward
    ("c4", "A/c B", (8, 3), AllGather(("c",), 0), 3 * 24, 3 * 24),
    ("c4", "A/c B", (8, 3), AllGather(("c",), 0, "replicated"), 3 * 24, 0),
    ("c3", "A/c B", (7, 3), AllGather(("c",), 0), 2 * 21, 2 * 21),
    ("c3", "A/c B", (1, 3), AllGather(("c",), 0), 2 * 3, 2 * 3),
    ("c4", "A B sum(c)", (8, 3), ReduceScatter(("c",), 0), 3 * 24, 3 * 24),
    ("c3", "A B sum(c)", (7, 3), ReduceScatter(("c",), 0), 2 * 21, 2 * 21),
    ("c4", "A B sum(c)", (8, 3), AllReduce(("c",)), 2 * 3 * 24, 0),
    ("c4", "A B sum(c)", (8, 3), AllReduce(("c",), "varying"), 2 * 3 * 24, 2 * 3 * 24),
    ("c4", "A B", (8, 3), ToVarying(("c",)), 0, 2 * 3 * 24),
    ("c4", "A B each(c)", (8, 3), ToReplicated(("c",)), 0, 0),
    ("c4", "A B", (8, 3), Slice(("c",), 0), 0, 3 * 24),
    ("c4", "A B each(c)", (8, 3), Slice(("c",), 0, "varying"), 0, 0),
    ("c4", "A/c B", (8, 4), AllToAll(("c",), 0, 1), 3 * 32 // 4, 3 * 32 // 4),
    ("h4", "A/h B", (8, 3), halo(("h",), 0, "a-1:b+1", 8), 2 * 3 * 3, 2 * 3 * 3),
    ("h4", "A/h B", (8, 3), halo(("h",), 0, "a-1:b-1", 10, "circular"), 3 * 3, 3 * 3),
    ("c2x2", "A/(c0,c1) B", (8, 3), repartition(("c0", "c1"), 0, 8, ("c1", "c0")), 4 * 3, 4 * 3),
]


@pytest.mark.parametrize(
    ("world", "case", "forward", "backward"),
    [(ranks_of(g), Case(g, layout, shape, move), f, b) for g, layout, shape, move, f, b in RING],
    ids=[f"{g} {move}" for g, _, _, move, _, _ in RING],
)
def test_ring_volumes(world: int, case: Case, forward: int, backward: int) -> None:
    """The bytes sent by all ranks in total, by the ring convention."""
    results = run(world, check_move, case)
    assert sum(result["bytes"][0][0] for result in results) == forward * 8
    assert sum(result["bytes"][1][0] for result in results) == backward * 8


@pytest.mark.parametrize("world", [2, 4])
def test_volumes_of_one_rank(world: int) -> None:
    """All-gather (p-1) shards, reduce-scatter (p-1) output shards, allreduce 2(p-1)/p of the tensor."""
    grid, p = f"c{world}", world
    for result in run(world, check_move, Case(grid, "A/c B", (2 * p, 3), AllGather(("c",), 0))):
        assert result["bytes"][0][0] == (p - 1) * 2 * 3 * 8 and result["messages"][0][0] == p - 1
        assert result["bytes"][1][0] == (p - 1) * 2 * 3 * 8 and result["messages"][1][0] == p - 1
    for result in run(world, check_move, Case(grid, "A B sum(c)", (2 * p, 3), AllReduce(("c",)))):
        assert result["bytes"][0][0] == 2 * (p - 1) * 2 * p * 3 * 8 // p


def count_small() -> list[tuple[int, int]]:
    """Bytes and messages of moves that send little or nothing."""
    grid = Grid.parse("c2h2")
    counts = []
    for layout, shape, move in (
        ("A/c B", (1, 3), AllGather(("c",), 0)),  # only the first rank has elements
        ("A/c B", (0, 3), AllGather(("c",), 0)),
        ("A/c B", (4, 0), AllGather(("c",), 0)),
        ("A B/h", (4, 6), halo(("h",), 1, "a:b", 6)),
        ("A B/h", (4, 0), halo(("h",), 1, "a-1:b+1", 0)),
        ("A B/h", (0, 6), halo(("h",), 1, "a-1:b+1", 6)),
        ("A/c B", (1, 1), AllToAll(("c",), 0, 1)),  # the element stays on its rank
    ):
        case = Case("c2h2", layout, shape, move)
        x = value(Layout.parse(layout), shape, grid, 1)
        x.requires_grad_(True)
        _, run_move = bound(case, grid, tuple(x.shape))
        with distfx.record_comm() as ledger:
            y = run_move(x)
            y.backward(torch.ones_like(y))
        counts.append((ledger.bytes(), ledger.messages()))
    return counts


def test_empty_messages_are_not_sent() -> None:
    one, none = (3 * 8, 1), (0, 0)  # forward from the first rank, backward from the second
    for rank, counts in enumerate(run(4, count_small)):
        assert counts == [one, *[none] * 6], rank


def run_alone() -> dict[str, Any]:
    """Moves on a grid of one rank, without axes."""
    grid = Grid()
    segment = grid.segment(())
    x = numbers((3, 4), 1).requires_grad_(True)
    shape = tuple(x.shape)
    with distfx.record_comm() as ledger:
        for move in (AllReduce(()), ToVarying(()), ToReplicated(())):
            bound_move = move.bind(Layout.parse("A B"), shape, shape, grid)
            assert segment.group is None and segment.size == 1 and bound_move.forward.messages == 0
            assert bound_move.forward.sent_bytes(8) == bound_move.backward.sent_bytes(8) == 0
    return {"rows": ledger.rows, "axes": grid.axes}


def test_one_rank_sends_nothing() -> None:
    assert run(1, run_alone) == [{"rows": [], "axes": {}}]


# ----------------------------------------------------------------------------- begin and finish


def overlap(cases: list[Case]) -> list[bool]:
    """Whether two overlapping moves with work in between equal the same moves one after the other."""
    grid = Grid.parse(cases[0].grid)
    outcomes = []
    for first, second in zip(cases, cases[1:] + cases[:1], strict=True):
        results, entries = [], []
        for split in (False, True):
            leaves, moves = [], []
            for number, case in enumerate((first, second)):
                x = value(Layout.parse(case.layout), case.shape, grid, number)
                leaves.append(x.requires_grad_(True))
                moves.append(bound(case, grid, tuple(x.shape))[1])
            with distfx.record_comm() as ledger:
                if split:
                    one = begin(moves[0], leaves[0] * 2)
                    work = (leaves[1].exp() * leaves[1]).sum()
                    two = begin(moves[1], leaves[1] * 3)
                    work = work + (leaves[0] ** 2).sum()
                    z = finish(two)
                    work = work + (z * z).sum()
                    y = finish(one)
                else:
                    work = (leaves[1].exp() * leaves[1]).sum() + (leaves[0] ** 2).sum()
                    y, z = moves[0](leaves[0] * 2), moves[1](leaves[1] * 3)
                    work = work + (z * z).sum()
                grad = numbers(tuple(y.shape), 7).to(y.dtype)
                (work + (y * grad).sum() + z.sum()).backward()
            results.append([y.detach(), z.detach(), *(leaf.grad for leaf in leaves)])
            entries.append(sorted((e.move, e.axis, e.phase, e.bytes, e.messages) for e in ledger.rows))
        close = all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(*results, strict=True))
        outcomes.append(close and entries[0] == entries[1])
    return outcomes


@pytest.mark.parametrize(("world", "grid"), [(2, "h2"), (3, "h3"), (4, "h4"), (4, "c2x2"), (8, "n2c2h2")])
def test_begin_and_finish_equal_one_step(world: int, grid: str) -> None:
    cases = [case for case in CASES if case.grid == grid][:40]
    for outcomes in run(world, overlap, cases):
        assert all(outcomes), [str(case) for case, ok in zip(cases, outcomes, strict=True) if not ok]


def finish_twice() -> None:
    grid = Grid.parse("c2")
    case = Case("c2", "A/c B", (4, 2), AllGather(("c",), 0))
    ticket = begin(bound(case, grid, (2, 2))[1], torch.ones(2, 2))
    finish(ticket)
    finish(ticket)


def test_finish_is_called_once() -> None:
    with pytest.raises(Exception, match="not in flight"):
        run(2, finish_twice)


# ------------------------------------------------------------------------------- memory formats and dtypes

FORMATS = ("contiguous", "channels_last", "transposed", "strided")
FORMAT_CASES = [
    Case("h2", "N C H/h W", (2, 3, 7, 4), halo(("h",), 2, "a-2:b+2", 7)),
    Case("h2", "N C H/h W", (2, 3, 7, 4), halo(("h",), 2, "a-2:b-2", 11, "reflect")),
    Case("h2", "N C/h H W", (2, 5, 3, 4), AllGather(("h",), 1)),
    Case("h2", "N/h C H W", (4, 5, 3, 4), AllGather(("h",), 0, "replicated")),
    Case("h2", "N C H W sum(h)", (2, 5, 3, 4), ReduceScatter(("h",), 1)),
    Case("h2", "N C H W sum(h)", (2, 5, 3, 4), AllReduce(("h",), "varying")),
    Case("h2", "N C H/h W", (2, 5, 6, 4), AllToAll(("h",), 2, 1)),
    Case("h2", "N C H W", (2, 5, 6, 4), Slice(("h",), 2)),
    Case("h2", "N C H W each(h)", (2, 5, 6, 4), Slice(("h",), 1, "varying")),
    Case("h2", "N C H W", (2, 5, 6, 4), ToVarying(("h",))),
    Case("h2", "N C H W each(h)", (2, 5, 6, 4), ToReplicated(("h",))),
]


def formatted(x: Tensor, name: str) -> Tensor:
    """The same values in another memory format."""
    if name == "channels_last":
        return x.to(memory_format=torch.channels_last)
    if name == "transposed":
        return x.transpose(1, 3).contiguous().transpose(1, 3)
    if name == "strided":
        return torch.stack([x, x + 1], dim=-1)[..., 0]
    return x


def check_formats(case: Case, dtype: torch.dtype) -> dict[str, tuple[bool, bool]]:
    """For each memory format of input and gradient: whether value and gradient are right, and stored channels last.

    ``mixed``: the format differs between ranks, as it may if a part has one channel.
    """
    grid = Grid.parse(case.grid)
    layout = Layout.parse(case.layout)
    outcome = {}
    plain = value(layout, case.shape, grid, 1)
    _, run_move = bound(case, grid, tuple(plain.shape))
    want = run_move(plain.requires_grad_(True))
    grad = cotangent(want, case.move.result(layout), grid, 2)
    want.backward(grad)
    assert plain.grad is not None
    for channels_last in (False, True):
        _, run_move = bound(case, grid, tuple(plain.shape), channels_last)
        for name in (*FORMATS, "mixed"):
            local_name = FORMATS[grid.rank % 2] if name == "mixed" else name
            x = formatted(plain.detach().to(dtype), local_name).requires_grad_(True)
            y = run_move(x)
            y.backward(formatted(grad.to(dtype), local_name))
            assert x.grad is not None
            right = torch.equal(y.double(), want) and torch.equal(x.grad.double(), plain.grad) and y.dtype == dtype
            outcome[f"{name}, {'last' if channels_last else 'first'}"] = (right, y.stride(1) == 1)
    return outcome


@pytest.mark.parametrize("case", FORMAT_CASES, ids=[str(case.move) for case in FORMAT_CASES])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [2])
def test_memory_formats_and_dtypes(world: int, dtype: torch.dtype, case: Case) -> None:
    for outcome in run(world, check_formats, case, dtype):
        assert all(right for right, _ in outcome.values()), outcome
        assert outcome["channels_last, last"][1], "the result is not channels_last"


def slice_then_halo() -> tuple[int, ...]:
    """The strides of a channels_last input after the moves before a first convolution."""
    grid = Grid.parse("h2")
    x = numbers((2, 3, 8, 4), 1).to(memory_format=torch.channels_last)
    y = bound(Case("h2", "N C H W", (2, 3, 8, 4), Slice(("h",), 2)), grid, (2, 3, 8, 4), channels_last=True)[1](x)
    case = Case("h2", "N C H/h W", (2, 3, 8, 4), halo(("h",), 2, "a-1:b+1", 8))
    return bound(case, grid, (2, 3, 4, 4), channels_last=True)[1](y).stride()


def test_channels_last_input_stays_channels_last() -> None:
    for stride in run(2, slice_then_halo):
        assert stride == (6 * 4 * 3, 1, 4 * 3, 3)


# ----------------------------------------------------------------------------------- fill, layouts, printing


def fill_border() -> Tensor:
    grid = Grid.parse("h2")
    case = Case("h2", "H/h W", (4, 2), halo(("h",), 0, "a-1:b+1", 4, fill=-math.inf))
    x = value(Layout.parse(case.layout), case.shape, grid, 1)
    x.requires_grad_(True)
    y = bound(case, grid, tuple(x.shape))[1](x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    return torch.cat([y.detach().flatten(), x.grad.flatten()])


def test_the_border_is_filled() -> None:
    first, second = run(2, fill_border)
    x = numbers((4, 2), 1)
    infinite = torch.full((1, 2), -math.inf, dtype=torch.float64)
    assert torch.equal(first[:8], torch.cat([infinite, x[:3]]).flatten())
    assert torch.equal(second[:8], torch.cat([x[1:], infinite]).flatten())
    assert first[8:].tolist() == [1, 1, 2, 2] and second[8:].tolist() == [2, 2, 1, 1]


def test_results() -> None:
    x = Layout.parse("N/n C/(c0,c1) H/h W")
    assert AllGather(("c1",), 1).result(x) == Layout.parse("N/n C/c0 H/h W each(c1)")
    assert AllGather(("c0", "c1"), 1, "replicated").result(x) == Layout.parse("N/n C H/h W")
    assert AllToAll(("c1",), 1, 3).result(x) == Layout.parse("N/n C/c0 H/h W/c1")
    assert Slice(("w",), 3).result(x) == Layout.parse("N/n C/(c0,c1) H/h W/w")
    assert ToVarying(("w",)).result(x) == Layout.parse("N/n C/(c0,c1) H/h W each(w)")
    assert ToReplicated(("w",)).result(ToVarying(("w",)).result(x)) == x
    partial = Layout.parse("N/n K/c1 sum(c0)")
    assert ReduceScatter(("c0",), 1).result(partial) == Layout.parse("N/n K/(c1,c0)")
    assert AllReduce(("c0",)).result(partial) == Layout.parse("N/n K/c1")
    assert AllReduce(("c0",), "varying").result(partial) == Layout.parse("N/n K/c1 each(c0)")


def test_only_minor_axes_are_gathered() -> None:
    with pytest.raises(AssertionError):
        AllGather(("c0",), 1).result(Layout.parse("N C/(c0,c1)"))
    with pytest.raises(AssertionError):
        AllToAll(("c0",), 1, 0).result(Layout.parse("N C/(c0,c1)"))
    with pytest.raises(AssertionError):
        ReduceScatter(("c",), 1).result(Layout.parse("N C"))


def test_moves_print_as_calls_of_the_graph() -> None:
    assert str(AllGather(("c",), 1)) == "all_gather(dim=1, axis='c')"
    assert str(AllGather(("c0", "c1"), 1, "replicated")) == "all_gather(dim=1, axis=('c0', 'c1'), to='replicated')"
    assert str(halo(("h",), 2, "2a-3:2b+2", 7)) == "halo(dim=2, axis='h', lo=3, hi=2, stride=2)"
    assert str(repartition(("c0", "c1"), 1, 8, ("c1", "c0"))) == "exchange(dim=1, axis=('c0', 'c1'), split='(c1,c0)')"
    assert str(AllToAll(("h",), 2, 1)) == "all_to_all(gather_dim=2, split_dim=1, axis='h')"
    assert str(Slice(("n",), 0, "varying")) == "slice(dim=0, axis='n', of='varying')"
    assert str(replace(halo(("h",), 2, "a-1:b+1", 7), mode="circular")).endswith("mode='circular')")
