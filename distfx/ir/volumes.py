"""The ring convention: what a rank sends for an allreduce."""

from __future__ import annotations

__all__ = ["allreduce_bytes", "allreduce_messages"]


def allreduce_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that a rank sends for an allreduce of ``nbytes``: ``2 (p-1)/p`` of them, rounded down."""
    return 2 * (ranks - 1) * nbytes // ranks


def allreduce_messages(ranks: int) -> int:
    """Messages that a rank sends for a ring allreduce."""
    return 2 * (ranks - 1)
