"""Convolution and transposed convolution on local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distfx.ir.layout import Window
from distfx.runtime.kernels.autocast import autocast_operands
from distfx.runtime.kernels.empty import ZeroResult
from distfx.runtime.kernels.formats import to_memory_format
from distfx.runtime.kernels.sums import add_bias

__all__ = ["conv_transpose", "convolution"]


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, channels_last: bool) -> Tensor:
    """``aten.convolution`` with autocast, which ignores that operator on CPUs."""
    operands = autocast_operands(to_memory_format(x, channels_last), weight, bias)
    result: Tensor = torch.ops.aten.convolution(*operands, *rest)
    return result


def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    split: Sequence[bool],
    start: Sequence[int],
    size: Sequence[int],
) -> Tensor:
    """The block ``[start, start + size)`` of a transposed convolution's output, from the inputs that reach it.

    Input i adds to the outputs ``s*i - p + d*r``. Along a split dim, ``x`` starts at the first input that reaches the
    block. Outputs of neighbouring blocks are cut off, and outputs that no tap reaches are zero.
    """
    channels = weight.shape[1] * groups
    x, weight, bias = autocast_operands(x, weight, bias)
    if x.numel() == 0 or weight.numel() == 0 or min(size) == 0:
        result = ZeroResult((x.shape[0], channels, *size), product=True)(x, weight)
        return result if bias is None else add_bias(result, bias, dim=1)
    ndim = len(size)
    local_padding, output_padding, cuts = [0] * ndim, [0] * ndim, []
    for i in range(ndim):
        reach = dilation[i] * (weight.shape[2 + i] - 1)
        if split[i]:
            window = Window(lo=reach - padding[i] - stride[i] + 1, hi=padding[i] + stride[i] - 1, div=stride[i])
            first, _ = window.need(start[i], start[i] + size[i])
            cuts.append((2 + i, start[i] - (stride[i] * int(first) - padding[i]), size[i]))
        else:
            local_padding[i] = padding[i]
            output_padding[i] = size[i] - ((x.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + reach + 1)
    result = torch.convolution(
        x, weight, None, list(stride), local_padding, list(dilation), transposed=True, output_padding=output_padding,
        groups=groups,
    )  # fmt: skip
    for dim, first, length in cuts:
        before, after = max(0, -first), max(0, first + length - result.shape[dim])
        if before or after:
            result = F.pad(result, [0, 0] * (result.dim() - 1 - dim) + [before, after])
        result = result.narrow(dim, max(0, first), length)
    return result if bias is None else add_bias(result, bias, dim=1)
