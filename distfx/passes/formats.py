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

IMAGE_RANKS = (4, 5)
"""Ranks of tensors that have a channels-last format."""

_LAST_TO_FIRST = {rank: (0, rank - 1, *range(1, rank - 1)) for rank in IMAGE_RANKS}
"""The permutation of dims from channels last to channels first."""


__all__ = ["assign_memory_formats"]


def assign_memory_formats(graph: Graph, wish: bool, grid: Grid) -> None:
    """Set ``last`` in the ``meta`` of every node. ``wish``: an input or a parameter is channels last, on some rank.

    As in torch, a convolution makes all that follows channels last then, as far as dims stay what they are. Where
    nothing is, those convolutions on CPUs are computed so that are faster so; what the graph returns is as ever.
    """
    choice = grid if not wish and grid.device_type == "cpu" and torch.backends.mkldnn.is_available() else None
    for node in graph.nodes:
        meta(node).channels_last = len(Meta.local_shape.get(node) or ()) in IMAGE_RANKS and _lies_last(
            node, wish, choice
        )
    if choice is not None:
        output = graph.output_node()
        for result in [node for node in output.all_input_nodes if meta(node).channels_last]:
            with graph.inserting_before(output):
                first = graph.call_function(ops.to_memory_format, (result,), {"channels_last": False})
            inherit(first, result, Meta.shape, Meta.local_shape, Meta.layout, Meta.dtype)
            meta(first).channels_last = False
            output.replace_input_with(result, first)


def _lies_last(node: Node, wish: bool, grid: Grid | None) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return wish
    if node.target is aten.reshape.default:
        return False
    if node.target is aten.permute.default:
        order: Any = node.args[1]
        return tuple(order) == _LAST_TO_FIRST[len(order)] and not _of_operands(node)
    if node.target is aten.convolution.default:
        faster = None if grid is None else _is_faster_last(node, grid)
        return wish or (_of_operands(node) if faster is None else faster)
    return _of_operands(node)


def _of_operands(node: Node) -> bool:
    images = [x for x in node.all_input_nodes if x.op != "get_attr"]
    return any(
        meta(x).channels_last for x in images if len(Meta.local_shape.get(x) or ()) == len(meta(node).local_shape)
    )


FEW = 64
"""Channels of a group up to which oneDNN is faster on channels last, if there is enough space:"""


MUCH = 3000
"""positions of the result on a rank."""


def _is_faster_last(node: Node, grid: Grid) -> bool | None:
    """Whether oneDNN computes a convolution faster channels last; ``None`` where that hardly matters.

    Of channels first it makes copies in blocks, of input, result and their gradients. With few channels these copies
    take as long as a tenth of all; with many, and little space, its kernels for channels last are slower by far.
    """
    if meta(node).dtype not in (torch.float32, torch.bfloat16) or len(meta(node).local_shape) != 4 or node.args[6]:
        return None
    x, weight = cast(list[Node], node.args[:2])
    filters, channels, *taps = _share(weight, grid)
    if math.prod(taps) == 1:
        return None
    groups = meta(x).shape[1] // meta(weight).shape[1]
    samples, _, *space = _share(node, grid)
    return max(filters // groups, channels) <= FEW and samples * math.prod(space) >= MUCH


def _share(node: Node, grid: Grid) -> list[int]:
    """The sizes of a rank's part as if all were even: what hangs on these is alike on all ranks."""
    sizes = zip(meta(node).shape, meta(node).layout.dims, strict=True)
    return [-(-size // math.prod(grid.axes[axis] for axis in split.axes)) for size, split in sizes]
