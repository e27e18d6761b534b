"""One operator for each idea: all convolutions are ``convolution``, all views ``reshape``, a split is slices."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from distfx.ir.meta import Meta, meta
from distfx.ir.nodes import arguments, aten
from distfx.ir.ops import OpOutput
from distfx.passes.losses import split_loss
from distfx.rules.registry import has_operand_roles

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
    aten.ravel.default,
}
_DROPOUTS = {
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
}


def name_after_module(node: Node, old: Node) -> None:
    """The main call of a torch.nn module is called as the module is: ``layer1_0_conv1``."""
    stack = list((Meta.nn_module_stack.get(old) or {}).values())
    if stack and str(stack[-1][1]).startswith("torch.nn.modules") and meta(node).path:
        name = re.sub(r"\W", "_", meta(node).path)
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
    rank = len(meta(x).shape)
    shapes: Any = meta(source).shape  # of several tensors
    if source.target is aten.unbind.int:
        node.target, node.args = aten.select.int, (x, dim % rank, index % len(shapes))
        return
    start = sum((shape[dim] for shape in shapes[: index % len(shapes)]), 0)
    node.target, node.args = aten.slice.Tensor, (x, dim % rank, start, start + meta(node).shape[dim])


def _permutation(node: Node) -> list[int]:
    """The order of dims that a transposition of any kind gives."""
    rank = len(meta(node).shape)
    order = list(range(rank))
    if node.target in (aten.t.default, aten.numpy_T.default):
        return order[::-1]
    if node.target in (aten.movedim.int, aten.movedim.intlist):
        pairs = [([d] if isinstance(d, int) else d) for d in node.args[1:3]]
        moved = {to % rank: at % rank for at, to in zip(*pairs, strict=True)}
        rest = iter(dim for dim in order if dim not in moved.values())
        return [moved[i] if i in moved else next(rest) for i in order]
    if node.target in (aten.mT.default, aten.matrix_H.default):
        return [*order[:-2], rank - 1, rank - 2]
    a, b = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
    order[a], order[b] = order[b], order[a]
    return order


_TRANSPOSITIONS = {
    aten.transpose.int,
    aten.swapaxes.default,
    aten.swapdims.default,
    aten.t.default,
    aten.numpy_T.default,
    aten.mT.default,
    aten.matrix_H.default,
    aten.movedim.int,
    aten.movedim.intlist,
}
_PADS = {
    aten.constant_pad_nd.default: "constant",
    aten.reflection_pad1d.default: "reflect",
    aten.reflection_pad2d.default: "reflect",
    aten.reflection_pad3d.default: "reflect",
    aten.replication_pad1d.default: "replicate",
    aten.replication_pad2d.default: "replicate",
    aten.replication_pad3d.default: "replicate",
}


def _call(graph: Graph, like: Node, target: Any, args: tuple[Any, ...], shape: Sequence[Any]) -> Node:
    """A new call before ``like``, with its place in the model."""
    with graph.inserting_before(like):
        node = graph.call_function(target, args)
    node.meta = dict(like.meta)
    meta(node).shape = tuple(shape)
    return node


def _shuffle(graph: Graph, node: Node) -> None:
    """Pixel shuffle and its inverse are reshape, permute, reshape."""
    x: Any = node.args[0]
    r: Any = node.args[1]
    up = node.target is aten.pixel_shuffle.default
    small = x if up else node
    *lead, c, h, w = meta(small).shape
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
    node.target, node.args = aten.reshape.default, (second, list(meta(node).shape))


def _stacked(graph: Graph, node: Node) -> None:
    """A stack is a concatenation of tensors with one more dim."""
    operands: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    shape = list(meta(node).shape)
    dim %= len(shape)
    one = [*shape[:dim], 1, *shape[dim + 1 :]]
    node.args = ([_call(graph, node, aten.reshape.default, (x, one), one) for x in operands], dim)
    node.target, node.kwargs = aten.cat.default, {}


def _norm(graph: Graph, node: Node) -> None:
    """Every spelling of a vector norm; those of infinite order are extremes of absolute values."""
    a = arguments(node)
    x, order, dims = node.args[0], a["ord"] if "ord" in a else a["p"], a.get("dim")
    keepdim, dtype = bool(a.get("keepdim")), a.get("dtype")
    order = 2.0 if order is None else float(order)
    assert isinstance(x, Node)
    node.kwargs = {} if dtype is None else {"dtype": dtype}
    if math.isinf(order) and dtype is None:
        node.target = aten.amax.default if order > 0 else aten.amin.default
        size = _call(graph, node, aten.abs.default, (x,), meta(x).shape)
        node.args = (size, [] if dims is None else [dims] if isinstance(dims, int) else list(dims), keepdim)
    else:
        node.target = aten.linalg_vector_norm.default
        node.args = (x, order, None if dims is None else dims if isinstance(dims, list | tuple) else [dims], keepdim)


_NORMS = {
    aten.linalg_vector_norm.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim_dtype,
}


_OPERANDS_APART = {
    aten.linear.default,
    aten.dot.default,
    aten.vdot.default,
    aten.outer.default,
    aten.inner.default,
    aten.matmul.default,
    aten.bmm.default,
    aten.mm.default,
    aten.einsum.default,
    aten.scaled_dot_product_attention.default,
    aten.cat.default,
}


def _apart(graph: Graph, node: Node) -> None:
    """A tensor that is several operands of a call, which may need it in different layouts, gets a name for each."""
    seen: set[Node] = set()

    def other(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [other(item) for item in value]
        if not isinstance(value, Node):
            return value
        if value in seen:
            return _call(graph, node, aten.alias.default, (value,), meta(value).shape)
        seen.add(value)
        return value

    node.args = tuple(other(value) for value in node.args)


def _added_product(graph: Graph, node: Node) -> None:
    """``addmm`` and ``baddbmm`` are a product, factors and a sum."""
    a = arguments(node)
    added, first, second = node.args[:3]
    product = aten.mm.default if node.target is aten.addmm.default else aten.bmm.default
    made = _call(graph, node, product, (first, second), meta(node).shape)
    _apart(graph, made)
    if a["alpha"] != 1:
        made = _call(graph, node, aten.mul.Tensor, (made, a["alpha"]), meta(node).shape)
    node.target, node.args = aten.add.Tensor, (made, added)
    node.kwargs = {"alpha": a["beta"]} if a["beta"] != 1 else {}


def _rotated(graph: Graph, node: Node) -> None:
    """A quarter turn is a flip and a transposition, a half turn two flips."""
    given: Any = arguments(node)
    x, turns, rank = given["self"], given["k"], len(meta(node).shape)
    a, b = (dim % rank for dim in given["dims"])
    if turns % 2 == 0:
        node.target = aten.flip.default if turns % 4 else aten.alias.default
        node.args = (x, [a, b]) if turns % 4 else (x,)
        return
    flipped = _call(graph, node, aten.flip.default, (x, [b if turns % 4 == 1 else a]), meta(x).shape)
    order = list(range(rank))
    order[a], order[b] = b, a
    node.target, node.args = aten.permute.default, (flipped, order)


def _channel_shuffle(graph: Graph, node: Node) -> None:
    n, c, *space = meta(node).shape
    groups: Any = node.args[1]
    split = [n, groups, c // groups, *space]
    order = [0, 2, 1, *range(3, len(split))]
    first = _call(graph, node, aten.reshape.default, (node.args[0], split), split)
    second = _call(graph, node, aten.permute.default, (first, order), [split[i] for i in order])
    node.target, node.args = aten.reshape.default, (second, list(meta(node).shape))


def _glu(graph: Graph, node: Node) -> None:
    dim: Any = arguments(node)["dim"]
    shape = meta(node).shape
    size = shape[dim]
    parts = [(node.args[0], dim % len(shape), at, at + size) for at in (0, size)]
    value, gate = (_call(graph, node, aten.slice.Tensor, part, shape) for part in parts)
    node.args = (value, _call(graph, node, aten.sigmoid.default, (gate,), shape))
    node.target, node.kwargs = aten.mul.Tensor, {}


def _narrow(graph: Graph, node: Node) -> None:
    x, dim, start, length = cast(Any, node.args)
    if isinstance(start, int) and start < 0:  # from the end, which a slice of ``start + length`` would not be at 0
        start = start + meta(x).shape[dim]
    node.target, node.args = aten.slice.Tensor, (x, dim, start, start + length)


def _pad(graph: Graph, node: Node) -> None:
    value = node.args[2] if len(node.args) > 2 else None
    mode = _PADS[node.target]  # type: ignore[index]
    node.target, node.args = aten.pad.default, (*node.args[:2], mode, value)


def _piled(graph: Graph, node: Node) -> None:
    """``hstack`` of tensors of two dims or more is a concatenation."""
    if len(meta(node).shape) > 1:
        node.target, node.args = aten.cat.default, (node.args[0], 1)
        _apart(graph, node)


def _differences(graph: Graph, node: Node) -> None:
    """Of neighbours along a dim: the later less the earlier, as often as is said."""
    given = arguments(node)
    if given["prepend"] is not None or given["append"] is not None or meta(node).dtype is torch.bool:
        return
    x: Any = node.args[0]
    dim = given["dim"] % len(meta(x).shape)
    for number in range(given["n"]):
        shape = [size - 1 if i == dim else size for i, size in enumerate(meta(x).shape)]
        later = _call(graph, node, aten.slice.Tensor, (x, dim, 1, 2**63 - 1), shape)
        earlier = _call(graph, node, aten.slice.Tensor, (x, dim, 0, meta(x).shape[dim] - 1), shape)
        if number == given["n"] - 1:
            node.target, node.args, node.kwargs = aten.sub.Tensor, (later, earlier), {}
        else:
            x = _call(graph, node, aten.sub.Tensor, (later, earlier), shape)


def _crop_before_circle(graph: Graph, node: Node) -> None:
    """What a circular padding crops (by widths below zero) is gone before the rest is wrapped around."""
    given = arguments(node)
    x, widths = given["self"], list(given["pad"])
    if given["mode"] != "circular" or min(widths) >= 0:
        return
    for i in range(len(widths) // 2):
        before, after = (min(0, width) for width in widths[2 * i : 2 * i + 2])
        if before or after:
            dim, shape = len(meta(x).shape) - 1 - i, list(meta(x).shape)
            end = shape[dim] + after
            shape[dim] = end + before
            x = _call(graph, node, aten.slice.Tensor, (x, dim, -before, end), shape)
    node.args, node.kwargs = (x, [max(0, width) for width in widths], "circular"), {}


_REWRITES: dict[Any, Callable[[Graph, Node], None]] = {
    aten.channel_shuffle.default: _channel_shuffle,
    aten.rot90.default: _rotated,
    aten.glu.default: _glu,
    aten.narrow.default: _narrow,
    aten.diff.default: _differences,
    aten.hstack.default: _piled,
    aten.pad.default: _crop_before_circle,
    **dict.fromkeys(_PADS, _pad),
}


def _is_pure(target: Any) -> bool:
    """Whether calling an operator once more changes nothing."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


_POOLING = re.compile(r"(?:adaptive_|fractional_)?(?:max|avg)_(?:un)?pool(\d)d")


def _space(node: Node) -> int:
    """Of an operator that takes images without a batch, too: how many dims of space it has; else 0."""
    if node.target is aten.convolution.default:
        stride: Any = node.args[3]
        return len(stride)
    target = node.target.op if isinstance(node.target, OpOutput) else node.target
    pooling = _POOLING.match(getattr(target, "__name__", ""))
    return int(pooling[1]) if pooling else 0


def _batched(graph: Graph, node: Node) -> Node:
    """An operator on one image is that on a batch of one. Gives the call that computes."""
    space = _space(node)
    images = [a for a in node.args[:2] if isinstance(a, Node) and a.op != "get_attr"] if space else []
    images = [image for image in images if len(meta(image).shape) == space + 1]
    if not images or len(meta(node).shape) != space + 1:  # of several results each has a call of its own
        return node

    def batch(image: Node) -> Node:
        shape = [1, *meta(image).shape]
        same = (user for user in image.users if user.target is aten.reshape.default and user.args == (image, shape))
        return next(same, None) or _call(graph, node, aten.reshape.default, (image, shape), shape)

    shape = list(meta(node).shape)
    args = tuple(batch(a) if isinstance(a, Node) and a in images else a for a in node.args)
    made = _call(graph, node, node.target, args, [1, *shape])
    made.kwargs, node.kwargs = node.kwargs, {}
    node.target, node.args = aten.reshape.default, (made, shape)
    return made


def canonical(graph: Graph, node: Node) -> Node:
    """One operator for each idea: ``convolution`` for all convolutions, ``reshape`` for all views, and so on.

    Gives the call that is the module's own, if it was one.
    """
    _rewrite(graph, node)
    return _batched(graph, node)


def _rewrite(graph: Graph, node: Node) -> None:
    if split_loss(graph, node):
        return
    target = node.target
    source = node.args[0] if node.args else None
    if target is operator.getitem and isinstance(source, Node) and source.target in (*_SPLITS, aten.unbind.int):
        _part(node)
    elif target is operator.getitem and isinstance(source, Node) and source.target is aten.broadcast_tensors.default:
        operand: Any = source.args[0][node.args[1]]  # type: ignore[index]
        same = meta(operand).shape == meta(node).shape
        node.target = aten.alias.default if same else aten.expand.default
        node.args = (operand,) if same else (operand, list(meta(node).shape))
    elif target is operator.getitem and isinstance(source, Node) and _is_pure(source.target):
        index: Any = node.args[1]
        node.target, node.args, node.kwargs = OpOutput(source.target, index), source.args, source.kwargs  # type: ignore[arg-type]
    elif target in _TRANSPOSITIONS and not (target is aten.matrix_H.default and meta(node).dtype.is_complex):
        node.args, node.target = (source, _permutation(node)), aten.permute.default
    elif target in (aten.expand.default, aten.expand_as.default):
        node.args, node.kwargs, node.target = (source, list(meta(node).shape)), {}, aten.expand.default
    elif target in (aten.pixel_shuffle.default, aten.pixel_unshuffle.default):
        _shuffle(graph, node)
    elif target is aten.stack.default:
        _stacked(graph, node)
    elif target is aten.slice.Tensor and meta(source).shape == meta(node).shape and arguments(node)["step"] == 1:  # type: ignore[arg-type]
        node.target, node.args, node.kwargs = aten.alias.default, (source,), {}  # the first of y[:, :3]: all samples
    elif target in (aten.addmm.default, aten.baddbmm.default):
        _added_product(graph, node)
    elif target in (aten.cat.default, aten.concat.default) and len(source) == 1:  # type: ignore[arg-type]
        node.target, node.args, node.kwargs = aten.alias.default, (source[0],), {}  # type: ignore[index]
    elif target in _OPERANDS_APART or target is aten.concat.default or has_operand_roles(target):
        node.target = aten.cat.default if target is aten.concat.default else target
        _apart(graph, node)
    elif target is aten.rrelu.default and not arguments(node)["training"]:
        a = arguments(node)
        node.target, node.args, node.kwargs = aten.leaky_relu.default, (source, (a["lower"] + a["upper"]) / 2), {}
    elif target in _REWRITES:
        _REWRITES[target](graph, node)
    elif target in _NORMS:
        _norm(graph, node)
    elif target is aten.count_nonzero.default or target is aten.count_nonzero.dim_IntList:
        true = _call(graph, node, aten.ne.Scalar, (source, 0), meta(source).shape)  # type: ignore[arg-type]
        meta(true).dtype = torch.bool
        node.target, node.args = aten.sum.dim_IntList, (true, arguments(node).get("dim"))
    elif target is aten.type_as.default:
        node.args, node.target = (source, meta(node).dtype), aten.to.dtype
    elif target in _CONVOLUTIONS or target in _TRANSPOSED:
        _canonical_convolution(graph, node)
    elif target in _RESHAPES:
        node.args, node.kwargs, node.target = (node.args[0], list(meta(node).shape)), {}, aten.reshape.default
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
        taps = meta(weight).shape[2:]
        total = [d * (k - 1) for d, k in zip(dilation, taps, strict=True)]
        padding = [t // 2 for t in total]
        if any(t % 2 for t in total):  # an even kernel has one more tap on the right
            x = _padded(graph, node, x, [width for t in reversed(total) for width in (0, t % 2)])
    else:
        padding = _tuple(a["padding"], rank)
    node.args = (x, weight, a["bias"], stride, padding, dilation, transposed, output_padding, a["groups"])
    node.kwargs, node.target = {}, aten.convolution.default
    _apart(graph, node)


def _padded(graph: Graph, node: Node, x: Node, widths: list[int]) -> Node:
    shape = list(meta(x).shape)
    for i, width in enumerate(widths):
        shape[-1 - i // 2] = shape[-1 - i // 2] + width
    return _call(graph, node, aten.pad.default, (x, widths, "constant", 0.0), shape)
