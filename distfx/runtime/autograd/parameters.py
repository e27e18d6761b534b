"""Parameters as shards: DTensors on one mesh, and the reduction of their gradients.

A parameter's gradient is summed only over the ranks that hold the same shard and used it in different ways. Gradients
are reduced in buckets, asynchronously, as backward produces them. Autograd runs nodes in the
reverse order of their creation, so each bucket goes through two functions: :class:`_WaitForReduction` before the
forward pass, and :class:`_StartReduction` just before its first use. In backward, ``_StartReduction`` runs as soon as
the bucket's gradients are there and starts the reduction; ``_WaitForReduction`` runs when all other work is done, and
waits for it. Hooks, gradient accumulation and ``autograd.grad`` therefore see finished gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distfx.errors import DistfxError
from distfx.grid import Grid, Segment
from distfx.ir import volumes
from distfx.ir.buckets import Bucket
from distfx.ir.layout import Layout
from distfx.report import ledger
from distfx.runtime.comm.failure import CommunicationScope
from distfx.runtime.comm.transport import Work, all_reduce, send_receive
from distfx.runtime.kernels.formats import empty, is_channels_last, memory_order

__all__ = ["BeforeBackward", "Gradients", "SegmentBucket", "distribute", "placements", "to_dtensor"]

# ---------------------------------------------------------------------------------------------------- shards


def placements(layout: Layout, mesh: DeviceMesh) -> list[Placement]:
    """The DTensor placements of a stored parameter's layout."""
    dims = [layout.dim_of(axis) for axis in mesh.mesh_dim_names or ()]
    return [Replicate() if dim is None else Shard(dim) for dim in dims]


def to_dtensor(local: Tensor, like_shape: torch.Size, layout: Layout, grid: Grid) -> DTensor:
    """A DTensor of global shape ``like_shape`` whose part on this rank is ``local``."""
    strides, mesh = torch.empty(like_shape, device="meta").stride(), grid.parameter_mesh
    placed = placements(layout, mesh)
    made = DTensor.from_local(local, mesh, placed, run_check=False, shape=like_shape, stride=strides)
    return DTensor(local, made._spec, requires_grad=False)  # ``made`` has a view, of other strides where a size is one


def distribute(value: Tensor, layout: Layout, grid: Grid, *, broadcast: bool) -> DTensor:
    """This rank's shard of ``value``, of rank 0's if ``broadcast``. ``value`` itself is left as it was."""
    whole, settled = value.detach(), layout.storage()
    device = grid.device

    def part(rank: int) -> Tensor:
        mine = whole
        for dim, (lo, hi) in enumerate(settled.bounds(whole.shape, grid.placement(rank))):
            mine = mine.narrow(dim, int(lo), int(hi - lo))
        return mine

    own = part(grid.rank)
    shard = empty(own.shape, whole, is_channels_last(whole), device)
    if broadcast and grid.size > 1:
        with CommunicationScope(f"broadcast of a parameter of shape {tuple(value.shape)}"):
            shard.copy_(_from_first(part, own, settled, grid, device))
    else:
        shard.copy_(own)
    return to_dtensor(shard, value.shape, layout, grid)


def _from_first(part: Callable[[int], Tensor], own: Tensor, layout: Layout, grid: Grid, device: torch.device) -> Tensor:
    """This rank's part as rank 0 has it, of whose ``own`` it has the shape: no rank takes more than its shard.

    Rank 0 sends each shard to the first of the ranks that have it, which broadcasts it to the others.
    """
    shards = grid.segment(tuple(axis for axis in grid.axes if layout.dim_of(axis) is not None))
    copies = grid.segment(tuple(axis for axis in grid.axes if layout.dim_of(axis) is None))
    mine = own.to(device, copy=True).contiguous()
    if copies.index == 0 and shards.index == 0:
        for member in range(1, shards.size):
            other = part(shards.members[member]).to(device).contiguous()
            _wait(send_receive(shards, [(member, other)] if other.numel() else [], []))
    elif copies.index == 0:
        _wait(send_receive(shards, [], [(0, mine)] if mine.numel() else []))
    if copies.size > 1 and mine.numel():
        dist.broadcast(mine, src=copies.members[0], group=copies.group)
    return mine


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


# ------------------------------------------------------------------------------------------------- gradients


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


def _laid_as(grad: Tensor, param: Tensor) -> Tensor:
    """A gradient as its parameter lies in memory; a copy only where it does not."""
    strides = zip(grad.stride(), param.stride(), grad.shape, strict=True)
    if all(mine == its or size == 1 for mine, its, size in strides):
        return grad
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad)


class _BucketReduction:
    """The reduction of one bucket's gradients in one backward pass."""

    def __init__(self, target: SegmentBucket, params: Sequence[Tensor]) -> None:
        self.target, self.bucket = target, target.bucket
        self.params = params
        """The shards: their gradients lie in memory as they do, which fused optimizers take for granted."""
        self.work: Work | None = None
        self.flat: Tensor | None = None

    def start(self, given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Start summing gradients, of those parameters that have one; gives views of the buffer of the sums."""
        segment = self.target.segment
        if segment.size == 1:
            return tuple(given)
        orders = [memory_order(param.dim(), self.bucket.channels_last) for param in self.params]
        grads = [grad.permute(order) for grad, (order, _) in zip(given, orders, strict=True) if grad is not None]
        if not grads:
            return tuple(given)
        if len(grads) == 1 and grads[0].is_contiguous():
            self.flat = grads[0] if self.bucket.may_overwrite else grads[0].clone()
        else:
            self.flat = torch.cat([grad.reshape(-1) for grad in grads])
        sent = volumes.allreduce_bytes(self.flat.numel() * self.flat.element_size(), segment.size)
        messages = volumes.allreduce_messages(segment.size)
        ledger.record(self.bucket.label, "all_reduce", segment.axes, "backward", sent, messages)
        with self.target.scope():
            self.work = all_reduce(segment, self.flat)
        sizes = [grad.numel() for grad in grads]
        parts = iter(self.flat.reshape(-1).split(sizes))
        turned = iter([part.view(grad.shape) for part, grad in zip(parts, grads, strict=True)])
        return tuple(
            None if grad is None else next(turned).permute(back) for grad, (_, back) in zip(given, orders, strict=True)
        )

    def wait(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The sums, in the views that ``start`` gave."""
        if self.work is not None:
            with self.target.scope():
                self.work.wait()
        self.work = self.flat = None
        pairs = zip(grads, self.params, strict=True)
        return [None if grad is None else _laid_as(grad, param) for grad, param in pairs]


class _WaitForReduction(torch.autograd.Function):
    """From DTensors to their local tensors. Back: waits, and gives the gradients as DTensors."""

    @staticmethod
    def forward(ctx: Any, reduction: _BucketReduction, *params: DTensor) -> tuple[Tensor, ...]:
        ctx.reduction = reduction
        ctx.set_materialize_grads(False)  # a parameter that took no part has no gradient, as on one device
        ctx.specs = [p._spec for p in params]
        return tuple(p._local_tensor.detach() for p in params)  # as to_local, which takes 10 us for each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[DTensor | None, ...]:
        triples = zip(ctx.reduction.wait(grads), ctx.specs, ctx.needs_input_grad[1:], strict=True)
        # placed as the parameter is; DTensor.from_local derives that anew, which takes some 70 us for each
        wrapped = (DTensor(g, s, requires_grad=False) if g is not None and needed else None for g, s, needed in triples)
        return (None, *wrapped)


class _StartReduction(torch.autograd.Function):
    """The identity on local tensors. Back: starts the reduction of the gradients."""

    @staticmethod
    def forward(ctx: Any, reduction: _BucketReduction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reduction = reduction
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # with the very strides, which ``view_as`` may change

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.reduction.start(grads))


class Gradients:
    """The parameters and buffers of one forward pass, as local tensors; created before it."""

    def __init__(self, tensors: Mapping[str, DTensor], buckets: Sequence[SegmentBucket], seed: int = 0) -> None:
        self.tensors = tensors
        self.seed = seed
        """What the random operators of this pass draw from."""
        self.waiting: list[tuple[_BucketReduction, tuple[Tensor, ...]] | None] = []
        for target in buckets:
            params = [tensors[name] for name in target.bucket.names]
            if torch.is_grad_enabled() and any(p.requires_grad for p in params):
                reduction = _BucketReduction(target, [p._local_tensor for p in params])
                self.waiting.append((reduction, _WaitForReduction.apply(reduction, *params)))
            else:
                self.waiting.append(None)
        self.buckets = buckets

    def bucket(self, index: int) -> tuple[Tensor, ...]:
        """The local tensors of a bucket, at its first use."""
        taken = self.waiting[index]
        if taken is None:
            with torch.no_grad():
                return tuple(self.tensors[name].to_local() for name in self.buckets[index].bucket.names)
        reduction, tensors = taken
        return _StartReduction.apply(reduction, *tensors)

    def plain(self, name: str) -> Tensor:
        """The local tensor of a buffer, or of a parameter without gradient."""
        with torch.no_grad():
            return self.tensors[name].to_local()


class BeforeBackward:
    """A hook on the outputs of a forward pass, which runs before anything else does, going back."""

    def __init__(self, held: Iterable[DTensor]) -> None:
        self.held = [(tensor, tensor._version) for tensor in held]

    def __call__(self, grad: Tensor) -> None:
        if torch._C._functorch.is_batchedtensor(grad) or torch._C._functorch.is_legacy_batchedtensor(grad):
            raise DistfxError(
                "gradients of many functions at once (vmap, jacobian(..., vectorize=True)) would need messages of as "
                "many: take one after the other"
            )
        # DTensor counts changes of the whole (not those of foreach and fused optimizers), autograd looks at the part
        # that was saved: what it says then is true
        changed = [tensor._local_tensor for tensor, version in self.held if tensor._version != version]
        torch.autograd.graph.increment_version(changed)
        self.held = [(tensor, tensor._version) for tensor, _ in self.held]  # the graph may be gone through again
