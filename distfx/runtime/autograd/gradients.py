"""The reduction of parameter gradients, in buckets, while backward runs.

A parameter's gradient is summed only over the ranks that store the same shard and used it on different data. Autograd
runs nodes in the reverse order of their creation, so each bucket passes through two functions:
:class:`_WaitForReduction` before the forward pass, and :class:`_StartReduction` just before the bucket's first use. In
backward, ``_StartReduction`` runs as soon as all gradients of the bucket exist, and starts the reduction.
``_WaitForReduction`` runs after all other work, and waits. Hooks, gradient accumulation and ``autograd.grad`` therefore
see reduced gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from distfx.errors import DistfxError
from distfx.grid import Grid, Segment
from distfx.ir import volumes
from distfx.ir.buckets import Bucket
from distfx.report import ledger
from distfx.runtime.autograd.dtensor import is_batched, local_tensor, spec_of, wrap
from distfx.runtime.comm.failure import CommunicationScope
from distfx.runtime.comm.transport import Work, all_reduce
from distfx.runtime.kernels.formats import memory_order

__all__ = ["BackwardGuard", "Gradients", "SegmentBucket"]


@dataclass(frozen=True)
class SegmentBucket:
    """A bucket with the segment over which its gradients are summed."""

    bucket: Bucket
    segment: Segment

    @classmethod
    def of(cls, bucket: Bucket, grid: Grid) -> SegmentBucket:
        return cls(bucket, grid.segment(bucket.axes))

    def scope(self) -> CommunicationScope:
        """The scope of the allreduce. Its path is the names of the first and last parameter."""
        names = " ... ".join(dict.fromkeys((self.bucket.names[0], self.bucket.names[-1])))
        return CommunicationScope("all_reduce", self.bucket.label, names, self.segment, "backward")


def _match_strides(grad: Tensor, shard: Tensor) -> Tensor:
    """``grad`` with the strides of ``shard``. Copied only if they differ."""
    strides = zip(grad.stride(), shard.stride(), grad.shape, strict=True)
    if all(a == b or size == 1 for a, b, size in strides):
        return grad
    return torch.empty_like(shard, dtype=grad.dtype).copy_(grad)


class _BucketReduction:
    """The reduction of one bucket's gradients in one backward pass."""

    def __init__(self, target: SegmentBucket, shards: Sequence[Tensor]) -> None:
        self.target, self.bucket = target, target.bucket
        self.shards = shards
        """The local parameters. Their gradients get the same strides, because fused optimizers assume that."""
        self.work: Work | None = None
        self.flat: Tensor | None = None

    def start(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Start summing the gradients that exist. Returns views of the buffer that will hold the sums."""
        segment = self.target.segment
        if segment.size == 1:
            return tuple(grads)
        orders = [memory_order(shard.dim(), self.bucket.channels_last) for shard in self.shards]
        stored = [grad.permute(order) for grad, (order, _) in zip(grads, orders, strict=True) if grad is not None]
        if not stored:
            return tuple(grads)
        if len(stored) == 1 and stored[0].is_contiguous():
            self.flat = stored[0] if self.bucket.may_overwrite else stored[0].clone()
        else:
            self.flat = torch.cat([grad.reshape(-1) for grad in stored])
        sent = volumes.allreduce_bytes(self.flat.numel() * self.flat.element_size(), segment.size)
        messages = volumes.allreduce_messages(segment.size)
        ledger.record(self.bucket.label, "all_reduce", segment.axes, "backward", sent, messages)
        with self.target.scope():
            self.work = all_reduce(segment, self.flat)
        slices = self.flat.reshape(-1).split([grad.numel() for grad in stored])
        sums = iter([part.view(grad.shape) for part, grad in zip(slices, stored, strict=True)])
        return tuple(
            None if grad is None else next(sums).permute(inverse)
            for grad, (_, inverse) in zip(grads, orders, strict=True)
        )

    def wait(self, sums: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Wait until ``sums``, the views that ``start`` returned, hold the sums."""
        if self.work is not None:
            with self.target.scope():
                self.work.wait()
        self.work = self.flat = None
        pairs = zip(sums, self.shards, strict=True)
        return [None if grad is None else _match_strides(grad, shard) for grad, shard in pairs]


class _WaitForReduction(torch.autograd.Function):
    """Forward: DTensors to local tensors. Backward: wait, and wrap the gradients as DTensors."""

    @staticmethod
    def forward(ctx: Any, reduction: _BucketReduction, *params: DTensor) -> tuple[Tensor, ...]:
        ctx.reduction = reduction
        ctx.set_materialize_grads(False)  # an unused parameter has no gradient, as on one device
        ctx.specs = [spec_of(param) for param in params]
        return tuple(local_tensor(param).detach() for param in params)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[DTensor | None, ...]:
        triples = zip(ctx.reduction.wait(grads), ctx.specs, ctx.needs_input_grad[1:], strict=True)
        return (None, *(wrap(grad, spec) if grad is not None and needed else None for grad, spec, needed in triples))


class _StartReduction(torch.autograd.Function):
    """Forward: the identity on local tensors. Backward: start the reduction of the gradients."""

    @staticmethod
    def forward(ctx: Any, reduction: _BucketReduction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reduction = reduction
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # keeps the strides; view_as may change them

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.reduction.start(grads))


class Gradients:
    """The parameters and buffers of one forward pass as local tensors, with the reduction of their gradients.

    Create it before the forward pass: backward then waits for the reductions last.
    """

    def __init__(self, tensors: Mapping[str, DTensor], buckets: Sequence[SegmentBucket], seed: int = 0) -> None:
        self.tensors, self.buckets = tensors, buckets
        self.seed = seed
        """The seed of the random operators of this pass."""
        self.reductions: list[tuple[_BucketReduction, tuple[Tensor, ...]] | None] = []
        """For each bucket that needs gradients, its reduction and its local tensors."""
        for target in buckets:
            params = [tensors[name] for name in target.bucket.names]
            if torch.is_grad_enabled() and any(param.requires_grad for param in params):
                reduction = _BucketReduction(target, [local_tensor(param) for param in params])
                self.reductions.append((reduction, _WaitForReduction.apply(reduction, *params)))
            else:
                self.reductions.append(None)

    def bucket(self, index: int) -> tuple[Tensor, ...]:
        """The local tensors of a bucket. Call it at the bucket's first use."""
        entry = self.reductions[index]
        if entry is None:
            with torch.no_grad():
                return tuple(self.tensors[name].to_local() for name in self.buckets[index].bucket.names)
        reduction, tensors = entry
        return _StartReduction.apply(reduction, *tensors)

    def without_gradient(self, name: str) -> Tensor:
        """The local tensor of a buffer, or of a parameter that needs no gradient."""
        with torch.no_grad():
            return self.tensors[name].to_local()


class BackwardGuard:
    """A hook on the outputs of a forward pass. It runs before the rest of backward.

    It rejects batched gradients, and lets autograd notice parameters that were modified since the forward pass.
    """

    def __init__(self, parameters: Iterable[DTensor]) -> None:
        self.versions = [(tensor, tensor._version) for tensor in parameters]

    def __call__(self, grad: Tensor) -> None:
        if is_batched(grad):
            raise DistfxError(
                "vmap and jacobian(..., vectorize=True) compute the gradients of many functions at once, and moves "
                "cannot send batched gradients: compute one gradient after the other"
            )
        # An in-place operation raises the version of the DTensor, but autograd saved the local tensor and compares its
        # version. (Foreach and fused optimizers raise neither.)
        changed = [local_tensor(tensor) for tensor, version in self.versions if tensor._version != version]
        torch.autograd.graph.increment_version(changed)
        self.versions = [(tensor, tensor._version) for tensor, _ in self.versions]  # for another backward
