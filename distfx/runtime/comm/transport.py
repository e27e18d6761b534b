"""Messages inside a segment: one batch of sends and receives, and the allreduce, on whatever backend there is.

Gathers, scatters, halos and all-to-alls are all batches of point-to-point messages of known size, so uneven parts need
no padding and no metadata is ever sent. The backend's native gather and reduce-scatter are used where it has fast
ones (NCCL) and the parts are even.
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
    """What ``torch.distributed`` hands out for an operation in flight."""

    def wait(self) -> Any: ...


class Message:
    """One message of a batch; its error says with whom."""

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
    """A communication in flight. ``wait`` finishes it and gives its result."""

    def wait(self) -> T:
        raise NotImplementedError


class Ready(Pending[Tensor]):
    """A result that needed no communication."""

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result


def has_native_gather(segment: Segment, tensor: Tensor) -> bool:
    """Whether even gathers and reduce-scatters should go to the backend as such: NCCL's rings beat many messages."""
    return tensor.is_cuda and segment.nccl


def send_receive(
    segment: Segment, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
) -> list[Work]:
    """Start all messages at once: ``(member, contiguous tensor)`` each. Wait for every work that is returned."""
    if not sends and not receives:
        return []
    group, ranks = segment.group, segment.group_ranks
    if segment.nccl and (sends or receives)[0][1].is_cuda:  # whose messages wait for each other unless in one batch
        ops = [dist.P2POp(dist.irecv, t, group=group, group_peer=ranks[m]) for m, t in receives]
        ops += [dist.P2POp(dist.isend, t, group=group, group_peer=ranks[m]) for m, t in sends]
        return list(dist.batch_isend_irecv(ops))
    members = segment.members
    works: list[Work] = [Message(group.recv([t], ranks[m], 0), members[m]) for m, t in receives]
    works += [Message(group.send([t], ranks[m], 0), members[m]) for m, t in sends]
    return works


_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(segment: Segment, tensor: Tensor, op: str = "sum") -> Work:
    """Start summing ``tensor`` in place over the segment, or taking its greatest or least values."""
    return dist.all_reduce(tensor, _REDUCTIONS[op], group=segment.group, async_op=True)


def all_gather_even(segment: Segment, result: Tensor, part: Tensor) -> Work:
    """Start gathering equal parts into ``result``, whose first dim counts the members."""
    return dist.all_gather_single(result.flatten(0, 1), part, group=segment.group, async_op=True)


def reduce_scatter_even(segment: Segment, result: Tensor, parts: Tensor) -> Work:
    """Start summing ``parts``, whose first dim counts the members, each member receiving its own."""
    return dist.reduce_scatter_single(result, parts.flatten(0, 1), group=segment.group, async_op=True)
