"""Pooling kernels beyond ATen's: windows that vary by position, and positions in the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distfx.runtime.kernels.local import ZeroResult

__all__ = ["adaptive_pool", "max_pool_index"]


def adaptive_pool(
    x: Tensor, *, kind: str, extent: Sequence[int], result: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> Tensor:
    """The block of an adaptive pooling's output that starts at ``start``: ``avg``, ``max``, or the ``index`` of it.

    Output o pools the inputs ``[floor(o E / R), ceil((o+1) E / R))`` of a dim of extent E, R of whose results there
    are; the first input here is the first that the block needs. One dim after another: a window is a box.
    """
    rank = len(size)
    lead = x.shape[: x.dim() - rank]
    if x.numel() == 0 or min(size) == 0:
        return ZeroResult((*lead, *size), torch.int64 if kind == "index" else None)(x)
    index = torch.zeros(x.shape, dtype=torch.int64, device=x.device) if kind == "index" else None
    stride = 1
    for i in reversed(range(rank)):
        dim = x.dim() - rank + i
        ends = (1,) * (rank - 1 - i)
        out = torch.arange(start[i], start[i] + size[i] + 1, device=x.device)
        low = out[:-1] * extent[i] // result[i]
        high = (out[1:] * extent[i] + result[i] - 1) // result[i]
        taps = low[:, None] + torch.arange(_widest(start[i], size[i], extent[i], result[i]), device=x.device)
        inside = taps < high[:, None]
        taken = (torch.minimum(taps, high[:, None] - 1) - start[i] * extent[i] // result[i]).flatten()

        def windows(value: Tensor, dim: int = dim, taken: Tensor = taken, shape: torch.Size = taps.shape) -> Tensor:
            return value.index_select(dim, taken).unflatten(dim, tuple(shape))

        if kind == "avg":
            wide = torch.promote_types(x.dtype, torch.float32)  # in half precision 257 is none
            weight = (inside / (high - low).to(wide)[:, None]).to(x.dtype)
            x = (windows(x) * weight.view(*taps.shape, *ends)).sum(dim + 1)
            continue
        least = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
        best = windows(x).masked_fill(~inside.view(*taps.shape, *ends), least).max(dim + 1, keepdim=True)
        if index is not None:
            place = low.view(-1, 1, *ends) + best.indices
            index = (windows(index).gather(dim + 1, best.indices) + place * stride).squeeze(dim + 1)
        stride *= extent[i]
        x = best.values.squeeze(dim + 1)
    return x if index is None else index


def _widest(start: int, size: int, extent: int, result: int) -> int:
    """The most inputs that one of these outputs pools: known here, so that no device need be asked."""
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
    """Where in the whole input, by its number in the plane, each window of this block has its greatest element.

    ``first`` is the position of the part's first element in the whole.
    """
    rank = len(size)
    lead = x.shape[: x.dim() - rank]
    if x.numel() == 0 or min(size) == 0:
        return ZeroResult((*lead, *size), torch.int64)(x)
    aten = torch.ops.aten
    pools: tuple[Callable[..., Any], ...] = (
        aten.max_pool1d_with_indices,
        aten.max_pool2d_with_indices,
        aten.max_pool3d_with_indices,
    )
    _, here = pools[rank - 1](x.detach(), list(kernel), list(stride), list(padding), list(dilation), ceil_mode)
    index = torch.zeros_like(here)
    places = torch.unravel_index(here, x.shape[x.dim() - rank :])
    for place, low, whole, step in zip(places, first, extent, dilation, strict=True):
        at = place + low
        # in the padding only if a window has nothing but -inf: then the first of its places that is inside
        index = index * whole + torch.where(at < 0, at.remainder(step), at)
    return index
