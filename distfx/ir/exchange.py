"""The exchange: one algorithm that gives every rank the positions of a dim that it needs.

Each member of a segment *owns* an interval of a dim and *needs* a list of its positions. Positions that a member needs
but does not own are fetched from their owners. Every communication along one dim is a case of this:

====================  ==========================================================
communication         a member needs
====================  ==========================================================
halo                  the interval that a window reads for the member's block
all-gather            the whole dim
repartition           its interval in another partition
padding               positions of the border, or the mark :data:`PADDING`
crop                  fewer positions than it owns
flip                  its positions in reverse order
====================  ==========================================================

No case treats neighbours specially. A halo that is wider than a shard comes from several ranks. An empty shard owns
nothing, so that no rank requests a part of it.

:func:`make_schedule` is a pure function: from the intervals and the positions of all members it computes the
:class:`ExchangeSchedule` of one of them, a list of copies, sends and receives. The runtime executes the schedule in the
forward pass and its adjoint in the backward pass. The adjoint sends every message in the opposite direction and adds
values where the schedule copies them. Hence a reduce-scatter is the adjoint of an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["PADDING", "PAD_MODES", "ExchangeSchedule", "Selection", "make_schedule", "source_positions"]

Interval = tuple[int, int]
Positions = npt.NDArray[np.int64]

PADDING = -1
"""Stands in a list of positions for one that no rank owns: the result holds the fill value there."""


@dataclass(frozen=True)
class Selection:
    """Positions along a dim, in order: as a few runs ``(start, length)``, or else as a list of positions."""

    positions: tuple[int, ...] | None
    runs: tuple[tuple[int, int], ...] | None
    length: int

    @classmethod
    def of(cls, positions: Positions, max_runs: int = 3) -> Selection:
        """The selection of ``positions``: runs if there are at most ``max_runs`` of them."""
        cuts = np.flatnonzero(np.diff(positions) != 1) + 1
        if len(cuts) + 1 > max_runs:
            return cls(tuple(int(p) for p in positions), None, len(positions))
        runs = tuple((int(run[0]), len(run)) for run in np.split(positions, cuts) if len(run))
        return cls(None, runs, len(positions))


@dataclass(frozen=True)
class ExchangeSchedule:
    """One member's part of an exchange along one dim. Peers are indices into the members of the segment.

    The member owns a shard with extent ``owned``, and the result has extent ``length``. ``send`` selects positions of
    the shard for each peer. ``receive`` selects the positions of the result that come from each peer. ``keep`` is a
    pair: positions of the shard, and the positions of the result to which they are copied. ``fill`` selects the
    positions of the result that hold the fill value.
    """

    owned: int
    length: int
    keep: tuple[Selection, Selection]
    send: tuple[tuple[int, Selection], ...]
    receive: tuple[tuple[int, Selection], ...]
    fill: Selection
    even: bool = False
    """Whether all members gather the whole dim from shards of equal extent, in order. It is the same on every member,
    since all must choose the same algorithm."""

    @property
    def local_slice(self) -> tuple[int, int] | None:
        """``(start, length)`` if the result is this slice of the shard and no message is needed, else ``None``."""
        source, runs = self.keep[0], self.keep[0].runs
        if self.send or self.receive or self.fill.length or runs is None or len(runs) > 1:
            return None
        return runs[0] if source.length else (0, 0)

    @property
    def send_length(self) -> int:
        """The number of positions sent to all peers."""
        return sum(selection.length for _, selection in self.send)

    @property
    def receive_length(self) -> int:
        """The number of positions received from all peers, which is also the number that the adjoint sends."""
        return sum(selection.length for _, selection in self.receive)


def make_schedule(owned: Sequence[Interval], needed: Sequence[Positions], me: int) -> ExchangeSchedule:
    """The schedule of member ``me``, if each member ``r`` owns the interval ``owned[r]`` and needs ``needed[r]``.

    >>> schedule = make_schedule([(0, 4), (4, 8)], [np.arange(0, 5), np.arange(3, 8)], me=0)
    >>> [(peer, part.runs) for peer, part in schedule.send], [(peer, part.runs) for peer, part in schedule.receive]
    ([(1, ((3, 1),))], [(1, ((4, 1),))])
    """
    lo, hi = owned[me]
    mine = needed[me]

    def indices_in(interval: Interval, positions: Positions) -> Positions:
        """The indices of those ``positions`` that are in ``interval``."""
        return np.flatnonzero((positions >= interval[0]) & (positions < interval[1])).astype(np.int64)

    send = []
    for peer, positions in enumerate(needed):
        indices = indices_in((lo, hi), positions)
        if peer != me and len(indices):
            send.append((peer, Selection.of(positions[indices] - lo)))
    receive = []
    for peer, interval in enumerate(owned):
        indices = indices_in(interval, mine)
        if peer != me and len(indices):
            receive.append((peer, Selection.of(indices)))
    local = indices_in((lo, hi), mine)
    keep = (Selection.of(mine[local] - lo), Selection.of(local))
    fill = Selection.of(np.flatnonzero(mine == PADDING).astype(np.int64))
    equal_parts = [(owned[0][0] + i * (hi - lo), owned[0][0] + (i + 1) * (hi - lo)) for i in range(len(owned))]
    whole = np.arange(equal_parts[0][0], equal_parts[-1][1])
    even = hi > lo and list(owned) == equal_parts and all(np.array_equal(positions, whole) for positions in needed)
    schedule = ExchangeSchedule(hi - lo, len(mine), keep, tuple(send), tuple(receive), fill, even)
    assert local.size + schedule.receive_length + fill.length == len(mine), "a needed position has no owner"
    return schedule


def _reflect(position: Positions, extent: int) -> Positions:
    return np.where(position < 0, -position, np.where(position >= extent, 2 * (extent - 1) - position, position))


PAD_MODES: dict[str, Callable[[Positions, int], Positions]] = {
    "constant": lambda position, extent: np.where((position < 0) | (position >= extent), PADDING, position),
    "circular": lambda position, extent: position % max(extent, 1),
    "replicate": lambda position, extent: np.clip(position, 0, max(extent - 1, 0)),
    "reflect": _reflect,
}
"""For each padding mode of ``torch.nn.functional.pad``, the source of a position outside of ``[0, extent)``."""


def source_positions(lo: int, hi: int, extent: int, mode: str = "constant") -> Positions:
    """The positions that provide the values of the interval ``[lo, hi)``, which may exceed the dim ``[0, extent)``.

    >>> source_positions(-2, 3, 8, "reflect"), source_positions(-1, 2, 8)
    (array([2, 1, 0, 1, 2]), array([-1,  0,  1]))
    """
    return PAD_MODES[mode](np.arange(lo, max(lo, hi), dtype=np.int64), extent)
