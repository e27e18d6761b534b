"""Memory formats: whether images lie channels last.

That is a matter of the graph, the same on all ranks, and not of the strides that a rank happens to have: a part with
one channel has both formats, and sums whose order in memory differs between ranks would be of other elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import Graph, Node

from distfx.grid import Grid

__all__ = ["any_channels_last", "empty", "is_channels_last", "laid", "local_parts", "memory_order", "settle"]

aten = torch.ops.aten

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(x: Tensor) -> bool:
    """By its strides: a part of a channels_last tensor is not dense. Not of one channel, which may be either."""
    return x.dim() in _LAST and x.shape[1] > 1 and x.stride(1) == 1 and x.stride(-1) > 1


def any_channels_last(tensors: Iterable[Tensor]) -> bool:
    return any(is_channels_last(tensor) for tensor in tensors)


def local_parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """This rank's part of each."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors)


def _format(rank: int, last: bool) -> torch.memory_format:
    return _LAST[rank] if last and rank in _LAST else torch.contiguous_format


def memory_order(rank: int, last: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims of a tensor in the order in which they lie in memory, and the way back from it."""
    dims = tuple(range(rank))
    return ((0, *dims[2:], 1), (0, dims[-1], *dims[1:-1])) if last and rank in _LAST else (dims, dims)


def empty(shape: Sequence[int], like: Tensor, last: bool, device: torch.device | None = None) -> Tensor:
    """An uninitialised tensor of ``shape``, of the dtype of ``like``."""
    memory_format = _format(len(shape), last)
    return torch.empty(tuple(shape), dtype=like.dtype, device=device or like.device, memory_format=memory_format)


def laid(x: Tensor, last: bool) -> Tensor:
    """``x`` without gaps, channels last or first: itself where it lies so."""
    return x.contiguous(memory_format=_format(x.dim(), last))


def settle(graph: Graph, wish: bool, grid: Grid) -> None:
    """Set ``last`` in the ``meta`` of every node. ``wish``: an input or a parameter is channels last, on some rank.

    As in torch, a convolution makes all that follows channels last then, as far as dims stay what they are. Where
    nothing is, those convolutions on CPUs are computed so that are faster so; what the graph returns is as ever.
    """
    choice = grid if not wish and grid.device_type == "cpu" and torch.backends.mkldnn.is_available() else None
    for node in graph.nodes:
        node.meta["last"] = len(node.meta.get("local", ())) in _LAST and _lies_last(node, wish, choice)
    if choice is not None:
        output = graph.output_node()
        for result in [node for node in output.all_input_nodes if node.meta["last"]]:
            with graph.inserting_before(output):
                first = graph.call_function(laid, (result, False))
            first.meta = {key: result.meta[key] for key in ("shape", "local", "layout", "dtype")} | {"last": False}
            output.replace_input_with(result, first)


def _lies_last(node: Node, wish: bool, grid: Grid | None) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return wish
    if node.target is aten.reshape.default:
        return False
    if node.target is aten.permute.default:
        order: Any = node.args[1]
        return tuple(order) == memory_order(len(order), True)[1] and not _of_operands(node)
    if node.target is aten.convolution.default:
        faster = None if grid is None else _is_faster_last(node, grid)
        return wish or (_of_operands(node) if faster is None else faster)
    return _of_operands(node)


def _of_operands(node: Node) -> bool:
    images = [x for x in node.all_input_nodes if x.op != "get_attr"]
    return any(x.meta["last"] for x in images if len(x.meta.get("local", ())) == len(node.meta["local"]))


FEW = 64
"""Channels of a group up to which oneDNN is faster on channels last, if there is enough space:"""
MUCH = 3000
"""positions of the result on a rank."""


def _is_faster_last(node: Node, grid: Grid) -> bool | None:
    """Whether oneDNN computes a convolution faster channels last; ``None`` where that hardly matters.

    Of channels first it makes copies in blocks, of input, result and their gradients. With few channels these copies
    take as long as a tenth of all; with many, and little space, its kernels for channels last are slower by far.
    """
    if node.meta["dtype"] not in (torch.float32, torch.bfloat16) or len(node.meta["local"]) != 4 or node.args[6]:
        return None
    x, weight = cast(list[Node], node.args[:2])
    filters, channels, *taps = _share(weight, grid)
    if math.prod(taps) == 1:
        return None
    groups = x.meta["shape"][1] // weight.meta["shape"][1]
    samples, _, *space = _share(node, grid)
    return max(filters // groups, channels) <= FEW and samples * math.prod(space) >= MUCH


def _share(node: Node, grid: Grid) -> list[int]:
    """The sizes of a rank's part as if all were even: what hangs on these is alike on all ranks."""
    sizes = zip(node.meta["shape"], node.meta["layout"].dims, strict=True)
    return [-(-size // math.prod(grid.axes[axis] for axis in split.axes)) for size, split in sizes]
