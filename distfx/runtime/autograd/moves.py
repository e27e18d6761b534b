"""Moves as differentiable functions of local tensors, whole or as ``begin`` and ``finish`` with work in between.

Backward runs the adjoint half. Split in two, the halves mirror each other: ``finish`` starts the adjoint when the
gradient comes back, ``begin`` waits for it.
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

__all__ = ["Refresh", "RunMove", "begin", "finish"]

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
        last: bool = False,
    ) -> None:
        self.move, self.segment, self.node, self.path = move, segment, node, path
        self.last = last
        """Whether images lie channels last."""
        self.__name__ = name or move.name
        self.during = {
            phase: CommunicationScope(self.__name__, node, path, segment, phase) for phase in ("forward", "backward")
        }

    def __call__(self, x: Tensor) -> Tensor:
        return _Whole.apply(x, self)

    def start(self, half: Transfer, x: Tensor, phase: str) -> Pending[Tensor]:
        """Start one half, and enter it into the ledger."""
        return self.begin(half, phase, x.element_size(), lambda: start(half, x, self.segment, self.last))

    def begin(self, half: Transfer, phase: str, itemsize: int, action: Callable[[], Pending[T]]) -> Pending[T]:
        """Start one half by ``action``, and enter it into the ledger."""
        if ledger.is_open():
            ledger.record(self.node, self.__name__, half.axes, phase, half.sent_bytes(itemsize), half.messages)
        with self.during[phase]:
            return action()

    def wait(self, pending: Pending[T], phase: str) -> T:
        """The result of a half that was started."""
        with self.during[phase]:
            return pending.wait()

    def __repr__(self) -> str:
        return f"<{self.__name__} along {','.join(self.move.forward.axes)} of {self.segment.size} ranks>"


class Refresh:
    """Gather the slices of a buffer that the ranks of a segment wrote, into each rank's copy of it."""

    def __init__(self, gather: BoundMove, segment: Segment, node: str, path: str | None) -> None:
        self.move, self.segment, self.node, self.path = gather, segment, node, path
        self.__name__ = "refresh"

    def __call__(self, buffer: Tensor) -> None:
        half: Transfer = self.move.forward
        take = self.move.backward
        sent = half.sent_bytes(buffer.element_size())
        ledger.record(self.node, self.__name__, half.axes, "forward", sent, half.messages)
        whole = buffer.data  # not counted as a change: backward may have saved slices, whose values stay
        part = start(take, whole, self.segment).wait()
        with CommunicationScope(self.__name__, self.node, self.path, self.segment, "forward"):
            whole.copy_(start(half, part, self.segment).wait())


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: RunMove) -> Tensor:
        ctx.run = run
        result = run.wait(run.start(run.move.forward, x, "forward"), "forward")
        return x.detach() if result is x else result  # a view, but one with the very strides

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        run: RunMove = ctx.run
        return run.wait(run.start(run.move.backward, grad, "backward"), "backward"), None


class _Token:
    """What the two parts of a split move have in common: whatever is in flight, forward or backward."""

    pending: Pending[Tensor] | None = None

    def take(self, run: RunMove, phase: str) -> Tensor:
        assert self.pending is not None, "a move was finished that was not begun"
        pending, self.pending = self.pending, None
        return run.wait(pending, phase)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: RunMove, token: _Token) -> Tensor:
        ctx.run, ctx.token = run, token
        token.pending = run.start(run.move.forward, x, "forward")
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.token.take(ctx.run, "backward"), None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, run: RunMove, token: _Token) -> Tensor:
        ctx.run, ctx.token = run, token
        return token.take(run, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.token.pending = ctx.run.start(ctx.run.move.backward, grad, "backward")
        return grad.new_empty(0), None, None


def begin(run: RunMove, x: Tensor) -> tuple[Tensor, RunMove, _Token]:
    """Start a move. What is returned goes to :func:`finish`, once; work done in between overlaps with it."""
    token = _Token()
    return _Begin.apply(x, run, token), run, token


def finish(ticket: tuple[Tensor, RunMove, _Token]) -> Tensor:
    """The result of a move that was begun."""
    return _Finish.apply(*ticket)
