"""Routes: the chain of moves from one layout to another, and an estimate of its cost.

A chain starts with the moves that make the tensor smaller (slices) and ends with those that make it larger (gathers),
so that halos are exchanged for the smaller tensor:

1. add partial sums: reduce-scatter if the target is split by the axis, else allreduce
2. slice dims by axes that only the target uses
3. mark the tensor as varying
4. exchange: reorder the axes of a dim, or change its unit
5. exchange halos
6. all-to-all: move an axis from one dim to another
7. gather dims along axes that the target does not use there
8. repeat steps 2 and 5 for dims that were blocked before the gathers
9. mark the tensor as replicated
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distfx.ir.layout import Layout, Window
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
from distfx.ir.symbolic import Size

__all__ = ["Border", "estimate", "route"]


@dataclass(frozen=True)
class Border:
    """How windows read beyond the ends of a dim: the padding mode, its fill value, and for each dim the extent that
    the blocks of the target partition."""

    extents: Mapping[int, Size]
    mode: str = "constant"
    fill: float = 0.0


def route(source: Layout, target: Layout, shape: Sequence[Size], border: Border | None = None) -> tuple[Move, ...]:
    """The moves that turn ``source`` into ``target``, for a tensor of global ``shape``.

    >>> x = Layout.parse("N/n C/c H/h W")
    >>> [str(m) for m in route(x, Layout.parse("N/n C H/h W each(c)"), (8, 64, 56, 56))]
    ["all_gather(dim=1, axis='c')"]
    """
    assert not target.partial, "the target of a route cannot be a partial sum"
    search = _Route(source, target, shape, border)
    search.find()
    return tuple(search.moves)


class _Route:
    """The moves so far, and the layout after them."""

    def __init__(self, source: Layout, target: Layout, shape: Sequence[Size], border: Border | None) -> None:
        self.source, self.target, self.shape, self.border = source, target, shape, border
        self.layout = source
        self.moves: list[Move] = []

    def find(self) -> None:
        self._add_partial_sums()
        self._slice()
        self._mark_varying()
        self._reorder()
        self._exchange_halos()
        self._transpose()
        self._gather()
        self._slice()
        self._exchange_halos()
        self._mark_replicated()
        assert self.layout == self.target, f"no route from {self.source} to {self.target}: it ends in {self.layout}"

    def _append(self, move: Move) -> None:
        self.moves.append(move)
        self.layout = move.result(self.layout)

    def _target_state(self, axis: str) -> str:
        return "varying" if axis in self.target.varying else "replicated"

    def _difference(self, dim: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes to remove from a dim, and those to add to it, after the major axes that both layouts share."""
        current, target = self.layout.dims[dim], self.target.dims[dim]
        shared = 0
        if current.unit == target.unit or not current.axes or not target.axes:
            while shared < min(len(current.axes), len(target.axes)) and current.axes[shared] == target.axes[shared]:
                shared += 1
        return current.axes[shared:], target.axes[shared:]

    def _add_partial_sums(self) -> None:
        for axis in sorted(self.layout.partial):
            dim = self.target.dim_of(axis)
            axes = self.layout.dims[dim].axes if dim is not None else ()
            if dim is not None and self.target.dims[dim].axes[: len(axes) + 1] == (*axes, axis):
                self._append(ReduceScatter((axis,), dim))
            else:
                self._append(AllReduce((axis,), self._target_state(axis)))

    def _slice(self) -> None:
        for dim, split in enumerate(self.target.dims):
            surplus, missing = self._difference(dim)
            if surplus or any(axis in self.layout.split_axes for axis in missing):
                continue
            for axis in missing:
                state = "varying" if axis in self.layout.varying else "replicated"
                self._append(Slice((axis,), dim, state, split.unit))

    def _mark_varying(self) -> None:
        if axes := sorted(self.target.varying - self.layout.varying - self.layout.split_axes):
            self._append(ToVarying(tuple(axes)))

    def _reorder(self) -> None:
        for dim, split in enumerate(self.target.dims):
            surplus, missing = self._difference(dim)
            if surplus and set(surplus) == set(missing):
                self._append(Exchange(surplus, dim, replace(split, window=None), self.shape[dim]))

    def _exchange_halos(self) -> None:
        for dim, split in enumerate(self.target.dims):
            current = self.layout.dims[dim]
            if split.window and not current.window and (current.axes, current.unit) == (split.axes, split.unit):
                border = self.border
                assert border is not None, "a route to a layout with halos needs a border"
                self._append(Exchange(split.axes, dim, split, border.extents[dim], border.mode, border.fill))

    def _transpose(self) -> None:
        for dim in range(len(self.target.dims)):
            surplus, _ = self._difference(dim)
            axes = surplus[-1:]
            other = self.target.dim_of(axes[0]) if axes else None
            if other is None or other == dim:
                continue
            if self._difference(other) == ((), axes) and self.layout.dims[other].unit == 1:
                self._append(AllToAll(axes, dim, other))

    def _gather(self) -> None:
        for dim in range(len(self.target.dims)):
            while surplus := self._difference(dim)[0]:
                states = {self._target_state(axis) for axis in surplus}
                axes = surplus if len(states) == 1 else surplus[-1:]
                self._append(AllGather(axes, dim, self._target_state(axes[0])))

    def _mark_replicated(self) -> None:
        if axes := sorted(self.layout.varying - self.target.varying):
            self._append(ToReplicated(tuple(axes)))


def _width(window: Window) -> float:
    """The approximate number of positions that a block fetches; 1 if it depends on symbolic sizes."""
    if not isinstance(window.lo, int) or not isinstance(window.hi, int) or not isinstance(window.div, int):
        return 1.0
    return (max(0, window.lo) + max(0, window.hi)) / window.div


def estimate(
    moves: Sequence[Move], layout: Layout, shape: Sequence[int], sizes: Mapping[str, int], *, backward: bool = True
) -> float:
    """The approximate number of elements that a rank sends for ``moves``: forward, and backward unless excluded."""
    total = 0.0
    for move in moves:
        local = math.prod(shape) / math.prod(sizes[axis] for axis in layout.split_axes)
        p = math.prod(sizes[axis] for axis in move.axes)
        forward, adjoint = 0.0, 0.0
        match move:
            case AllGather():
                forward = (p - 1) * local
                adjoint = forward if move.to == "varying" else 0.0
            case ReduceScatter() | AllToAll():
                forward = adjoint = (p - 1) / p * local
            case AllReduce():
                forward = 2 * (p - 1) / p * local
                adjoint = forward if move.to == "varying" else 0.0
            case ToVarying():
                adjoint = 2 * (p - 1) / p * local
            case Slice(of="replicated"):
                adjoint = (p - 1) / p * local
            case Exchange():
                window = move.target.window
                width = shape[move.dim] / p if window is None else _width(window)
                forward = adjoint = min(1.0, width * p / max(1, shape[move.dim])) * local
        total += forward + (adjoint if backward else 0.0)
        layout = move.result(layout)
    return total
