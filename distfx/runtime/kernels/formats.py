"""Memory formats: whether images lie channels last.

That is a matter of the graph, the same on all ranks, and not of the strides that a rank happens to have: a part with
one channel has both formats, and sums whose order in memory differs between ranks would be of other elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = [
    "any_channels_last",
    "empty",
    "is_channels_last",
    "local_parts",
    "memory_order",
    "to_memory_format",
]

aten = torch.ops.aten

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(x: Tensor) -> bool:
    """By its strides: a part of a channels_last tensor is not dense. Not of one channel, which may be either."""
    return x.layout is torch.strided and x.dim() in _LAST and x.shape[1] > 1 and x.stride(1) == 1 and x.stride(-1) > 1


def any_channels_last(tensors: Iterable[Tensor]) -> bool:
    return any(is_channels_last(tensor) for tensor in tensors)


def local_parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """This rank's part of each."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors)


def _format(rank: int, last: bool) -> torch.memory_format:
    return _LAST[rank] if last and rank in _LAST else torch.contiguous_format


def memory_order(rank: int, last: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims of a tensor in the order in which they lie in memory, and the way back from it."""
    dims = tuple(range(rank))
    return ((0, *dims[2:], 1), (0, dims[-1], *dims[1:-1])) if last and rank in _LAST else (dims, dims)


def empty(shape: Sequence[int], like: Tensor, last: bool, device: torch.device | None = None) -> Tensor:
    """An uninitialised tensor of ``shape``, of the dtype of ``like``."""
    memory_format = _format(len(shape), last)
    return torch.empty(tuple(shape), dtype=like.dtype, device=device or like.device, memory_format=memory_format)


def to_memory_format(x: Tensor, channels_last: bool) -> Tensor:
    """``x`` without gaps, channels last or first: itself where it lies so."""
    return x.contiguous(memory_format=_format(x.dim(), channels_last))
