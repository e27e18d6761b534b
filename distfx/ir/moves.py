"""Moves: each is one communication that turns one layout into another.

A :class:`Move` is symbolic: :meth:`Move.result` computes the layout after it. :meth:`Move.bind` fixes the shape and the
rank and returns two *transfers*, the forward communication and its adjoint, which autograd runs in the backward pass. A
:class:`Transfer` is plain data: the slices that this rank sends, and to whom. The adjoint of a transfer is again a
transfer, so that one table describes all moves. :mod:`distfx.ir.layout` explains *varying*, *replicated* and *partial*.

==============================  ==========================  ==========================================
move                            forward                     backward (the adjoint)
==============================  ==========================  ==========================================
AllGather, to varying           exchange                    adjoint exchange
AllGather, to replicated        exchange                    narrow to this rank's part
ReduceScatter                   adjoint exchange            exchange
AllReduce, to replicated        allreduce                   identity
AllReduce, to varying           allreduce                   allreduce
Slice, of replicated            narrow to this rank's part  exchange
Slice, of varying               narrow to this rank's part  zero-pad to the whole
Exchange (halo, padding, ...)   exchange                    adjoint exchange
AllToAll                        all-to-all                  all-to-all with the two dims swapped
ToVarying                       identity                    allreduce
ToReplicated                    identity                    zero on all ranks but the first
==============================  ==========================  ==========================================

*Exchange* gives each rank the positions of one dim that it needs (:mod:`distfx.ir.exchange`). The *adjoint exchange*
sends every message in the opposite direction and adds values where the exchange copies them.
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
    """The part of a grid that moves use: the coordinates and the segments of one rank."""

    @property
    def rank(self) -> int: ...

    @property
    def coords(self) -> dict[str, int]: ...

    def placement(self, rank: int | None = None) -> Coords: ...

    def members(self, axes: tuple[str, ...]) -> tuple[int, ...]: ...


# -- transfers


@dataclass(frozen=True)
class Transfer:
    """One direction of a move on one rank. It turns a local tensor of shape ``before`` into one of shape ``after``."""

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
        """Bytes this rank sends, for elements of ``itemsize`` bytes."""
        return self.elements * itemsize


@dataclass(frozen=True)
class Identity(Transfer):
    """Returns the tensor unchanged."""


@dataclass(frozen=True)
class FirstRankOnly(Transfer):
    """Returns the tensor unchanged on the first rank of the segment (``keep``), and zeros on the others."""

    keep: bool


@dataclass(frozen=True)
class Narrow(Transfer):
    """Returns the part of the tensor that starts at ``lo`` along ``dim``."""

    dim: int
    lo: int


@dataclass(frozen=True)
class ZeroPad(Transfer):
    """Returns zeros that contain the tensor from ``lo`` on along ``dim``."""

    dim: int
    lo: int


@dataclass(frozen=True)
class Reduce(Transfer):
    """Returns the sum of the tensors of all ranks of the segment."""

    ranks: int

    def sent_bytes(self, itemsize: int) -> int:
        return volumes.allreduce_bytes(math.prod(self.before) * itemsize, self.ranks)

    @property
    def messages(self) -> int:
        return volumes.allreduce_messages(self.ranks)


@dataclass(frozen=True)
class DimExchange(Transfer):
    """Executes an exchange schedule along ``dim``, or its adjoint."""

    dim: int
    schedule: ExchangeSchedule
    adjoint: bool
    fill: float = 0.0

    @property
    def elements(self) -> int:
        return self._cross_section * (self.schedule.receive_length if self.adjoint else self.schedule.send_length)

    @property
    def messages(self) -> int:
        if not self._cross_section:
            return 0
        return len(self.schedule.receive if self.adjoint else self.schedule.send)

    @property
    def _cross_section(self) -> int:
        """The number of elements at one position of the dim."""
        return math.prod(self.before[: self.dim]) * math.prod(self.before[self.dim + 1 :])


@dataclass(frozen=True)
class Transpose(Transfer):
    """An all-to-all: gathers ``gather_dim`` and splits ``split_dim``. Member r has the r-th interval of the cuts."""

    gather_dim: int
    split_dim: int
    gather_cuts: tuple[tuple[int, int], ...]
    split_cuts: tuple[tuple[int, int], ...]
    me: int

    def block_to(self, peer: int) -> Shape:
        """The shape of the block that this rank sends to ``peer``."""
        return _resized(self.before, self.split_dim, _length(self.split_cuts[peer]))

    @property
    def elements(self) -> int:
        return sum(math.prod(self.block_to(peer)) for peer in range(len(self.split_cuts)) if peer != self.me)

    @property
    def messages(self) -> int:
        peers = [peer for peer in range(len(self.split_cuts)) if peer != self.me]
        return len([peer for peer in peers if math.prod(self.block_to(peer)) > 0])


@dataclass(frozen=True)
class BoundMove:
    """A move for one rank and one shape: the forward transfer and its adjoint."""

    name: str
    forward: Transfer
    backward: Transfer


def _length(interval: tuple[int, int]) -> int:
    return interval[1] - interval[0]


def _resized(shape: Shape, dim: int, extent: int) -> Shape:
    return (*shape[:dim], extent, *shape[dim + 1 :])


# -- moves


@dataclass(frozen=True)
class Move:
    """One communication along ``axes``."""

    axes: tuple[str, ...]
    name: ClassVar[str] = "move"

    def result(self, layout: Layout) -> Layout:
        """The layout after the move, from the layout before it."""
        raise NotImplementedError

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        """The two transfers for a tensor of global ``shape`` in ``layout``, if this rank's part has shape ``local``."""
        raise NotImplementedError

    @property
    def op(self) -> str:
        """The name of the inserted operator that stands for the move in a graph."""
        return self.name

    def arguments(self) -> dict[str, Any]:
        """The literal arguments of the inserted operator, as a printed graph shows them."""
        return {"axis": self.axes[0] if len(self.axes) == 1 else self.axes}

    def __str__(self) -> str:
        return f"{self.op}({', '.join(f'{key}={value!r}' for key, value in self.arguments().items())})"


@dataclass(frozen=True)
class _DimMove(Move):
    """A move along one dim."""

    dim: int

    def arguments(self) -> dict[str, Any]:
        return {"dim": self.dim, **super().arguments()}

    def _bounds(self, split: Split, extent: int, grid: RankView) -> list[tuple[int, int]]:
        """The interval of the dim that each member of the segment owns."""
        bounds = (split.bounds(extent, grid.placement(rank)) for rank in grid.members(self.axes))
        return [(int(lo), int(hi)) for lo, hi in bounds]

    def _exchange(
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
        """The exchange from split ``source`` to split ``target``, and its adjoint. ``local`` is this rank's shape."""
        owned = self._bounds(source, extent, grid)
        blocks = self._bounds(target, target_extent, grid)
        window = target.window or Window()
        needed = []
        for block in blocks:
            lo, hi = window.need(*block)
            needed.append(source_positions(int(lo), int(hi), extent, mode))
        schedule = make_schedule(owned, needed, grid.members(self.axes).index(grid.rank))
        after = _resized(local, self.dim, schedule.length)
        before = _resized(local, self.dim, schedule.owned)
        return (
            DimExchange(self.axes, before, after, self.dim, schedule, False, fill),
            DimExchange(self.axes, after, before, self.dim, schedule, True),
        )

    def _without_axes(self, split: Split) -> Split:
        """``split`` without this move's axes, which must be its minor ones."""
        assert split.axes[-len(self.axes) :] == self.axes, f"{self} of a dim split by {split.axes}"
        return replace(split, axes=split.axes[: -len(self.axes)])

    def _with_axes(self, split: Split) -> Split:
        """``split`` with this move's axes as minor axes."""
        return replace(split, axes=split.axes + self.axes)


def _with_state(layout: Layout, axes: tuple[str, ...], to: str) -> Layout:
    return replace(layout, varying=layout.varying | set(axes)) if to == "varying" else layout


@dataclass(frozen=True)
class AllGather(_DimMove):
    """Gather ``dim`` along ``axes``, which must be the minor axes that split it."""

    to: str = "varying"
    name: ClassVar[str] = "all_gather"

    def result(self, layout: Layout) -> Layout:
        return _with_state(layout.with_dim(self.dim, self._without_axes(layout.dims[self.dim])), self.axes, self.to)

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        split, extent = replace(layout.dims[self.dim], window=None), shape[self.dim]
        gather, adjoint = self._exchange(split, extent, self._without_axes(split), extent, local, grid)
        if self.to == "varying":
            return BoundMove(self.name, gather, adjoint)
        lo, _ = split.bounds(extent, grid.placement())
        start, _ = self._without_axes(split).bounds(extent, grid.placement())
        return BoundMove(self.name, gather, Narrow(self.axes, gather.after, gather.before, self.dim, int(lo - start)))

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | ({"to": self.to} if self.to != "varying" else {})


@dataclass(frozen=True)
class ReduceScatter(_DimMove):
    """Add the partial sums over ``axes`` and split ``dim`` by these axes, as its minor ones."""

    name: ClassVar[str] = "reduce_scatter"

    def result(self, layout: Layout) -> Layout:
        assert set(self.axes) <= layout.partial, f"{self} of {layout}, which is not a partial sum over {self.axes}"
        total = replace(layout, partial=layout.partial - set(self.axes))
        return total.with_dim(self.dim, self._with_axes(layout.dims[self.dim]))

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        whole, extent = layout.dims[self.dim], shape[self.dim]
        split = self._with_axes(whole)
        lo, hi = split.bounds(extent, grid.placement())
        gather, scatter = self._exchange(split, extent, whole, extent, _resized(local, self.dim, int(hi - lo)), grid)
        return BoundMove(self.name, scatter, gather)


@dataclass(frozen=True)
class AllReduce(Move):
    """Add the partial sums over ``axes``."""

    to: str = "replicated"
    name: ClassVar[str] = "all_reduce"

    def result(self, layout: Layout) -> Layout:
        return _with_state(replace(layout, partial=layout.partial - set(self.axes)), self.axes, self.to)

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        reduce = Reduce(self.axes, local, local, len(grid.members(self.axes)))
        return BoundMove(self.name, reduce, reduce if self.to == "varying" else Identity(self.axes, local, local))

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | ({"to": self.to} if self.to != "replicated" else {})


@dataclass(frozen=True)
class Slice(_DimMove):
    """Take this rank's part of ``dim`` along ``axes``, which become its minor axes. The forward pass sends nothing."""

    of: str = "replicated"
    unit: Size = 1
    name: ClassVar[str] = "slice"

    def _with_axes(self, split: Split) -> Split:
        return replace(split, axes=split.axes + self.axes, unit=self.unit)

    def result(self, layout: Layout) -> Layout:
        base = replace(layout, varying=layout.varying - set(self.axes))
        return base.with_dim(self.dim, self._with_axes(layout.dims[self.dim]))

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        whole, extent = layout.dims[self.dim], shape[self.dim]
        split = self._with_axes(whole)
        lo, hi = split.bounds(extent, grid.placement())
        start, _ = whole.bounds(extent, grid.placement())
        part = _resized(local, self.dim, int(hi - lo))
        narrow = Narrow(self.axes, local, part, self.dim, int(lo - start))
        if self.of == "varying":
            return BoundMove(self.name, narrow, ZeroPad(self.axes, part, local, self.dim, narrow.lo))
        gather, _ = self._exchange(split, extent, whole, extent, part, grid)
        return BoundMove(self.name, narrow, gather)

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | ({"of": self.of} if self.of != "replicated" else {})


@dataclass(frozen=True)
class Exchange(_DimMove):
    """Give each rank the interval of ``dim`` that its block of the target needs: halo, padding, crop, repartition.

    ``target`` is the split of the dim after the move, with the window that each block needs. The blocks partition
    ``extent``. Positions outside of the dim are read according to the padding ``mode``, or hold the value ``fill``.
    """

    target: Split
    extent: Size
    mode: str = "constant"
    fill: float = 0.0
    name: ClassVar[str] = "exchange"

    def result(self, layout: Layout) -> Layout:
        return layout.with_dim(self.dim, self.target)

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        assert isinstance(self.extent, int), "the extent of an exchange must be a number before it is bound"
        source = layout.dims[self.dim]
        forward, adjoint = self._exchange(
            source, shape[self.dim], self.target, self.extent, local, grid, mode=self.mode, fill=self.fill
        )
        return BoundMove(self.name, forward, adjoint)

    def arguments(self) -> dict[str, Any]:
        window = self.target.window
        arguments: dict[str, Any] = super().arguments()
        if window:
            arguments |= {"lo": window.lo, "hi": window.hi}
            arguments |= {"stride": window.mul} if window.mul != 1 else {}
            arguments |= {"div": window.div} if window.div != 1 else {}
        else:
            arguments |= {"split": str(self.target).lstrip("/")}
        arguments |= {"mode": self.mode} if self.mode != "constant" else {}
        return arguments | ({"fill": self.fill} if self.fill else {})

    @property
    def op(self) -> str:
        return "halo" if self.target.window is not None else "exchange"


@dataclass(frozen=True)
class AllToAll(Move):
    """Gather ``gather_dim`` along ``axes`` and split ``split_dim`` by them. They are minor axes of both."""

    gather_dim: int
    split_dim: int
    name: ClassVar[str] = "all_to_all"

    def result(self, layout: Layout) -> Layout:
        split = layout.dims[self.gather_dim]
        assert split.axes[-len(self.axes) :] == self.axes
        gathered = layout.with_dim(self.gather_dim, replace(split, axes=split.axes[: -len(self.axes)]))
        target = gathered.dims[self.split_dim]
        return gathered.with_dim(self.split_dim, replace(target, axes=target.axes + self.axes))

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
    """Mark a replicated tensor as varying: the ranks along ``axes`` use it differently, so its gradient is summed."""

    name: ClassVar[str] = "to_varying"

    def result(self, layout: Layout) -> Layout:
        return replace(layout, varying=layout.varying | set(self.axes))

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        ranks = len(grid.members(self.axes))
        return BoundMove(self.name, Identity(self.axes, local, local), Reduce(self.axes, local, local, ranks))


@dataclass(frozen=True)
class ToReplicated(Move):
    """Mark a varying tensor as replicated: the ranks along ``axes`` use it identically, so only one of their gradients
    counts."""

    name: ClassVar[str] = "to_replicated"

    def result(self, layout: Layout) -> Layout:
        return replace(layout, varying=layout.varying - set(self.axes))

    def bind(self, layout: Layout, shape: Shape, local: Shape, grid: RankView) -> BoundMove:
        first = all(grid.coords[axis] == 0 for axis in self.axes)
        return BoundMove(self.name, Identity(self.axes, local, local), FirstRankOnly(self.axes, local, local, first))
