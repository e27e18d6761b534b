"""The base class of kernels that reduce values over a segment."""

from __future__ import annotations

from torch import Tensor

from distfx.grid import Segment
from distfx.ir import volumes
from distfx.report import ledger
from distfx.runtime.comm.failure import CommunicationScope
from distfx.runtime.comm.transport import all_reduce

__all__ = ["SegmentKernel"]


class SegmentKernel:
    """A kernel that computes sums, maxima and minima over a segment. Each allreduce is recorded in the ledger."""

    path: str | None = None
    """The module path of the layer."""

    def __init__(self, name: str, segment: Segment, node: str) -> None:
        self.__name__ = name
        self.segment, self.node = segment, node

    def sum(self, value: Tensor, phase: str) -> Tensor:
        """Sum ``value`` over the segment, in place."""
        return self.reduce(value, phase, "sum")

    def reduce(self, value: Tensor, phase: str, op: str) -> Tensor:
        """Reduce ``value`` over the segment, in place. ``op`` is ``"sum"``, ``"max"`` or ``"min"``."""
        ranks = self.segment.size
        if ranks == 1:
            return value
        sent = volumes.allreduce_bytes(value.numel() * value.element_size(), ranks)
        ledger.record(self.node, self.__name__, self.segment.axes, phase, sent, volumes.allreduce_messages(ranks))
        with CommunicationScope(self.__name__, self.node, self.path, self.segment, phase):
            all_reduce(self.segment, value, op).wait()
        return value
