"""link: turn a bound graph into a runnable one.

in: a bound graph.   out: a graph of kernels on local tensors. Moves get their segments, inserted operators their
kernels, parameters their gradient buckets. The first argument of the linked graph is the
:class:`~distfx.runtime.autograd.gradients.Gradients` of the forward pass.

This is the only pass that knows the runtime.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from distfx.grid import Grid
from distfx.ir import ops
from distfx.ir.buckets import Bucket
from distfx.ir.meta import Meta, meta
from distfx.ir.nodes import aten, is_empty
from distfx.ir.torch_private import OpOverload
from distfx.runtime.autograd.gradients import Gradients
from distfx.runtime.autograd.moves import Refresh, RunMove
from distfx.runtime.kernels import table
from distfx.runtime.kernels.autocast import WithoutAutocast
from distfx.runtime.kernels.batch_norm import BatchNorm
from distfx.runtime.kernels.convolution import convolution
from distfx.runtime.kernels.empty import ZeroResult
from distfx.runtime.kernels.halo_convolution import HaloConvolution
from distfx.runtime.kernels.in_place import InPlaceActivation, KeepFirstDtype
from distfx.runtime.kernels.norm import Norm
from distfx.runtime.kernels.random import Draw, Dropout
from distfx.runtime.kernels.reduce import Reduction

__all__ = ["link"]

KERNELS: dict[Any, Callable[..., Tensor]] = {ops.inserted(name): kernel for name, kernel in table.KERNELS.items()}
"""Inserted operators that become a plain function."""

COLLECTIVES: dict[Any, Any] = {ops.batch_norm: BatchNorm, ops.norm: Norm, ops.reduce: Reduction}
"""Inserted operators that become a kernel with a segment."""


def _bucket(gradients: Gradients, index: int) -> tuple[Tensor, ...]:
    return gradients.bucket(index)


def _plain(gradients: Gradients, name: str) -> Tensor:
    return gradients.without_gradient(name)


def link(graph: Graph, grid: Grid, buckets: Sequence[Bucket]) -> GraphModule:
    """Make a bound graph runnable, in place."""
    with graph.inserting_before(next(iter(graph.nodes))):
        gradients = graph.placeholder("gradients")
    for node in [each for each in graph.nodes if each.op == "call_function"]:
        node.args, node.kwargs = ops.on_device((node.args, node.kwargs), grid.device)
        _link_call(node, grid, gradients)
        if Meta.in_place.get(node) and isinstance(node.target, OpOverload):
            node.target = KeepFirstDtype(node.target)
        if Meta.autocast.get(node) is False and node.target is not operator.getitem:
            node.target = WithoutAutocast(node.target)
    _link_parameters(graph, gradients, buckets)
    linked = GraphModule(torch.nn.Module(), graph)
    linked.recompile()
    return linked


def _link_parameters(graph: Graph, gradients: Node, buckets: Sequence[Bucket]) -> None:
    """Read every parameter from its bucket, each bucket at its first use, and every buffer by name."""
    place = {name: (i, j) for i, bucket in enumerate(buckets) for j, name in enumerate(bucket.names)}
    opened: dict[int, Node] = {}
    for node in list(graph.nodes):
        for operand in [n for n in node.all_input_nodes if n.op == "get_attr"]:
            name = str(operand.target)
            with graph.inserting_before(node):
                if name in place:
                    number, index = place[name]
                    if number not in opened:
                        opened[number] = graph.call_function(_bucket, (gradients, number))
                    value = graph.call_function(operator.getitem, (opened[number], index))
                else:
                    value = graph.call_function(_plain, (gradients, name))
            value.meta = dict(operand.meta)
            meta(value).parameter = name
            operand.replace_all_uses_with(value)
            graph.erase_node(operand)
    for node in graph.find_nodes(op="get_attr"):
        graph.erase_node(node)


def _link_call(node: Node, grid: Grid, gradients: Node) -> None:
    """Replace an inserted operator by its kernel, and a call that ATen may refuse on empty tensors by zeros."""
    target, arguments = node.target, dict[str, Any](node.kwargs)
    if isinstance(target, ops.OpOutput) and target.op in ops.OWN_FUNCTIONS:
        node.target = target = replace(target, op=ops.OWN_FUNCTIONS[target.op])
    elif target in ops.OWN_FUNCTIONS:
        node.target = ops.OWN_FUNCTIONS[target]
        return
    if target is ops.halo_convolution:
        _link_halo_convolution(node, grid)
    elif target is ops.refresh:
        transfers = meta(node).transfers
        segment = grid.segment(transfers.forward.axes)
        node.target = Refresh(transfers, segment, meta(node).owner, Meta.path.get(node))
        node.kwargs = {}
    elif Meta.transfers.is_set(node):
        node.target, node.kwargs = _run_move(node, target.__name__, grid), {}  # type: ignore[union-attr]
    elif target in COLLECTIVES:
        if "average_over" in arguments:
            arguments["average_over"] = grid.segment(tuple(arguments["average_over"]))
        segment = grid.segment(tuple(arguments.pop("axis")))
        node.target, node.kwargs = COLLECTIVES[target](segment, node.name, **arguments), {}
        node.target.path = Meta.path.get(node)  # type: ignore[union-attr]
    elif target is ops.activate_in_place:
        node.target, node.kwargs = InPlaceActivation(arguments["activation"]), {}
    elif target is ops.dropout:
        node.target = Dropout(node.name, **arguments)
        node.args, node.kwargs = (gradients, *node.args), {}
    elif target is ops.draw:
        node.target = Draw(node.name, arguments.pop("operator"), arguments.pop("part"))
        node.args, node.kwargs = (gradients, *node.args), arguments
    elif target in KERNELS:
        node.target = KERNELS[target]
    elif target is not operator.getitem and is_empty(node):
        # The dtype of the first operand may have been converted since capture: follow it where the two are the same.
        same = meta(node).dtype == meta(node.all_input_nodes[0]).dtype
        node.target = ZeroResult(meta(node).local_shape, None if same else meta(node).dtype, meta(node).is_product)
    elif target is aten.convolution.default:
        node.target, node.kwargs = convolution, {"channels_last": meta(node).channels_last}


def _link_halo_convolution(node: Node, grid: Grid) -> None:
    arguments = dict[str, Any](node.kwargs)
    weight = node.args[1]
    assert isinstance(weight, Node)
    run = _run_move(node, "halo", grid)
    empty = meta(node).local_shape if arguments.pop("empty") else None
    node.target = HaloConvolution(run, meta(weight).local_shape[2:], **arguments, empty_shape=empty)
    node.kwargs = {}


def _run_move(node: Node, name: str, grid: Grid) -> RunMove:
    transfers = meta(node).transfers
    segment = grid.segment(transfers.forward.axes)
    return RunMove(transfers, segment, meta(node).owner, name, Meta.path.get(node), meta(node).channels_last)
