"""Calls on empty parts: the result is zero or has no elements, but backward must run as on the other ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distfx.ir.torch_private import tree_leaves
from distfx.runtime.kernels.autocast import autocast_dtype

__all__ = ["ZeroResult"]


class _Zeros(torch.autograd.Function):
    """Zeros that depend on ``tensors`` in the autograd graph. The gradients of ``tensors`` are zero."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], dtype: torch.dtype | None, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        result = tensors[0].new_zeros(shape, dtype=dtype)
        if not result.is_floating_point():
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors))


class ZeroResult:
    """The kernel of a rank whose part is empty: zeros of the given shape.

    ``dtype``: that of the result, by default the first operand's. ``product``: autocast lowers the call, so follow the
    dtype of the ranks that do compute.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype | None = None, product: bool = False) -> None:
        self.shape, self.dtype, self.product = shape, dtype, product
        self.__name__ = "zero"

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        dtype = autocast_dtype(tensors[0]) if self.product else self.dtype
        return _Zeros.apply(self.shape, dtype, *tensors)
