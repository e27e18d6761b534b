"""Batch norm in training, with the statistics of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distfx.grid import Segment
from distfx.runtime.kernels.collective import SegmentKernel

__all__ = ["BatchNorm"]


class BatchNorm(SegmentKernel):
    """Batch norm in training, with statistics over all ranks of a segment.

    The means and squared deviations of the ranks are merged by count (Chan et al.), in float32 or better: first the
    mean, then the deviations from it. Running statistics are updated as on one device. If the batch is also split
    outside the segment, they are updated by the average over the segment ``average_over``, so that replicas stay equal.
    """

    def __init__(
        self,
        segment: Segment,
        node: str,
        momentum: float,
        eps: float,
        count: Sequence[int],
        average_over: Segment | None = None,
    ) -> None:
        super().__init__("batch_norm", segment, node)
        self.momentum, self.eps = momentum, eps
        self.count = math.prod(count)
        """The global number of values per channel."""
        self.averaging = None if average_over is None else SegmentKernel("batch_norm", average_over, node)

    def average(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """The statistics that update the running ones."""
        if self.averaging is None:
            return mean, var
        self.averaging.path = self.path
        both = self.averaging.sum(torch.stack([mean, var]), "forward").div_(self.averaging.segment.size)
        return both[0], both[1]

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
    ) -> Tensor:
        return _BatchNorm.apply(x, weight, bias, running_mean, running_var, self)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        norm: BatchNorm,
    ) -> Tensor:
        channels = x.shape[1]
        wide = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
        local_count = x.numel() // channels if channels else 0
        if local_count:
            local_mean, local_var = torch.batch_norm_update_stats(x.to(wide), None, None, 0.0)
        else:
            local_mean = local_var = x.new_zeros(channels, dtype=wide)
        mean = norm.sum(local_mean * local_count, "forward").div_(norm.count)
        square = norm.sum((local_var + (local_mean - mean).square_()) * local_count, "forward")
        var = square / norm.count
        if running_mean is not None and running_var is not None:
            new_mean, new_var = norm.average(mean, square / (norm.count - 1))
            running_mean.lerp_(new_mean.to(running_mean.dtype), norm.momentum)
            running_var.lerp_(new_var.to(running_var.dtype), norm.momentum)
        ctx.save_for_backward(x, weight, mean, var)
        ctx.norm = norm
        if not x.numel():
            return torch.empty_like(x)
        gain, shift = (None if value is None else value.to(wide) for value in (weight, bias))
        return torch.native_batch_norm(x.to(wide), gain, shift, mean, var, False, 0.0, norm.eps)[0].to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        norm: BatchNorm = ctx.norm
        wide = mean.dtype
        scale = (var + norm.eps).rsqrt_()
        gain = scale if weight is None else scale * weight.to(wide)
        if x.numel():
            slope = torch.ones_like(mean) if weight is None else weight.to(wide)  # the CUDA kernel needs a weight
            dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
                grad.to(wide), x.to(wide), slope, mean, var, mean, scale, False, norm.eps, [True, True, True]
            )
        else:
            dx, dweight, dbias = torch.empty_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
        if ctx.needs_input_grad[0]:
            sums = norm.sum(torch.stack([dbias, dweight]), "backward").div_(norm.count)
            shape = (1, -1, *(1,) * (x.dim() - 2))
            through_var, through_mean = (gain * scale * sums[1]).view(shape), (gain * sums[0]).view(shape)
            dx = dx.sub_((x - mean.view(shape)).mul_(through_var).add_(through_mean)).to(x.dtype)
        dtype = None if weight is None else weight.dtype
        dw = dweight.to(dtype) if ctx.needs_input_grad[1] else None
        db = dbias.to(dtype or wide) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None, None
