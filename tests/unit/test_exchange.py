"""The exchange, with all members in one process: it equals indexing the whole dim, and its adjoint the transpose."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from distfx.ir.exchange import PAD_MODES, PADDING, ExchangeSchedule, Selection, make_schedule, source_positions
from distfx.ir.layout import Split, Window

Interval = tuple[int, int]


@st.composite
def partitions(draw: st.DrawFn, extent: int, members: int) -> list[Interval]:
    """Any partition of ``[0, extent)`` into intervals in order, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, extent), min_size=members - 1, max_size=members - 1)))
    return list(itertools.pairwise([0, *cuts, extent]))


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[int, list[Interval], list[np.ndarray]]:
    """Any owners, and any needed positions: intervals, or positions in any order, repeated, mixed with padding."""
    extent, members = draw(st.integers(1, 20)), draw(st.integers(1, 5))
    owned = draw(partitions(extent, members))
    owned = draw(st.permutations(owned))
    needed = []
    for _ in range(members):
        if draw(st.booleans()):
            lo = draw(st.integers(0, extent))
            positions = list(range(lo, draw(st.integers(lo, extent))))
        else:
            positions = draw(st.lists(st.integers(PADDING, extent - 1), max_size=25))
        needed.append(np.array(positions, dtype=np.int64))
    return extent, owned, needed


def positions_of(selection: Selection) -> list[int]:
    """The positions of a selection, from its runs or its list."""
    if selection.runs is not None:
        return [i for first, length in selection.runs for i in range(first, first + length)]
    assert selection.positions is not None
    return list(selection.positions)


def forward(schedules: list[ExchangeSchedule], shards: list[np.ndarray], fill: float = 0.0) -> list[np.ndarray]:
    """The result of every member, from copies, messages and padding."""
    results = []
    for me, schedule in enumerate(schedules):
        result = np.full(schedule.length, np.nan)
        result[positions_of(schedule.keep[1])] = shards[me][positions_of(schedule.keep[0])]
        for peer, places in schedule.receive:
            (sent,) = [message for to, message in schedules[peer].send if to == me]
            result[positions_of(places)] = shards[peer][positions_of(sent)]
        result[positions_of(schedule.fill)] = fill
        results.append(result)
    return results


def backward(schedules: list[ExchangeSchedule], grads: list[np.ndarray]) -> list[np.ndarray]:
    """The adjoint: every message in the opposite direction, sums in place of copies."""
    results = [np.zeros(schedule.owned) for schedule in schedules]
    for me, schedule in enumerate(schedules):
        np.add.at(results[me], positions_of(schedule.keep[0]), grads[me][positions_of(schedule.keep[1])])
        for peer, places in schedule.receive:
            (sent,) = [message for to, message in schedules[peer].send if to == me]
            np.add.at(results[peer], positions_of(sent), grads[me][positions_of(places)])
    return results


def make(owned: list[Interval], needed: list[np.ndarray]) -> list[ExchangeSchedule]:
    return [make_schedule(owned, needed, me) for me in range(len(owned))]


def check(extent: int, owned: list[Interval], needed: list[np.ndarray]) -> list[ExchangeSchedule]:
    """Compare both directions of an exchange with indexing the whole dim."""
    schedules = make(owned, needed)
    x = np.arange(1.0, extent + 1)
    for result, positions in zip(forward(schedules, [x[lo:hi] for lo, hi in owned], -7.0), needed, strict=True):
        np.testing.assert_array_equal(result, np.where(positions == PADDING, -7.0, x[positions]))
    rng = np.random.default_rng(0)
    grads = [rng.integers(-9, 9, len(positions)).astype(float) for positions in needed]
    whole = np.zeros(extent)
    for grad, positions in zip(grads, needed, strict=True):
        np.add.at(whole, positions[positions != PADDING], grad[positions != PADDING])
    for result, (lo, hi) in zip(backward(schedules, grads), owned, strict=True):
        np.testing.assert_array_equal(result, whole[lo:hi])
    return schedules


@settings(deadline=None, max_examples=400)
@given(exchanges())
def test_every_member_receives_its_positions_and_returns_their_gradient(
    exchange: tuple[int, list[Interval], list[np.ndarray]],
) -> None:
    check(*exchange)


@settings(deadline=None, max_examples=200)
@given(exchanges())
def test_adjoint_is_the_transpose(exchange: tuple[int, list[Interval], list[np.ndarray]]) -> None:
    extent, owned, needed = exchange
    schedules = make(owned, needed)
    lengths, sizes = [schedule.length for schedule in schedules], [hi - lo for lo, hi in owned]
    assert sizes == [schedule.owned for schedule in schedules]

    def split(flat: np.ndarray, parts: list[int]) -> list[np.ndarray]:
        return np.split(flat, np.cumsum(parts)[:-1])

    columns = [np.concatenate(forward(schedules, split(unit, sizes))) for unit in np.eye(extent)]
    rows = [np.concatenate(backward(schedules, split(unit, lengths))) for unit in np.eye(sum(lengths))]
    matrix = np.stack(columns, 1)
    transpose = np.stack(rows, 1) if rows else np.zeros((extent, 0))
    np.testing.assert_array_equal(matrix.T, transpose)


@settings(deadline=None, max_examples=200)
@given(exchanges())
def test_sends_match_receives(exchange: tuple[int, list[Interval], list[np.ndarray]]) -> None:
    _, owned, needed = exchange
    schedules = make(owned, needed)
    for a, b in itertools.product(range(len(schedules)), repeat=2):
        sent = [m for peer, m in schedules[a].send if peer == b]
        received = [m for peer, m in schedules[b].receive if peer == a]
        assert len(sent) == len(received) <= (a != b)
        for out, into in zip(sent, received, strict=True):
            assert out.length == into.length > 0
            assert [owned[a][0] + i for i in positions_of(out)] == needed[b][positions_of(into)].tolist()
    assert sum(schedule.send_length for schedule in schedules) == sum(schedule.receive_length for schedule in schedules)


@settings(deadline=None, max_examples=200)
@given(exchanges())
def test_a_local_slice_is_the_whole_result(exchange: tuple[int, list[Interval], list[np.ndarray]]) -> None:
    extent, owned, needed = exchange
    x = np.arange(float(extent))
    for me, schedule in enumerate(make(owned, needed)):
        lo, hi = owned[me]
        if schedule.local_slice is not None:
            first, length = schedule.local_slice
            np.testing.assert_array_equal(x[lo:hi][first : first + length], x[needed[me]])
            assert not schedule.send and not schedule.receive


def test_a_local_slice_needs_no_messages() -> None:
    owned = [(0, 4), (4, 8)]
    assert make(owned, [np.arange(0, 4), np.arange(5, 7)])[1].local_slice == (1, 2)
    assert make(owned, [np.arange(0, 4), np.arange(0)])[1].local_slice == (0, 0)
    assert make(owned, [np.arange(0, 5), np.arange(4, 8)])[1].local_slice is None  # it must send


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=20))
def test_selections_keep_order_and_repetition(positions: list[int]) -> None:
    selection = Selection.of(np.array(positions, dtype=np.int64))
    assert positions_of(selection) == positions and selection.length == len(positions)
    assert (selection.runs is None) != (selection.positions is None)


def test_few_runs_are_runs() -> None:
    assert Selection.of(np.array([3, 4, 5, 0, 1])).runs == ((3, 3), (0, 2))
    assert Selection.of(np.array([9, 7, 5, 3])).positions == (9, 7, 5, 3)
    assert Selection.of(np.array([], dtype=np.int64)).runs == ()


def test_a_position_without_owner_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="no owner"):
        make_schedule([(0, 2), (2, 4)], [np.array([4]), np.array([0])], 0)


# -- halos and padding


@settings(deadline=None, max_examples=200)
@given(
    extent=st.integers(1, 24),
    members=st.integers(1, 6),
    window=st.builds(
        Window, lo=st.integers(-3, 12), hi=st.integers(-3, 12), mul=st.integers(1, 3), div=st.integers(1, 3)
    ),
    blocks=st.integers(0, 24),
    mode=st.sampled_from(["constant", "replicate", "circular"]),
)
def test_halos_of_any_width(extent: int, members: int, window: Window, blocks: int, mode: str) -> None:
    """Wider than the neighbouring shard, across empty shards, or cropping."""
    coords = [{"h": (i, members)} for i in range(members)]
    owned = [Split(("h",)).bounds(extent, c) for c in coords]
    targets = [Split(("h",)).bounds(blocks, c) for c in coords]
    needed = [source_positions(*window.need(*target), extent, mode) for target in targets]  # type: ignore[misc]
    check(extent, owned, needed)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", list(PAD_MODES))
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_padding_equals_torch(mode: str, data: st.DataObject) -> None:
    extent = data.draw(st.integers(1, 16))
    most = {"constant": 9, "replicate": 9, "circular": extent, "reflect": extent - 1}[mode]
    least = -((extent - 1) // 2) if mode == "constant" else 0
    before, after = data.draw(st.integers(least, most)), data.draw(st.integers(least, most))
    members = data.draw(st.integers(1, 5))
    x = torch.arange(1.0, extent + 1)[None, None]
    value = -7.0 if mode == "constant" else None
    expected = F.pad(x, (before, after), mode=mode, value=value)[0, 0].numpy()
    total = extent + before + after
    owned = data.draw(partitions(extent, members))
    cuts = data.draw(partitions(total, members))
    needed = [source_positions(lo - before, hi - before, extent, mode) for lo, hi in cuts]
    shards = [x[0, 0, lo:hi].numpy() for lo, hi in owned]
    result = np.concatenate(forward(make(owned, needed), shards, -7.0))
    np.testing.assert_array_equal(result, expected)
    check(extent, owned, needed)


def test_padding_modes_are_all_of_torch() -> None:
    assert set(PAD_MODES) == {"constant", "reflect", "replicate", "circular"}


def test_a_reversed_interval_is_empty() -> None:
    assert len(source_positions(3, 1, 8)) == 0
