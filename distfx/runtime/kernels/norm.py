"""Group, layer, instance and RMS norm over split dims, with the statistics of the whole tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distfx.grid import Segment
from distfx.runtime.kernels.collective import SegmentKernel

__all__ = ["Norm"]


class Norm(SegmentKernel):
    """Standardise over ``dims``, and over the channels of each group if there are ``groups``; then scale and shift.

    Sums are computed in float32 or better: first the mean over all ranks, then the squared deviations from it. An RMS
    norm does not subtract the mean: ``centre=False``. ``group`` is the number of channels of a group, ``start`` the
    first channel of this rank. ``trailing``: weight and bias belong to the last dims, not to dim 1.
    """

    def __init__(
        self,
        segment: Segment,
        node: str,
        *,
        dims: list[int],
        eps: float,
        count: int,
        group: int = 0,
        groups: int = 0,
        start: int = 0,
        trailing: bool = False,
        centre: bool = True,
    ) -> None:
        super().__init__("norm", segment, node)
        self.eps, self.count = eps, count
        self.dims, self.group, self.groups, self.start, self.trailing = dims, group, groups, start, trailing
        self.centre = centre

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        result: Tensor = _Standardise.apply(x, self)
        shape = (-1,) if self.trailing else (-1, *(1,) * (x.dim() - 2))
        if weight is not None:
            result = result * (weight if self.trailing else weight.view(shape))
        return result if bias is None else result + (bias if self.trailing else bias.view(shape))

    def fold(self, x: Tensor) -> Tensor:
        """The sum over ``dims``, which are kept with size one, and over the channels of each group."""
        sums = x.sum(self.dims, keepdim=True) if self.dims else x  # torch sums over all dims if the list is empty
        if not self.groups:
            return sums
        folded = sums.new_zeros((sums.shape[0], self.groups, *sums.shape[2:]))
        return folded.index_add_(1, self._group_of(x), sums)

    def unfold(self, statistic: Tensor, x: Tensor) -> Tensor:
        """A statistic of each group, repeated for each channel."""
        return statistic.index_select(1, self._group_of(x)) if self.groups else statistic

    def _group_of(self, x: Tensor) -> Tensor:
        channels = torch.arange(self.start, self.start + x.shape[1], device=x.device)
        return torch.div(channels, self.group, rounding_mode="floor")


class _Standardise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Norm) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if norm.centre:
            mean = norm.sum(norm.fold(wide), "forward") / norm.count
            centred = wide - norm.unfold(mean, x)
        else:
            centred = wide.clone()
        square = norm.sum(norm.fold(centred.square()), "forward") / norm.count
        scale = norm.unfold((square + norm.eps).rsqrt_(), x)
        result = centred.mul_(scale)
        ctx.save_for_backward(result, scale)
        ctx.norm, ctx.dtype = norm, x.dtype
        return result.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        result, scale = ctx.saved_tensors
        norm: Norm = ctx.norm
        grad = grad.to(result.dtype)
        if not norm.centre:
            second = norm.sum(norm.fold(grad * result), "backward").div_(norm.count)
            return ((grad - result * norm.unfold(second, result)) * scale).to(ctx.dtype), None
        sums = torch.stack([norm.fold(grad), norm.fold(grad * result)])
        first, second = norm.sum(sums, "backward").div_(norm.count)
        correction = result * norm.unfold(second, result) + norm.unfold(first, result)
        return ((grad - correction) * scale).to(ctx.dtype), None
