"""A convolution together with its halo exchange: the interior is computed while the halo is in flight.

Convolution is linear. The convolution of a rank's own block, padded with zeros in place of the halo, is the result
except for the outputs near the edges. These also need the convolution of the received rows with the taps that reach
them (:mod:`distfx.runtime.kernels.halo_strips`). So the block is not copied into a larger tensor, autograd saves it as
it is, and no rank waits for a message while there is work to do. Backward computes the gradients of the received rows
first, and sends them while it computes the rest.

Where the result cannot be split in this way, the halo is assembled before the convolution. The order of messages is the
same in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distfx.ir.exchange import Selection
from distfx.ir.moves import DimExchange
from distfx.runtime.autograd.moves import RunMove
from distfx.runtime.autograd.transfers import pack, place
from distfx.runtime.comm.transport import Pending, Work, send_receive
from distfx.runtime.kernels.autocast import autocast_operands
from distfx.runtime.kernels.formats import to_memory_format
from distfx.runtime.kernels.halo_strips import HaloStrip, split_halo

__all__ = ["HaloConvolution"]

aten = torch.ops.aten


class HaloConvolution:
    """The kernel of a convolution whose input needs a halo exchange."""

    def __init__(
        self,
        run: RunMove,
        taps: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        empty_shape: tuple[int, ...] | None,
    ) -> None:
        exchange = run.move.forward
        assert isinstance(exchange, DimExchange)
        self.run, self.exchange = run, exchange
        self.stride, self.padding, self.dilation, self.groups = list(stride), list(padding), list(dilation), groups
        self.empty_shape = empty_shape
        """The shape of the result if this rank has nothing to compute."""
        self.__name__ = "halo_convolution"
        dim = exchange.dim - 2
        split = None if empty_shape is not None else split_halo(exchange, taps[dim], stride[dim], dilation[dim])
        self.strips: tuple[HaloStrip, ...] | None = None
        """The strips of received rows; ``None`` if the halo is assembled."""
        self.block_padding, self.strip_padding = list(padding), list(padding)
        self.strip_padding[dim] = 0
        if split is not None:
            self.block_padding[dim], self.strips = split.padding, split.strips

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
        self, grad: Tensor, x: Tensor, weight: Tensor, padding: Sequence[int], mask: Sequence[bool]
    ) -> tuple[Any, Any, Any]:
        """The gradients of input, weight and bias: those that ``mask`` selects, ``None`` for the others."""
        sizes = [weight.shape[0]] if mask[2] else None
        return aten.convolution_backward(
            grad, x, weight, sizes, self.stride, list(padding), self.dilation, False, [0] * len(padding), self.groups,
            list(mask),
        )  # fmt: skip


class _RowsInFlight(Pending[list[Tensor]]):
    """The messages of a halo exchange. The result is the list of received messages."""

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
        ctx.conv, ctx.has_bias = conv, bias is not None
        exchange, run, dim = conv.exchange, conv.run, conv.exchange.dim
        if conv.strips is None:
            window = run.wait(run.start(exchange, x, "forward"), "forward")
            ctx.save_for_backward(window, weight)
            if conv.empty_shape is not None:
                return x.new_zeros(conv.empty_shape)
            return conv.convolve(window, weight, bias, conv.padding)
        schedule = exchange.schedule
        x = to_memory_format(x, run.channels_last)  # copy a slice once, not in each kernel
        pending = run.begin(
            exchange, "forward", x.element_size(), lambda: _start_rows(run, x, dim, schedule.send, schedule.receive)
        )
        result = conv.convolve(x, weight, bias, conv.block_padding)
        received = run.wait(pending, "forward")
        strip_rows = [_assemble(strip, x, dim, received) for strip in conv.strips]
        for strip, rows in zip(conv.strips, strip_rows, strict=True):
            summand = conv.convolve(rows, weight.narrow(dim, strip.tap, strip.taps), None, conv.strip_padding)
            result.narrow(dim, strip.out, strip.outs).add_(summand)
        ctx.save_for_backward(x, weight, *strip_rows)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        conv: HaloConvolution = ctx.conv
        need_x, need_weight, need_bias = (bool(need) for need in ctx.needs_input_grad[:3])
        mask = (need_x, need_weight, need_bias and ctx.has_bias)
        if conv.strips is None:
            return _backward_of_window(conv, mask, grad, *ctx.saved_tensors)
        x, weight, *strip_rows = ctx.saved_tensors
        run, dim, schedule = conv.run, conv.exchange.dim, conv.exchange.schedule
        dtaps_of_strips: list[Tensor | None] = []
        drows_of_messages: list[list[Tensor]] = [[] for _ in schedule.receive]
        for strip, rows in zip(conv.strips, strip_rows, strict=True):
            taps = weight.narrow(dim, strip.tap, strip.taps)
            edge = grad.narrow(dim, strip.out, strip.outs)
            drows, dtaps, _ = conv.gradients(edge, rows, taps, conv.strip_padding, (need_x, need_weight, False))
            dtaps_of_strips.append(dtaps)
            for source in strip.sources if drows is not None else ():
                drows_of_messages[source.message].append(drows.narrow(dim, source.start, source.length))
        pending: Pending[list[Tensor]] | None = None
        if need_x:
            sends = [torch.cat(rows, dim) if len(rows) > 1 else rows[0].contiguous() for rows in drows_of_messages]
            pending = run.begin(
                run.move.backward,
                "backward",
                grad.element_size(),
                lambda: _start_rows(run, x, dim, schedule.receive, schedule.send, sends),
            )
        dx, dw, db = conv.gradients(grad, x, weight, conv.block_padding, mask)
        for strip, dtaps in zip(conv.strips, dtaps_of_strips, strict=True):
            if dw is not None and dtaps is not None:
                dw.narrow(dim, strip.tap, strip.taps).add_(dtaps)
        if pending is not None:
            received = run.wait(pending, "backward")
            for (_, message), rows in zip(schedule.send, received, strict=True):
                place(dx, dim, message, rows, add=True)
        return dx, dw, db, None


def _backward_of_window(
    conv: HaloConvolution, mask: tuple[bool, bool, bool], grad: Tensor, window: Tensor, weight: Tensor
) -> tuple[Tensor | None, ...]:
    """Backward of a convolution whose halo was assembled."""
    if conv.empty_shape is None:
        dx, dw, db = conv.gradients(grad, window, weight, conv.padding, mask)
    else:
        dx, dw = torch.zeros_like(window), torch.zeros_like(weight)
        db = weight.new_zeros(conv.empty_shape[1]) if mask[2] else None
    run = conv.run
    return (run.wait(run.start(run.move.backward, dx, "backward"), "backward") if mask[0] else None), dw, db, None


def _start_rows(
    run: RunMove,
    x: Tensor,
    dim: int,
    send: Sequence[tuple[int, Selection]],
    receive: Sequence[tuple[int, Selection]],
    values: Sequence[Tensor] | None = None,
) -> _RowsInFlight:
    """Start sending ``values``, by default the rows ``send`` of ``x``, and receiving the rows ``receive``."""
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
    return _RowsInFlight(works, sent, buffers)


def _assemble(strip: HaloStrip, x: Tensor, dim: int, received: Sequence[Tensor]) -> Tensor:
    """The rows of a strip: a received message itself, or zeros with the received rows copied into them."""
    source = strip.sources[0]
    if len(strip.sources) == 1 and strip.rows == source.length == received[source.message].shape[dim]:
        return received[source.message]
    rows = x.new_zeros((*x.shape[:dim], strip.rows, *x.shape[dim + 1 :]))
    for source in strip.sources:
        part = received[source.message].narrow(dim, source.offset, source.length)
        rows.narrow(dim, source.start, source.length).copy_(part)
    return rows
