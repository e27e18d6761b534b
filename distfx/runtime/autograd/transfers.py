"""Execution of transfers: :func:`start` begins one on a local tensor; waiting for it returns the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, singledispatch

import torch
from torch import Tensor

from distfx.grid import Segment
from distfx.ir.exchange import Selection
from distfx.ir.moves import DimExchange, FirstRankOnly, Identity, Narrow, Reduce, Transfer, Transpose, ZeroPad
from distfx.runtime.comm.transport import (
    Pending,
    Ready,
    Work,
    all_gather_even,
    all_reduce,
    has_native_gather,
    reduce_scatter_even,
    send_receive,
)
from distfx.runtime.kernels.formats import memory_order, new_empty

__all__ = ["pack", "place", "start"]


class _InFlight(Pending[Tensor]):
    """A transfer whose result is ``finish()`` once all works are done. Keeps the buffers alive until then."""

    def __init__(self, works: list[Work], finish: Callable[[], Tensor], buffers: list[Tensor]) -> None:
        self.works, self.finish, self.buffers = works, finish, buffers

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        result = self.finish()
        self.buffers.clear()
        return result


@singledispatch
def start(transfer: Transfer, x: Tensor, segment: Segment, channels_last: bool = False) -> Pending[Tensor]:
    """Start ``transfer`` on the local tensor ``x``.

    ``channels_last``: store the result channels last. It must be the same on all ranks.
    """
    raise TypeError(f"transfers of type {type(transfer).__name__} cannot be executed")


@start.register
def _(transfer: Identity, x: Tensor, segment: Segment, channels_last: bool = False) -> Pending[Tensor]:
    return Ready(x)


@start.register
def _(transfer: FirstRankOnly, x: Tensor, segment: Segment, channels_last: bool = False) -> Pending[Tensor]:
    return Ready(x if transfer.keep else torch.zeros_like(x))


@start.register
def _(transfer: Narrow, x: Tensor, segment: Segment, channels_last: bool = False) -> Pending[Tensor]:
    return Ready(x.narrow(transfer.dim, transfer.lo, transfer.after[transfer.dim]))


@start.register
def _(transfer: ZeroPad, x: Tensor, segment: Segment, channels_last: bool = False) -> Pending[Tensor]:
    result = new_empty(transfer.after, x, channels_last).zero_()
    result.narrow(transfer.dim, transfer.lo, transfer.before[transfer.dim]).copy_(x)
    return Ready(result)


@start.register
def _(transfer: Reduce, x: Tensor, segment: Segment, channels_last: bool = False) -> Pending[Tensor]:
    order, inverse = memory_order(x.dim(), channels_last)
    result = x.permute(order).clone(memory_format=torch.contiguous_format)
    return _InFlight([all_reduce(segment, result)], lambda: result.permute(inverse), [result])


# -- exchanges along one dim


@lru_cache(maxsize=4096)
def _index(positions: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a later call may save it for backward
        return torch.tensor(positions, device=device)


def pack(x: Tensor, dim: int, message: Selection) -> Tensor:
    """The positions of ``message`` as one contiguous tensor. Copied only if they are not contiguous already."""
    if message.runs is None:
        assert message.positions is not None
        return x.index_select(dim, _index(message.positions, x.device)).contiguous()
    if len(message.runs) == 1:
        return x.narrow(dim, *message.runs[0]).contiguous()
    return torch.cat([x.narrow(dim, *run) for run in message.runs], dim)


def place(result: Tensor, dim: int, message: Selection, value: Tensor, *, add: bool) -> None:
    """Write ``value`` to the positions of ``message`` in ``result``, or add it there."""
    if message.runs is None:
        assert message.positions is not None
        index = _index(message.positions, result.device)
        result.index_add_(dim, index, value) if add else result.index_copy_(dim, index, value)
        return
    offset = 0
    for first, length in message.runs:
        part, piece = result.narrow(dim, first, length), value.narrow(dim, offset, length)
        part.add_(piece) if add else part.copy_(piece)
        offset += length


def _receive_buffer(result: Tensor, dim: int, message: Selection) -> tuple[Tensor, bool]:
    """The buffer that receives a message, and whether it is a slice of ``result``. Such a slice must be contiguous."""
    if message.runs is not None and len(message.runs) == 1:
        view = result.narrow(dim, *message.runs[0])
        if view.is_contiguous():
            return view, True
    shape = (*result.shape[:dim], message.length, *result.shape[dim + 1 :])
    return torch.empty(shape, dtype=result.dtype, device=result.device), False


@start.register
def _(transfer: DimExchange, x: Tensor, segment: Segment, channels_last: bool = False) -> Pending[Tensor]:
    if _is_even_gather(transfer, segment) and has_native_gather(segment, x):
        run = _start_native_reduce_scatter if transfer.adjoint else _start_native_gather
    else:
        run = _start_adjoint_exchange if transfer.adjoint else _start_exchange
    return run(transfer, x, segment, channels_last)


def _start_exchange(transfer: DimExchange, x: Tensor, segment: Segment, channels_last: bool) -> Pending[Tensor]:
    schedule, dim = transfer.schedule, transfer.dim
    if (run := schedule.local_slice) is not None:
        return Ready(x if run == (0, x.shape[dim]) else x.narrow(dim, *run))
    result = new_empty(transfer.after, x, channels_last)
    sends = [(peer, pack(x, dim, message)) for peer, message in schedule.send] if transfer.messages else []
    targets = [(peer, message, *_receive_buffer(result, dim, message)) for peer, message in schedule.receive]
    receives = [(peer, buffer) for peer, _, buffer, _ in targets] if result.numel() else []
    works = send_receive(segment, sends, receives)
    if schedule.keep[0].length:
        source, target = schedule.keep
        value = x.narrow(dim, *source.runs[0]) if source.runs and len(source.runs) == 1 else pack(x, dim, source)
        place(result, dim, target, value, add=False)
    if schedule.fill.length:
        _fill(result, dim, schedule.fill, transfer.fill)

    def finish() -> Tensor:
        for _, message, buffer, direct in targets:
            if not direct:
                place(result, dim, message, buffer, add=False)
        return result

    return _InFlight(works, finish, [x, result, *(t for _, t in sends), *(t for _, t in receives)])


def _fill(result: Tensor, dim: int, message: Selection, value: float) -> None:
    if not result.dtype.is_floating_point and math.isinf(value):  # the least and greatest integer instead
        limits = torch.iinfo(result.dtype)
        value = limits.min if value < 0 else limits.max
    if message.runs is None:
        assert message.positions is not None
        result.index_fill_(dim, _index(message.positions, result.device), value)
        return
    for run in message.runs:
        result.narrow(dim, *run).fill_(value)


def _start_adjoint_exchange(transfer: DimExchange, x: Tensor, segment: Segment, channels_last: bool) -> Pending[Tensor]:
    """Send back the gradients of received positions, and add them where the positions came from."""
    schedule, dim = transfer.schedule, transfer.dim
    if (run := schedule.local_slice) is not None:
        return Ready(x if run == (0, schedule.owned) else _zero_pad(transfer, x, run[0], channels_last))
    sends = [(peer, pack(x, dim, message)) for peer, message in schedule.receive] if transfer.messages else []
    shape = transfer.after
    receives = []
    for peer, message in schedule.send:
        buffer = torch.empty((*shape[:dim], message.length, *shape[dim + 1 :]), dtype=x.dtype, device=x.device)
        receives.append((peer, buffer))
    works = send_receive(segment, sends, receives if not receives or receives[0][1].numel() else [])
    source, target = schedule.keep
    if source.runs == ((0, schedule.owned),) and target.runs is not None and len(target.runs) == 1:
        result = new_empty(transfer.after, x, channels_last).copy_(x.narrow(dim, *target.runs[0]))
    else:
        result = new_empty(transfer.after, x, channels_last).zero_()
        if source.length:
            place(result, dim, source, pack(x, dim, target), add=True)

    def finish() -> Tensor:
        for (_, message), (_, buffer) in zip(schedule.send, receives, strict=True):
            place(result, dim, message, buffer, add=True)
        return result

    return _InFlight(works, finish, [x, *(t for _, t in sends)])


def _zero_pad(transfer: DimExchange, x: Tensor, lo: int, channels_last: bool) -> Tensor:
    result = new_empty(transfer.after, x, channels_last).zero_()
    result.narrow(transfer.dim, lo, x.shape[transfer.dim]).copy_(x)
    return result


# -- even gathers on backends with a native one


def _is_even_gather(transfer: DimExchange, segment: Segment) -> bool:
    """Whether equal parts are gathered in rank order. The answer is the same on all members of the segment."""
    return transfer.schedule.even and list(segment.members) == sorted(segment.members)


def _start_native_gather(transfer: DimExchange, x: Tensor, segment: Segment, channels_last: bool) -> Pending[Tensor]:
    order, inverse = memory_order(x.dim(), channels_last)
    part, dim = x.permute(order).contiguous(), order.index(transfer.dim)
    gathered = torch.empty((segment.size, *part.shape), dtype=x.dtype, device=x.device)
    work = all_gather_even(segment, gathered, part)

    def finish() -> Tensor:
        return gathered.movedim(0, dim).flatten(dim, dim + 1).contiguous().permute(inverse)

    return _InFlight([work], finish, [part, gathered])


def _start_native_reduce_scatter(
    transfer: DimExchange, x: Tensor, segment: Segment, channels_last: bool
) -> Pending[Tensor]:
    order, inverse = memory_order(x.dim(), channels_last)
    dim = order.index(transfer.dim)
    parts = x.permute(order).unflatten(dim, (segment.size, transfer.schedule.owned)).movedim(dim, 0).contiguous()
    result = torch.empty(parts.shape[1:], dtype=x.dtype, device=x.device)
    work = reduce_scatter_even(segment, result, parts)
    return _InFlight([work], lambda: result.permute(inverse), [parts, result])


# -- all-to-all between two dims


@start.register
def _(transfer: Transpose, x: Tensor, segment: Segment, channels_last: bool = False) -> Pending[Tensor]:
    result = new_empty(transfer.after, x, channels_last)
    sends, receives, copies = [], [], []
    for peer in range(segment.size):
        lo, hi = transfer.split_cuts[peer]
        block = x.narrow(transfer.split_dim, lo, hi - lo)
        begin, end = transfer.gather_cuts[peer]
        target = result.narrow(transfer.gather_dim, begin, end - begin)
        if peer == transfer.me:
            target.copy_(block)
            continue
        if block.numel():
            sends.append((peer, block.contiguous()))
        if target.numel():
            buffer = torch.empty(target.shape, dtype=x.dtype, device=x.device)
            receives.append((peer, buffer))
            copies.append((target, buffer))
    works = send_receive(segment, sends, receives)

    def finish() -> Tensor:
        for target, buffer in copies:
            target.copy_(buffer)
        return result

    return _InFlight(works, finish, [x, result, *(t for _, t in sends)])
