"""Executing the halves of moves: from a local tensor to a communication in flight to its result."""

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
from distfx.runtime.kernels.formats import empty, memory_order

__all__ = ["pack", "place", "start"]


class _InFlight(Pending[Tensor]):
    """Waits for all works, then runs ``finish``, which gives the result. Holds every buffer until then."""

    def __init__(self, works: list[Work], finish: Callable[[], Tensor], buffers: list[Tensor]) -> None:
        self.works, self.finish, self.buffers = works, finish, buffers

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        result = self.finish()
        self.buffers.clear()
        return result


@singledispatch
def start(half: Transfer, x: Tensor, segment: Segment, last: bool = False) -> Pending[Tensor]:
    """Start ``half`` on the local tensor ``x``; ``last``: images lie channels last, on all ranks alike."""
    raise TypeError(f"no way to run {type(half).__name__}")


@start.register
def _(half: Identity, x: Tensor, segment: Segment, last: bool = False) -> Pending[Tensor]:
    return Ready(x)


@start.register
def _(half: FirstRankOnly, x: Tensor, segment: Segment, last: bool = False) -> Pending[Tensor]:
    return Ready(x if half.keep else torch.zeros_like(x))


@start.register
def _(half: Narrow, x: Tensor, segment: Segment, last: bool = False) -> Pending[Tensor]:
    return Ready(x.narrow(half.dim, half.lo, half.after[half.dim]))


@start.register
def _(half: ZeroPad, x: Tensor, segment: Segment, last: bool = False) -> Pending[Tensor]:
    result = empty(half.after, x, last).zero_()
    result.narrow(half.dim, half.lo, half.before[half.dim]).copy_(x)
    return Ready(result)


@start.register
def _(half: Reduce, x: Tensor, segment: Segment, last: bool = False) -> Pending[Tensor]:
    order, back = memory_order(x.dim(), last)
    result = x.permute(order).clone(memory_format=torch.contiguous_format)
    return _InFlight([all_reduce(segment, result)], lambda: result.permute(back), [result])


# -- along one dim


@lru_cache(maxsize=4096)
def _index(positions: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a later call may save it for backward
        return torch.tensor(positions, device=device)


def pack(x: Tensor, dim: int, message: Selection) -> Tensor:
    """The positions of ``message`` as one contiguous tensor; without a copy where they lie so."""
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


def _landing(result: Tensor, dim: int, message: Selection) -> tuple[Tensor, bool]:
    """Where a message is received: straight into ``result`` where that is contiguous, else a buffer to be placed."""
    if message.runs is not None and len(message.runs) == 1:
        view = result.narrow(dim, *message.runs[0])
        if view.is_contiguous():
            return view, True
    shape = (*result.shape[:dim], message.length, *result.shape[dim + 1 :])
    return torch.empty(shape, dtype=result.dtype, device=result.device), False


@start.register
def _(half: DimExchange, x: Tensor, segment: Segment, last: bool = False) -> Pending[Tensor]:
    if _even_gather(half, segment) and has_native_gather(segment, x):
        return _native_scatter(half, x, segment, last) if half.adjoint else _native_gather(half, x, segment, last)
    return _turned(half, x, segment, last) if half.adjoint else _straight(half, x, segment, last)


def _straight(half: DimExchange, x: Tensor, segment: Segment, last: bool) -> Pending[Tensor]:
    plan, dim = half.schedule, half.dim
    if (run := plan.local_slice) is not None:
        return Ready(x if run == (0, x.shape[dim]) else x.narrow(dim, *run))
    result = empty(half.after, x, last)
    sends = [(peer, pack(x, dim, message)) for peer, message in plan.send] if half.messages else []
    landings = [(peer, message, *_landing(result, dim, message)) for peer, message in plan.receive]
    receives = [(peer, buffer) for peer, _, buffer, _ in landings] if result.numel() else []
    works = send_receive(segment, sends, receives)
    for source, target in [plan.keep] if plan.keep[0].length else []:
        value = x.narrow(dim, *source.runs[0]) if source.runs and len(source.runs) == 1 else pack(x, dim, source)
        place(result, dim, target, value, add=False)
    if plan.fill.length:
        _fill(result, dim, plan.fill, half.fill)

    def finish() -> Tensor:
        for _, message, buffer, direct in landings:
            if not direct:
                place(result, dim, message, buffer, add=False)
        return result

    return _InFlight(works, finish, [x, result, *(t for _, t in sends), *(t for _, t in receives)])


def _fill(result: Tensor, dim: int, message: Selection, value: float) -> None:
    if not result.dtype.is_floating_point and math.isinf(value):  # of integers the least and the greatest
        limits = torch.iinfo(result.dtype)
        value = limits.min if value < 0 else limits.max
    if message.runs is None:
        assert message.positions is not None
        result.index_fill_(dim, _index(message.positions, result.device), value)
        return
    for run in message.runs:
        result.narrow(dim, *run).fill_(value)


def _turned(half: DimExchange, x: Tensor, segment: Segment, last: bool) -> Pending[Tensor]:
    """The adjoint: what was received goes back and is added where it came from."""
    plan, dim = half.schedule, half.dim
    if (run := plan.local_slice) is not None:
        return Ready(x if run == (0, plan.owned) else _padded(half, x, run[0], last))
    sends = [(peer, pack(x, dim, message)) for peer, message in plan.receive] if half.messages else []
    shape = (*half.after[:dim], 0, *half.after[dim + 1 :])
    receives = []
    for peer, message in plan.send:
        buffer = torch.empty((*shape[:dim], message.length, *shape[dim + 1 :]), dtype=x.dtype, device=x.device)
        receives.append((peer, buffer))
    works = send_receive(segment, sends, receives if not receives or receives[0][1].numel() else [])
    source, target = plan.keep
    if source.runs == ((0, plan.owned),) and target.runs is not None and len(target.runs) == 1:
        result = empty(half.after, x, last).copy_(x.narrow(dim, *target.runs[0]))
    else:
        result = empty(half.after, x, last).zero_()
        if source.length:
            place(result, dim, source, pack(x, dim, target), add=True)

    def finish() -> Tensor:
        for (_, message), (_, buffer) in zip(plan.send, receives, strict=True):
            place(result, dim, message, buffer, add=True)
        return result

    return _InFlight(works, finish, [x, *(t for _, t in sends)])


def _padded(half: DimExchange, x: Tensor, lo: int, last: bool) -> Tensor:
    result = empty(half.after, x, last).zero_()
    result.narrow(half.dim, lo, x.shape[half.dim]).copy_(x)
    return result


# -- even gathers on backends that have fast ones


def _even_gather(half: DimExchange, segment: Segment) -> bool:
    """Whether the members of the segment, who all must answer alike, gather equal parts in order."""
    return half.schedule.even and list(segment.members) == sorted(segment.members)


def _native_gather(half: DimExchange, x: Tensor, segment: Segment, last: bool) -> Pending[Tensor]:
    order, back = memory_order(x.dim(), last)
    part, dim = x.permute(order).contiguous(), order.index(half.dim)
    gathered = torch.empty((segment.size, *part.shape), dtype=x.dtype, device=x.device)
    work = all_gather_even(segment, gathered, part)

    def finish() -> Tensor:
        return gathered.movedim(0, dim).flatten(dim, dim + 1).contiguous().permute(back)

    return _InFlight([work], finish, [part, gathered])


def _native_scatter(half: DimExchange, x: Tensor, segment: Segment, last: bool) -> Pending[Tensor]:
    order, back = memory_order(x.dim(), last)
    dim = order.index(half.dim)
    parts = x.permute(order).unflatten(dim, (segment.size, half.schedule.owned)).movedim(dim, 0).contiguous()
    result = torch.empty(parts.shape[1:], dtype=x.dtype, device=x.device)
    work = reduce_scatter_even(segment, result, parts)
    return _InFlight([work], lambda: result.permute(back), [parts, result])


# -- between two dims


@start.register
def _(half: Transpose, x: Tensor, segment: Segment, last: bool = False) -> Pending[Tensor]:
    result = empty(half.after, x, last)
    sends, receives, places = [], [], []
    for peer in range(segment.size):
        lo, hi = half.split_cuts[peer]
        block = x.narrow(half.split_dim, lo, hi - lo)
        begin, end = half.gather_cuts[peer]
        place = result.narrow(half.gather_dim, begin, end - begin)
        if peer == half.me:
            place.copy_(block)
            continue
        if block.numel():
            sends.append((peer, block.contiguous()))
        if place.numel():
            buffer = torch.empty(place.shape, dtype=x.dtype, device=x.device)
            receives.append((peer, buffer))
            places.append((place, buffer))
    works = send_receive(segment, sends, receives)

    def finish() -> Tensor:
        for place, buffer in places:
            place.copy_(buffer)
        return result

    return _InFlight(works, finish, [x, result, *(t for _, t in sends)])
