"""The one exchange: who sends which part of a dim to whom, so that every rank has what it needs of it.

Each member of a segment *owns* an interval of a dim and *needs* a list of positions of it: for a halo the interval
of the convolution's window, for a gather everything, for reflect padding the mirrored positions, for a repartition
another interval. Needed minus owned is fetched from whoever owns it. There are no neighbours here: a halo wider than
a shard reaches over several ranks, an empty shard owns nothing and is asked for nothing.

:func:`make_schedule` is pure: from what each member owns and needs it makes this rank's :class:`ExchangeSchedule`, a
list of copies, sends and receives along the dim. Forward, the runtime executes it as it is. Backward, it executes the
adjoint: every message goes the other way, and copies become sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["PAD_MODES", "ExchangeSchedule", "Message", "make_schedule", "source_positions"]

Interval = tuple[int, int]
Positions = npt.NDArray[np.int64]
FILL = -1


@dataclass(frozen=True)
class Message:
    """Positions along a dim, in order: a few runs ``(start, length)``, or every position by itself."""

    positions: tuple[int, ...] | None
    runs: tuple[tuple[int, int], ...] | None
    length: int

    @classmethod
    def of(cls, positions: Positions, most: int = 3) -> Message:
        """A message of ``positions``, as runs where these are few."""
        cuts = np.flatnonzero(np.diff(positions) != 1) + 1
        if len(cuts) + 1 > most:
            return cls(tuple(int(p) for p in positions), None, len(positions))
        runs = tuple((int(run[0]), len(run)) for run in np.split(positions, cuts) if len(run))
        return cls(None, runs, len(positions))


@dataclass(frozen=True)
class ExchangeSchedule:
    """One rank's part of an exchange along one dim. Peers are members of the segment, by position in it.

    ``keep`` pairs what it copies from its own shard with where that goes; ``send`` are positions in its own shard;
    ``receive`` and ``fill`` are positions in the result, which has extent ``length``.
    """

    owned: int
    length: int
    keep: tuple[Message, Message]
    send: tuple[tuple[int, Message], ...]
    receive: tuple[tuple[int, Message], ...]
    fill: Message
    even: bool = False
    """Whether it is a gather of equal parts, in order, on every member: all must know it alike."""

    @property
    def local_run(self) -> tuple[int, int] | None:
        """``(start, length)`` if the result is just that part of the own shard and no message is needed."""
        source, runs = self.keep[0], self.keep[0].runs
        if self.send or self.receive or self.fill.length or runs is None or len(runs) > 1:
            return None
        return runs[0] if source.length else (0, 0)

    @property
    def sent(self) -> int:
        """Positions sent, over all peers."""
        return sum(message.length for _, message in self.send)

    @property
    def returned(self) -> int:
        """Positions sent by the adjoint: those that came from others go back."""
        return sum(message.length for _, message in self.receive)


def make_schedule(owned: Sequence[Interval], needed: Sequence[Positions], me: int) -> ExchangeSchedule:
    """This member's schedule, where member ``r`` owns ``owned[r]`` and needs ``needed[r]`` (``FILL``: padding).

    >>> plan = make_schedule([(0, 4), (4, 8)], [np.arange(0, 5), np.arange(3, 8)], me=0)
    >>> [(peer, message.runs) for peer, message in plan.send], [(peer, m.runs) for peer, m in plan.receive]
    ([(1, ((3, 1),))], [(1, ((4, 1),))])
    """
    lo, hi = owned[me]
    mine = needed[me]

    def where(positions: Positions, interval: Interval) -> Positions:
        """The places in ``positions`` that lie in ``interval``."""
        return np.flatnonzero((positions >= interval[0]) & (positions < interval[1])).astype(np.int64)

    send = []
    for peer, positions in enumerate(needed):
        wanted = where(positions, (lo, hi))
        if peer != me and len(wanted):
            send.append((peer, Message.of(positions[wanted] - lo)))
    receive = []
    for peer, interval in enumerate(owned):
        places = where(mine, interval)
        if peer != me and len(places):
            receive.append((peer, Message.of(places)))
    kept = where(mine, (lo, hi))
    fill = Message.of(np.flatnonzero(mine == FILL).astype(np.int64))
    keep = (Message.of(mine[kept] - lo), Message.of(kept))
    parts = [(owned[0][0] + i * (hi - lo), owned[0][0] + (i + 1) * (hi - lo)) for i in range(len(owned))]
    whole = np.arange(parts[0][0], parts[-1][1])
    even = hi > lo and list(owned) == parts and all(np.array_equal(each, whole) for each in needed)
    result = ExchangeSchedule(hi - lo, len(mine), keep, tuple(send), tuple(receive), fill, even)
    assert kept.size + sum(m.length for _, m in receive) + fill.length == len(mine), "a needed position has no owner"
    return result


def _reflect(position: Positions, extent: int) -> Positions:
    return np.where(position < 0, -position, np.where(position >= extent, 2 * (extent - 1) - position, position))


PAD_MODES: dict[str, Callable[[Positions, int], Positions]] = {
    "constant": lambda position, extent: np.where((position < 0) | (position >= extent), FILL, position),
    "circular": lambda position, extent: position % max(extent, 1),
    "replicate": lambda position, extent: np.clip(position, 0, max(extent - 1, 0)),
    "reflect": _reflect,
}
"""Where a position outside of ``[0, extent)`` is read from, for each padding mode of ``torch.nn.functional.pad``."""


def source_positions(lo: int, hi: int, extent: int, mode: str = "constant") -> Positions:
    """The positions of a dim of ``extent`` that fill the interval ``[lo, hi)``, which may reach beyond its ends.

    >>> source_positions(-2, 3, 8, "reflect"), source_positions(-1, 2, 8)
    (array([2, 1, 0, 1, 2]), array([-1,  0,  1]))
    """
    return PAD_MODES[mode](np.arange(lo, max(lo, hi), dtype=np.int64), extent)
