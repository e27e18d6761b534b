"""link: turn a bound graph into a runnable one.

Moves get their segments, inserted operators their kernels, parameters their gradient buckets. The first argument of the
linked graph is the :class:`~distfx.runtime.autograd.parameters.Gradients` of the forward pass.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from distfx.grid import Grid, Segment
from distfx.ir import ops
from distfx.ir.moves import BoundMove, Half
from distfx.report import ledger
from distfx.runtime.autograd.moves import RunMove
from distfx.runtime.autograd.parameters import Bucket, Gradients
from distfx.runtime.autograd.transfers import start
from distfx.runtime.comm.failure import During
from distfx.runtime.kernels.autocast import InFull
from distfx.runtime.kernels.formats import settle
from distfx.runtime.kernels.halo_convolution import HaloConvolution
from distfx.runtime.kernels.in_place import OfFirst, overwrite
from distfx.runtime.kernels.local import KERNELS as PLAIN
from distfx.runtime.kernels.local import BatchNorm, Zero, convolution
from distfx.runtime.kernels.norm import Norm
from distfx.runtime.kernels.pool import adaptive_pool, max_pool_index
from distfx.runtime.kernels.random import Draw, Dropout
from distfx.runtime.kernels.reduce import Reduction
from distfx.runtime.kernels.resample import resample

__all__ = ["link"]

aten = torch.ops.aten
KERNELS = PLAIN | {"resample": resample, "adaptive_pool": adaptive_pool, "max_pool_index": max_pool_index}


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


def link(module: GraphModule, grid: Grid, buckets: Sequence[Bucket], last: bool = False) -> GraphModule:
    """Make a bound graph runnable, in place. ``last``: images are to lie channels last."""
    graph = module.graph
    settle(graph, last, grid)
    place = {name: (i, j) for i, bucket in enumerate(buckets) for j, name in enumerate(bucket.names)}
    taken: dict[int, Node] = {}
    _read_before_writes(graph)
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        gradients = graph.placeholder("gradients")
    _share_results(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and (halo := _own_halo(node)) is not None:
            _fuse(node, halo, grid)
    overwrite(graph)
    for node in list(graph.nodes):
        if node.op == "get_attr":
            continue
        if node.op == "call_function":
            node.args, node.kwargs = ops.on_device((node.args, node.kwargs), grid.device)
            _link_call(node, grid, gradients)
            if node.meta.get("in_place") and isinstance(node.target, torch._ops.OpOverload):
                node.target = OfFirst(node.target)
            if node.meta.get("autocast") is False and node.target is not operator.getitem:
                node.target = InFull(node.target)
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


def _written(node: Node) -> Node | None:
    """The buffer into which a call of the model writes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable or not node.args:
        return None
    place: Any = node.args[0]
    while isinstance(place, Node) and place.target in _ITSELF:
        place = place.args[0]
    return place if isinstance(place, Node) and place.op == "get_attr" else None


_ITSELF = (ops.fan, ops.mask, aten.detach.default)
"""What gives the very tensor, going forward."""


def _read_before_writes(graph: Graph) -> None:
    """What is read of a buffer before the graph writes into it is a copy: backward may need it as it was."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        buffer = _written(node)
        if buffer is None:
            continue
        same = [buffer, *(user for user in buffer.users if user.target in _ITSELF)]
        for source, reader in [(each, user) for each in same for user in each.users if user not in same]:
            last = max(place[use] for use in _uses(reader))
            if last < place[node] and _written(reader) is None and reader.target is not ops.refresh:
                with graph.inserting_before(reader):
                    copy = graph.call_function(torch.clone, (source,))
                copy.meta = {
                    key: source.meta[key] for key in ("shape", "local", "layout", "dtype") if key in source.meta
                }
                place[copy] = place[reader]
                reader.replace_input_with(source, copy)


def _uses(node: Node) -> Iterator[Node]:
    """A call, and those that read what it reads by way of the view that it gives."""
    yield node
    schema = getattr(node.target, "_schema", None)
    views = schema is not None and any(given.alias_info is not None for given in schema.returns)
    if views or node.target in (ops.slice, aten.reshape.default):
        for user in node.users:
            yield from _uses(user)


def _own_halo(node: Node) -> Node | None:
    """The halo exchange just before a convolution and for it alone: the two may become one kernel.

    A matter of the graph, not of this rank's part, and nothing communicates in between: on every rank alike.
    """
    source = node.args[0] if node.args else None
    if node.target is not aten.convolution.default or not isinstance(source, Node) or source.target is not ops.halo:
        return None
    between = source.next
    while between is not node and between.op == "get_attr":
        between = between.next
    alone = list(source.users) == [node] and node.all_input_nodes.count(source) == 1
    return source if alone and between is node and not node.args[6] else None


def _fuse(node: Node, halo: Node, grid: Grid) -> None:
    halo.meta["last"] = node.meta["last"]
    run = _run_move(halo, grid)
    _, weight, bias, stride, padding, dilation, _, _, groups = node.args
    assert isinstance(weight, Node)
    taps = weight.meta["local"][2:]
    empty = node.meta["local"] if _is_empty(node) else None
    node.target = HaloConvolution(run, taps, stride, padding, dilation, groups, empty)  # type: ignore[arg-type]
    node.args = (halo.args[0], weight, bias)
    halo.graph.erase_node(halo)


def _run_move(node: Node, grid: Grid) -> RunMove:
    bound = node.meta["bound"]
    name: str = node.target.__name__  # type: ignore[union-attr]
    segment, last = grid.segment(bound.forward.axes), node.meta["last"]
    return RunMove(bound, segment, node.meta["owner"], name, node.meta.get("path"), last)


def _share_results(graph: Graph) -> None:
    """An operator several of whose results are wanted is called once."""
    calls: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if isinstance(node.target, ops.Nth) and not _is_empty(node):
            calls.setdefault((node.target.op, repr((node.args, node.kwargs))), []).append(node)
    for (op, _), nodes in calls.items():
        if len(nodes) < 2:
            continue
        with graph.inserting_before(nodes[0]):
            every = graph.call_function(op, nodes[0].args, dict(nodes[0].kwargs))
        every.meta = {key: nodes[0].meta.get(key) for key in ("path", "source")}
        for node in nodes:
            part: Any = node.target
            node.target, node.args, node.kwargs = operator.getitem, (every, part.index), {}


def _link_call(node: Node, grid: Grid, gradients: Node) -> None:
    bound = node.meta.get("bound")
    if isinstance(node.target, HaloConvolution):
        return
    if isinstance(node.target, ops.Nth) and node.target.op in ops.OWN_FUNCTIONS:
        node.target = replace(node.target, op=ops.OWN_FUNCTIONS[node.target.op])
    elif node.target in ops.OWN_FUNCTIONS:
        node.target = ops.OWN_FUNCTIONS[node.target]
        return
    if node.target is ops.refresh:
        assert isinstance(bound, BoundMove)
        node.target = Refresh(bound, grid.segment(bound.forward.axes), node.meta["owner"], node.meta.get("path"))
        node.kwargs = {}
    elif isinstance(bound, BoundMove):
        node.target, node.kwargs = _run_move(node, grid), {}
    elif node.target in (ops.batch_norm, ops.norm, ops.reduce):
        kwargs: dict[str, Any] = dict(node.kwargs)
        if "apart" in kwargs:
            kwargs["apart"] = grid.segment(tuple(kwargs["apart"]))
        kinds: dict[Any, Any] = {ops.batch_norm: BatchNorm, ops.norm: Norm, ops.reduce: Reduction}
        node.target = kinds[node.target](grid.segment(tuple(kwargs.pop("axis"))), node.name, **kwargs)
        node.target.path = node.meta.get("path")  # type: ignore[union-attr]
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
    elif node.target is not operator.getitem and _is_empty(node):
        dtype = node.meta["dtype"]  # where it is its operand's it follows that, which may have been converted since
        same = dtype == node.all_input_nodes[0].meta["dtype"]
        product = node.meta["decision"].spec.row.product
        node.target = Zero(node.meta["local"], None if same else dtype, product)
    elif node.target is aten.convolution.default:
        node.target, node.kwargs = convolution, {"last": node.meta["last"]}


def _is_empty(node: Node) -> bool:
    """Whether a call that ATen may refuse on empty tensors has no result here, or one that is a sum over nothing."""
    decision = node.meta.get("decision")
    if decision is None or decision.spec is None or decision.spec.row.name == "pointwise" or "local" not in node.meta:
        return False
    row, shapes = decision.spec.row, [node.meta["local"]]
    if row.product:
        shapes += [operand.meta["local"] for operand in node.all_input_nodes]
    return any(math.prod(shape) == 0 for shape in shapes)
