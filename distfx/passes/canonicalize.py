"""canonicalize: one operator for each concept. All convolutions are ``convolution``, all views ``reshape``, and so on.

:data:`REWRITES` maps each operator that has a canonical form to a function that rewrites its call in place. A function
does nothing if a call has no canonical form.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from distfx.ir.meta import Meta, meta
from distfx.ir.nodes import arguments, aten, operator_of
from distfx.ir.ops import OpOutput
from distfx.ir.torch_private import OpOverload, is_mutable, rename
from distfx.passes.losses import LOSSES

__all__ = ["REWRITES", "canonicalize", "name_after_module"]

Rewrite = Callable[[Graph, Node], None]

_END = 2**63 - 1


def canonicalize(graph: Graph, node: Node) -> Node:
    """Rewrite a call to its canonical form, in place. Returns the call that does the work of the module."""
    rewrite = REWRITES.get(node.target)
    if rewrite is not None:
        rewrite(graph, node)
    return _add_batch_dim(graph, node)


def name_after_module(node: Node, exported: Node) -> None:
    """Name the main call of a torch.nn module after the module's path: ``layer1_0_conv1``."""
    stack = list((Meta.nn_module_stack.get(exported) or {}).values())
    if stack and str(stack[-1][1]).startswith("torch.nn.modules") and meta(node).path:
        name = re.sub(r"\W", "_", meta(node).path)
        rename(node, f"{name}_pad" if node.target is aten.pad.default else name)


def _insert_call(graph: Graph, node: Node, target: Any, args: tuple[Any, ...], shape: Sequence[Any]) -> Node:
    """Insert a call before ``node`` with the same provenance and dtype."""
    with graph.inserting_before(node):
        call = graph.call_function(target, args)
    call.meta = dict(node.meta)
    meta(call).shape = tuple(shape)
    return call


def _replace_call(node: Node, target: Any, *args: Any, **kwargs: Any) -> None:
    """Make the node a call of ``target``."""
    node.target, node.args, node.kwargs = target, args, kwargs


def _duplicate_operands(graph: Graph, node: Node) -> None:
    """Insert an alias for each repeated operand, because each use may need another layout."""
    seen: set[Node] = set()

    def distinct(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [distinct(item) for item in value]
        if not isinstance(value, Node):
            return value
        if value in seen:
            return _insert_call(graph, node, aten.alias.default, (value,), meta(value).shape)
        seen.add(value)
        return value

    node.args = tuple(distinct(value) for value in node.args)


# -------------------------------------------------------------------------------------------- several outputs


def _rewrite_output(graph: Graph, node: Node) -> None:
    """Make one output of a call that returns several tensors a separate call."""
    source: Any = node.args[0]
    if not isinstance(source, Node):
        return
    rewrite = _OUTPUTS.get(source.target)
    if rewrite is not None:
        rewrite(node, source)
    elif _is_pure(source.target):
        index: Any = node.args[1]
        _replace_call(node, OpOutput(source.target, index), *source.args, **source.kwargs)  # type: ignore[arg-type]


def _is_pure(target: Any) -> bool:
    """Whether an operator may be called again: it has no side effects and draws no random numbers."""
    return (
        isinstance(target, OpOverload)
        and not is_mutable(target)
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def _output_of_split(node: Node, source: Node) -> None:
    """An output of a split is a slice."""
    x: Any = source.args[0]
    index: Any = node.args[1]
    dim: Any = arguments(source)["dim"]
    shapes: Any = meta(source).shape  # of all outputs
    start = sum((shape[dim] for shape in shapes[: index % len(shapes)]), 0)
    _replace_call(node, aten.slice.Tensor, x, dim % len(meta(x).shape), start, start + meta(node).shape[dim])


def _output_of_unbind(node: Node, source: Node) -> None:
    """An output of ``unbind`` is a selection."""
    x: Any = source.args[0]
    index: Any = node.args[1]
    dim: Any = arguments(source)["dim"]
    _replace_call(node, aten.select.int, x, dim % len(meta(x).shape), index % len(meta(source).shape))


def _output_of_broadcast(node: Node, source: Node) -> None:
    """An output of ``broadcast_tensors`` is an expanded operand."""
    operands: Any = source.args[0]
    index: Any = node.args[1]
    operand, shape = operands[index], meta(node).shape
    if meta(operand).shape == shape:
        _replace_call(node, aten.alias.default, operand)
    else:
        _replace_call(node, aten.expand.default, operand, list(shape))


_OUTPUTS: Mapping[Any, Callable[[Node, Node], None]] = {
    aten.split.Tensor: _output_of_split,
    aten.split.sizes: _output_of_split,
    aten.split_with_sizes.default: _output_of_split,
    aten.chunk.default: _output_of_split,
    aten.tensor_split.sections: _output_of_split,
    aten.tensor_split.indices: _output_of_split,
    aten.unbind.int: _output_of_unbind,
    aten.broadcast_tensors.default: _output_of_broadcast,
}


# --------------------------------------------------------------------------------------------- views and shapes


def _reshape(graph: Graph, node: Node) -> None:
    _replace_call(node, aten.reshape.default, node.args[0], list(meta(node).shape))


def _expand(graph: Graph, node: Node) -> None:
    _replace_call(node, aten.expand.default, node.args[0], list(meta(node).shape))


def _permute(graph: Graph, node: Node) -> None:
    """Every kind of transposition is a permutation of dims."""
    if node.target is aten.matrix_H.default and meta(node).dtype.is_complex:
        return  # it also conjugates
    node.args, node.target = (node.args[0], _permutation(node)), aten.permute.default


def _permutation(node: Node) -> list[int]:
    """The order of dims after a transposition."""
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


def _slice(graph: Graph, node: Node) -> None:
    """A slice of everything is an alias: the first index of ``y[:, :3]``."""
    x: Any = node.args[0]
    if meta(x).shape == meta(node).shape and arguments(node)["step"] == 1:
        _replace_call(node, aten.alias.default, x)


def _narrow(graph: Graph, node: Node) -> None:
    values: Any = arguments(node)
    x, dim, start, length = values["self"], values["dim"], values["start"], values["length"]
    if isinstance(start, int) and start < 0:  # counted from the end: the end of the slice could be 0
        start = start + meta(x).shape[dim]
    _replace_call(node, aten.slice.Tensor, x, dim, start, start + length)


def _stack(graph: Graph, node: Node) -> None:
    """A stack is a concatenation of tensors with one more dim."""
    operands: Any = node.args[0]
    dim: Any = arguments(node)["dim"]
    shape = list(meta(node).shape)
    dim %= len(shape)
    piece = [*shape[:dim], 1, *shape[dim + 1 :]]
    pieces = [_insert_call(graph, node, aten.reshape.default, (x, piece), piece) for x in operands]
    _replace_call(node, aten.cat.default, pieces, dim)


def _concatenate(graph: Graph, node: Node) -> None:
    operands: Any = node.args[0]
    if len(operands) == 1:
        _replace_call(node, aten.alias.default, operands[0])
        return
    node.target = aten.cat.default
    _duplicate_operands(graph, node)


def _hstack(graph: Graph, node: Node) -> None:
    """``hstack`` of tensors with two dims or more is a concatenation along the second."""
    if len(meta(node).shape) > 1:
        _replace_call(node, aten.cat.default, node.args[0], 1)
        _duplicate_operands(graph, node)


def _pixel_shuffle(graph: Graph, node: Node) -> None:
    """Pixel shuffle and its inverse are a reshape, a permutation and a reshape."""
    x: Any = node.args[0]
    r: Any = node.args[1]
    is_upscaling = node.target is aten.pixel_shuffle.default
    *lead, c, h, w = meta(x if is_upscaling else node).shape  # of the smaller image
    rank, c = len(lead), c // (r * r)
    channels_first, interleaved = [*lead, c, r, r, h, w], [*lead, c, h, r, w, r]
    if is_upscaling:
        split, permuted = channels_first, interleaved
        order = [*range(rank), rank, rank + 3, rank + 1, rank + 4, rank + 2]
    else:
        split, permuted = interleaved, channels_first
        order = [*range(rank), rank, rank + 2, rank + 4, rank + 1, rank + 3]
    first = _insert_call(graph, node, aten.reshape.default, (x, split), split)
    second = _insert_call(graph, node, aten.permute.default, (first, order), permuted)
    _replace_call(node, aten.reshape.default, second, list(meta(node).shape))


def _channel_shuffle(graph: Graph, node: Node) -> None:
    n, c, *space = meta(node).shape
    groups: Any = node.args[1]
    split = [n, groups, c // groups, *space]
    order = [0, 2, 1, *range(3, len(split))]
    first = _insert_call(graph, node, aten.reshape.default, (node.args[0], split), split)
    second = _insert_call(graph, node, aten.permute.default, (first, order), [split[i] for i in order])
    _replace_call(node, aten.reshape.default, second, list(meta(node).shape))


def _rotate(graph: Graph, node: Node) -> None:
    """A rotation by 90 degrees is a flip and a transposition, by 180 degrees two flips."""
    values: Any = arguments(node)
    x, turns, rank = values["self"], values["k"] % 4, len(meta(node).shape)
    a, b = (dim % rank for dim in values["dims"])
    if turns == 0:
        _replace_call(node, aten.alias.default, x)
    elif turns == 2:
        _replace_call(node, aten.flip.default, x, [a, b])
    else:
        flipped = _insert_call(graph, node, aten.flip.default, (x, [b if turns == 1 else a]), meta(x).shape)
        order = list(range(rank))
        order[a], order[b] = b, a
        _replace_call(node, aten.permute.default, flipped, order)


# ----------------------------------------------------------------------------------------------------- padding

_PADDING_MODES = {
    aten.constant_pad_nd.default: "constant",
    aten.reflection_pad1d.default: "reflect",
    aten.reflection_pad2d.default: "reflect",
    aten.reflection_pad3d.default: "reflect",
    aten.replication_pad1d.default: "replicate",
    aten.replication_pad2d.default: "replicate",
    aten.replication_pad3d.default: "replicate",
}


def _pad(graph: Graph, node: Node) -> None:
    value = node.args[2] if len(node.args) > 2 else None
    mode = _PADDING_MODES[node.target]  # type: ignore[index]
    node.target, node.args = aten.pad.default, (*node.args[:2], mode, value)


def _crop_before_circular_pad(graph: Graph, node: Node) -> None:
    """Negative widths of a circular padding crop the tensor before the rest wraps around."""
    values = arguments(node)
    x, widths = values["self"], list(values["pad"])
    if values["mode"] != "circular" or min(widths) >= 0:
        return
    for i in range(len(widths) // 2):
        before, after = (min(0, width) for width in widths[2 * i : 2 * i + 2])
        if before or after:
            dim, shape = len(meta(x).shape) - 1 - i, list(meta(x).shape)
            end = shape[dim] + after
            shape[dim] = end + before
            x = _insert_call(graph, node, aten.slice.Tensor, (x, dim, -before, end), shape)
    _replace_call(node, aten.pad.default, x, [max(0, width) for width in widths], "circular")


# ------------------------------------------------------------------------------------- convolutions and products

_CONVOLUTIONS = {
    aten.conv1d.default: 1,
    aten.conv2d.default: 2,
    aten.conv3d.default: 3,
    aten.conv1d.padding: 1,
    aten.conv2d.padding: 2,
    aten.conv3d.padding: 3,
}
"""The number of spatial dims of each."""
_TRANSPOSED_CONVOLUTIONS = {
    aten.conv_transpose1d.default: 1,
    aten.conv_transpose2d.input: 2,
    aten.conv_transpose3d.input: 3,
}


def _convolution(graph: Graph, node: Node) -> None:
    a = arguments(node)
    rank = (_CONVOLUTIONS | _TRANSPOSED_CONVOLUTIONS)[node.target]  # type: ignore[index]
    stride, dilation = _per_dim(a["stride"], rank), _per_dim(a["dilation"], rank)
    is_transposed = node.target in _TRANSPOSED_CONVOLUTIONS
    output_padding = _per_dim(a.get("output_padding", 0), rank)
    x, weight = a["input"], a["weight"]
    if a["padding"] == "same":
        taps = meta(weight).shape[2:]
        totals = [d * (k - 1) for d, k in zip(dilation, taps, strict=True)]
        padding = [total // 2 for total in totals]
        if any(total % 2 for total in totals):  # an even kernel has one more tap on the right
            x = _pad_right(graph, node, x, [total % 2 for total in totals])
    else:
        padding = _per_dim(0 if a["padding"] == "valid" else a["padding"], rank)
    _replace_call(
        node, aten.convolution.default,
        x, weight, a["bias"], stride, padding, dilation, is_transposed, output_padding, a["groups"],
    )  # fmt: skip
    _duplicate_operands(graph, node)


def _per_dim(value: Any, rank: int) -> list[int]:
    """One number for each spatial dim."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * rank if len(values) == 1 else values


def _pad_right(graph: Graph, node: Node, x: Node, widths: Sequence[int]) -> Node:
    """Pad the end of the last dims with zeros."""
    shape = list(meta(x).shape)
    for i, width in enumerate(reversed(widths)):
        shape[-1 - i] = shape[-1 - i] + width
    pairs = [side for width in reversed(widths) for side in (0, width)]
    return _insert_call(graph, node, aten.pad.default, (x, pairs, "constant", 0.0), shape)


def _add_product(graph: Graph, node: Node) -> None:
    """``addmm`` and ``baddbmm`` are a product, its factor, and a sum."""
    values = arguments(node)
    summand, first, second = node.args[:3]
    target = aten.mm.default if node.target is aten.addmm.default else aten.bmm.default
    product = _insert_call(graph, node, target, (first, second), meta(node).shape)
    _duplicate_operands(graph, product)
    if values["alpha"] != 1:
        product = _insert_call(graph, node, aten.mul.Tensor, (product, values["alpha"]), meta(node).shape)
    _replace_call(node, aten.add.Tensor, product, summand)
    if values["beta"] != 1:
        node.kwargs = {"alpha": values["beta"]}


# ------------------------------------------------------------------------------------------ element-wise, reductions


def _glu(graph: Graph, node: Node) -> None:
    """One half times the sigmoid of the other."""
    dim: Any = arguments(node)["dim"]
    shape = meta(node).shape
    size = shape[dim]
    halves = [(node.args[0], dim % len(shape), start, start + size) for start in (0, size)]
    value, gate = (_insert_call(graph, node, aten.slice.Tensor, half, shape) for half in halves)
    _replace_call(node, aten.mul.Tensor, value, _insert_call(graph, node, aten.sigmoid.default, (gate,), shape))


def _rrelu(graph: Graph, node: Node) -> None:
    """Without training the slope is the mean of its bounds."""
    values = arguments(node)
    if not values["training"]:
        _replace_call(node, aten.leaky_relu.default, node.args[0], (values["lower"] + values["upper"]) / 2)


def _dropout(graph: Graph, node: Node) -> None:
    """Without training, or with p = 0, dropout is the identity."""
    if not node.args[2] or node.args[1] == 0:
        node.target, node.args = aten.alias.default, (node.args[0],)


def _type_as(graph: Graph, node: Node) -> None:
    node.target, node.args = aten.to.dtype, (node.args[0], meta(node).dtype)


def _norm(graph: Graph, node: Node) -> None:
    """All vector norms are ``linalg_vector_norm``; those of infinite order are extremes of absolute values."""
    a = arguments(node)
    x, order, dims = node.args[0], a["ord"] if "ord" in a else a["p"], a.get("dim")
    keepdim, dtype = bool(a.get("keepdim")), a.get("dtype")
    order = 2.0 if order is None else float(order)
    if isinstance(dims, int):
        dims = [dims]
    assert isinstance(x, Node)
    if math.isinf(order) and dtype is None:
        target = aten.amax.default if order > 0 else aten.amin.default
        magnitude = _insert_call(graph, node, aten.abs.default, (x,), meta(x).shape)
        _replace_call(node, target, magnitude, [] if dims is None else list(dims), keepdim)
    else:
        _replace_call(node, aten.linalg_vector_norm.default, x, order, dims, keepdim)
        node.kwargs = {} if dtype is None else {"dtype": dtype}


def _count_nonzero(graph: Graph, node: Node) -> None:
    x: Any = node.args[0]
    is_nonzero = _insert_call(graph, node, aten.ne.Scalar, (x, 0), meta(x).shape)
    meta(is_nonzero).dtype = torch.bool
    _replace_call(node, aten.sum.dim_IntList, is_nonzero, arguments(node).get("dim"))


def _difference(graph: Graph, node: Node) -> None:
    """Repeated differences of neighbours along a dim: the later minus the earlier."""
    values = arguments(node)
    if values["prepend"] is not None or values["append"] is not None or meta(node).dtype is torch.bool:
        return
    x: Any = node.args[0]
    dim = values["dim"] % len(meta(x).shape)
    for order in range(1, values["n"] + 1):
        shape = [size - 1 if i == dim else size for i, size in enumerate(meta(x).shape)]
        later = _insert_call(graph, node, aten.slice.Tensor, (x, dim, 1, _END), shape)
        earlier = _insert_call(graph, node, aten.slice.Tensor, (x, dim, 0, meta(x).shape[dim] - 1), shape)
        if order == values["n"]:
            _replace_call(node, aten.sub.Tensor, later, earlier)
        else:
            x = _insert_call(graph, node, aten.sub.Tensor, (later, earlier), shape)


# --------------------------------------------------------------------------------------------- images without batch

_POOLING = re.compile(r"(?:adaptive_|fractional_)?(?:max|avg)_(?:un)?pool(\d)d")


def _spatial_rank(node: Node) -> int:
    """The number of spatial dims of a convolution or pooling, which also take images without a batch; else 0."""
    if node.target is aten.convolution.default:
        stride: Any = node.args[3]
        return len(stride)
    pooling = _POOLING.match(getattr(operator_of(node), "__name__", ""))
    return int(pooling[1]) if pooling else 0


def _add_batch_dim(graph: Graph, node: Node) -> Node:
    """Turn an operator on one image into that on a batch of one. Returns the call that computes."""
    rank = _spatial_rank(node)
    images = [a for a in node.args[:2] if isinstance(a, Node) and a.op != "get_attr"] if rank else []
    images = [image for image in images if len(meta(image).shape) == rank + 1]
    if not images or len(meta(node).shape) != rank + 1:  # a call with several outputs waits for its OpOutput
        return node

    def batch(image: Node) -> Node:
        shape = [1, *meta(image).shape]
        same = (user for user in image.users if user.target is aten.reshape.default and user.args == (image, shape))
        return next(same, None) or _insert_call(graph, node, aten.reshape.default, (image, shape), shape)

    shape = list(meta(node).shape)
    args = tuple(batch(a) if isinstance(a, Node) and a in images else a for a in node.args)
    batched = _insert_call(graph, node, node.target, args, [1, *shape])
    batched.kwargs = node.kwargs
    _replace_call(node, aten.reshape.default, batched, shape)
    return batched


# ------------------------------------------------------------------------------------------------------- the table

REWRITES: Mapping[Any, Rewrite] = {
    operator.getitem: _rewrite_output,
    # views and shapes
    aten.view.default: _reshape,
    aten.reshape.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.flatten.using_ints: _reshape,
    aten.unflatten.int: _reshape,
    aten.view_as.default: _reshape,
    aten.reshape_as.default: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.unsqueeze.default: _reshape,
    aten.ravel.default: _reshape,
    aten.expand.default: _expand,
    aten.expand_as.default: _expand,
    aten.transpose.int: _permute,
    aten.swapaxes.default: _permute,
    aten.swapdims.default: _permute,
    aten.t.default: _permute,
    aten.numpy_T.default: _permute,
    aten.mT.default: _permute,
    aten.matrix_H.default: _permute,
    aten.movedim.int: _permute,
    aten.movedim.intlist: _permute,
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.stack.default: _stack,
    aten.cat.default: _concatenate,
    aten.concat.default: _concatenate,
    aten.hstack.default: _hstack,
    aten.pixel_shuffle.default: _pixel_shuffle,
    aten.pixel_unshuffle.default: _pixel_shuffle,
    aten.channel_shuffle.default: _channel_shuffle,
    aten.rot90.default: _rotate,
    # padding
    aten.pad.default: _crop_before_circular_pad,
    **dict.fromkeys(_PADDING_MODES, _pad),
    # convolutions and products
    **dict.fromkeys((*_CONVOLUTIONS, *_TRANSPOSED_CONVOLUTIONS), _convolution),
    aten.addmm.default: _add_product,
    aten.baddbmm.default: _add_product,
    aten.linear.default: _duplicate_operands,
    aten.dot.default: _duplicate_operands,
    aten.vdot.default: _duplicate_operands,
    aten.outer.default: _duplicate_operands,
    aten.inner.default: _duplicate_operands,
    aten.matmul.default: _duplicate_operands,
    aten.bmm.default: _duplicate_operands,
    aten.mm.default: _duplicate_operands,
    aten.einsum.default: _duplicate_operands,
    aten.scaled_dot_product_attention.default: _duplicate_operands,
    # element-wise operators and reductions
    aten.glu.default: _glu,
    aten.rrelu.default: _rrelu,
    aten.dropout.default: _dropout,
    aten.feature_dropout.default: _dropout,
    aten.alpha_dropout.default: _dropout,
    aten.feature_alpha_dropout.default: _dropout,
    aten.type_as.default: _type_as,
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.norm.ScalarOpt_dtype: _norm,
    aten.norm.ScalarOpt_dim_dtype: _norm,
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.diff.default: _difference,
    # losses
    **LOSSES,
}
"""For each operator that has a canonical form the function that rewrites its calls."""
