"""Reductions over split dims: one kernel, :class:`Reduction`, which holds a segment and reduces small values over it.

Each kind is a row of :data:`KINDS`: what it computes from this rank's part, and what it sends. The result of a
reduction is the same on every rank of the segment, and so is its gradient: what flows back is local wherever the
formula allows. Softmax and cumulative sums keep their split dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distfx.grid import Segment
from distfx.runtime.kernels.local import Collective

__all__ = ["KINDS", "Reduction"]


def _wide(x: Tensor) -> Tensor:
    """``x`` in float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.dtype.is_floating_point else x


def _ordered(x: Tensor) -> Tensor:
    """Floats as integers in the same order, nan the greatest: backends do not agree on the greater of nan and 1."""
    kind = torch.int64 if x.dtype == torch.float64 else torch.int32
    bits = torch.where(x.isnan(), torch.nan, x).contiguous().view(kind)
    return torch.where(bits < 0, bits ^ torch.iinfo(kind).max, bits)


def _floats(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits).view(dtype)


class Reduction(Collective):
    """One reduction (or softmax, or cumulative sum) of a tensor whose ``dims`` are split over the segment.

    ``start`` and ``extent`` say where this rank's part of each of ``dims`` starts, and how far the whole reaches;
    ``part`` is the number of this rank's part.
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
        self.kind, self.compute = kind, KINDS[kind]
        self.dims, self.keepdim, self.part = dims, keepdim, part
        self.start, self.extent, self.order, self.dtype = start, extent, order, dtype
        self.greatest = not kind.endswith("min")
        self.log = kind.startswith("log")

    @property
    def count(self) -> int:
        return math.prod(self.extent)

    def __call__(self, x: Tensor) -> Tensor:
        return self.compute(x if self.dtype is None else x.to(self.dtype), self)

    # -- what the kinds are made of; all of these keep the reduced dims as ones

    def fold(self, x: Tensor) -> Tensor:
        """The sum over ``dims`` here."""
        return x.sum(self.dims, keepdim=True)

    def identity(self, x: Tensor) -> float | int | bool:
        """What is less (or greater) than anything."""
        if x.dtype.is_floating_point:
            return -math.inf if self.greatest else math.inf
        if x.dtype == torch.bool:
            return not self.greatest
        limits = torch.iinfo(x.dtype)
        return limits.min if self.greatest else limits.max

    def local_extreme(self, x: Tensor) -> Tensor:
        """The greatest or least element here."""
        if any(x.shape[dim] == 0 for dim in self.dims):
            shape = [1 if dim in self.dims else size for dim, size in enumerate(x.shape)]
            return x.new_full(shape, self.identity(x))
        return x.amax(self.dims, keepdim=True) if self.greatest else x.amin(self.dims, keepdim=True)

    def extreme(self, local: Tensor, phase: str = "forward") -> Tensor:
        """The greatest or least of the ranks' values."""
        op = "max" if self.greatest else "min"
        if local.dtype == torch.bool:
            return self.reduce(local.to(torch.uint8), phase, op).bool()
        if not local.dtype.is_floating_point:
            return self.reduce(local.clone(), phase, op)
        sign = 1 if self.greatest else -1  # nan wins either way
        wide = _wide(local)
        return (sign * _floats(self.reduce(_ordered(sign * wide), phase, "max"), wide.dtype)).to(local.dtype)

    def squeeze(self, x: Tensor) -> Tensor:
        """Without the reduced dims, unless they are kept."""
        return x if self.keepdim else x.squeeze(self.dims)

    def unsqueeze(self, x: Tensor) -> Tensor:
        """The inverse of ``squeeze``."""
        if not self.keepdim:
            for dim in self.dims:
                x = x.unsqueeze(dim)
        return x


# ----------------------------------------------------------------------------------------- softmax and its kin


class _Softmax(torch.autograd.Function):
    """``exp(x - max) / sum``, or its logarithm; backward one sum."""

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
    """``log sum exp(x - max) + max``; its gradient is the softmax, which each rank has."""

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
    """The greatest or least element; all that are equal to it share the gradient."""

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
        shared = r.sum(r.fold(equal), "backward")
        return (equal * (r.unsqueeze(grad) / shared)).to(x.dtype), None


def _first(x: Tensor, r: Reduction) -> tuple[Tensor, Tensor]:
    """The greatest or least element, and where it first stands in the whole, by its number among ``dims``."""
    value = r.local_extreme(x)
    nowhere = torch.iinfo(torch.int64).max
    index = torch.full_like(value, nowhere, dtype=torch.int64)
    if x.numel():
        ordered = x.to(torch.uint8) if x.dtype is torch.bool else x
        last = ordered.movedim(r.dims, list(range(-len(r.dims), 0)))
        flat = last.flatten(-len(r.dims)) if x.dim() > len(r.dims) else last.reshape(-1)
        found = flat.argmax(-1) if r.greatest else flat.argmin(-1)
        index = torch.zeros_like(found)
        places = torch.unravel_index(found, [x.shape[dim] for dim in r.dims])
        for place, first, extent in zip(places, r.start, r.extent, strict=True):
            index = index * extent + place + first
        index = index.view(value.shape)
    best = r.extreme(value)
    mine = (value == best) | (value.isnan() & best.isnan())
    return best, r.reduce(torch.where(mine, index, nowhere), "forward", "min")


class _Pick(torch.autograd.Function):
    """The greatest or least element; the first that is equal to it has the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, r: Reduction) -> Tensor:
        value, index = _first(x, r)
        ctx.save_for_backward(index)
        ctx.r, ctx.shape = r, x.shape
        return r.squeeze(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        r: Reduction = ctx.r
        number = torch.zeros((), dtype=torch.int64, device=grad.device)
        for dim, first, extent in zip(r.dims, r.start, r.extent, strict=True):
            place = torch.arange(first, first + ctx.shape[dim], device=grad.device)
            number = number * extent + place.view(-1, *(1,) * (len(ctx.shape) - 1 - dim))
        return torch.where(number == index, r.unsqueeze(grad), 0), None


def _argument(x: Tensor, r: Reduction) -> Tensor:
    return r.squeeze(_first(x.detach(), r)[1])


def _truth(x: Tensor, r: Reduction) -> Tensor:
    """Whether any element is true (the greatest), or all are (the least)."""
    return r.squeeze(r.extreme(r.local_extreme(x.bool())))


# ------------------------------------------------------------------------------------------ moments and norms


class _Variance(torch.autograd.Function):
    """The mean squared deviation from the mean, ``order`` fewer counted; its root for a standard deviation."""

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
    """``(sum |x|^p)^(1/p)`` for a finite p; zero where the norm is zero, as torch has it."""

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


# ------------------------------------------------------------------------------------- products and prefixes


class _Every(torch.autograd.Function):
    """Every rank's value, along a new first dim. ``once``: all ranks do the same with them; else each its own."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, r: Reduction, once: bool) -> Tensor:
        every = value.new_zeros((r.segment.size, *value.shape))
        every[r.part] = value
        ctx.r, ctx.once = r, once
        return r.sum(every, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.once:
            grad = ctx.r.sum(grad.clone(memory_format=torch.contiguous_format), "backward")
        return grad[ctx.r.part], None, None


def _product(x: Tensor, r: Reduction) -> Tensor:
    local = _wide(x)
    for dim in r.dims:
        local = local.prod(dim, keepdim=True)
    return r.squeeze(_Every.apply(local, r, True).prod(0)).to(x.dtype)


def _cumulative(x: Tensor, r: Reduction) -> Tensor:
    """The running sum here, and the sums of the parts before it."""
    wide, (dim,) = _wide(x), r.dims
    before = _Every.apply(wide.sum(dim, keepdim=True), r, False)[: r.part].sum(0)
    return (wide.cumsum(dim) + before).to(x.dtype)


def _cumulative_product(x: Tensor, r: Reduction) -> Tensor:
    wide, (dim,) = _wide(x), r.dims
    before = _Every.apply(wide.prod(dim, keepdim=True), r, False)[: r.part].prod(0)
    return (wide.cumprod(dim) * before).to(x.dtype)


KINDS: dict[str, Callable[[Tensor, Reduction], Tensor]] = {
    "softmax": _Softmax.apply,
    "log_softmax": _Softmax.apply,
    "logsumexp": _LogSumExp.apply,
    "amax": _Extreme.apply,
    "amin": _Extreme.apply,
    "max": _Pick.apply,
    "min": _Pick.apply,
    "argmax": _argument,
    "argmin": _argument,
    "any_max": _truth,
    "all_min": _truth,
    "var": _Variance.apply,
    "std": _Variance.apply,
    "norm": _Norm.apply,
    "prod": _product,
    "cumsum": _cumulative,
    "cumprod": _cumulative_product,
}
"""The function that computes each kind. What it sends is in :data:`distfx.ir.reductions.TRAFFIC`."""
