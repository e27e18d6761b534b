"""A convolution together with the halo exchange before it: the inside is computed while the halo travels.

A convolution is linear. On its own block, padded with zeros to where the halo will be, it gives every output but for
what the halo adds to the outermost ones; that is a convolution of the halo's few rows with the taps that reach them.
So the block is never copied into a larger one and is saved for backward as it is, and nothing waits for a message
while there is work. Going back, the gradients of the halo are computed first and travel during the rest.

Where a rank's window does not lie evenly around its block (some strides, padding that repeats its own rows, empty
parts), the halo is assembled and convolved as the graph says. The order of messages is the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distfx.ir.exchange import ExchangeSchedule, Selection
from distfx.ir.moves import DimExchange
from distfx.runtime.autograd.moves import RunMove
from distfx.runtime.autograd.transfers import pack, place
from distfx.runtime.comm.transport import Pending, Work, send_receive
from distfx.runtime.kernels.autocast import autocast_operands
from distfx.runtime.kernels.formats import to_memory_format

__all__ = ["HaloConvolution"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """Rows of a message, by its number in the schedule and their offset in it, and where in a strip they lie."""

    message: int
    offset: int
    start: int
    length: int


@dataclass(frozen=True)
class Strip:
    """Rows that come from others, on one side of the block, and what they take part in.

    ``rows`` of the window are zero but for what is received; the taps ``[tap, tap + taps)`` bring them to the outputs
    ``[out, out + outs)``.
    """

    rows: int
    tap: int
    taps: int
    out: int
    outs: int
    parts: tuple[Part, ...]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _strip(
    lo: int, hi: int, outputs: int, taps: int, stride: int, dilation: int, plan: ExchangeSchedule
) -> Strip | None:
    """The strip for the received rows that lie in ``[lo, hi)`` of the window."""
    parts = []
    for number, (_, message) in enumerate(plan.receive):
        offset = 0
        for start, length in message.runs or ():
            if lo <= start < hi:
                parts.append(Part(number, offset, start, length))
            offset += length
    if not parts:
        return None
    first, last = min(part.start for part in parts), max(part.start + part.length for part in parts) - 1
    out = max(0, _ceil(first - dilation * (taps - 1), stride))
    outs = min(outputs - 1, last // stride) + 1 - out
    if outs <= 0:
        return None
    tap = max(0, _ceil(first - stride * (out + outs - 1), dilation))
    end = min(taps - 1, (last - stride * out) // dilation)
    begin = stride * out + dilation * tap
    rows = stride * (outs - 1) + dilation * (end - tap) + 1
    parts = [replace(part, start=part.start - begin) for part in parts]
    if any(part.start < 0 or part.start + part.length > rows for part in parts):
        return None  # rows that no tap reads
    return Strip(rows, tap, end - tap + 1, out, outs, tuple(parts))


def _strips(half: DimExchange, taps: int, stride: int, dilation: int) -> tuple[int, tuple[Strip, ...]] | None:
    """The padding that puts the block's own convolution in its place, and the strips; ``None`` if there is none."""
    plan, reach = half.schedule, dilation * (taps - 1)
    source, target = plan.keep
    if half.fill or not plan.owned or source.runs != ((0, plan.owned),):
        return None
    if target.runs is None or len(target.runs) != 1 or any(message.runs is None for _, message in plan.receive):
        return None
    before = target.runs[0][0]
    outputs = (plan.length - reach - 1) // stride + 1
    if outputs < 1 or before > reach or (plan.owned + 2 * before - reach - 1) // stride + 1 != outputs:
        return None
    sides = ((0, before), (before + plan.owned, plan.length))
    found = [_strip(lo, hi, outputs, taps, stride, dilation, plan) for lo, hi in sides]
    strips = tuple(strip for strip in found if strip is not None)
    placed = sum(part.length for strip in strips for part in strip.parts)
    return (before, strips) if placed == plan.receive_length else None


class HaloConvolution:
    """The kernel of a convolution whose input comes by a halo exchange."""

    def __init__(
        self,
        run: RunMove,
        taps: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        empty: tuple[int, ...] | None,
    ) -> None:
        half = run.move.forward
        assert isinstance(half, DimExchange)
        self.run, self.half = run, half
        self.stride, self.padding, self.dilation, self.groups = list(stride), list(padding), list(dilation), groups
        self.empty = empty
        """The result's shape, if there is nothing to compute here."""
        self.__name__ = "halo_convolution"
        at = half.dim - 2
        found = None if empty is not None else _strips(half, taps[at], stride[at], dilation[at])
        self.strips: tuple[Strip, ...] | None = None
        self.around = list(padding)
        if found is not None:
            self.around[at], self.strips = found

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = _HaloConvolution.apply(*autocast_operands(x, weight, bias), self)
        return result

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
        zeros = [0] * len(padding)
        return torch.convolution(
            x, weight, bias, self.stride, list(padding), self.dilation, transposed=False, output_padding=zeros,
            groups=self.groups,
        )  # fmt: skip

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, padding: Sequence[int], wanted: Sequence[bool]
    ) -> tuple[Any, Any, Any]:
        """Of input, weight and bias."""
        sizes = [weight.shape[0]] if wanted[2] else None
        return aten.convolution_backward(
            grad, x, weight, sizes, self.stride, list(padding), self.dilation, False, [0] * len(padding), self.groups,
            list(wanted),
        )  # fmt: skip

    def thin(self) -> list[int]:
        """The padding of a strip: none along it."""
        return [0 if 2 + i == self.half.dim else p for i, p in enumerate(self.padding)]


class _Edges(Pending[list[Tensor]]):
    """The messages of a halo in flight, in buffers of their own."""

    def __init__(self, works: list[Work], sent: list[Tensor], received: list[Tensor]) -> None:
        self.works, self.sent, self.received = works, sent, received

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        self.sent.clear()
        return self.received


class _HaloConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, conv: HaloConvolution) -> Tensor:
        ctx.conv, ctx.bias = conv, bias is not None
        half, run, dim = conv.half, conv.run, conv.half.dim
        if conv.strips is None:
            whole = run.wait(run.start(half, x, "forward"), "forward")
            ctx.save_for_backward(whole, weight)
            if conv.empty is not None:
                return x.new_zeros(conv.empty)
            return conv.convolve(whole, weight, bias, conv.padding)
        plan = half.schedule
        x = to_memory_format(x, run.last)  # a slice of an input: copied once, not by each kernel
        flight = run.begin(half, "forward", x.element_size(), lambda: _edges(run, x, dim, plan.send, plan.receive))
        result = conv.convolve(x, weight, bias, conv.around)
        received = run.wait(flight, "forward")
        strips = [_assembled(strip, x, dim, received) for strip in conv.strips]
        for strip, rows in zip(conv.strips, strips, strict=True):
            added = conv.convolve(rows, weight.narrow(dim, strip.tap, strip.taps), None, conv.thin())
            result.narrow(dim, strip.out, strip.outs).add_(added)
        ctx.save_for_backward(x, weight, *strips)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        conv: HaloConvolution = ctx.conv
        need_x, need_weight, need_bias = (bool(need) for need in ctx.needs_input_grad[:3])
        wanted = (need_x, need_weight, need_bias and ctx.bias)
        if conv.strips is None:
            return _backward_assembled(conv, wanted, grad, *ctx.saved_tensors)
        x, weight, *strips = ctx.saved_tensors
        run, dim, plan = conv.run, conv.half.dim, conv.half.schedule
        parts: list[Tensor | None] = []
        returned: list[list[Tensor]] = [[] for _ in plan.receive]
        for strip, rows in zip(conv.strips, strips, strict=True):
            taps = weight.narrow(dim, strip.tap, strip.taps)
            outer = grad.narrow(dim, strip.out, strip.outs)
            drows, dtaps, _ = conv.gradients(outer, rows, taps, conv.thin(), (need_x, need_weight, False))
            parts.append(dtaps)
            for part in strip.parts if drows is not None else ():
                returned[part.message].append(drows.narrow(dim, part.start, part.length))
        flight: Pending[list[Tensor]] | None = None
        if need_x:
            sends = [torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].contiguous() for pieces in returned]
            back, size = run.move.backward, grad.element_size()
            flight = run.begin(back, "backward", size, lambda: _edges(run, x, dim, plan.receive, plan.send, sends))
        dx, dw, db = conv.gradients(grad, x, weight, conv.around, wanted)
        for strip, dtaps in zip(conv.strips, parts, strict=True):
            if dw is not None and dtaps is not None:
                dw.narrow(dim, strip.tap, strip.taps).add_(dtaps)
        if flight is not None:
            received = run.wait(flight, "backward")
            for (_, message), rows in zip(plan.send, received, strict=True):
                place(dx, dim, message, rows, add=True)
        return dx, dw, db, None


def _backward_assembled(
    conv: HaloConvolution, wanted: tuple[bool, bool, bool], grad: Tensor, whole: Tensor, weight: Tensor
) -> tuple[Tensor | None, ...]:
    if conv.empty is None:
        dx, dw, db = conv.gradients(grad, whole, weight, conv.padding, wanted)
    else:
        dx, dw = torch.zeros_like(whole), torch.zeros_like(weight)
        db = weight.new_zeros(conv.empty[1]) if wanted[2] else None
    run = conv.run
    return (run.wait(run.start(run.move.backward, dx, "backward"), "backward") if wanted[0] else None), dw, db, None


def _edges(
    run: RunMove,
    x: Tensor,
    dim: int,
    send: Sequence[tuple[int, Selection]],
    receive: Sequence[tuple[int, Selection]],
    values: Sequence[Tensor] | None = None,
) -> _Edges:
    """Start sending the rows of ``send``, taken from ``x`` or given as ``values``, and receiving ``receive``'s."""
    sent = [pack(x, dim, message) for _, message in send] if values is None else list(values)
    shape = list(x.shape)
    buffers = [
        torch.empty((*shape[:dim], message.length, *shape[dim + 1 :]), dtype=x.dtype, device=x.device)
        for _, message in receive
    ]
    works = send_receive(
        run.segment,
        [(peer, value) for (peer, _), value in zip(send, sent, strict=True)],
        [(peer, buffer) for (peer, _), buffer in zip(receive, buffers, strict=True)],
    )
    return _Edges(works, sent, buffers)


def _assembled(strip: Strip, x: Tensor, dim: int, received: Sequence[Tensor]) -> Tensor:
    """The rows of a strip: a message as it came, or zeros with the received rows in their places."""
    part = strip.parts[0]
    if len(strip.parts) == 1 and strip.rows == part.length == received[part.message].shape[dim]:
        return received[part.message]
    rows = x.new_zeros((*x.shape[:dim], strip.rows, *x.shape[dim + 1 :]))
    for part in strip.parts:
        source = received[part.message].narrow(dim, part.offset, part.length)
        rows.narrow(dim, part.start, part.length).copy_(source)
    return rows
