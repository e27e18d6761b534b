"""Routes between layouts: they end where they should, and their numbers are right on real ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import run
from test_moves import cotangent, inner, part, replicated, same_along, value, whole_value

from distfx.grid import Grid
from distfx.ir.layout import Layout, Split, Window
from distfx.ir.moves import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Move,
    ReduceScatter,
    Slice,
    ToReplicated,
    ToVarying,
)
from distfx.ir.route import Border, estimate, route
from distfx.runtime.autograd.moves import RunMove

SHAPE = (6, 8, 5)


def random_layout(choose: random.Random, axes: tuple[str, ...], *, source: bool, units: bool, halos: bool) -> Layout:
    """Any layout of a tensor of three dims: a source may be a partial sum, a target may have windows."""
    places: list[list[str]] = [[], [], [], [], []]  # the dims, a state, nothing
    partial, varying = set(), set()
    for axis in choose.sample(axes, len(axes)):
        at = choose.randrange(6)
        if at < 3:
            places[at].append(axis)
        elif at == 3 and source:
            partial.add(axis)
        elif at == 4:
            varying.add(axis)
    dims = []
    for axes_here, extent in zip(places[:3], SHAPE, strict=True):
        unit = choose.choice((1, 2)) if units and extent % 2 == 0 else 1
        window = Window(choose.randrange(3), choose.randrange(3)) if halos and choose.random() < 0.5 else None
        dims.append(Split(tuple(axes_here), unit, window))
    return Layout(tuple(dims), frozenset(partial), frozenset(varying))


def border_of(target: Layout) -> Border:
    return Border({dim: extent for dim, extent in enumerate(SHAPE)})


def follow(moves: tuple[Move, ...], layout: Layout) -> Layout:
    for move in moves:
        layout = move.result(layout)
    return layout


@pytest.mark.parametrize(
    ("units", "halos"), [(False, False), (False, True), (True, False)], ids=["plain", "halos", "granules"]
)
@settings(deadline=None, max_examples=1500)
@given(seed=st.integers(0, 2**32))
def test_every_route_ends_in_its_target(units: bool, halos: bool, seed: int) -> None:
    choose = random.Random(seed)
    axes = ("n", "c0", "c1", "h", "w")[: choose.randint(1, 5)]
    source = random_layout(choose, axes, source=True, units=units, halos=False)
    target = random_layout(choose, axes, source=False, units=units, halos=halos)
    moves = route(source, target, SHAPE, border_of(target))
    assert follow(moves, source) == target, f"{source} -> {target}: {[str(m) for m in moves]}"
    assert estimate(moves, source, SHAPE, dict.fromkeys(axes, 2)) >= 0


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_no_way_is_short(seed: int) -> None:
    layout = random_layout(random.Random(seed), ("n", "c", "h", "w"), source=False, units=True, halos=False)
    assert route(layout, layout, SHAPE) == ()


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        ("N/n C/c H", "N/n C H each(c)", [AllGather]),
        ("N/n C/c H", "N/n C H", [AllGather]),
        ("N/n C H sum(c)", "N/n C/c H", [ReduceScatter]),
        ("N/n C/c1 H sum(c0)", "N/n C/(c1,c0) H", [ReduceScatter]),
        ("N/n C H sum(c)", "N/n C H", [AllReduce]),
        ("N/n C H sum(c)", "N/n C H each(c)", [AllReduce]),
        ("N C H", "N/n C H/h", [Slice, Slice]),
        ("N C H each(h)", "N C H/h", [Slice]),
        ("N C/(c0,c1) H", "N C/(c1,c0) H", [Exchange]),
        ("N C/(c0,c1) H", "N C/c0 H each(c1)", [AllGather]),
        ("N C/(c0,c1) H", "N C H each(c0,c1)", [AllGather]),
        ("N C/h H", "N C H/h", [AllToAll]),
        ("N C/(c,h) H", "N C/c H/h", [AllToAll]),
        ("N C H", "N C H each(h)", [ToVarying]),
        ("N C H each(h)", "N C H", [ToReplicated]),
        ("N C H/h", "N C H/h{a-1:b+1}", [Exchange]),
        ("N C/c H/h", "N C H/h{a-1:b+1} each(c)", [Exchange, AllGather]),  # the halo first, on the smaller tensor
        ("N C H", "N C H/h{a-1:b+1}", [Slice, Exchange]),
        ("N C/c[2] H", "N C/c H", [Exchange]),
    ],
)
def test_the_way_is_the_expected_one(source: str, target: str, kinds: list[type[Move]]) -> None:
    moves = route(Layout.parse(source), Layout.parse(target), SHAPE, Border({2: SHAPE[2]}))
    assert [type(move) for move in moves] == kinds


def test_nothing_is_moved_into_a_sum() -> None:
    with pytest.raises(AssertionError, match="partial sum"):
        route(Layout.parse("N C"), Layout.parse("N C sum(c)"), (2, 2))


def test_estimates_are_ring_volumes() -> None:
    sizes = {"c": 4, "h": 2}
    shape = (8, 16, 4)

    def sent(source: str, target: str) -> float:
        start = Layout.parse(source)
        return estimate(route(start, Layout.parse(target), shape), start, shape, sizes)

    total = 8 * 16 * 4
    assert sent("N C/c H", "N C H each(c)") == 2 * 3 / 4 * total
    assert sent("N C/c H", "N C H") == 3 / 4 * total
    assert sent("N C H sum(c)", "N C/c H") == 2 * 3 / 4 * total
    assert sent("N C H sum(c)", "N C H") == 2 * 3 / 4 * total
    assert sent("N C H", "N C/c H") == 3 / 4 * total
    assert sent("N C H each(c)", "N C/c H") == 0


# -- on real ranks

PAIRS = [
    ("c2x2", "N C/(c0,c1) H", "N C/(c1,c0) H"),
    ("c2x2", "N C/(c0,c1) H", "N/c1 C/c0 H"),
    ("c2x2", "N/c0 C/c1 H", "N/c1 C/c0 H"),
    ("c2x2", "N/(c0,c1) C H", "N C H/(c1,c0)"),
    ("c2x2", "N C/(c0,c1) H", "N C/c1 H each(c0)"),
    ("c2x2", "N C/(c0,c1) H", "N C H each(c0)"),
    ("c2x2", "N C/(c0,c1) H", "N C H each(c1)"),
    ("c2x2", "N C H sum(c0,c1)", "N C/(c1,c0) H"),
    ("c2x2", "N C H sum(c0,c1)", "N C/c0 H each(c1)"),
    ("c2x2", "N C H each(c0,c1)", "N C/(c1,c0) H"),
    ("c2x2", "N C H", "N C/(c1,c0) H"),
    ("n2h2", "N/n C H/h", "N/h C H/n"),
    ("n2h2", "N/n C H/h", "N C H each(n)"),
    ("n2h2", "N C H/h sum(n)", "N/n C H/h{a-1:b+2}"),
    ("n2h2", "N/(h,n) C H", "N/n C H/h{a-2:b+2}"),
    ("n2h2", "N/n C/h H", "N/n C H/h{a-1:b+1}"),
    ("n2c2", "N/n C/c H", "N/n C H each(c)"),
    ("n2c2", "N/n C[2] H sum(c)", "N/n C/c[2] H"),
]


def check_routes(pairs: list[tuple[str, str, str]]) -> list[tuple[str, bool]]:
    """On a rank: the values of each route and its adjoint."""
    outcomes = []
    for text, source_text, target_text in pairs:
        grid = Grid.parse(text)
        source, target = Layout.parse(source_text), Layout.parse(target_text)
        moves = route(source, target, SHAPE, border_of(target))
        x = value(source, SHAPE, grid, 1).requires_grad_(True)
        y: Any = x
        layout, local = source, tuple(x.shape)
        for move in moves:
            bound = move.bind(layout, SHAPE, local, grid)
            y = RunMove(bound, grid.segment(move.axes))(y)
            layout, local = move.result(layout), bound.forward.after
        expected = part(whole_value(source.partial, SHAPE, grid, 1), target, grid)
        right = y.shape == expected.shape and bool((y == expected).all())
        grad = cotangent(y, target, grid, 2)
        if moves:
            y.backward(grad)
            assert x.grad is not None
            right &= inner(y.detach(), grad, target, grid) == inner(x.detach(), x.grad, source, grid)
            right &= same_along(x.grad, replicated(source, grid) | source.partial, grid)
        outcomes.append((f"{text}: {source_text} -> {target_text} by {[str(m) for m in moves]}", bool(right)))
    return outcomes


def settled_pairs(grid: str, axes: tuple[str, ...], count: int, **options: bool) -> list[tuple[str, str, str]]:
    """Random pairs, the same in every run."""
    choose = random.Random(f"{grid} {options}")
    pairs = []
    for _ in range(count):
        source = random_layout(choose, axes, source=True, units=options["units"], halos=False)
        target = random_layout(choose, axes, source=False, **options)
        pairs.append((grid, str(source), str(replace(target))))
    return pairs


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize(
    "pairs",
    [
        PAIRS,
        settled_pairs("c2x2", ("c0", "c1"), 60, units=False, halos=False),
        settled_pairs("n2h2", ("n", "h"), 60, units=False, halos=True),
        settled_pairs("n2c2", ("n", "c"), 40, units=True, halos=False),
    ],
    ids=["chosen", "channels", "halos", "granules"],
)
def test_routes_carry_the_right_numbers(world: int, pairs: list[tuple[str, str, str]]) -> None:
    for rank, outcomes in enumerate(run(world, check_routes, pairs)):
        wrong = [text for text, right in outcomes if not right]
        assert not wrong, f"rank {rank}: " + "\n".join(wrong)


@pytest.mark.parametrize("world", [8])
def test_routes_of_three_axes(world: int) -> None:
    pairs = settled_pairs("n2c2h2", ("n", "c", "h"), 60, units=False, halos=True)
    for outcomes in run(world, check_routes, pairs):
        assert not [text for text, right in outcomes if not right]
