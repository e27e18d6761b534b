"""Communication within a segment, on any backend: batches of sends and receives, and the allreduce.

Gathers, scatters, halos and all-to-alls are batches of point-to-point messages whose sizes are known. So uneven parts
need no padding, and no metadata is sent. For even parts on NCCL, whose rings are faster than many messages, the native
gather and reduce-scatter are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from distfx.grid import Segment

__all__ = ["Pending", "Ready", "Work", "all_reduce", "has_native_gather", "send_receive"]


T = TypeVar("T")


class Work(Protocol):
    """An operation in flight, as returned by ``torch.distributed``."""

    def wait(self) -> Any: ...


class PeerWork:
    """One message of a batch. Its errors carry the rank of the peer."""

    __slots__ = ("peer", "work")

    def __init__(self, work: Work, peer: int) -> None:
        self.work, self.peer = work, peer

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            error.peer = self.peer  # type: ignore[attr-defined]
            raise


class Pending(Generic[T]):
    """A communication in flight. ``wait`` completes it and returns its result."""

    def wait(self) -> T:
        raise NotImplementedError


class Ready(Pending[Tensor]):
    """A result that needs no communication."""

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result


def has_native_gather(segment: Segment, tensor: Tensor) -> bool:
    """Whether even gathers and reduce-scatters should use the native collective of the backend."""
    return tensor.is_cuda and segment.nccl


def send_receive(
    segment: Segment, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
) -> list[Work]:
    """Start all messages, each ``(member, contiguous tensor)``, and return the works to wait for."""
    if not sends and not receives:
        return []
    group, ranks = segment.group, segment.group_ranks
    if segment.nccl and (sends or receives)[0][1].is_cuda:  # NCCL needs one batch, or messages wait for each other
        ops = [dist.P2POp(dist.irecv, t, group=group, group_peer=ranks[m]) for m, t in receives]
        ops += [dist.P2POp(dist.isend, t, group=group, group_peer=ranks[m]) for m, t in sends]
        return list(dist.batch_isend_irecv(ops))
    members = segment.members
    works: list[Work] = [PeerWork(group.recv([t], ranks[m], 0), members[m]) for m, t in receives]
    works += [PeerWork(group.send([t], ranks[m], 0), members[m]) for m, t in sends]
    return works


_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(segment: Segment, tensor: Tensor, op: str = "sum") -> Work:
    """Start reducing ``tensor`` in place over the segment: ``"sum"``, ``"max"`` or ``"min"``."""
    return dist.all_reduce(tensor, _REDUCTIONS[op], group=segment.group, async_op=True)


def all_gather_even(segment: Segment, result: Tensor, part: Tensor) -> Work:
    """Start gathering parts of equal size into ``result``, whose first dim has one entry per member."""
    return dist.all_gather_single(result.flatten(0, 1), part, group=segment.group, async_op=True)


def reduce_scatter_even(segment: Segment, result: Tensor, parts: Tensor) -> Work:
    """Start summing ``parts``, whose first dim has one entry per member. Each member receives its own entry."""
    return dist.reduce_scatter_single(result, parts.flatten(0, 1), group=segment.group, async_op=True)
