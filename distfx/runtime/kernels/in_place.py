"""Kernels that write their result over an operand, and in backward the gradient over that of the result.

:mod:`distfx.passes.reuse` decides where this is safe, and explains how much memory it saves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["InPlaceActivation", "KeepFirstDtype", "add_into"]

aten = torch.ops.aten


_GRADIENTS: dict[Any, Callable[..., Tensor]] = {
    aten.relu_.default: lambda grad, y: aten.threshold_backward.grad_input(grad, y, 0, grad_input=grad),
    aten.leaky_relu_.default: lambda grad, y, slope=0.01: aten.leaky_relu_backward.grad_input(
        grad, y, slope, True, grad_input=grad
    ),
    aten.elu_.default: lambda grad, y, alpha=1.0, scale=1.0, input_scale=1.0: aten.elu_backward.grad_input(
        grad, alpha, scale, input_scale, True, y, grad_input=grad
    ),
}
"""The gradient of each activation, from the gradient of its result, which is overwritten, and the result."""


class InPlaceActivation:
    """An activation that overwrites its operand. Its backward overwrites the gradient of the result."""

    def __init__(self, target: Callable[..., Tensor]) -> None:
        self.target, self.gradient = target, _GRADIENTS[target]
        self.__name__ = str(target)

    def __call__(self, x: Tensor, *slopes: float) -> Tensor:
        result: Tensor = _InPlaceActivation.apply(x, self, slopes)
        return result


class _InPlaceActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: InPlaceActivation, slopes: tuple[float, ...]) -> Tensor:
        ctx.activation, ctx.slopes = activation, slopes
        ctx.mark_dirty(x)
        activation.target(x, *slopes)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        return ctx.activation.gradient(grad, result, *ctx.slopes), None, None


class KeepFirstDtype:
    """A call that the model makes in place, so its result has the dtype of the first operand."""

    def __init__(self, target: Callable[..., Tensor]) -> None:
        self.target = target
        self.__name__ = getattr(target, "__name__", str(target))

    def __call__(self, first: Tensor, *others: Any, **kwargs: Any) -> Tensor:
        return self.target(first, *others, **kwargs).to(first.dtype)


def add_into(result: Tensor, other: Any, **kwargs: Any) -> Tensor:
    """The sum, written over ``result`` unless the dtypes differ, as they may under autocast."""
    if isinstance(other, Tensor) and other.dtype != result.dtype:
        return torch.add(result, other, **kwargs)
    return result.add_(other, **kwargs)
