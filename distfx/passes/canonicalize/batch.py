"""Convolutions and poolings of one image become those of a batch of one."""

from __future__ import annotations

import re
from typing import Any

from torch.fx import Graph, Node

from distfx.ir.meta import meta
from distfx.ir.nodes import aten, operator_of
from distfx.passes.canonicalize.calls import insert_call, replace_call

__all__ = ["add_batch_dim"]


_POOLING = re.compile(r"(?:adaptive_|fractional_)?(?:max|avg)_(?:un)?pool(\d)d")


def _spatial_rank(node: Node) -> int:
    """The number of spatial dims of a convolution or pooling, which also take images without a batch; else 0."""
    if node.target is aten.convolution.default:
        stride: Any = node.args[3]
        return len(stride)
    pooling = _POOLING.match(getattr(operator_of(node), "__name__", ""))
    return int(pooling[1]) if pooling else 0


def add_batch_dim(graph: Graph, node: Node) -> Node:
    """Turn an operator on one image into that on a batch of one. Returns the call that computes."""
    ndim = _spatial_rank(node)
    images = [a for a in node.args[:2] if isinstance(a, Node) and a.op != "get_attr"] if ndim else []
    images = [image for image in images if len(meta(image).shape) == ndim + 1]
    if not images or len(meta(node).shape) != ndim + 1:  # a call with several outputs waits for its OpOutput
        return node

    def batch(image: Node) -> Node:
        shape = [1, *meta(image).shape]
        same = (user for user in image.users if user.target is aten.reshape.default and user.args == (image, shape))
        return next(same, None) or insert_call(graph, node, aten.reshape.default, (image, shape), shape)

    shape = list(meta(node).shape)
    args = tuple(batch(a) if isinstance(a, Node) and a in images else a for a in node.args)
    batched = insert_call(graph, node, node.target, args, [1, *shape])
    batched.kwargs = node.kwargs
    replace_call(node, aten.reshape.default, batched, shape)
    return batched
