"""Reductions over split dims: one kernel, :class:`Reduction`, that reduces small values over a segment.

:data:`REDUCTIONS` maps each kind to the function that computes it. The result of a reduction is replicated over the
segment, and so is its gradient, so backward communicates only where the formula needs other ranks' values. Softmax and
cumulative sums keep their split dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distfx.grid import Segment
from distfx.runtime.kernels.collective import SegmentKernel

__all__ = ["REDUCTIONS", "Reduction"]


def _wide(x: Tensor) -> Tensor:
    """``x`` in float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.dtype.is_floating_point else x


def _to_ordered_integers(x: Tensor) -> Tensor:
    """Floats as integers in the same order, with nan as the greatest. Backends disagree on the maximum of nan and 1."""
    dtype = torch.int64 if x.dtype == torch.float64 else torch.int32
    bits = torch.where(x.isnan(), torch.nan, x).contiguous().view(dtype)
    return torch.where(bits < 0, bits ^ torch.iinfo(dtype).max, bits)


def _to_floats(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`_to_ordered_integers`."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits).view(dtype)


class Reduction(SegmentKernel):
    """One reduction (or softmax, or cumulative sum) of a tensor whose ``dims`` are split over the segment.

    For each of ``dims``, ``start`` is the first position of this rank's part and ``extent`` the global size. ``part``
    is the index of this rank's part. ``order`` is that of a norm, or the correction of a variance.
    """

    def __init__(
        self,
        segment: Segment,
        node: str,
        *,
        kind: str,
        dims: list[int],
        keepdim: bool = False,
        start: Sequence[int] = (),
        extent: Sequence[int] = (),
        part: int = 0,
        order: float = 2.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__("reduce", segment, node)
        self.kind, self.compute = kind, REDUCTIONS[kind]
        self.dims, self.keepdim, self.part = dims, keepdim, part
        self.start, self.extent, self.order, self.dtype = start, extent, order, dtype
        self.greatest = not kind.endswith("min")
        self.log = kind.startswith("log")

    @property
    def count(self) -> int:
        return math.prod(self.extent)

    def __call__(self, x: Tensor) -> Tensor:
        return self.compute(x if self.dtype is None else x.to(self.dtype), self)

    # -- building blocks of the kinds. All keep the reduced dims with size one.

    def fold(self, x: Tensor) -> Tensor:
        """The sum over ``dims`` of this rank's part."""
        return x.sum(self.dims, keepdim=True)

    def identity(self, x: Tensor) -> float | int | bool:
        """The value that never is the maximum, or the minimum."""
        if x.dtype.is_floating_point:
            return -math.inf if self.greatest else math.inf
        if x.dtype == torch.bool:
            return not self.greatest
        limits = torch.iinfo(x.dtype)
        return limits.min if self.greatest else limits.max

    def local_extreme(self, x: Tensor) -> Tensor:
        """The maximum or minimum of this rank's part."""
        if any(x.shape[dim] == 0 for dim in self.dims):
            shape = [1 if dim in self.dims else size for dim, size in enumerate(x.shape)]
            return x.new_full(shape, self.identity(x))
        return x.amax(self.dims, keepdim=True) if self.greatest else x.amin(self.dims, keepdim=True)

    def extreme(self, local: Tensor, phase: str = "forward") -> Tensor:
        """The maximum or minimum over the ranks."""
        op = "max" if self.greatest else "min"
        if local.dtype == torch.bool:
            return self.reduce(local.to(torch.uint8), phase, op).bool()
        if not local.dtype.is_floating_point:
            return self.reduce(local.clone(), phase, op)
        sign = 1 if self.greatest else -1  # always a maximum, because nan must win for the minimum, too
        wide = _wide(local)
        return (sign * _to_floats(self.reduce(_to_ordered_integers(sign * wide), phase, "max"), wide.dtype)).to(
            local.dtype
        )

    def squeeze(self, x: Tensor) -> Tensor:
        """Remove the reduced dims, unless ``keepdim``."""
        return x if self.keepdim else x.squeeze(self.dims)

    def unsqueeze(self, x: Tensor) -> Tensor:
        """The inverse of ``squeeze``."""
        if not self.keepdim:
            for dim in self.dims:
                x = x.unsqueeze(dim)
        return x


# ----------------------------------------------------------------------------------------- softmax and logsumexp


class _Softmax(torch.autograd.Function):
    """``exp(x - max) / sum``, or its logarithm. Backward needs one sum over the segment."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, r: Reduction) -> Tensor:
        wide = _wide(x)
        shifted = wide - r.extreme(r.local_extreme(wide))
        total = r.sum(r.fold(shifted.exp()), "forward")
        result = (shifted - total.log() if r.log else shifted.exp_().div_(total)).to(x.dtype)
        ctx.save_for_backward(result)
        ctx.r = r
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        r: Reduction = ctx.r
        wide, value = _wide(grad), _wide(result)
        if r.log:
            return (wide - value.exp() * r.sum(r.fold(wide), "backward")).to(grad.dtype), None
        return (value * (wide - r.sum(r.fold(wide * value), "backward"))).to(grad.dtype), None


class _LogSumExp(torch.autograd.Function):
    """``log sum exp(x - max) + max``. Its gradient is the softmax, which each rank computes for its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, r: Reduction) -> Tensor:
        wide = _wide(x)
        top = r.extreme(r.local_extreme(wide))
        top.masked_fill_(top.isinf(), 0)
        result = r.sum(r.fold((wide - top).exp()), "forward").log_().add_(top)
        ctx.save_for_backward(x, result)
        ctx.r = r
        return r.squeeze(result).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, result = ctx.saved_tensors
        share = (_wide(x) - result).exp_()
        return (share * ctx.r.unsqueeze(grad)).to(x.dtype), None


# ------------------------------------------------------------------------------------------------- extremes


class _Extreme(torch.autograd.Function):
    """The maximum or minimum. All elements equal to it share the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, r: Reduction) -> Tensor:
        result = r.extreme(r.local_extreme(x))
        ctx.save_for_backward(x, result)
        ctx.r = r
        return r.squeeze(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, result = ctx.saved_tensors
        r: Reduction = ctx.r
        equal = _wide(((x == result) | (x.isnan() & result.isnan())).to(x.dtype))
        count = r.sum(r.fold(equal), "backward")
        return (equal * (r.unsqueeze(grad) / count)).to(x.dtype), None


def _first_extreme(x: Tensor, r: Reduction) -> tuple[Tensor, Tensor]:
    """The maximum or minimum, and the flat global index over ``dims`` of its first occurrence."""
    value = r.local_extreme(x)
    nowhere = torch.iinfo(torch.int64).max
    index = torch.full_like(value, nowhere, dtype=torch.int64)
    if x.numel():
        ordered = x.to(torch.uint8) if x.dtype is torch.bool else x
        moved = ordered.movedim(r.dims, list(range(-len(r.dims), 0)))
        flat = moved.flatten(-len(r.dims)) if x.dim() > len(r.dims) else moved.reshape(-1)
        local_index = flat.argmax(-1) if r.greatest else flat.argmin(-1)
        index = torch.zeros_like(local_index)
        coordinates = torch.unravel_index(local_index, [x.shape[dim] for dim in r.dims])
        for coordinate, first, extent in zip(coordinates, r.start, r.extent, strict=True):
            index = index * extent + coordinate + first
        index = index.view(value.shape)
    best = r.extreme(value)
    is_best = (value == best) | (value.isnan() & best.isnan())
    return best, r.reduce(torch.where(is_best, index, nowhere), "forward", "min")


class _FirstExtreme(torch.autograd.Function):
    """The maximum or minimum. Its first occurrence gets the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, r: Reduction) -> Tensor:
        value, index = _first_extreme(x, r)
        ctx.save_for_backward(index)
        ctx.r, ctx.shape = r, x.shape
        return r.squeeze(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        r: Reduction = ctx.r
        flat_index = torch.zeros((), dtype=torch.int64, device=grad.device)
        for dim, first, extent in zip(r.dims, r.start, r.extent, strict=True):
            positions = torch.arange(first, first + ctx.shape[dim], device=grad.device)
            flat_index = flat_index * extent + positions.view(-1, *(1,) * (len(ctx.shape) - 1 - dim))
        return torch.where(flat_index == index, r.unsqueeze(grad), 0), None


def _extreme_index(x: Tensor, r: Reduction) -> Tensor:
    return r.squeeze(_first_extreme(x.detach(), r)[1])


def _any_or_all(x: Tensor, r: Reduction) -> Tensor:
    """Whether any element is true (the maximum), or all are (the minimum)."""
    return r.squeeze(r.extreme(r.local_extreme(x.bool())))


# ------------------------------------------------------------------------------------------ moments and norms


class _Variance(torch.autograd.Function):
    """The sum of squared deviations from the mean over ``count - order``; for ``std`` its square root."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, r: Reduction) -> Tensor:
        wide = _wide(x)
        mean = r.sum(r.fold(wide), "forward") / r.count
        result = r.sum(r.fold((wide - mean).square_()), "forward") / max(0, r.count - r.order)
        result = result.sqrt_() if r.kind == "std" else result
        ctx.save_for_backward(x, mean, result)
        ctx.r = r
        return r.squeeze(result).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, mean, result = ctx.saved_tensors
        r: Reduction = ctx.r
        scale = r.unsqueeze(_wide(grad)) / (r.count - r.order)
        scale = (scale / result).masked_fill_(result == 0, 0) if r.kind == "std" else 2 * scale
        return ((_wide(x) - mean) * scale).to(x.dtype), None


class _Norm(torch.autograd.Function):
    """``(sum |x|^p)^(1/p)`` for a finite p. The gradient is zero where the norm is zero, as in torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, r: Reduction) -> Tensor:
        wide, p = _wide(x), r.order
        if p == 0:
            result = r.sum(r.fold((wide != 0).to(wide.dtype)), "forward")
        else:
            result = r.sum(r.fold(wide.square() if p == 2 else wide.abs().pow_(p)), "forward").pow_(1 / p)
        ctx.save_for_backward(x, result)
        ctx.r = r
        return r.squeeze(result).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, result = ctx.saved_tensors
        wide, p, back = _wide(x), ctx.r.order, ctx.r.unsqueeze(_wide(grad))
        if p == 0:
            return torch.zeros_like(x), None
        if p == 1:
            return (wide.sgn() * back).to(x.dtype), None
        if p != 2:
            wide = wide * wide.abs().pow_(p - 2)
            wide = wide.masked_fill_(x == 0, 0) if p < 2 else wide
        scale = (back / result.pow(p - 1)).masked_fill_(result == 0, 0)
        return (wide * scale).to(x.dtype), None


# ------------------------------------------------------------------------------------- products and cumulative sums


class _StackRanks(torch.autograd.Function):
    """The values of all ranks, stacked along a new first dim.

    ``replicated``: all ranks use the stack in the same way, so their gradients are equal; otherwise they are summed.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, r: Reduction, replicated: bool) -> Tensor:
        stack = value.new_zeros((r.segment.size, *value.shape))
        stack[r.part] = value
        ctx.r, ctx.replicated = r, replicated
        return r.sum(stack, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.replicated:
            grad = ctx.r.sum(grad.clone(memory_format=torch.contiguous_format), "backward")
        return grad[ctx.r.part], None, None


def _product(x: Tensor, r: Reduction) -> Tensor:
    local = _wide(x)
    for dim in r.dims:
        local = local.prod(dim, keepdim=True)
    return r.squeeze(_StackRanks.apply(local, r, True).prod(0)).to(x.dtype)


def _cumulative_sum(x: Tensor, r: Reduction) -> Tensor:
    """The cumulative sum of this rank's part plus the sums of the parts before it."""
    wide, (dim,) = _wide(x), r.dims
    before = _StackRanks.apply(wide.sum(dim, keepdim=True), r, False)[: r.part].sum(0)
    return (wide.cumsum(dim) + before).to(x.dtype)


def _cumulative_product(x: Tensor, r: Reduction) -> Tensor:
    wide, (dim,) = _wide(x), r.dims
    before = _StackRanks.apply(wide.prod(dim, keepdim=True), r, False)[: r.part].prod(0)
    return (wide.cumprod(dim) * before).to(x.dtype)


REDUCTIONS: dict[str, Callable[[Tensor, Reduction], Tensor]] = {
    "softmax": _Softmax.apply,
    "log_softmax": _Softmax.apply,
    "logsumexp": _LogSumExp.apply,
    "amax": _Extreme.apply,
    "amin": _Extreme.apply,
    "max": _FirstExtreme.apply,
    "min": _FirstExtreme.apply,
    "argmax": _extreme_index,
    "argmin": _extreme_index,
    "any_max": _any_or_all,
    "all_min": _any_or_all,
    "var": _Variance.apply,
    "std": _Variance.apply,
    "norm": _Norm.apply,
    "prod": _product,
    "cumsum": _cumulative_sum,
    "cumprod": _cumulative_product,
}
"""The function that computes each kind. :data:`distfx.ir.reductions.TRAFFIC` has the values that each one sends."""
