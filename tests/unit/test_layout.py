"""Layouts: the notation parses back, bounds partition a dim exactly, windows are what an operator reads."""

import itertools
from types import SimpleNamespace

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.ranks import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from distfx.ir.layout import Layout, Split, Window, is_channel_axis, piece
from distfx.ir.symbolic import evaluate
from distfx.rules.contraction import conv_windows

AXES = ("n", "c", "c0", "c1", "d", "h", "w")
NAMES = ("N", "C", "K", "D", "H", "W", "R2", "x_1", "7")

windows = st.builds(
    Window, lo=st.integers(-9, 9), hi=st.integers(-9, 9), mul=st.integers(1, 12), div=st.integers(1, 12)
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout: each axis unused, in some dim, summed over or varying, in any order."""
    rank = draw(st.integers(0, 5))
    places: list[list[str]] = [[] for _ in range(rank + 3)]
    for axis in draw(st.permutations(AXES)):
        places[draw(st.integers(0, rank + 2))].append(axis)
    dims = []
    for axes in places[:rank]:
        window = draw(st.none() | windows)
        dims.append(Split(tuple(axes), draw(st.sampled_from((1, 1, 4, 49))), window))
    names = draw(st.lists(st.sampled_from(NAMES), min_size=rank, max_size=rank))
    return Layout(tuple(dims), frozenset(places[rank]), frozenset(places[rank + 1]), tuple(names))


# -- notation


@settings(deadline=None, max_examples=300)
@given(layouts())
def test_parses_back(layout: Layout) -> None:
    again = Layout.parse(str(layout))
    assert again == layout
    assert str(again) == str(layout)
    assert eval(repr(layout), {"Layout": Layout.parse}) == layout


@settings(deadline=None)
@given(layouts())
def test_parses_back_without_names(layout: Layout) -> None:
    assert Layout.parse(str(layout.with_names(()))) == layout


@settings(deadline=None)
@given(windows)
def test_window_parses_back(window: Window) -> None:
    assert Window.parse(str(window)) == window
    assert window.trivial == (str(window) == "a:b")


def test_reads_as_a_person_writes() -> None:
    layout = Layout.parse("N/n C/(c1,c0) H/h{2a-3:2b+2} W sum(w) each(d)")
    assert layout.dims == (
        Split(("n",)),
        Split(("c1", "c0")),
        Split(("h",), 1, Window(lo=3, hi=2, mul=2)),
        Split(),
    )
    assert layout.partial == {"w"} and layout.varying == {"d"} and layout.names == ("N", "C", "H", "W")
    assert Layout.parse("()") == Layout(()) and str(Layout(())) == "()"
    assert Layout.parse("N C/c[49]").dims[1].unit == 49


def test_order_of_axes_matters_but_names_do_not() -> None:
    assert Layout.parse("C/(c0,c1)") != Layout.parse("C/(c1,c0)")
    assert Layout.parse("N/n C") == Layout.parse("A/n B")
    assert hash(Layout.parse("N/n C")) == hash(Layout.parse("A/n B"))
    assert Layout.parse("N sum(c,h)") == Layout.parse("N sum(h,c)")


def test_symbolic_granules_parse_back() -> None:
    height, width = sympy.symbols("H W", integer=True, positive=True)
    layout = Layout((Split(("n",)), Split(("c",), height * width)), names=("N", "F"))
    assert str(Layout.parse(str(layout))) == str(layout)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("N/n C//c", ["'C//c'", "write it like"]),
        ("N/n C/(c0 c1)", ["'C/(c0'", "write it like"]),
        ("N/n +", ["'+'", "N/n +"]),
        ("H/h{a-1}", ["a-1", "2a-3:2b+2"]),
        ("H/h{2a-3:b+2}", ["2a-3:b+2", "write it like"]),
        ("N/n C/n", ["axis n twice", "C/n"]),
        ("N/n C sum(n)", ["axis n twice"]),
        ("N C sum(c) each(c)", ["axis c twice"]),
        ("N/(n,n)", ["axis n twice"]),
    ],
)
def test_errors_teach(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        Layout.parse(text)
    for word in words:
        assert word in str(error.value)


def test_a_state_given_twice_is_not_lost() -> None:
    try:
        layout = Layout.parse("N sum(c) sum(h)")
    except ValueError:
        return
    assert layout.partial == {"c", "h"}


def test_a_whole_dim_has_no_granule_and_no_halo() -> None:
    assert Split((), 4, Window(1, 1)) == Split()


def test_small_views() -> None:
    layout = Layout.parse("N/n C/(c0,c1) H/h{a-1:b+1} W sum(w) each(d)")
    assert layout.split_axes == {"n", "c0", "c1", "h"}
    assert [layout.dim_of(axis) for axis in ("n", "c1", "h", "w")] == [0, 1, 2, None]
    assert layout.storage() == Layout.parse("N/n C/(c0,c1) H/h W sum(w)")
    assert layout.with_dim(1, Split()) == Layout.parse("N/n C H/h{a-1:b+1} W sum(w) each(d)")
    assert Layout.replicated(3) == Layout.parse("A B C")


# -- bounds


def parts_of(split: Split, extent: int, sizes: dict[str, int]) -> list[tuple[int, int]]:
    """The bounds at all coordinates, the major axis slowest."""
    steps = itertools.product(*(range(sizes[axis]) for axis in split.axes))
    return [
        split.bounds(extent, {a: (i, sizes[a]) for a, i in zip(split.axes, step, strict=True)})  # type: ignore[misc]
        for step in steps
    ]


@settings(deadline=None, max_examples=300)
@given(
    extent=st.integers(0, 60),
    axes=st.lists(st.sampled_from(AXES), unique=True, max_size=3),
    sizes=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    unit=st.integers(1, 5),
)
def test_bounds_partition_the_extent(extent: int, axes: list[str], sizes: list[int], unit: int) -> None:
    parts = parts_of(Split(tuple(axes), unit), extent * unit, dict(zip(axes, sizes, strict=False)))
    at = 0
    for lo, hi in parts:
        assert lo <= hi and lo % unit == hi % unit == 0
        if hi > lo:
            assert lo == at
            at = hi
    assert at == extent * unit


@settings(deadline=None)
@given(extent=st.integers(0, 60), parts=st.integers(1, 9))
def test_samples_and_space_are_balanced(extent: int, parts: int) -> None:
    sizes = [hi - lo for lo, hi in (piece(extent, parts, i, chunk=False) for i in range(parts))]
    assert max(sizes) - min(sizes) <= 1  # type: ignore[operator]


@settings(deadline=None)
@given(extent=st.integers(1, 60), parts=st.integers(1, 9))
def test_channels_are_chunks(extent: int, parts: int) -> None:
    chunks = [c.tolist() for c in torch.arange(extent).chunk(parts)]
    chunks += [[]] * (parts - len(chunks))
    assert [list(range(*bounds)) for bounds in parts_of(Split(("c",)), extent, {"c": parts})] == chunks


@settings(deadline=None)
@given(extent=st.integers(1, 60), major=st.integers(1, 5), minor=st.integers(1, 5), swap=st.booleans())
def test_nested_channels_are_chunks_of_chunks(extent: int, major: int, minor: int, swap: bool) -> None:
    axes = ("c1", "c0") if swap else ("c0", "c1")
    expected = []
    outer = list(torch.arange(extent).chunk(major))
    for part in outer + [torch.arange(0)] * (major - len(outer)):
        inner = [c.tolist() for c in part.chunk(minor)] if len(part) else []
        expected += inner + [[]] * (minor - len(inner))
    parts = parts_of(Split(axes), extent, {axes[0]: major, axes[1]: minor})
    assert [list(range(*bounds)) for bounds in parts] == expected


def hold(shape: tuple[int, int], extents: list[int]) -> list[tuple[list[float], list[float]]]:
    """What DTensor holds on this rank for two shards of one dim, and for one shard on the major mesh dim."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("c0", "c1"))
    held = []
    for extent in extents:
        x = torch.arange(float(extent))
        both = distribute_tensor(x, mesh, [Shard(0), Shard(0)]).to_local()
        major = distribute_tensor(x, mesh, [Shard(0), Replicate()]).to_local()
        held.append((both.tolist(), major.tolist()))
    return held


@pytest.mark.parametrize(("world", "shape"), [(4, (2, 2)), (6, (2, 3)), (6, (3, 2))])
def test_channels_lie_as_dtensor_shards(world: int, shape: tuple[int, int]) -> None:
    extents = [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 17]
    for rank, held in enumerate(run(world, hold, shape, extents)):
        i, j = divmod(rank, shape[1])
        coords = {"c0": (i, shape[0]), "c1": (j, shape[1])}
        for extent, (both, major) in zip(extents, held, strict=True):
            assert both == list(range(*Split(("c0", "c1")).bounds(extent, coords)))  # type: ignore[arg-type]
            assert major == list(range(*Split(("c0",)).bounds(extent, coords)))  # type: ignore[arg-type]


@settings(deadline=None, max_examples=150)
@given(
    extent=st.integers(1, 50),
    axes=st.lists(st.sampled_from(AXES), unique=True, min_size=1, max_size=2),
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=2),
    unit=st.integers(1, 3),
    data=st.data(),
)
def test_symbolic_bounds_become_the_numeric_ones(
    extent: int, axes: list[str], sizes: list[int], unit: int, data: st.DataObject
) -> None:
    symbol, granule = sympy.symbols("E U", integer=True, positive=True)
    places = {axis: sympy.Symbol(f"i_{axis}", integer=True, nonnegative=True) for axis in axes}
    where = {axis: data.draw(st.integers(0, size - 1)) for axis, size in zip(axes, sizes, strict=False)}
    numeric = Split(tuple(axes), unit).bounds(
        extent * unit, {a: (where[a], s) for a, s in zip(axes, sizes, strict=False)}
    )
    symbolic = Split(tuple(axes), granule).bounds(
        symbol * granule, {a: (places[a], s) for a, s in zip(axes, sizes, strict=False)}
    )
    values = {symbol: extent, granule: unit} | {places[a]: where[a] for a in axes}
    assert tuple(evaluate(size, values) for size in symbolic) == numeric


def test_layout_bounds_take_each_dim_by_itself() -> None:
    layout = Layout.parse("N/n C/c H/h W")
    coords = {"n": (1, 2), "c": (0, 3), "h": (2, 4)}
    assert layout.bounds((5, 7, 9, 4), coords) == ((2, 5), (0, 3), (4, 6), (0, 4))
    assert layout.local_shape((5, 7, 9, 4), coords) == (3, 3, 2, 4)
    assert [is_channel_axis(axis) for axis in AXES] == [False, True, True, True, False, False, False]


# -- windows


def window_of(k: int, s: int, p: int, d: int, transposed: bool) -> Window:
    """The window that the rule of convolution asks for."""
    weight = SimpleNamespace(meta={"shape": (1, 1, k)})
    return conv_windows(SimpleNamespace(args=(None, weight, None, [s], [p], [d], transposed)))[0]  # type: ignore[arg-type]


def positions_read(y: torch.Tensor, x: torch.Tensor, a: int, b: int) -> list[int]:
    """Which positions of ``x`` the block ``[a, b)`` of ``y`` depends on."""
    (grad,) = torch.autograd.grad(y[0, 0, a:b].sum(), x)
    return torch.nonzero(grad[0, 0]).flatten().tolist()


@settings(deadline=None, max_examples=300)
@given(
    extent=st.integers(1, 24),
    k=st.integers(1, 6),
    s=st.integers(1, 4),
    p=st.integers(0, 5),
    d=st.integers(1, 3),
    transposed=st.booleans(),
    data=st.data(),
)
def test_window_is_what_a_convolution_reads(
    extent: int, k: int, s: int, p: int, d: int, transposed: bool, data: st.DataObject
) -> None:
    x = torch.ones(1, 1, extent, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(1, 1, k, dtype=torch.float64)
    if transposed:
        extra = data.draw(st.integers(0, max(s, d) - 1))
        size = (extent - 1) * s - 2 * p + d * (k - 1) + extra + 1
        assume(size >= 1)
        y = F.conv_transpose1d(x, weight, None, s, p, extra, 1, d)
    else:
        assume(extent + 2 * p - d * (k - 1) >= 1)
        y = F.conv1d(x, weight, None, s, p, d)
    a = data.draw(st.integers(0, y.shape[2] - 1))
    b = data.draw(st.integers(a + 1, y.shape[2]))
    lo, hi = window_of(k, s, p, d, transposed).need(a, b)
    read = positions_read(y, x, a, b)
    assert lo <= hi  # type: ignore[operator]
    assert set(read) <= set(range(lo, hi))  # type: ignore[arg-type]
    if d == 1 and (k >= s or transposed):  # no gaps between taps: not one position more than is read
        inside = range(max(lo, 0), min(hi, extent))  # type: ignore[call-overload]
        assert list(inside) == read


@settings(deadline=None)
@given(windows, st.integers(-5, 20))
def test_an_empty_block_needs_nothing(window: Window, at: int) -> None:
    lo, hi = window.need(at, at)
    assert lo == hi


@settings(deadline=None, max_examples=150)
@given(windows, st.integers(0, 20), st.integers(1, 9))
def test_symbolic_needs_become_the_numeric_ones(window: Window, a: int, length: int) -> None:
    first, last = sympy.symbols("a b", integer=True, nonnegative=True)
    need = window.need(first, last)
    values = {first: a, last: a + length}
    assert tuple(evaluate(size, values) for size in need) == window.need(a, a + length)
