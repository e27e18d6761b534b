"""Memory formats: whether images are stored channels last.

The graph decides this for all ranks. The strides of a local tensor cannot: a part with one channel is in both formats.
If ranks stored a tensor in different orders, an allreduce of its memory would add different elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["any_channels_last", "is_channels_last", "memory_order", "new_empty", "to_memory_format"]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(x: Tensor) -> bool:
    """Whether ``x`` is stored channels last. False for one channel, which is in both formats.

    Decided by the strides, because a slice of a channels-last tensor is not dense.
    """
    if x.layout is not torch.strided or x.dim() not in _CHANNELS_LAST:
        return False
    return x.shape[1] > 1 and x.stride(1) == 1 and x.stride(-1) > 1


def any_channels_last(tensors: Iterable[Tensor]) -> bool:
    return any(is_channels_last(tensor) for tensor in tensors)


def _format(ndim: int, channels_last: bool) -> torch.memory_format:
    return _CHANNELS_LAST[ndim] if channels_last and ndim in _CHANNELS_LAST else torch.contiguous_format


def memory_order(ndim: int, channels_last: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims of a tensor in the order in which they are stored, and the inverse permutation."""
    dims = tuple(range(ndim))
    return ((0, *dims[2:], 1), (0, dims[-1], *dims[1:-1])) if channels_last and ndim in _CHANNELS_LAST else (dims, dims)


def new_empty(shape: Sequence[int], like: Tensor, channels_last: bool, device: torch.device | None = None) -> Tensor:
    """An uninitialised tensor of ``shape`` with the dtype, and unless given the device, of ``like``."""
    memory_format = _format(len(shape), channels_last)
    return torch.empty(tuple(shape), dtype=like.dtype, device=device or like.device, memory_format=memory_format)


def to_memory_format(x: Tensor, channels_last: bool) -> Tensor:
    """``x`` stored densely, channels last or first. Copied only if it is not already."""
    return x.contiguous(memory_format=_format(x.dim(), channels_last))
