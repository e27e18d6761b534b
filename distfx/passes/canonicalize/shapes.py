"""Views, permutations, slices and concatenations."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from distfx.ir.meta import meta
from distfx.ir.nodes import arguments, aten
from distfx.passes.canonicalize.calls import duplicate_operands, insert_call, replace_call

__all__ = [
    "channel_shuffle",
    "concatenate",
    "expand",
    "hstack",
    "narrow",
    "permute",
    "pixel_shuffle",
    "reshape",
    "rotate",
    "simplify_slice",
    "stack",
]


def reshape(graph: Graph, node: Node) -> None:
    replace_call(node, aten.reshape.default, node.args[0], list(meta(node).shape))


def expand(graph: Graph, node: Node) -> None:
    replace_call(node, aten.expand.default, node.args[0], list(meta(node).shape))


def permute(graph: Graph, node: Node) -> None:
    """Every kind of transposition is a permutation of dims."""
    if node.target is aten.matrix_H.default and meta(node).dtype.is_complex:
        return  # it also conjugates
    node.args, node.target = (node.args[0], _permutation(node)), aten.permute.default


def _permutation(node: Node) -> list[int]:
    """The order of dims after a transposition."""
    ndim = len(meta(node).shape)
    order = list(range(ndim))
    if node.target in (aten.t.default, aten.numpy_T.default):
        return order[::-1]
    if node.target in (aten.movedim.int, aten.movedim.intlist):
        pairs = [([d] if isinstance(d, int) else d) for d in node.args[1:3]]
        moved = {to % ndim: at % ndim for at, to in zip(*pairs, strict=True)}
        rest = iter(dim for dim in order if dim not in moved.values())
        return [moved[i] if i in moved else next(rest) for i in order]
    if node.target in (aten.mT.default, aten.matrix_H.default):
        return [*order[:-2], ndim - 1, ndim - 2]
    a, b = (int(d) % ndim for d in node.args[1:3])  # type: ignore[arg-type]
    order[a], order[b] = order[b], order[a]
    return order


def simplify_slice(graph: Graph, node: Node) -> None:
    """A slice of everything is an alias: the first index of ``y[:, :3]``."""
    x: Any = node.args[0]
    if meta(x).shape == meta(node).shape and arguments(node)["step"] == 1:
        replace_call(node, aten.alias.default, x)


def narrow(graph: Graph, node: Node) -> None:
    values: Any = arguments(node)
    x, dim, start, length = values["self"], values["dim"], values["start"], values["length"]
    if isinstance(start, int) and start < 0:  # counted from the end: the end of the slice could be 0
        start = start + meta(x).shape[dim]
    replace_call(node, aten.slice.Tensor, x, dim, start, start + length)


def stack(graph: Graph, node: Node) -> None:
    """A stack is a concatenation of tensors with one more dim."""
    operands: Any = node.args[0]
    dim: Any = arguments(node)["dim"]
    shape = list(meta(node).shape)
    dim %= len(shape)
    piece = [*shape[:dim], 1, *shape[dim + 1 :]]
    pieces = [insert_call(graph, node, aten.reshape.default, (x, piece), piece) for x in operands]
    replace_call(node, aten.cat.default, pieces, dim)


def concatenate(graph: Graph, node: Node) -> None:
    operands: Any = node.args[0]
    if len(operands) == 1:
        replace_call(node, aten.alias.default, operands[0])
        return
    node.target = aten.cat.default
    duplicate_operands(graph, node)


def hstack(graph: Graph, node: Node) -> None:
    """``hstack`` of tensors with two dims or more is a concatenation along the second."""
    if len(meta(node).shape) > 1:
        replace_call(node, aten.cat.default, node.args[0], 1)
        duplicate_operands(graph, node)


def pixel_shuffle(graph: Graph, node: Node) -> None:
    """Pixel shuffle and its inverse are a reshape, a permutation and a reshape."""
    x: Any = node.args[0]
    r: Any = node.args[1]
    is_upscaling = node.target is aten.pixel_shuffle.default
    *lead, c, h, w = meta(x if is_upscaling else node).shape  # of the smaller image
    ndim, c = len(lead), c // (r * r)
    channels_first, interleaved = [*lead, c, r, r, h, w], [*lead, c, h, r, w, r]
    if is_upscaling:
        split, permuted = channels_first, interleaved
        order = [*range(ndim), ndim, ndim + 3, ndim + 1, ndim + 4, ndim + 2]
    else:
        split, permuted = interleaved, channels_first
        order = [*range(ndim), ndim, ndim + 2, ndim + 4, ndim + 1, ndim + 3]
    first = insert_call(graph, node, aten.reshape.default, (x, split), split)
    second = insert_call(graph, node, aten.permute.default, (first, order), permuted)
    replace_call(node, aten.reshape.default, second, list(meta(node).shape))


def channel_shuffle(graph: Graph, node: Node) -> None:
    n, c, *space = meta(node).shape
    groups: Any = node.args[1]
    split = [n, groups, c // groups, *space]
    order = [0, 2, 1, *range(3, len(split))]
    first = insert_call(graph, node, aten.reshape.default, (node.args[0], split), split)
    second = insert_call(graph, node, aten.permute.default, (first, order), [split[i] for i in order])
    replace_call(node, aten.reshape.default, second, list(meta(node).shape))


def rotate(graph: Graph, node: Node) -> None:
    """A rotation by 90 degrees is a flip and a transposition, by 180 degrees two flips."""
    values: Any = arguments(node)
    x, turns, ndim = values["self"], values["k"] % 4, len(meta(node).shape)
    a, b = (dim % ndim for dim in values["dims"])
    if turns == 0:
        replace_call(node, aten.alias.default, x)
    elif turns == 2:
        replace_call(node, aten.flip.default, x, [a, b])
    else:
        flipped = insert_call(graph, node, aten.flip.default, (x, [b if turns == 1 else a]), meta(x).shape)
        order = list(range(ndim))
        order[a], order[b] = b, a
        replace_call(node, aten.permute.default, flipped, order)
