"""The ledger: the bytes and messages that the moves of this rank send, by node, axis and phase.

=======================  ====================================================
communication            bytes counted on each rank
=======================  ====================================================
point-to-point message   its size
all-gather               the p-1 shards that this rank sends
reduce-scatter           the p-1 output shards that this rank sends
allreduce of m bytes     ``2 (p-1)/p m``, the volume of the ring algorithm
=======================  ====================================================

Here p is the number of ranks of the segment. The ledger does not count the few bytes with which ranks check that they
received the same shapes, because these are not data of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Entry", "Ledger", "is_open", "record", "record_comm"]


@dataclass(frozen=True)
class Entry:
    """One communication that was executed."""

    node: str
    move: str
    axis: str
    phase: str
    bytes: int
    messages: int


@dataclass
class Ledger:
    """The communications that were executed inside a :func:`record_comm` block.

    >>> with record_comm() as ledger:
    ...     record("conv1", "halo", ("h",), "forward", 1024, 2)
    >>> ledger.bytes(axis="h"), ledger.messages(phase="backward")
    (1024, 0)
    """

    rows: list[Entry] = field(default_factory=list)

    def _select(self, node: str | None, axis: str | None, phase: str | None) -> Iterator[Entry]:
        for row in self.rows:
            if node in (None, row.node) and axis in (None, row.axis) and phase in (None, row.phase):
                yield row

    def bytes(self, axis: str | None = None, phase: str | None = None, node: str | None = None) -> int:
        """Bytes this rank sent: all of them, or those of one axis, phase (``"forward"``, ``"backward"``) or node."""
        return sum(row.bytes for row in self._select(node, axis, phase))

    def messages(self, axis: str | None = None, phase: str | None = None, node: str | None = None) -> int:
        """Messages this rank sent; filters as in :meth:`bytes`."""
        return sum(row.messages for row in self._select(node, axis, phase))

    def __str__(self) -> str:
        lines = [f"{'node':32} {'move':16} {'axis':6} {'phase':8} {'bytes':>12} {'messages':>8}"]
        for r in self.rows:
            lines.append(f"{r.node:32} {r.move:16} {r.axis:6} {r.phase:8} {r.bytes:12,} {r.messages:8}")
        return "\n".join([*lines, f"{'total':65} {self.bytes():12,} {self.messages():8}"])


_open: list[Ledger] = []


@contextmanager
def record_comm() -> Iterator[Ledger]:
    """Record the communications of this rank in a new ledger while the block runs. Blocks may be nested."""
    ledger = Ledger()
    _open.append(ledger)
    try:
        yield ledger
    finally:
        _open[:] = [other for other in _open if other is not ledger]


def is_open() -> bool:
    """Whether any ledger is recording."""
    return bool(_open)


def record(node: str, move: str, axes: tuple[str, ...], phase: str, nbytes: int, messages: int) -> None:
    """Append one communication to every open ledger, unless it sent nothing."""
    if _open and (nbytes or messages):
        entry = Entry(node, move, "*".join(axes), phase, nbytes, messages)
        for ledger in _open:
            ledger.rows.append(entry)
