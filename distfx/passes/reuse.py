"""reuse: write results over an operand that nothing else reads.

in: a bound graph.   out: the same graph with in-place activations and sums.

The model's own ``inplace=True`` and ``+=`` were made functional by capture. An activation or a sum may be written over
an operand if the operand is a new tensor, nothing else reads it, and the call that made it does not save it.
For some activations autograd then keeps the result, which the next layer keeps anyway, instead of the operand. This
saves a third of what layers of convolution, norm and leaky ReLU keep for backward.

In the same way, the gradient of a large activation overwrites the gradient of its result if the only reader of the
result has made that gradient as a new tensor.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from torch.fx import Graph, Node

from distfx.ir import ops
from distfx.ir.meta import Meta, meta
from distfx.ir.nodes import aten

__all__ = ["reuse_buffers"]

_ACTIVATIONS: dict[Any, Any] = {
    aten.relu.default: aten.relu_.default,
    aten.leaky_relu.default: aten.leaky_relu_.default,
    aten.elu.default: aten.elu_.default,
}
"""Activations whose gradient autograd computes from their result, with their in-place forms."""

LARGE = 1 << 18
"""Number of elements above which gradients are overwritten. Smaller ones are cheaper to allocate."""

_NEW_BOTH_WAYS = (
    aten.convolution.default,
    aten.linear.default,
    aten.batch_norm.default,
    aten.instance_norm.default,
    aten.group_norm.default,
    aten.layer_norm.default,
    ops.batch_norm,
    ops.halo_convolution,
)
"""Calls that return a new tensor, do not save it for backward, and return a new tensor as their input's gradient."""

_NEW = (*_NEW_BOTH_WAYS, aten.add.Tensor, ops.add_bias)
"""Calls that return a new tensor and do not save it for backward."""


def reuse_buffers(graph: Graph) -> None:
    """Make activations and sums overwrite an operand that nothing else uses."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _ACTIVATIONS and _is_unused_elsewhere(node.args[0]) and _keeps_sign(node):
            node.target = _ACTIVATIONS[node.target]
            if _gets_new_gradient(node):
                node.kwargs = {"activation": node.target}
                node.target = ops.activate_in_place
        elif node.target is aten.add.Tensor:
            _add_in_place(node)


def _keeps_sign(node: Node) -> bool:
    """Whether an activation's result has the sign of its operand. With a negative slope it does not."""
    slopes = (*node.args[1:], *node.kwargs.values())
    return all(isinstance(slope, int | float) and slope >= 0 for slope in slopes)


def _add_in_place(node: Node) -> None:
    first, second = node.args
    is_in_place = Meta.in_place.get(node)  # in the model
    if _is_unused_elsewhere(first) and _same_shape(first, node):
        node.target = aten.add_.Tensor if is_in_place else ops.add_into
    elif not is_in_place and not node.kwargs and _is_unused_elsewhere(second) and _same_shape(second, node):
        node.target, node.args = ops.add_into, (second, first)


def _gets_new_gradient(node: Node) -> bool:
    """Whether the gradient of a large result is a new tensor that one call returns."""
    if len(node.users) != 1 or node.kwargs or math.prod(meta(node).local_shape) < LARGE:
        return False
    (user,) = node.users
    return user.target in _NEW_BOTH_WAYS and user.args[0] is node and user.all_input_nodes.count(node) == 1


def _is_unused_elsewhere(value: Any) -> TypeGuard[Node]:
    """Whether a tensor is new and one call reads it, once."""
    if not isinstance(value, Node) or len(value.users) != 1:
        return False
    (user,) = value.users
    return list(user.args).count(value) == 1 and _is_new(value)


def _is_new(node: Node) -> bool:
    if node.target is ops.norm:  # saves the standardized values, but not what scaling and shifting make of them
        return any(parameter is not None for parameter in node.args[1:])
    if node.target is aten.add_.Tensor:  # otherwise it writes into a buffer
        return Meta.in_place.is_set(node)
    return node.target in (*_NEW, ops.add_into)


def _same_shape(operand: Node, result: Node) -> bool:
    same = meta(operand).dtype == meta(result).dtype
    return bool(same and meta(operand).local_shape == meta(result).local_shape)
