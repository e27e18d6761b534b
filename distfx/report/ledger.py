"""The ledger: every byte and message that the moves of this rank send, by node, axis and phase.

Bytes are what this rank sends. Point-to-point messages count as sent; gathers and reduce-scatters are the (p-1)
shards that leave this rank; an allreduce of m bytes counts by the ring convention, ``2 (p-1)/p m``. The few bytes by
which ranks check that they were given the same shapes are not data and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Entry", "Ledger", "is_open", "record", "record_comm"]


@dataclass(frozen=True)
class Entry:
    """One communication as it ran."""

    node: str
    move: str
    axis: str
    phase: str
    bytes: int
    messages: int


@dataclass
class Ledger:
    """What was communicated while it was open.

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
        """Bytes this rank sent, all of them or those of one axis, phase (``"forward"``, ``"backward"``) or node."""
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
    """Count what this rank sends while the block runs. Blocks nest."""
    ledger = Ledger()
    _open.append(ledger)
    try:
        yield ledger
    finally:
        _open[:] = [other for other in _open if other is not ledger]


def is_open() -> bool:
    """Whether anybody counts."""
    return bool(_open)


def record(node: str, move: str, axes: tuple[str, ...], phase: str, nbytes: int, messages: int) -> None:
    """Enter one communication into every open ledger. Nothing is entered for one that sent nothing."""
    if _open and (nbytes or messages):
        entry = Entry(node, move, "*".join(axes), phase, nbytes, messages)
        for ledger in _open:
            ledger.rows.append(entry)
