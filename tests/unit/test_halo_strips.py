"""The convolution of a block plus those of its strips is the convolution of the whole window."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from distfx.ir.exchange import make_schedule, source_positions
from distfx.ir.layout import Window
from distfx.ir.moves import DimExchange
from distfx.runtime.kernels.halo_strips import split_halo


def exchange(extent: int, ranks: int, rank: int, window: Window, mode: str = "constant") -> DimExchange:
    """The exchange of a rank that convolves its part of ``extent`` rows."""
    blocks = [(i * extent // ranks, (i + 1) * extent // ranks) for i in range(ranks)]
    windows = [window.need(lo, hi) for lo, hi in blocks]
    needed = [source_positions(int(lo), int(hi), extent, mode) for lo, hi in windows]
    schedule = make_schedule(blocks, needed, rank)
    return DimExchange(("h",), (1, 1, schedule.owned), (1, 1, schedule.length), 2, schedule, False)


def compare(transfer: DimExchange, rows: Tensor, weight: Tensor, dilation: int) -> int | None:
    """The number of strips if the convolution can be split, after comparing it with that of the window."""
    schedule, taps = transfer.schedule, weight.shape[2]
    split = split_halo(transfer, taps, 1, dilation)
    if split is None:
        return None
    ((start, length),) = schedule.keep[1].runs or ()
    result = F.conv1d(rows.narrow(2, start, length), weight, padding=split.padding, dilation=dilation)
    for strip in split.strips:
        strip_rows = rows.new_zeros(1, 1, strip.rows)
        for source in strip.sources:
            message = torch.cat([rows.narrow(2, *run) for run in schedule.receive[source.message][1].runs or ()], 2)
            strip_rows.narrow(2, source.start, source.length).copy_(message.narrow(2, source.offset, source.length))
        summand = F.conv1d(strip_rows, weight.narrow(2, strip.tap, strip.taps), dilation=dilation)
        result.narrow(2, strip.out, strip.outs).add_(summand)
    torch.testing.assert_close(result, F.conv1d(rows, weight, dilation=dilation))
    return len(split.strips)


@pytest.mark.parametrize("extent", [4, 5, 9, 13])
@pytest.mark.parametrize(("taps", "dilation"), [(3, 1), (5, 1), (7, 1), (3, 2), (3, 3)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_split_is_exact(extent: int, taps: int, dilation: int, ranks: int) -> None:
    torch.manual_seed(0)
    reach = dilation * (taps - 1) // 2
    weight = torch.randn(1, 1, taps, dtype=torch.float64)
    strips = []
    for rank in range(ranks):
        transfer = exchange(extent, ranks, rank, Window(reach, reach))
        rows = torch.randn(1, 1, transfer.schedule.length, dtype=torch.float64)
        for run in transfer.schedule.fill.runs or ():
            rows.narrow(2, *run).zero_()  # the padding at the border
        strips.append(compare(transfer, rows, weight, dilation))
    if dilation == 1 and reach <= extent // ranks:  # the halo comes from the next neighbours, and taps read all of it
        assert strips == [1, *[2] * (ranks - 2), 1]


def test_repeated_rows_are_assembled() -> None:
    """Reflect padding reads own rows twice: the block is not contiguous in its window."""
    assert split_halo(exchange(8, 2, 0, Window(2, 2), "reflect"), 5, 1, 1) is None


def test_an_empty_block_is_assembled() -> None:
    assert split_halo(exchange(1, 2, 0, Window(1, 1)), 3, 1, 1) is None
