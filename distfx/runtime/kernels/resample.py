"""Interpolation of a block: nearest, linear or cubic, one dim after the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from distfx.ir.layout import Window
from distfx.runtime.kernels.empty import ZeroResult

__all__ = ["resample"]

CUBIC = -0.75
"""The parameter of torch's cubic convolution."""


@lru_cache(maxsize=1024)
def _nearest(
    kind: str, ndim: int, scale: float | None, extent: int, total: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The input position that torch reads for each output position of a dim.

    Found by interpolating the positions themselves with torch, because its rounding depends on dtype and rank, and it
    ignores some scale factors.
    """
    op = getattr(torch.ops.aten, f"{'upsample_nearest' if kind == 'nearest' else '_upsample_nearest_exact'}{ndim}d")
    ones = (1,) * (ndim - 1)
    with torch.inference_mode(False), torch.no_grad():  # a later call may save it for backward
        positions = torch.arange(extent, dtype=dtype, device=device).view(1, 1, extent, *ones)
        return op(positions, [total, *ones], scale, *(None for _ in ones)).flatten().to(torch.int64)


def _taps(
    kind: str, align: bool, scale: float | None, extent: int, total: int, outputs: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The input positions that the output positions ``outputs`` read, tap by tap, and their weights."""
    real = outputs.to(torch.float64)
    ratio = (extent / total) if scale is None else 1 / scale
    if align:
        source = real * ((extent - 1) / (total - 1)) if total > 1 else real * 0
    else:
        source = (real + 0.5) * ratio - 0.5
        source = source.clamp(min=0) if kind == "linear" else source
    base = source.floor()
    t = source - base
    first = base.to(torch.int64)
    if kind == "linear":
        return [first, first + 1], [1 - t, t]

    def near(x: Tensor) -> Tensor:
        return ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC

    return [first - 1, first, first + 1, first + 2], [far(t + 1), near(t), near(1 - t), far(2 - t)]


def resample(
    x: Tensor,
    *,
    kind: str,
    align: bool,
    scales: Sequence[float | None],
    extent: Sequence[int],
    result: Sequence[int],
    first: Sequence[Sequence[int] | None],
    start: Sequence[int],
    size: Sequence[int],
) -> Tensor:
    """The block ``[start, start + size)`` of an interpolation from ``extent`` to ``result`` positions.

    ``first`` has the window (lo, mul, div) of each split dim: ``x`` starts at the first position that the block's
    window contains.
    """
    if x.numel() == 0 or min(size) == 0:
        return ZeroResult((*x.shape[:2], *size))(x)
    for i, (total, count) in enumerate(zip(extent, size, strict=True)):
        outputs = torch.arange(start[i], start[i] + count, device=x.device)
        window = first[i]
        origin = int(Window(window[0], 0, window[1], window[2]).need(start[i], start[i] + count)[0]) if window else 0
        if kind.startswith("nearest"):
            exact = x.dtype if x.dtype is torch.float64 else torch.float32
            sources = _nearest(kind, len(size), scales[i], total, result[i], exact, x.device)
            x = x.index_select(2 + i, sources.narrow(0, start[i], count) - origin)
            continue
        positions, weights = _taps(kind, align, scales[i], total, result[i], outputs)
        parts = [x.index_select(2 + i, p.clamp(0, total - 1) - origin) for p in positions]
        shape = (-1, *(1,) * (x.dim() - 3 - i))
        factors = [w.to(x.dtype).view(shape) for w in weights]
        x = parts[0] * factors[0]
        for part, factor in zip(parts[1:], factors[1:], strict=True):
            x = torch.addcmul(x, part, factor)
    return x
