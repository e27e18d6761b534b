"""Sums on local tensors: a bias, the blocks of a concatenation, one rank's summand of a mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["add_bias", "add_blocks", "mean"]


def add_bias(x: Tensor, bias: Tensor, *, dim: int) -> Tensor:
    """``x`` plus ``bias`` along ``dim``, in the dtype of ``x``, which autocast may have lowered."""
    bias = bias.to(x.dtype)
    return x + bias.view(-1, *(1,) * (x.dim() - 2)) if dim == 1 else x + bias


def add_blocks(*blocks: Tensor) -> Tensor:
    """This rank's block of a concatenation along a split dim. Each operand's block is zero where others have data."""
    result = blocks[0]
    for block in blocks[1:]:
        result = result + block
    return result


def mean(x: Tensor, dims: Sequence[int], *, keepdim: bool, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over ``dims`` divided by the global ``count``, in float32 or better: this rank's summand of a mean."""
    result = dtype or x.dtype
    wide = torch.promote_types(result, torch.float32)
    return (x.sum(list(dims), keepdim=keepdim, dtype=wide) / count).to(result)
