"""Pooling on blocks: averages over windows of different sizes, adaptive pooling, and global indices of maxima."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distfx.runtime.kernels.empty import ZeroResult

__all__ = ["adaptive_pool", "avg_pool", "max_pool_index"]


def avg_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    include_padding: bool,
    *,
    split: Sequence[bool],
    start: Sequence[int],
    size: Sequence[int],
    extent: Sequence[int],
) -> Tensor:
    """The block ``[start, start + size)`` of an average pooling whose windows have different numbers of elements.

    The sum of each window is divided by the window's count in the whole input of ``extent``, with its padding if
    ``include_padding``.
    """
    if x.numel() == 0 or min(size) == 0:
        return ZeroResult((*x.shape[:2], *size))(x)
    ndim = len(size)
    widths: list[int] = []
    wide = torch.promote_types(x.dtype, torch.float32)  # half precision cannot represent all counts
    scale = torch.ones((1,) * (ndim), dtype=wide, device=x.device)
    for i in range(ndim):
        k, s, p = kernel[i], stride[i], padding[i]
        widths = ([0, 0] if split[i] else [p, (size[i] - 1) * s + k - p - x.shape[2 + i]]) + widths
        low = (torch.arange(start[i], start[i] + size[i], device=x.device)) * s - p
        high = (low + k).clamp(max=extent[i] + p)
        count = high - low if include_padding else high.clamp(max=extent[i]) - low.clamp(min=0)
        scale = scale * (k / count.to(wide)).view(-1, *(1,) * (ndim - 1 - i))
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[ndim - 1]
    return pool(F.pad(x, widths), tuple(kernel), tuple(stride)) * scale.to(x.dtype)


def adaptive_pool(
    x: Tensor, *, kind: str, extent: Sequence[int], result: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> Tensor:
    """The block ``[start, start + size)`` of an adaptive pooling. ``kind``: ``avg``, ``max``, or ``index`` of the max.

    Along a dim of E inputs (``extent``) and R outputs (``result``), output o pools the inputs
    ``[floor(o E / R), ceil((o+1) E / R))``. ``x`` starts at the first input of the block. Windows are boxes, so the
    dims are pooled one after another.
    """
    ndim = len(size)
    lead = x.shape[: x.dim() - ndim]
    if x.numel() == 0 or min(size) == 0:
        return ZeroResult((*lead, *size), torch.int64 if kind == "index" else None)(x)
    index = torch.zeros(x.shape, dtype=torch.int64, device=x.device) if kind == "index" else None
    stride = 1
    for i in reversed(range(ndim)):
        dim = x.dim() - ndim + i
        ends = (1,) * (ndim - 1 - i)
        out = torch.arange(start[i], start[i] + size[i] + 1, device=x.device)
        low = out[:-1] * extent[i] // result[i]
        high = (out[1:] * extent[i] + result[i] - 1) // result[i]
        taps = low[:, None] + torch.arange(_widest_window(start[i], size[i], extent[i], result[i]), device=x.device)
        inside = taps < high[:, None]
        sources = (torch.minimum(taps, high[:, None] - 1) - start[i] * extent[i] // result[i]).flatten()

        def windows(value: Tensor, dim: int = dim, sources: Tensor = sources, shape: torch.Size = taps.shape) -> Tensor:
            return value.index_select(dim, sources).unflatten(dim, tuple(shape))

        if kind == "avg":
            wide = torch.promote_types(x.dtype, torch.float32)  # half precision cannot represent all counts
            weight = (inside / (high - low).to(wide)[:, None]).to(x.dtype)
            x = (windows(x) * weight.view(*taps.shape, *ends)).sum(dim + 1)
            continue
        least = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
        best = windows(x).masked_fill(~inside.view(*taps.shape, *ends), least).max(dim + 1, keepdim=True)
        if index is not None:
            position = low.view(-1, 1, *ends) + best.indices
            index = (windows(index).gather(dim + 1, best.indices) + position * stride).squeeze(dim + 1)
        stride *= extent[i]
        x = best.values.squeeze(dim + 1)
    return x if index is None else index


def _widest_window(start: int, size: int, extent: int, result: int) -> int:
    """The largest number of inputs that one output pools. Computed on the host, to avoid a device synchronisation."""
    return max(-(-(o + 1) * extent // result) - o * extent // result for o in range(start, start + size))


def max_pool_index(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    *,
    extent: Sequence[int],
    first: Sequence[int],
    size: Sequence[int],
) -> Tensor:
    """The flat index in the whole input of each window's maximum, for the windows of this block.

    ``extent`` is the shape of the whole input, ``first`` the position in it of the first element of ``x``.
    """
    ndim = len(size)
    lead = x.shape[: x.dim() - ndim]
    if x.numel() == 0 or min(size) == 0:
        return ZeroResult((*lead, *size), torch.int64)(x)
    aten = torch.ops.aten
    pools: tuple[Callable[..., Any], ...] = (
        aten.max_pool1d_with_indices,
        aten.max_pool2d_with_indices,
        aten.max_pool3d_with_indices,
    )
    _, local_index = pools[ndim - 1](x.detach(), list(kernel), list(stride), list(padding), list(dilation), ceil_mode)
    index = torch.zeros_like(local_index)
    coordinates = torch.unravel_index(local_index, x.shape[x.dim() - ndim :])
    for coordinate, low, total, step in zip(coordinates, first, extent, dilation, strict=True):
        position = coordinate + low
        # A maximum in the padding means that the window has only -inf: torch returns its first element inside.
        index = index * total + torch.where(position < 0, position.remainder(step), position)
    return index
