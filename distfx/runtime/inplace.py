"""Results that overwrite an operand: what a model's ``inplace=True`` and ``+=`` mean, which capture made copies of.

An activation or a sum may be written over an operand that is a tensor of its own, read by nothing else, and not kept
by the call that made it. For some activations autograd then keeps the result, which the next layer keeps anyway,
instead of the operand besides: a third of all that layers of convolution, norm and leaky ReLU keep for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import Graph, Node

from distfx import ops
from distfx.runtime.halo_conv import HaloConvolution

__all__ = ["OfFirst", "overwrite"]

aten = torch.ops.aten

_ACTIVATIONS: dict[Any, Any] = {
    aten.relu.default: aten.relu_.default,
    aten.leaky_relu.default: aten.leaky_relu_.default,
    aten.elu.default: aten.elu_.default,
}
"""Those whose gradient autograd takes from their result."""

_NEW = (
    aten.convolution.default,
    aten.linear.default,
    aten.batch_norm.default,
    aten.instance_norm.default,
    aten.group_norm.default,
    aten.layer_norm.default,
    aten.add.Tensor,
    ops.add_bias,
    ops.batch_norm,
)
"""Calls that give a tensor of its own and do not need it for their gradient."""


def overwrite(graph: Graph) -> None:
    """Let activations and sums be written over an operand wherever nobody can tell."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _ACTIVATIONS and _is_spare(node.args[0]) and _increases(node):
            node.target = _ACTIVATIONS[node.target]
        elif node.target is aten.add.Tensor:
            _add_in_place(node)


def _increases(node: Node) -> bool:
    """Whether an activation's result has the sign of its operand: slopes may be given that fall below zero."""
    slopes = (*node.args[1:], *node.kwargs.values())
    return all(isinstance(slope, int | float) and slope >= 0 for slope in slopes)


def _add_in_place(node: Node) -> None:
    first, second = node.args
    own = node.meta.get("in_place")
    if _is_spare(first) and _alike(first, node):
        node.target = aten.add_.Tensor if own else add_into
    elif not own and not node.kwargs and _is_spare(second) and _alike(second, node):
        node.target, node.args = add_into, (second, first)


class OfFirst:
    """A call that the model makes in place: its result has the first operand's dtype, whatever the others are."""

    def __init__(self, target: Callable[..., Tensor]) -> None:
        self.target = target
        self.__name__ = getattr(target, "__name__", str(target))

    def __call__(self, first: Tensor, *others: Any, **kwargs: Any) -> Tensor:
        return self.target(first, *others, **kwargs).to(first.dtype)


def add_into(result: Tensor, other: Any, **kwargs: Any) -> Tensor:
    """The sum, written over ``result`` unless it has another dtype (as autocast may have made it)."""
    if isinstance(other, Tensor) and other.dtype != result.dtype:
        return torch.add(result, other, **kwargs)
    return result.add_(other, **kwargs)


def _is_spare(value: Any) -> TypeGuard[Node]:
    """Whether a tensor is read by one call only, once, and belongs to nobody else."""
    if not isinstance(value, Node) or len(value.users) != 1:
        return False
    (user,) = value.users
    return list(user.args).count(value) == 1 and _is_new(value)


def _is_new(node: Node) -> bool:
    if node.target is ops.norm:  # which keeps what it has standardised, but neither scales nor shifts that in place
        return any(parameter is not None for parameter in node.args[1:])
    if node.target is aten.add_.Tensor:  # else into a buffer
        return "in_place" in node.meta
    return isinstance(node.target, HaloConvolution) or node.target in (*_NEW, add_into)


def _alike(operand: Node, result: Node) -> bool:
    same = operand.meta["dtype"] == result.meta["dtype"]
    return bool(same and operand.meta["local"] == result.meta["local"])
