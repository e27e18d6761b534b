"""One operator for each idea: all convolutions are ``convolution``, all views ``reshape``, a split is slices."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from distfx.passes.nodes import arguments, aten

__all__ = ["canonical", "name_after_module"]

_CONVOLUTIONS = {
    aten.conv1d.default: 1,
    aten.conv2d.default: 2,
    aten.conv3d.default: 3,
    aten.conv1d.padding: 1,
    aten.conv2d.padding: 2,
    aten.conv3d.padding: 3,
}
_TRANSPOSED = {aten.conv_transpose1d.default: 1, aten.conv_transpose2d.input: 2, aten.conv_transpose3d.input: 3}
_RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
}
_NEW = {aten.new_empty.default: aten.empty.memory_format}
_DROPOUTS = {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default}


def name_after_module(node: Node, old: Node) -> None:
    """The main call of a torch.nn module is called as the module is: ``layer1_0_conv1``."""
    stack = list((old.meta.get("nn_module_stack") or {}).values())
    if stack and str(stack[-1][1]).startswith("torch.nn.modules") and node.meta["path"]:
        name = re.sub(r"\W", "_", node.meta["path"])
        node._rename(f"{name}_pad" if node.target is aten.pad.default else name)


def _tuple(value: Any, rank: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * rank if len(values) == 1 else values


_SPLITS = {
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
}


def _part(node: Node) -> None:
    """A part of a split is a slice; one of ``unbind`` is a selection."""
    source, index = node.args
    assert isinstance(source, Node) and isinstance(index, int)
    x: Any = source.args[0]
    dim: Any = arguments(source)["dim"]
    rank = len(x.meta["shape"])
    shapes = source.meta["shape"]
    if source.target is aten.unbind.int:
        node.target, node.args = aten.select.int, (x, dim % rank, index % len(shapes))
        return
    start = sum((shape[dim] for shape in shapes[: index % len(shapes)]), 0)
    node.target, node.args = aten.slice.Tensor, (x, dim % rank, start, start + node.meta["shape"][dim])


def _permutation(node: Node) -> list[int]:
    """The order of dims that a transposition of any kind gives."""
    rank = len(node.meta["shape"])
    order = list(range(rank))
    if node.target is aten.t.default:
        return order[::-1]
    if node.target is aten.movedim.int:
        source, target = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
        order.insert(target, order.pop(source))
        return order
    a, b = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
    order[a], order[b] = order[b], order[a]
    return order


_TRANSPOSITIONS = {aten.transpose.int, aten.swapaxes.default, aten.swapdims.default, aten.t.default, aten.movedim.int}


def _call(graph: Graph, like: Node, target: Any, args: tuple[Any, ...], shape: Sequence[Any]) -> Node:
    """A new call before ``like``, with its place in the model."""
    with graph.inserting_before(like):
        node = graph.call_function(target, args)
    node.meta = dict(like.meta) | {"shape": tuple(shape)}
    return node


def _shuffle(graph: Graph, node: Node) -> None:
    """Pixel shuffle and its inverse are reshape, permute, reshape."""
    x: Any = node.args[0]
    r: Any = node.args[1]
    up = node.target is aten.pixel_shuffle.default
    small = x if up else node
    *lead, c, h, w = small.meta["shape"]
    rank, c = len(lead), c // (r * r)
    if up:
        split = [*lead, c, r, r, h, w]
        order = [*range(rank), rank, rank + 3, rank + 1, rank + 4, rank + 2]
        moved = [*lead, c, h, r, w, r]
    else:
        split = [*lead, c, h, r, w, r]
        order = [*range(rank), rank, rank + 2, rank + 4, rank + 1, rank + 3]
        moved = [*lead, c, r, r, h, w]
    first = _call(graph, node, aten.reshape.default, (x, split), split)
    second = _call(graph, node, aten.permute.default, (first, order), moved)
    node.target, node.args = aten.reshape.default, (second, list(node.meta["shape"]))


def _stacked(graph: Graph, node: Node) -> None:
    """A stack is a concatenation of tensors with one more dim."""
    operands: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    shape = list(node.meta["shape"])
    dim %= len(shape)
    one = [*shape[:dim], 1, *shape[dim + 1 :]]
    node.args = ([_call(graph, node, aten.reshape.default, (x, one), one) for x in operands], dim)
    node.target, node.kwargs = aten.cat.default, {}


def canonical(graph: Graph, node: Node) -> None:
    """One operator for each idea: ``convolution`` for all convolutions, ``reshape`` for all views, and so on."""
    target = node.target
    source = node.args[0] if node.args else None
    if target is operator.getitem and isinstance(source, Node) and source.target in (*_SPLITS, aten.unbind.int):
        _part(node)
    elif target in _TRANSPOSITIONS:
        node.args, node.target = (source, _permutation(node)), aten.permute.default
    elif target in (aten.expand.default, aten.expand_as.default):
        node.args, node.kwargs, node.target = (source, list(node.meta["shape"])), {}, aten.expand.default
    elif target in (aten.pixel_shuffle.default, aten.pixel_unshuffle.default):
        _shuffle(graph, node)
    elif target is aten.stack.default:
        _stacked(graph, node)
    elif target in _NEW:
        words = {"dtype": node.meta["dtype"], **{key: value for key, value in node.kwargs.items() if value is not None}}
        node.target, node.args, node.kwargs = _NEW[target], (list(node.meta["shape"]),), words
    elif target is aten.type_as.default:
        node.args, node.target = (source, node.meta["dtype"]), aten.to.dtype
    elif target in (aten.cat.default, aten.concat.default):
        alone = isinstance(source, list | tuple) and len(source) == 1
        node.target = aten.alias.default if alone else aten.cat.default
        if alone:
            node.args, node.kwargs = (source[0],), {}  # type: ignore[index]
    elif target in _CONVOLUTIONS or target in _TRANSPOSED:
        _canonical_convolution(graph, node)
    elif target in _RESHAPES:
        node.args, node.kwargs, node.target = (node.args[0], list(node.meta["shape"])), {}, aten.reshape.default
    elif target in _DROPOUTS and (not node.args[2] or node.args[1] == 0):
        node.target, node.args = aten.alias.default, (node.args[0],)


def _canonical_convolution(graph: Graph, node: Node) -> None:
    a = arguments(node)
    rank = (_CONVOLUTIONS | _TRANSPOSED)[node.target]  # type: ignore[index]
    stride, dilation = _tuple(a["stride"], rank), _tuple(a["dilation"], rank)
    transposed = node.target in _TRANSPOSED
    output_padding = _tuple(a.get("output_padding", 0), rank) if transposed else [0] * rank
    x, weight = a["input"], a["weight"]
    if a["padding"] == "valid":
        a["padding"] = 0
    if a["padding"] == "same":
        taps = weight.meta["shape"][2:]
        total = [d * (k - 1) for d, k in zip(dilation, taps, strict=True)]
        padding = [t // 2 for t in total]
        if any(t % 2 for t in total):  # an even kernel has one more tap on the right
            x = _padded(graph, node, x, [width for t in reversed(total) for width in (0, t % 2)])
    else:
        padding = _tuple(a["padding"], rank)
    node.args = (x, weight, a["bias"], stride, padding, dilation, transposed, output_padding, a["groups"])
    node.kwargs, node.target = {}, aten.convolution.default


def _padded(graph: Graph, node: Node, x: Node, widths: list[int]) -> Node:
    shape = list(x.meta["shape"])
    for i, width in enumerate(widths):
        shape[-1 - i // 2] = shape[-1 - i // 2] + width
    return _call(graph, node, aten.pad.default, (x, widths, "constant", 0.0), shape)
