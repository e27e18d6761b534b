"""Moves as differentiable functions of local tensors, in one step or as ``begin`` and ``finish`` with work in between.

Backward runs the adjoint transfer. For a move in two steps, ``finish`` starts the adjoint when it receives the
gradient, and ``begin`` waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distfx.grid import Segment
from distfx.ir.moves import BoundMove, Transfer
from distfx.report import ledger
from distfx.runtime.autograd.transfers import start
from distfx.runtime.comm.failure import CommunicationScope
from distfx.runtime.comm.transport import Pending

__all__ = ["Refresh", "RunMove", "begin", "finish", "is_alias_of_move_input"]

T = TypeVar("T")


class RunMove:
    """A bound move with its segment: a callable on local tensors."""

    def __init__(
        self,
        move: BoundMove,
        segment: Segment,
        node: str = "",
        name: str = "",
        path: str | None = None,
        channels_last: bool = False,
    ) -> None:
        self.move, self.segment, self.node, self.path = move, segment, node, path
        self.channels_last = channels_last
        """Whether images are stored channels last."""
        self.__name__ = name or move.name
        self.scopes = {
            phase: CommunicationScope(self.__name__, node, path, segment, phase) for phase in ("forward", "backward")
        }

    def __call__(self, x: Tensor) -> Tensor:
        return _Move.apply(x, self)

    def start(self, transfer: Transfer, x: Tensor, phase: str) -> Pending[Tensor]:
        """Start a transfer and record it in the ledger."""
        return self.begin(
            transfer, phase, x.element_size(), lambda: start(transfer, x, self.segment, self.channels_last)
        )

    def begin(self, transfer: Transfer, phase: str, itemsize: int, action: Callable[[], Pending[T]]) -> Pending[T]:
        """Start a transfer by calling ``action``, and record it in the ledger."""
        if ledger.is_open():
            sent = transfer.sent_bytes(itemsize)
            ledger.record(self.node, self.__name__, transfer.axes, phase, sent, transfer.messages)
        with self.scopes[phase]:
            return action()

    def wait(self, pending: Pending[T], phase: str) -> T:
        """Wait for a transfer that was started. Returns its result."""
        with self.scopes[phase]:
            return pending.wait()

    def __repr__(self) -> str:
        return f"<{self.__name__} along {','.join(self.move.forward.axes)} of {self.segment.size} ranks>"


class Refresh:
    """Gather the slices of a buffer that the ranks of a segment wrote, into each rank's copy of the buffer."""

    def __init__(self, gather: BoundMove, segment: Segment, node: str, path: str | None) -> None:
        self.move, self.segment, self.node, self.path = gather, segment, node, path
        self.__name__ = "refresh"

    def __call__(self, buffer: Tensor) -> None:
        gather, take_slice = self.move.forward, self.move.backward
        sent = gather.sent_bytes(buffer.element_size())
        ledger.record(self.node, self.__name__, gather.axes, "forward", sent, gather.messages)
        # ``data`` does not count as a change for autograd, which may have saved slices: their values do not change.
        whole = buffer.data
        part = start(take_slice, whole, self.segment).wait()
        with CommunicationScope(self.__name__, self.node, self.path, self.segment, "forward"):
            whole.copy_(start(gather, part, self.segment).wait())


class _Move(torch.autograd.Function):
    """A move in one step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: RunMove) -> Tensor:
        ctx.run = run
        result = run.wait(run.start(run.move.forward, x, "forward"), "forward")
        return x.detach() if result is x else result  # a view that keeps the strides

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        run: RunMove = ctx.run
        return run.wait(run.start(run.move.backward, grad, "backward"), "backward"), None


def is_alias_of_move_input(tensor: Tensor) -> bool:
    """Whether a move returned ``tensor`` as a view of its input, because there was nothing to do."""
    return tensor._is_view() and type(tensor.grad_fn).__name__ == f"{_Move.__name__}Backward"


class _TransferSlot:
    """The transfer in flight between ``begin`` and ``finish`` of one move, forward or backward."""

    pending: Pending[Tensor] | None = None

    def take(self, run: RunMove, phase: str) -> Tensor:
        """Wait for the transfer and empty the slot."""
        assert self.pending is not None, "finish was called for a move that is not in flight"
        pending, self.pending = self.pending, None
        return run.wait(pending, phase)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: RunMove, slot: _TransferSlot) -> Tensor:
        ctx.run, ctx.slot = run, slot
        slot.pending = run.start(run.move.forward, x, "forward")
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.slot.take(ctx.run, "backward"), None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, run: RunMove, slot: _TransferSlot) -> Tensor:
        ctx.run, ctx.slot = run, slot
        return slot.take(run, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.slot.pending = ctx.run.start(ctx.run.move.backward, grad, "backward")
        return grad.new_empty(0), None, None


MoveTicket = tuple[Tensor, RunMove, _TransferSlot]
"""A move in flight. Its empty tensor links ``begin`` to ``finish`` in the autograd graph."""


def begin(run: RunMove, x: Tensor) -> MoveTicket:
    """Start a move. Pass the ticket to :func:`finish` once; work done in between overlaps with the move."""
    slot = _TransferSlot()
    return _Begin.apply(x, run, slot), run, slot


def finish(ticket: MoveTicket) -> Tensor:
    """Wait for a move that :func:`begin` started. Returns its result."""
    return _Finish.apply(*ticket)
