"""Convolutions, their padding, and matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from distfx.ir.meta import meta
from distfx.ir.nodes import arguments, aten
from distfx.passes.canonicalize.calls import duplicate_operands, insert_call, replace_call

__all__ = [
    "CONVOLUTIONS",
    "PADDING_MODES",
    "TRANSPOSED_CONVOLUTIONS",
    "add_product",
    "convolution",
    "crop_before_circular_pad",
    "pad",
]


PADDING_MODES = {
    aten.constant_pad_nd.default: "constant",
    aten.reflection_pad1d.default: "reflect",
    aten.reflection_pad2d.default: "reflect",
    aten.reflection_pad3d.default: "reflect",
    aten.replication_pad1d.default: "replicate",
    aten.replication_pad2d.default: "replicate",
    aten.replication_pad3d.default: "replicate",
}


def pad(graph: Graph, node: Node) -> None:
    value = node.args[2] if len(node.args) > 2 else None
    mode = PADDING_MODES[node.target]  # type: ignore[index]
    node.target, node.args = aten.pad.default, (*node.args[:2], mode, value)


def crop_before_circular_pad(graph: Graph, node: Node) -> None:
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
            x = insert_call(graph, node, aten.slice.Tensor, (x, dim, -before, end), shape)
    replace_call(node, aten.pad.default, x, [max(0, width) for width in widths], "circular")


CONVOLUTIONS = {
    aten.conv1d.default: 1,
    aten.conv2d.default: 2,
    aten.conv3d.default: 3,
    aten.conv1d.padding: 1,
    aten.conv2d.padding: 2,
    aten.conv3d.padding: 3,
}
"""The number of spatial dims of each."""
TRANSPOSED_CONVOLUTIONS = {
    aten.conv_transpose1d.default: 1,
    aten.conv_transpose2d.input: 2,
    aten.conv_transpose3d.input: 3,
}


def convolution(graph: Graph, node: Node) -> None:
    a = arguments(node)
    ndim = (CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS)[node.target]  # type: ignore[index]
    stride, dilation = _per_dim(a["stride"], ndim), _per_dim(a["dilation"], ndim)
    is_transposed = node.target in TRANSPOSED_CONVOLUTIONS
    output_padding = _per_dim(a.get("output_padding", 0), ndim)
    x, weight = a["input"], a["weight"]
    if a["padding"] == "same":
        taps = meta(weight).shape[2:]
        totals = [d * (k - 1) for d, k in zip(dilation, taps, strict=True)]
        padding = [total // 2 for total in totals]
        if any(total % 2 for total in totals):  # an even kernel has one more tap on the right
            x = _pad_right(graph, node, x, [total % 2 for total in totals])
    else:
        padding = _per_dim(0 if a["padding"] == "valid" else a["padding"], ndim)
    replace_call(
        node, aten.convolution.default,
        x, weight, a["bias"], stride, padding, dilation, is_transposed, output_padding, a["groups"],
    )  # fmt: skip
    duplicate_operands(graph, node)


def _per_dim(value: Any, ndim: int) -> list[int]:
    """One number for each spatial dim."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * ndim if len(values) == 1 else values


def _pad_right(graph: Graph, node: Node, x: Node, widths: Sequence[int]) -> Node:
    """Pad the end of the last dims with zeros."""
    shape = list(meta(x).shape)
    for i, width in enumerate(reversed(widths)):
        shape[-1 - i] = shape[-1 - i] + width
    pairs = [side for width in reversed(widths) for side in (0, width)]
    return insert_call(graph, node, aten.pad.default, (x, pairs, "constant", 0.0), shape)


def add_product(graph: Graph, node: Node) -> None:
    """``addmm`` and ``baddbmm`` are a product, its factor, and a sum."""
    values = arguments(node)
    summand, first, second = node.args[:3]
    target = aten.mm.default if node.target is aten.addmm.default else aten.bmm.default
    product = insert_call(graph, node, target, (first, second), meta(node).shape)
    duplicate_operands(graph, product)
    if values["alpha"] != 1:
        product = insert_call(graph, node, aten.mul.Tensor, (product, values["alpha"]), meta(node).shape)
    replace_call(node, aten.add.Tensor, product, summand)
    if values["beta"] != 1:
        node.kwargs = {"alpha": values["beta"]}
