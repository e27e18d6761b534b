"""Local kernels: what ATen has no single operator for. All of them are compositions of ATen calls on local tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch.autograd.function import once_differentiable

from distfx.grid import Segment
from distfx.ir import volumes
from distfx.ir.layout import Window
from distfx.report import ledger
from distfx.runtime.comm.failure import CommunicationScope
from distfx.runtime.comm.transport import all_reduce
from distfx.runtime.kernels.autocast import autocast_dtype, autocast_operands
from distfx.runtime.kernels.formats import to_memory_format

__all__ = [
    "KERNELS",
    "BatchNorm",
    "Collective",
    "Statistics",
    "ZeroResult",
    "add_bias",
    "avg_pool",
    "conv_transpose",
    "convolution",
    "mean",
]


class _Zeros(torch.autograd.Function):
    """Zeros that depend on tensors: nothing to compute here, but backward must run on this rank as on the others."""

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
    """The kernel of a rank whose part is empty: zeros of the right shape (a sum over nothing, or no elements)."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype | None = None, product: bool = False) -> None:
        self.shape, self.dtype, self.product = shape, dtype, product
        self.__name__ = "zero"

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        dtype = autocast_dtype(tensors[0]) if self.product else self.dtype  # as the ranks have it that do compute
        return _Zeros.apply(self.shape, dtype, *tensors)


def add_bias(x: Tensor, bias: Tensor, *, dim: int) -> Tensor:
    """``x`` plus ``bias`` along ``dim``."""
    bias = bias.to(x.dtype)  # which autocast may have lowered
    return x + bias.view(-1, *(1,) * (x.dim() - 2)) if dim == 1 else x + bias


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, old: Tensor, new: Tensor) -> Tensor:
        return new.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def straight(old: Tensor, new: Tensor) -> Tensor:
    """The values of ``new`` with the gradient of ``old``, which was written under ``no_grad``."""
    result: Tensor = _Straight.apply(old, new)
    return result


def add_blocks(*blocks: Tensor) -> Tensor:
    """A concatenation along a split dim: each operand's part of this block, zero where others have theirs."""
    result = blocks[0]
    for block in blocks[1:]:
        result = result + block
    return result


def mean(x: Tensor, dims: Sequence[int], *, keepdim: bool, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over ``dims`` divided by the global ``count``, in float32 or better: this rank's part of a mean."""
    result = dtype or x.dtype
    wide = torch.promote_types(result, torch.float32)
    return (x.sum(list(dims), keepdim=keepdim, dtype=wide) / count).to(result)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, channels_last: bool) -> Tensor:
    """A convolution under autocast, too: on CPUs that knows ``conv2d`` and its like, but not what they call."""
    result: Tensor = torch.ops.aten.convolution(
        *autocast_operands(to_memory_format(x, channels_last), weight, bias), *rest
    )
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

    Input i adds to the outputs ``s*i - p + d*r``. Along a split dim the first input here is the first that reaches the
    block; what is computed of the neighbours' blocks is cut off, and outputs that no tap reaches are zero.
    """
    channels = weight.shape[1] * groups
    x, weight, bias = autocast_operands(x, weight, bias)
    if x.numel() == 0 or weight.numel() == 0 or min(size) == 0:
        result = ZeroResult((x.shape[0], channels, *size), product=True)(x, weight)
        return result if bias is None else add_bias(result, bias, dim=1)
    rank = len(size)
    pads, extra, cuts = [0] * rank, [0] * rank, []
    for i in range(rank):
        reach = dilation[i] * (weight.shape[2 + i] - 1)
        if split[i]:
            window = Window(lo=reach - padding[i] - stride[i] + 1, hi=padding[i] + stride[i] - 1, div=stride[i])
            first, _ = window.need(start[i], start[i] + size[i])
            cuts.append((2 + i, start[i] - (stride[i] * int(first) - padding[i]), size[i]))
        else:
            pads[i] = padding[i]
            extra[i] = size[i] - ((x.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + reach + 1)
    result = torch.convolution(
        x, weight, None, list(stride), pads, list(dilation), transposed=True, output_padding=extra, groups=groups
    )
    for dim, first, length in cuts:
        before, after = max(0, -first), max(0, first + length - result.shape[dim])
        if before or after:
            result = F.pad(result, [0, 0] * (result.dim() - 1 - dim) + [before, after])
        result = result.narrow(dim, max(0, first), length)
    return result if bias is None else add_bias(result, bias, dim=1)


def avg_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    include: bool,
    *,
    split: Sequence[bool],
    start: Sequence[int],
    size: Sequence[int],
    extent: Sequence[int],
) -> Tensor:
    """The block of an average pooling's output whose windows hold different numbers of elements.

    Each window's sum is divided by its count in the whole input: with its padding (``include``) or without.
    """
    if x.numel() == 0 or min(size) == 0:
        return ZeroResult((*x.shape[:2], *size))(x)
    rank = len(size)
    widths: list[int] = []
    wide = torch.promote_types(x.dtype, torch.float32)  # in half precision 257 is none
    scale = torch.ones((1,) * (rank), dtype=wide, device=x.device)
    for i in range(rank):
        k, s, p = kernel[i], stride[i], padding[i]
        widths = ([0, 0] if split[i] else [p, (size[i] - 1) * s + k - p - x.shape[2 + i]]) + widths
        low = (torch.arange(start[i], start[i] + size[i], device=x.device)) * s - p
        high = (low + k).clamp(max=extent[i] + p)
        count = high - low if include else high.clamp(max=extent[i]) - low.clamp(min=0)
        scale = scale * (k / count.to(wide)).view(-1, *(1,) * (rank - 1 - i))
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    return pool(F.pad(x, widths), tuple(kernel), tuple(stride)) * scale.to(x.dtype)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, start: int, scale: float | None = None, gqa: bool = False
) -> Tensor:
    """Attention of the queries from number ``start`` on, each to the keys up to its own number."""
    if q.numel() == 0:
        return ZeroResult((*q.shape[:-1], v.shape[-1]), product=True)(q, k, v)
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril_(start)
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=gqa)


class Collective:
    """What every kernel has that reduces over a segment: sums and extremes over it, entered into the ledger."""

    path: str | None = None
    """The layer's module path."""

    def __init__(self, name: str, segment: Segment, node: str) -> None:
        self.__name__ = name
        self.segment, self.node = segment, node

    def sum(self, value: Tensor, phase: str) -> Tensor:
        """The sum over the segment, in place."""
        return self.reduce(value, phase, "sum")

    def reduce(self, value: Tensor, phase: str, op: str) -> Tensor:
        """The sum, the greatest or the least values over the segment, in place."""
        ranks = self.segment.size
        if ranks == 1:
            return value
        sent = volumes.allreduce_bytes(value.numel() * value.element_size(), ranks)
        ledger.record(self.node, self.__name__, self.segment.axes, phase, sent, volumes.allreduce_messages(ranks))
        with CommunicationScope(self.__name__, self.node, self.path, self.segment, phase):
            all_reduce(self.segment, value, op).wait()
        return value


class Statistics(Collective):
    """What every norm over a segment has besides: the global count of what is averaged."""

    def __init__(self, name: str, segment: Segment, node: str, eps: float, count: int) -> None:
        super().__init__(name, segment, node)
        self.eps, self.count = eps, count


class BatchNorm(Statistics):
    """Batch norm in training with the statistics of the whole batch, over all ranks of a segment.

    The ranks' means and sums of squared deviations are merged by count (Chan et al.), in float32 or better: first the
    mean, then the deviations about it. Running statistics are updated as one device would; where the segment is not
    all ranks that have a part of the batch (``apart``), by the average of theirs, so that replicas stay alike.
    """

    def __init__(
        self,
        segment: Segment,
        node: str,
        momentum: float,
        eps: float,
        count: Sequence[int],
        apart: Segment | None = None,
    ) -> None:
        super().__init__("batch_norm", segment, node, eps, math.prod(count))
        self.momentum = momentum
        self.others = None if apart is None else Collective("batch_norm", apart, node)

    def running(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """What running statistics are moved towards."""
        if self.others is None:
            return mean, var
        self.others.path = self.path
        average = self.others.sum(torch.stack([mean, var]), "forward").div_(self.others.segment.size)
        return average[0], average[1]

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
        here = x.numel() // channels if channels else 0
        if here:
            local_mean, local_var = torch.batch_norm_update_stats(x.to(wide), None, None, 0.0)
        else:
            local_mean = local_var = x.new_zeros(channels, dtype=wide)
        mean = norm.sum(local_mean * here, "forward").div_(norm.count)
        square = norm.sum((local_var + (local_mean - mean).square_()) * here, "forward")
        var = square / norm.count
        if running_mean is not None and running_var is not None:
            towards_mean, towards_var = norm.running(mean, square / (norm.count - 1))
            running_mean.lerp_(towards_mean.to(running_mean.dtype), norm.momentum)
            running_var.lerp_(towards_var.to(running_var.dtype), norm.momentum)
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
            slope = torch.ones_like(mean) if weight is None else weight.to(wide)  # all of these CUDA's kernels ask for
            dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
                grad.to(wide), x.to(wide), slope, mean, var, mean, scale, False, norm.eps, [True, True, True]
            )
        else:
            dx, dweight, dbias = torch.empty_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
        if ctx.needs_input_grad[0]:
            sums = norm.sum(torch.stack([dbias, dweight]), "backward").div_(norm.count)
            shape = (1, -1, *(1,) * (x.dim() - 2))
            about = (x - mean.view(shape)).mul_((gain * scale * sums[1]).view(shape)).add_((gain * sums[0]).view(shape))
            dx = dx.sub_(about).to(x.dtype)
        kept = None if weight is None else weight.dtype
        dw = dweight.to(kept) if ctx.needs_input_grad[1] else None
        db = dbias.to(kept or wide) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None, None


def pick_class(values: Tensor, target: Tensor, ignored: int) -> Tensor:
    """At each position the value of the class (dim 1, or the only one) that ``target`` names; zero where ignored."""
    dim, absent = min(1, values.dim() - 1), target == ignored
    index = target.masked_fill(absent, 0).unsqueeze(dim)
    return values.gather(dim, index).squeeze(dim).masked_fill(absent, 0)


def class_weights(target: Tensor, weight: Tensor, ignored: int) -> Tensor:
    """At each position the weight of the class that ``target`` names; zero where it is ignored."""
    absent = target == ignored
    return weight[target.masked_fill(absent, 0)].masked_fill(absent, 0)


KERNELS: dict[str, Callable[..., Tensor]] = {
    "add_bias": add_bias,
    "mean": mean,
    "conv_transpose": conv_transpose,
    "avg_pool": avg_pool,
    "add_blocks": add_blocks,
    "straight": straight,
    "pick_class": pick_class,
    "class_weights": class_weights,
    "causal_attention": causal_attention,
}
"""The inserted operators that are local, by name."""
