"""formats: decide for every node of a bound graph whether it is stored channels last.

in: a bound graph.   out: the same graph with ``meta.channels_last`` on every node.

The decision follows from the graph and is the same on all ranks. It cannot follow from the strides of a rank's part: a
part with one channel has both formats, and sums over ranks with different formats would add different elements.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from distfx.grid import Grid
from distfx.ir import ops
from distfx.ir.meta import Meta, inherit, meta
from distfx.ir.nodes import aten

__all__ = ["assign_memory_formats"]

IMAGE_NDIMS = (4, 5)
"""Numbers of dims of tensors that have a channels-last format."""

MAX_CHANNELS = 64
"""Channels per group up to which oneDNN is faster channels last, given at least ``MIN_POSITIONS``."""
MIN_POSITIONS = 3000
"""Positions of the result on a rank (samples and space) above which oneDNN is faster channels last."""

_LAST_TO_FIRST = {ndim: (0, ndim - 1, *range(1, ndim - 1)) for ndim in IMAGE_NDIMS}
"""The permutation of dims from channels last to channels first."""


def assign_memory_formats(graph: Graph, channels_last: bool, grid: Grid) -> None:
    """Set ``meta.channels_last`` of every node.

    ``channels_last`` says that an input or a parameter is stored channels last on some rank. As in torch, convolutions
    and what follows them are channels last then, as long as the dims keep their meaning. Otherwise, on CPUs,
    convolutions that are faster channels last are computed that way; the outputs of the graph stay channels first.
    """
    may_choose = not channels_last and grid.device_type == "cpu" and torch.backends.mkldnn.is_available()
    choice = grid if may_choose else None
    for node in graph.nodes:
        is_image = len(Meta.local_shape.get(node) or ()) in IMAGE_NDIMS
        meta(node).channels_last = is_image and _is_channels_last(node, channels_last, choice)
    if may_choose:
        _return_channels_first(graph)


def _return_channels_first(graph: Graph) -> None:
    output = graph.output_node()
    for result in [node for node in output.all_input_nodes if meta(node).channels_last]:
        with graph.inserting_before(output):
            first = graph.call_function(ops.to_memory_format, (result,), {"channels_last": False})
        inherit(first, result, Meta.shape, Meta.local_shape, Meta.layout, Meta.dtype)
        meta(first).channels_last = False
        output.replace_input_with(result, first)


def _is_channels_last(node: Node, channels_last: bool, grid: Grid | None) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return channels_last
    if node.target is aten.reshape.default:
        return False
    if node.target is aten.permute.default:
        order: Any = node.args[1]
        return tuple(order) == _LAST_TO_FIRST[len(order)] and not _has_channels_last_operand(node)
    if node.target is aten.convolution.default:
        faster = None if grid is None else _is_faster_channels_last(node, grid)
        return channels_last or (_has_channels_last_operand(node) if faster is None else faster)
    return _has_channels_last_operand(node)


def _has_channels_last_operand(node: Node) -> bool:
    ndim = len(meta(node).local_shape)
    images = [x for x in node.all_input_nodes if x.op != "get_attr" and len(Meta.local_shape.get(x) or ()) == ndim]
    return any(meta(x).channels_last for x in images)


def _is_faster_channels_last(node: Node, grid: Grid) -> bool | None:
    """Whether oneDNN computes a convolution faster channels last; ``None`` if it makes little difference.

    For channels-first tensors oneDNN copies the input, the result and their gradients into blocks. With few channels
    these copies take up to a tenth of the time. With many channels and little space its channels-last kernels are much
    slower.
    """
    if meta(node).dtype not in (torch.float32, torch.bfloat16) or len(meta(node).local_shape) != 4 or node.args[6]:
        return None
    x, weight = cast(list[Node], node.args[:2])
    filters, channels, *taps = _even_part(weight, grid)
    if math.prod(taps) == 1:
        return None
    groups = meta(x).shape[1] // meta(weight).shape[1]
    samples, _, *space = _even_part(node, grid)
    return max(filters // groups, channels) <= MAX_CHANNELS and samples * math.prod(space) >= MIN_POSITIONS


def _even_part(node: Node, grid: Grid) -> list[int]:
    """The shape of a rank's part if all parts were even, so that all ranks compute with the same numbers."""
    sizes = zip(meta(node).shape, meta(node).layout.dims, strict=True)
    return [-(-size // math.prod(grid.axes[axis] for axis in split.axes)) for size, split in sizes]
