"""Moves: one communication each, turning one layout into another.

A :class:`Move` is symbolic: it says what becomes of a layout. Bound to a shape and a place in the grid it is a pair
of *halves*, the forward communication and its adjoint, each of which is plain data: who sends which slices to whom.
A half is itself the adjoint of another, so one table holds the whole calculus:

========================  ==========================  ============================
move                      forward                     backward (its adjoint)
========================  ==========================  ============================
AllGather to varying      exchange                    exchange turned round, adding
AllGather to replicated   exchange                    take the own part
ReduceScatter             exchange turned round       exchange
AllReduce to replicated   allreduce                   nothing
AllReduce to varying      allreduce                   allreduce
Slice of replicated       take the own part           exchange
Slice of varying          take the own part           put it into zeros
Exchange (halo, pad, ...) exchange                    exchange turned round, adding
AllToAll                  all-to-all                  all-to-all, back
Fan (to varying)          nothing                     allreduce
Mask (to replicated)      nothing                     keep it on the first rank only
========================  ==========================  ============================
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from distfx.ir import volumes
from distfx.ir.exchange import ExchangeSchedule, make_schedule, source_positions
from distfx.ir.layout import Coords, Layout, Split, Window
from distfx.ir.symbolic import Size

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "BoundMove",
    "Exchange",
    "Move",
    "ReduceScatter",
    "Slice",
    "ToReplicated",
    "ToVarying",
    "Transfer",
]

Shape = tuple[int, ...]


class RankView(Protocol):
    """What a move asks of the grid: coordinates and segments, seen from one rank."""

    @property
    def rank(self) -> int: ...

    @property
    def coords(self) -> dict[str, int]: ...

    def placement(self, rank: int | None = None) -> Coords: ...

    def members(self, axes: tuple[str, ...]) -> tuple[int, ...]: ...


# ---------------------------------------------------------------------------------------------------- halves


@dataclass(frozen=True)
class Transfer:
    """One direction of a move on one rank: from a local tensor of shape ``before`` to one of shape ``after``."""

    axes: tuple[str, ...]
    before: Shape
    after: Shape

    @property
    def elements(self) -> int:
        """Elements this rank sends."""
        return 0

    @property
    def messages(self) -> int:
        """Messages this rank sends."""
        return 0

    def sent_bytes(self, itemsize: int) -> int:
        return self.elements * itemsize


@dataclass(frozen=True)
class Identity(Transfer):
    """The tensor stays as it is."""


@dataclass(frozen=True)
class FirstRankOnly(Transfer):
    """The tensor stays as it is on the first rank of the segment and becomes zero on the others."""

    keep: bool


@dataclass(frozen=True)
class Narrow(Transfer):
    """The part that starts at ``lo`` along ``dim``."""

    dim: int
    lo: int


@dataclass(frozen=True)
class ZeroPad(Transfer):
    """Zeros, but for the tensor itself that starts at ``lo`` along ``dim``."""

    dim: int
    lo: int


@dataclass(frozen=True)
class Reduce(Transfer):
    """The sum over the segment."""

    ranks: int

    def sent_bytes(self, itemsize: int) -> int:
        return volumes.allreduce_bytes(math.prod(self.before) * itemsize, self.ranks)

    @property
    def messages(self) -> int:
        return volumes.allreduce_messages(self.ranks)


@dataclass(frozen=True)
class DimExchange(Transfer):
    """A schedule along ``dim``; turned round (``adjoint``) every arrow points the other way and copies are sums."""

    dim: int
    schedule: ExchangeSchedule
    adjoint: bool
    fill: float = 0.0

    @property
    def elements(self) -> int:
        shape = self.before
        rest = math.prod(shape[: self.dim]) * math.prod(shape[self.dim + 1 :])
        return rest * (self.schedule.returned if self.adjoint else self.schedule.sent)

    @property
    def messages(self) -> int:
        if not math.prod(self.before[: self.dim]) * math.prod(self.before[self.dim + 1 :]):
            return 0
        return len(self.schedule.receive if self.adjoint else self.schedule.send)


@dataclass(frozen=True)
class Transpose(Transfer):
    """All-to-all: ``gather_dim`` becomes whole, ``split_dim`` is cut; member r owns the r-th of the cuts."""

    gather_dim: int
    split_dim: int
    gather_cuts: tuple[tuple[int, int], ...]
    split_cuts: tuple[tuple[int, int], ...]
    me: int

    def block_to(self, peer: int) -> Shape:
        """The shape of what goes to ``peer``."""
        return _resized(self.before, self.split_dim, _length(self.split_cuts[peer]))

    @property
    def elements(self) -> int:
        return sum(math.prod(self.block_to(peer)) for peer in range(len(self.split_cuts)) if peer != self.me)

    @property
    def messages(self) -> int:
        others = [peer for peer in range(len(self.split_cuts)) if peer != self.me]
        return len([peer for peer in others if math.prod(self.block_to(peer)) > 0])


@dataclass(frozen=True)
class BoundMove:
    """A move for one rank and one shape."""

    name: str
    forward: Transfer
    backward: Transfer


def _length(interval: tuple[int, int]) -> int:
    return interval[1] - interval[0]


def _resized(shape: Shape, dim: int, extent: int) -> Shape:
    return (*shape[:dim], extent, *shape[dim + 1 :])


# ----------------------------------------------------------------------------------------------------- moves


@dataclass(frozen=True)
class Move:
    """One communication along ``axes``."""

    axes: tuple[str, ...]
    name: ClassVar[str] = "move"

    def result(self, layout: Layout) -> Layout:
        """The layout that ``layout`` becomes."""
        raise NotImplementedError

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        """The two halves, for a tensor of global ``shape`` in ``layout`` whose part here has shape ``local``."""
        raise NotImplementedError

    @property
    def op(self) -> str:
        """The name of the operator it is in a graph."""
        return self.name

    def arguments(self) -> dict[str, Any]:
        """The literal arguments with which it stands in a printed graph."""
        return {"axis": self.axes[0] if len(self.axes) == 1 else self.axes}

    def __str__(self) -> str:
        return f"{self.op}({', '.join(f'{key}={value!r}' for key, value in self.arguments().items())})"


@dataclass(frozen=True)
class _Along(Move):
    dim: int

    def arguments(self) -> dict[str, Any]:
        return {"dim": self.dim, **super().arguments()}

    def _bounds(self, split: Split, extent: int, grid: RankView) -> list[tuple[int, int]]:
        """What each member of the segment owns of the dim."""
        bounds = (split.bounds(extent, grid.placement(rank)) for rank in grid.members(self.axes))
        return [(int(lo), int(hi)) for lo, hi in bounds]

    def _halves(
        self,
        source: Split,
        extent: int,
        target: Split,
        target_extent: int,
        local: Shape,
        grid: RankView,
        mode: str = "constant",
        fill: float = 0.0,
    ) -> tuple[DimExchange, DimExchange]:
        """The exchange from ``source`` to ``target`` of a tensor with part ``local``, and the same turned round."""
        owned = self._bounds(source, extent, grid)
        blocks = self._bounds(target, target_extent, grid)
        window = target.window or Window()
        needed = []
        for block in blocks:
            lo, hi = window.need(*block)
            needed.append(source_positions(int(lo), int(hi), extent, mode))
        plan = make_schedule(owned, needed, grid.members(self.axes).index(grid.rank))
        after = _resized(local, self.dim, plan.length)
        before = _resized(local, self.dim, plan.owned)
        return (
            DimExchange(self.axes, before, after, self.dim, plan, False, fill),
            DimExchange(self.axes, after, before, self.dim, plan, True),
        )

    def _minor(self, split: Split) -> Split:
        """``split`` without this move's axes, which must be its last ones."""
        assert split.axes[-len(self.axes) :] == self.axes, f"{self} of a dim split by {split.axes}"
        return replace(split, axes=split.axes[: -len(self.axes)])

    def _cut(self, split: Split) -> Split:
        """``split`` with this move's axes as its minor ones."""
        return replace(split, axes=split.axes + self.axes)


def _with_state(layout: Layout, axes: tuple[str, ...], to: str) -> Layout:
    return replace(layout, varying=layout.varying | set(axes)) if to == "varying" else layout


@dataclass(frozen=True)
class AllGather(_Along):
    """Make ``dim`` whole along ``axes``, the minor ones of those that split it."""

    to: str = "varying"
    name: ClassVar[str] = "all_gather"

    def result(self, layout: Layout) -> Layout:
        return _with_state(layout.with_dim(self.dim, self._minor(layout.dims[self.dim])), self.axes, self.to)

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        split, extent = replace(layout.dims[self.dim], window=None), shape[self.dim]
        gather, back = self._halves(split, extent, self._minor(split), extent, local, grid)
        if self.to == "varying":
            return BoundMove(self.name, gather, back)
        lo, _ = split.bounds(extent, grid.placement())
        start, _ = self._minor(split).bounds(extent, grid.placement())
        return BoundMove(self.name, gather, Narrow(self.axes, gather.after, gather.before, self.dim, int(lo - start)))

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | ({"to": self.to} if self.to != "varying" else {})


@dataclass(frozen=True)
class ReduceScatter(_Along):
    """Add up the partial sums over ``axes`` and split ``dim`` by them, as its minor axes."""

    name: ClassVar[str] = "reduce_scatter"

    def result(self, layout: Layout) -> Layout:
        assert set(self.axes) <= layout.partial, f"{self} of {layout}, which is no sum over {self.axes}"
        settled = replace(layout, partial=layout.partial - set(self.axes))
        return settled.with_dim(self.dim, self._cut(layout.dims[self.dim]))

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        whole, extent = layout.dims[self.dim], shape[self.dim]
        split = self._cut(whole)
        lo, hi = split.bounds(extent, grid.placement())
        gather, back = self._halves(split, extent, whole, extent, _resized(local, self.dim, int(hi - lo)), grid)
        return BoundMove(self.name, back, gather)


@dataclass(frozen=True)
class AllReduce(Move):
    """Add up the partial sums over ``axes``."""

    to: str = "replicated"
    name: ClassVar[str] = "all_reduce"

    def result(self, layout: Layout) -> Layout:
        return _with_state(replace(layout, partial=layout.partial - set(self.axes)), self.axes, self.to)

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        half = Reduce(self.axes, local, local, len(grid.members(self.axes)))
        return BoundMove(self.name, half, half if self.to == "varying" else Identity(self.axes, local, local))

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | ({"to": self.to} if self.to != "replicated" else {})


@dataclass(frozen=True)
class Slice(_Along):
    """Take this rank's part of ``dim`` along ``axes``, which become its minor axes. Going forward nothing is sent."""

    of: str = "replicated"
    unit: Size = 1
    name: ClassVar[str] = "slice"

    def _cut(self, split: Split) -> Split:
        return replace(split, axes=split.axes + self.axes, unit=self.unit)

    def result(self, layout: Layout) -> Layout:
        base = replace(layout, varying=layout.varying - set(self.axes))
        return base.with_dim(self.dim, self._cut(layout.dims[self.dim]))

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        whole, extent = layout.dims[self.dim], shape[self.dim]
        split = self._cut(whole)
        lo, hi = split.bounds(extent, grid.placement())
        start, _ = whole.bounds(extent, grid.placement())
        part = _resized(local, self.dim, int(hi - lo))
        take = Narrow(self.axes, local, part, self.dim, int(lo - start))
        if self.of == "varying":
            return BoundMove(self.name, take, ZeroPad(self.axes, part, local, self.dim, take.lo))
        gather, _ = self._halves(split, extent, whole, extent, part, grid)
        return BoundMove(self.name, take, gather)

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | ({"of": self.of} if self.of != "replicated" else {})


@dataclass(frozen=True)
class Exchange(_Along):
    """Give each rank the interval of ``dim`` that its block of the target needs: halo, padding, crop, repartition.

    ``target`` is how the dim is split afterwards, with the window of what each block needs; ``extent`` is the extent
    that the target's blocks partition. Out of range positions are read as ``mode`` says, or hold ``fill``.
    """

    target: Split
    extent: Size
    mode: str = "constant"
    fill: float = 0.0
    name: ClassVar[str] = "exchange"

    def result(self, layout: Layout) -> Layout:
        return layout.with_dim(self.dim, self.target)

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        assert isinstance(self.extent, int), "bind an exchange with a number for its extent"
        source = layout.dims[self.dim]
        halves = self._halves(
            source, shape[self.dim], self.target, self.extent, local, grid, mode=self.mode, fill=self.fill
        )
        return BoundMove(self.name, *halves)

    def arguments(self) -> dict[str, Any]:
        window = self.target.window
        words: dict[str, Any] = super().arguments()
        if window:
            words |= {"lo": window.lo, "hi": window.hi}
            words |= {"stride": window.mul} if window.mul != 1 else {}
            words |= {"div": window.div} if window.div != 1 else {}
        else:
            words |= {"split": str(self.target).lstrip("/")}
        words |= {"mode": self.mode} if self.mode != "constant" else {}
        return words | ({"fill": self.fill} if self.fill else {})

    @property
    def op(self) -> str:
        return "halo" if self.target.window is not None else "exchange"


@dataclass(frozen=True)
class AllToAll(Move):
    """Move ``axes`` from splitting ``gather_dim`` to splitting ``split_dim``, as minor axes of both."""

    gather_dim: int
    split_dim: int
    name: ClassVar[str] = "all_to_all"

    def result(self, layout: Layout) -> Layout:
        split = layout.dims[self.gather_dim]
        assert split.axes[-len(self.axes) :] == self.axes
        freed = layout.with_dim(self.gather_dim, replace(split, axes=split.axes[: -len(self.axes)]))
        taken = freed.dims[self.split_dim]
        return freed.with_dim(self.split_dim, replace(taken, axes=taken.axes + self.axes))

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        after = self.result(layout)
        members = grid.members(self.axes)
        me = members.index(grid.rank)

        def cuts(split: Split, whole: Split, extent: int) -> tuple[tuple[int, int], ...]:
            start, _ = whole.bounds(extent, grid.placement())
            bounds = (split.bounds(extent, grid.placement(rank)) for rank in members)
            return tuple((int(lo - start), int(hi - start)) for lo, hi in bounds)

        g, s = self.gather_dim, self.split_dim
        gather_cuts = cuts(layout.dims[g], after.dims[g], shape[g])
        split_cuts = cuts(after.dims[s], layout.dims[s], shape[s])
        total = max(hi for _, hi in gather_cuts)
        result = _resized(_resized(local, g, total), s, _length(split_cuts[me]))
        return BoundMove(
            self.name,
            Transpose(self.axes, local, result, g, s, gather_cuts, split_cuts, me),
            Transpose(self.axes, result, local, s, g, split_cuts, gather_cuts, me),
        )

    def arguments(self) -> dict[str, Any]:
        return {"gather_dim": self.gather_dim, "split_dim": self.split_dim, **super().arguments()}


@dataclass(frozen=True)
class ToVarying(Move):
    """From here on each rank uses the tensor its own way: its gradient is summed over ``axes``."""

    name: ClassVar[str] = "to_varying"

    def result(self, layout: Layout) -> Layout:
        return replace(layout, varying=layout.varying | set(self.axes))

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        ranks = len(grid.members(self.axes))
        return BoundMove(self.name, Identity(self.axes, local, local), Reduce(self.axes, local, local, ranks))


@dataclass(frozen=True)
class ToReplicated(Move):
    """From here on all ranks along ``axes`` do the same with the tensor: only one of them gives the gradient."""

    name: ClassVar[str] = "to_replicated"

    def result(self, layout: Layout) -> Layout:
        return replace(layout, varying=layout.varying - set(self.axes))

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        first = all(grid.coords[axis] == 0 for axis in self.axes)
        return BoundMove(self.name, Identity(self.axes, local, local), FirstRankOnly(self.axes, local, local, first))
