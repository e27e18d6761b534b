"""The geometry of a convolution whose halo arrives late: which outputs each received strip of rows adds to.

Along the exchanged dim, the window of a rank is its own block with received rows before and after it.
:func:`split_halo` splits the convolution of the window into that of the block, padded with zeros, and that of one strip
on each side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from distfx.ir.exchange import ExchangeSchedule
from distfx.ir.moves import DimExchange

__all__ = ["HaloSplit", "HaloStrip", "StripSource", "split_halo"]


@dataclass(frozen=True)
class StripSource:
    """Rows of a received message that are part of a strip."""

    message: int
    """The index of the message in the schedule."""
    offset: int
    """The first row in the message."""
    start: int
    """The first row in the strip."""
    length: int


@dataclass(frozen=True)
class HaloStrip:
    """Received rows on one side of the block.

    The taps ``[tap, tap + taps)`` of the kernel convolve the strip's ``rows``, which are zero outside of ``sources``.
    The result is added to the outputs ``[out, out + outs)``.
    """

    rows: int
    tap: int
    taps: int
    out: int
    outs: int
    sources: tuple[StripSource, ...]


@dataclass(frozen=True)
class HaloSplit:
    """A convolution as that of the block with ``padding`` zeros on both sides, plus those of the strips."""

    padding: int
    strips: tuple[HaloStrip, ...]


def split_halo(exchange: DimExchange, taps: int, stride: int, dilation: int) -> HaloSplit | None:
    """Split the convolution of this rank's window; ``None`` if its block and strips do not cover it.

    That happens for some strides, for padding that repeats rows, and for empty parts.
    """
    schedule, reach = exchange.schedule, dilation * (taps - 1)
    source, target = schedule.keep
    if exchange.fill or not schedule.owned or source.runs != ((0, schedule.owned),):
        return None
    if target.runs is None or len(target.runs) != 1 or any(message.runs is None for _, message in schedule.receive):
        return None
    before = target.runs[0][0]
    outputs = (schedule.length - reach - 1) // stride + 1
    if outputs < 1 or before > reach or (schedule.owned + 2 * before - reach - 1) // stride + 1 != outputs:
        return None
    sides = ((0, before), (before + schedule.owned, schedule.length))
    candidates = [_strip(lo, hi, outputs, taps, stride, dilation, schedule) for lo, hi in sides]
    strips = tuple(strip for strip in candidates if strip is not None)
    covered = sum(source.length for strip in strips for source in strip.sources)
    return HaloSplit(before, strips) if covered == schedule.receive_length else None


def _strip(
    lo: int, hi: int, outputs: int, taps: int, stride: int, dilation: int, schedule: ExchangeSchedule
) -> HaloStrip | None:
    """The strip of the received rows in ``[lo, hi)`` of the window; ``None`` if no tap reads some of them."""
    sources = []
    for index, (_, message) in enumerate(schedule.receive):
        offset = 0
        for start, length in message.runs or ():
            if lo <= start < hi:
                sources.append(StripSource(index, offset, start, length))
            offset += length
    if not sources:
        return None
    first, last = min(source.start for source in sources), max(source.start + source.length for source in sources) - 1
    out = max(0, _ceil_div(first - dilation * (taps - 1), stride))
    outs = min(outputs - 1, last // stride) + 1 - out
    if outs <= 0:
        return None
    tap = max(0, _ceil_div(first - stride * (out + outs - 1), dilation))
    end = min(taps - 1, (last - stride * out) // dilation)
    begin = stride * out + dilation * tap
    rows = stride * (outs - 1) + dilation * (end - tap) + 1
    sources = [replace(source, start=source.start - begin) for source in sources]
    if any(source.start < 0 or source.start + source.length > rows for source in sources):
        return None
    return HaloStrip(rows, tap, end - tap + 1, out, outs, tuple(sources))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
