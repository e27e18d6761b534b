"""Interpolation of a block: nearest, linear, cubic, one dim after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distfx.layout import Window
from distfx.runtime.kernels import Zero

__all__ = ["resample"]

CUBIC = -0.75
"""The parameter of torch's cubic convolution."""


def _taps(
    kind: str, align: bool, scale: float | None, extent: int, total: int, where: Tensor
) -> tuple[list[Tensor], list[Tensor] | None]:
    """For output positions ``where``: the input positions that are read, and their weights (none: just the one)."""
    real = where.to(torch.float64)
    ratio = (extent / total) if scale is None else 1 / scale
    if kind == "nearest":
        exact = real.to(torch.float32) * torch.tensor(ratio, dtype=torch.float32)  # as torch computes it
        return [exact.floor().to(torch.int64)], None
    if kind == "nearest-exact":
        return [((real + 0.5) * ratio).floor().to(torch.int64)], None
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

    Along a split dim ``x`` starts at the first position that the block's window (``first``: lo, mul, div) needs.
    """
    if x.numel() == 0 or min(size) == 0:
        return Zero((*x.shape[:2], *size))(x)
    for i, (total, count) in enumerate(zip(extent, size, strict=True)):
        where = torch.arange(start[i], start[i] + count, device=x.device)
        window = first[i]
        origin = int(Window(window[0], 0, window[1], window[2]).need(start[i], start[i] + count)[0]) if window else 0
        positions, weights = _taps(kind, align, scales[i], total, result[i], where)
        parts = [x.index_select(2 + i, p.clamp(0, total - 1) - origin) for p in positions]
        if weights is None:
            x = parts[0]
            continue
        shape = (-1, *(1,) * (x.dim() - 3 - i))
        factors = [w.to(x.dtype).view(shape) for w in weights]
        x = parts[0] * factors[0]
        for part, factor in zip(parts[1:], factors[1:], strict=True):
            x = torch.addcmul(x, part, factor)
    return x
