"""The way from one layout to another: the cheapest chain of moves, and what it costs about.

Chains start with what makes a tensor smaller (slices) and end with what makes it larger (gathers): a halo is
exchanged on the smaller tensor.
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
    """What windows read beyond the ends of a dim, and the extent that their blocks partition, for each dim."""

    extents: Mapping[int, Size]
    mode: str = "constant"
    fill: float = 0.0


def route(source: Layout, target: Layout, shape: Sequence[Size], border: Border | None = None) -> tuple[Move, ...]:
    """The moves that turn ``source`` into ``target``, for a tensor of global ``shape``.

    >>> x = Layout.parse("N/n C/c H/h W")
    >>> [str(m) for m in route(x, Layout.parse("N/n C H/h W each(c)"), (8, 64, 56, 56))]
    ["all_gather(dim=1, axis='c')"]
    """
    assert not target.partial, "nothing is moved into a partial sum"
    moves: list[Move] = []
    at = source

    def go(move: Move) -> None:
        nonlocal at
        moves.append(move)
        at = move.result(at)

    def state(axis: str) -> str:
        return "varying" if axis in target.varying else "replicated"

    for axis in sorted(at.partial):
        dim = target.dim_of(axis)
        have = at.dims[dim].axes if dim is not None else ()
        if dim is not None and target.dims[dim].axes[: len(have) + 1] == (*have, axis):
            go(ReduceScatter((axis,), dim))
        else:
            go(AllReduce((axis,), state(axis)))

    def rest(dim: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes that must leave a dim, and those that must come, beyond the major ones that stay."""
        have, want = at.dims[dim], target.dims[dim]
        common = 0
        if have.unit == want.unit or not have.axes or not want.axes:
            while common < min(len(have.axes), len(want.axes)) and have.axes[common] == want.axes[common]:
                common += 1
        return have.axes[common:], want.axes[common:]

    def slices() -> None:
        for dim, want in enumerate(target.dims):
            leave, come = rest(dim)
            if leave or not come or any(axis in at.split_axes for axis in come):
                continue
            for axis in come:
                go(Slice((axis,), dim, "varying" if axis in at.varying else "replicated", want.unit))

    def windows() -> None:
        for dim, want in enumerate(target.dims):
            have = at.dims[dim]
            if want.window and not have.window and (have.axes, have.unit) == (want.axes, want.unit):
                assert border is not None, "a window needs to know its border"
                go(Exchange(want.axes, dim, want, border.extents[dim], border.mode, border.fill))

    slices()
    if come := sorted(axis for axis in target.varying if axis not in at.varying | at.split_axes):
        go(ToVarying(tuple(come)))
    for dim, want in enumerate(target.dims):  # other order or granule of the same axes
        leave, come_axes = rest(dim)
        if leave and set(leave) == set(come_axes):
            go(Exchange(leave, dim, replace(want, window=None), shape[dim]))
    windows()
    for dim in range(len(target.dims)):  # an axis that moves from one dim to another
        leave, _ = rest(dim)
        other = target.dim_of(leave[-1]) if leave else None
        if other is not None and other != dim and rest(other) == ((), leave[-1:]) and at.dims[other].unit == 1:
            go(AllToAll(leave[-1:], dim, other))
    for dim in range(len(target.dims)):
        leave, _ = rest(dim)
        while leave:
            tail = [axis for axis in leave if state(axis) == state(leave[-1])]
            group = leave[-1:] if len(tail) < len(leave) else leave
            go(AllGather(group, dim, state(group[0])))
            leave, _ = rest(dim)
    slices()
    windows()
    if gone := tuple(sorted(at.varying - target.varying)):
        go(ToReplicated(gone))
    assert at == target, f"no way from {source} to {target}, only to {at}"
    return tuple(moves)


def _width(window: Window) -> float:
    """About how many positions a block fetches; one where that depends on sizes."""
    if not isinstance(window.lo, int) or not isinstance(window.hi, int) or not isinstance(window.div, int):
        return 1.0
    return (max(0, window.lo) + max(0, window.hi)) / window.div


def estimate(
    moves: Sequence[Move], layout: Layout, shape: Sequence[int], sizes: Mapping[str, int], *, backward: bool = True
) -> float:
    """About how many elements a rank sends for ``moves``, forward and, if there is a gradient, backward."""
    total = 0.0
    for move in moves:
        local = math.prod(shape) / math.prod(sizes[axis] for axis in layout.split_axes)
        p = math.prod(sizes[axis] for axis in move.axes)
        there, back = 0.0, 0.0
        match move:
            case AllGather():
                there = (p - 1) * local
                back = there if move.to == "varying" else 0.0
            case ReduceScatter() | AllToAll():
                there = back = (p - 1) / p * local
            case AllReduce():
                there = 2 * (p - 1) / p * local
                back = there if move.to == "varying" else 0.0
            case ToVarying():
                back = 2 * (p - 1) / p * local
            case Slice(of="replicated"):
                back = (p - 1) / p * local
            case Exchange():
                window = move.target.window
                width = shape[move.dim] / p if window is None else _width(window)
                there = back = min(1.0, width * p / max(1, shape[move.dim])) * local
        total += there + (back if backward else 0.0)
        layout = move.result(layout)
    return total
