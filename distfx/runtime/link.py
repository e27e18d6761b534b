"""Link: a bound graph becomes one that runs. Moves get their segments, inserted operators their kernels, parameters
their buckets. The graph's first argument is then the :class:`~distfx.runtime.parameters.Gradients` of the pass.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from distfx import ledger, ops
from distfx.grid import Grid, Segment
from distfx.moves import BoundMove, Half
from distfx.runtime.failure import During
from distfx.runtime.functions import RunMove
from distfx.runtime.halves import start
from distfx.runtime.kernels import KERNELS as PLAIN
from distfx.runtime.kernels import BatchNorm, Zero
from distfx.runtime.norm import Norm
from distfx.runtime.parameters import Bucket, Gradients
from distfx.runtime.random import Draw, Dropout
from distfx.runtime.resample import resample

__all__ = ["link"]

aten = torch.ops.aten
KERNELS = PLAIN | {"resample": resample}


class Refresh:
    """Gather the slices of a buffer that the ranks of a segment wrote, into each rank's copy of it."""

    def __init__(self, gather: BoundMove, segment: Segment, node: str, path: str | None) -> None:
        self.move, self.segment, self.node, self.path = gather, segment, node, path
        self.__name__ = "refresh"

    def __call__(self, buffer: Tensor) -> None:
        half: Half = self.move.forward
        take = self.move.backward
        sent = half.sent_bytes(buffer.element_size())
        ledger.record(self.node, self.__name__, half.axes, "forward", sent, half.messages)
        whole = buffer.data  # not counted as a change: backward may have saved slices, whose values stay
        part = start(take, whole, self.segment).wait()
        with During(self.__name__, self.node, self.path, self.segment, "forward"):
            whole.copy_(start(half, part, self.segment).wait())


def _bucket(gradients: Gradients, index: int) -> tuple[Tensor, ...]:
    return gradients.bucket(index)


def _plain(gradients: Gradients, name: str) -> Tensor:
    return gradients.plain(name)


def link(module: GraphModule, grid: Grid, buckets: Sequence[Bucket]) -> GraphModule:
    """Make a bound graph runnable, in place."""
    graph = module.graph
    place = {name: (i, j) for i, bucket in enumerate(buckets) for j, name in enumerate(bucket.names)}
    taken: dict[int, Node] = {}
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        gradients = graph.placeholder("gradients")
    for node in list(graph.nodes):
        if node.op == "get_attr":
            continue
        if node.op == "call_function":
            _link_call(node, grid, gradients)
        for operand in [n for n in node.all_input_nodes if n.op == "get_attr"]:
            name = str(operand.target)
            with graph.inserting_before(node):
                if name in place:
                    number, index = place[name]
                    if number not in taken:
                        taken[number] = graph.call_function(_bucket, (gradients, number))
                    value = graph.call_function(operator.getitem, (taken[number], index))
                else:
                    value = graph.call_function(_plain, (gradients, name))
            value.meta = dict(operand.meta) | {"parameter": name}
            operand.replace_all_uses_with(value)
            graph.erase_node(operand)
    for node in list(graph.nodes):
        if node.op == "get_attr":
            graph.erase_node(node)
    linked = GraphModule(torch.nn.Module(), graph)
    linked.recompile()
    return linked


def _link_call(node: Node, grid: Grid, gradients: Node) -> None:
    bound = node.meta.get("bound")
    if node.target is ops.refresh:
        assert isinstance(bound, BoundMove)
        node.target = Refresh(bound, grid.segment(bound.forward.axes), node.meta["owner"], node.meta.get("path"))
        node.kwargs = {}
    elif isinstance(bound, BoundMove):
        name: str = node.target.__name__  # type: ignore[union-attr]
        node.target = RunMove(bound, grid.segment(bound.forward.axes), node.meta["owner"], name, node.meta.get("path"))
        node.kwargs = {}
    elif node.target in (ops.batch_norm, ops.norm):
        kwargs: dict[str, Any] = dict(node.kwargs)
        kind = BatchNorm if node.target is ops.batch_norm else Norm
        node.target = kind(grid.segment(tuple(kwargs.pop("axis"))), node.name, **kwargs)
        node.target.path = node.meta.get("path")
        node.kwargs = {}
    elif node.target is ops.dropout:
        node.target = Dropout(node.name, **node.kwargs)  # type: ignore[arg-type]
        node.args, node.kwargs = (gradients, *node.args), {}
    elif node.target is ops.draw:
        kwargs = dict(node.kwargs)
        node.target = Draw(node.name, kwargs.pop("operator"), kwargs.pop("part"))
        node.args, node.kwargs = (gradients, *node.args), kwargs
    elif getattr(node.target, "__name__", None) in KERNELS and node.target is ops.inserted(node.target.__name__):  # type: ignore[union-attr]
        node.target = KERNELS[node.target.__name__]
    elif _is_empty(node):
        dtype = node.meta["dtype"]  # a float follows its operand, which may have been converted since
        node.target = Zero(node.meta["local"], None if dtype.is_floating_point else dtype)


def _is_empty(node: Node) -> bool:
    """Whether this rank has nothing to compute for a call that ATen may refuse on empty tensors."""
    decision = node.meta.get("decision")
    if decision is None or decision.spec is None or decision.spec.row.name == "pointwise" or "local" not in node.meta:
        return False
    shapes = [node.meta["local"], *(operand.meta["local"] for operand in node.all_input_nodes)]
    return any(math.prod(shape) == 0 for shape in shapes)
