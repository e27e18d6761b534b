"""Random convolutions, pools and networks on random grids: all that torch accepts is exact in parallel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.exact import check, grids
from support.models import ALGORITHMS, layers, stack

COMMON: dict[str, Any] = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "phases": [Phase.explicit, Phase.generate, Phase.shrink],
    "report_multiple_bugs": False,
    "print_blob": False,
}
STRATEGIES = ("auto", *ALGORITHMS)


@dataclass
class Case:
    """A network to check on a grid. Its ``repr`` is enough to run it again."""

    grid: str
    shape: tuple[int, ...]
    texts: list[str]
    strategy: str

    def run(self) -> None:
        check(stack, self.grid, [self.shape], strategy=self.strategy, kwargs=layers(*self.texts))


@dataclass
class Geometry:
    """A layer along one dim: kernel, stride, padding, dilation, output padding, the extents before and after."""

    k: int
    s: int
    p: int
    d: int
    op: int
    extent: int
    after: int


def each(dims: list[Geometry], name: str) -> tuple[int, ...]:
    """The attribute ``name`` of each dim."""
    return tuple(getattr(dim, name) for dim in dims)


@st.composite
def conv_dim(draw: st.DrawFn, rank: int, kind: str, extent: int | None = None) -> Geometry | None:
    """A legal geometry along one dim, for an input of ``extent`` if given; ``None`` if the drawn one is not legal."""
    k = draw(st.integers(1, 7 if rank < 3 else 4))
    d = draw(st.integers(1, 3 if k < 5 else 2))
    s = draw(st.integers(1, 4 if kind != "same" else 1))
    p = draw(st.integers(0, k)) if kind != "same" else 0
    reach = d * (k - 1)
    top = (16, 12, 7)[rank - 1]
    if kind == "transposed":
        op = draw(st.integers(0, max(s, d) - 1))
        least = max(1, -(-(2 * p - reach - op) // s) + 1)
        extent = extent or least + draw(st.integers(0, top // 2))
        after = (extent - 1) * s - 2 * p + reach + op + 1
        return Geometry(k, s, p, d, op, extent, after) if after >= 1 else None
    if kind == "same":
        extent = extent or draw(st.integers(1, top))
        return Geometry(k, s, p, d, 0, extent, extent)
    least = {"reflect": p + 1, "circular": max(1, p)}.get(kind, 1)
    extent = extent or max(least, reach + 1 - 2 * p) + draw(st.integers(0, top))
    after = (extent + 2 * p - reach - 1) // s + 1
    return Geometry(k, s, p, d, 0, extent, after) if after >= 1 and extent >= least else None


@st.composite
def convolution(draw: st.DrawFn, rank: int, channels: int, extents: list[int] | None = None) -> tuple[str, Any, Any]:
    """A convolution as text, the number of its filters, and its geometry."""
    kind = draw(st.sampled_from(("zeros",) * 5 + ("transposed",) * 3 + ("same", "reflect", "replicate", "circular")))
    dims = [draw(conv_dim(rank, kind, extents[i] if extents else None)) for i in range(rank)]
    if None in dims:  # possible only with given extents: a layer that fits all
        kind, dims = "zeros", [Geometry(1, 1, 0, 1, 0, e, e) for e in extents or ()]
    groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
    if draw(st.booleans()):
        groups = 1
    filters = groups * draw(st.integers(1, max(1, 9 // groups)))
    arguments = [
        f"{channels}, {filters}, {each(dims, 'k')}",
        f"stride={each(dims, 's')}",
        f"dilation={each(dims, 'd')}",
    ]
    arguments += [f"padding={each(dims, 'p')}" if kind != "same" else "padding='same'"]
    arguments += [f"groups={groups}", f"bias={draw(st.booleans())}"]
    if kind == "transposed":
        arguments.append(f"output_padding={each(dims, 'op')}")
    elif kind not in ("zeros", "same"):
        arguments.append(f"padding_mode='{kind}'")
    name = "ConvTranspose" if kind == "transposed" else "Conv"
    return f"{name}{rank}d({', '.join(arguments)})", filters, dims


@st.composite
def pool(draw: st.DrawFn, rank: int, extents: list[int] | None = None) -> tuple[str, list[Geometry]]:
    """A pooling as text, and its geometry."""
    largest = draw(st.booleans())
    ceil = draw(st.booleans())
    dims = []
    for i in range(rank):
        k = draw(st.integers(1, 5))
        s, p = draw(st.integers(1, 4)), draw(st.integers(0, k // 2))
        d = draw(st.integers(1, 2)) if largest else 1
        least = max(1, d * (k - 1) + 1 - 2 * p)
        least = max(least, k) if rank == 3 and not largest else least  # avg_pool3d requires it
        extent = extents[i] if extents else least + draw(st.integers(0, 10 if rank < 3 else 4))
        if extent < least:
            k = s = d = 1
            p = 0
        span = extent + 2 * p - d * (k - 1) - 1
        after = (-(-span // s) if ceil else span // s) + 1
        if ceil and (after - 1) * s >= extent + p:
            after -= 1  # the last window must begin inside
        dims.append(Geometry(k, s, p, d, 0, extent, after))
    arguments = [f"{each(dims, 'k')}, {each(dims, 's')}, {each(dims, 'p')}, ceil_mode={ceil}"]
    if largest:
        arguments.append(f"dilation={each(dims, 'd')}")
    else:
        arguments.append(f"count_include_pad={draw(st.booleans())}")
        if rank > 1 and draw(st.integers(0, 3)) == 0:
            arguments.append(f"divisor_override={draw(st.integers(1, 9))}")
    return f"{'Max' if largest else 'Avg'}Pool{rank}d({', '.join(arguments)})", dims


@st.composite
def placement(draw: st.DrawFn, world: int, rank: int) -> tuple[str, int, str]:
    """A grid of ``world`` ranks, a batch size that its axis ``n`` can split, and a strategy."""
    grid = draw(st.sampled_from(list(grids(world, "nc" + "dhw"[3 - rank :]))))
    samples = int(grid[1]) if grid.startswith("n") else 1
    strategy = draw(st.sampled_from(STRATEGIES)) if "c" in grid else "auto"
    return grid, samples + draw(st.integers(0, 2)), strategy


@st.composite
def convolutions(draw: st.DrawFn, world: int) -> Case:
    """One convolution."""
    rank = draw(st.sampled_from((1, 2, 2, 3)))
    grid, batch, strategy = draw(placement(world, rank))
    channels = draw(st.integers(1, 9))
    text, _, dims = draw(convolution(rank, channels))
    return Case(grid, (batch, channels, *each(dims, "extent")), [text], strategy)


@st.composite
def pools(draw: st.DrawFn, world: int) -> Case:
    """A 1x1 convolution, which may split channels, and a pool."""
    rank = draw(st.sampled_from((1, 2, 2, 3)))
    grid, batch, strategy = draw(placement(world, rank))
    text, dims = draw(pool(rank))
    filters = draw(st.integers(1, 5))
    texts = [f"Conv{rank}d(2, {filters}, 1)", text]
    return Case(grid, (batch, 2, *each(dims, "extent")), texts, strategy)


@st.composite
def networks(draw: st.DrawFn, world: int) -> Case:
    """Three to five layers, each of which accepts the output of the one before."""
    rank = draw(st.sampled_from((1, 2, 2)))
    grid, batch, strategy = draw(placement(world, rank))
    channels = draw(st.integers(1, 6))
    text, filters, dims = draw(convolution(rank, channels))
    shape, texts = (batch, channels, *each(dims, "extent")), [text]
    for _ in range(draw(st.integers(2, 4))):
        extents = [dim.after for dim in dims]
        kind = draw(st.sampled_from(("conv", "conv", "pool", "norm", "act")))
        if kind == "conv":
            text, filters, dims = draw(convolution(rank, filters, extents))
        elif kind == "pool":
            text, dims = draw(pool(rank, extents))
        elif kind == "norm" and "bias=False" in texts[-1] and batch * math.prod(extents) > 3:
            text = f"BatchNorm{rank}d({filters})"
        else:
            text = draw(st.sampled_from(("Tanh()", "SiLU()", f"PReLU({filters})")))
        texts.append(text)
        if max(each(dims, "after")) > 40:
            break
    return Case(grid, shape, texts, strategy)


def _worlds(pairs: list[tuple[int, int]]) -> Any:
    """Run a test for each world size, with a number of examples."""
    return pytest.mark.parametrize(("world", "examples"), pairs, ids=[f"{world}" for world, _ in pairs])


def _run(cases: Any, examples: int) -> None:
    """Run ``examples`` draws of ``cases``."""

    @settings(max_examples=examples, **COMMON)
    @given(cases)
    def each_case(case: Case) -> None:
        case.run()

    each_case()


@_worlds([(2, 30), (3, 20), (4, 30), (6, 6), (8, 5)])
def test_random_convolutions(world: int, examples: int) -> None:
    _run(convolutions(world), examples)


@_worlds([(2, 12), (3, 8), (4, 10)])
def test_random_pools(world: int, examples: int) -> None:
    _run(pools(world), examples)


@_worlds([(2, 12), (3, 8), (4, 12), (8, 3)])
def test_random_networks(world: int, examples: int) -> None:
    _run(networks(world), examples)
