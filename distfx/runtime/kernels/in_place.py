"""Results that overwrite an operand: what a model's ``inplace=True`` and ``+=`` mean, which capture made copies of.

An activation or a sum may be written over an operand that is a tensor of its own, read by nothing else, and not kept
by the call that made it. For some activations autograd then keeps the result, which the next layer keeps anyway,
instead of the operand besides: a third of all that layers of convolution, norm and leaky ReLU keep for backward.

Likewise, going back, the gradient of a large activation is written over that of its result, where the one call that
reads the result made a new tensor for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx import Graph, Node

from distfx.ir import ops
from distfx.runtime.kernels.halo_convolution import HaloConvolution

__all__ = ["OfFirst", "overwrite"]

aten = torch.ops.aten

_ACTIVATIONS: dict[Any, Any] = {
    aten.relu.default: aten.relu_.default,
    aten.leaky_relu.default: aten.leaky_relu_.default,
    aten.elu.default: aten.elu_.default,
}
"""Those whose gradient autograd takes from their result."""

_GRADIENTS: dict[Any, Callable[..., Tensor]] = {
    aten.relu_.default: lambda grad, y: aten.threshold_backward.grad_input(grad, y, 0, grad_input=grad),
    aten.leaky_relu_.default: lambda grad, y, slope=0.01: aten.leaky_relu_backward.grad_input(
        grad, y, slope, True, grad_input=grad
    ),
    aten.elu_.default: lambda grad, y, alpha=1.0, scale=1.0, input_scale=1.0: aten.elu_backward.grad_input(
        grad, alpha, scale, input_scale, True, y, grad_input=grad
    ),
}
"""Their gradients, from that of the result, which is overwritten, and the result."""

LARGE = 1 << 18
"""Gradients of so many elements are overwritten: to make a new small one takes less time than a call from Python."""

_NEW_BOTH_WAYS = (
    aten.convolution.default,
    aten.linear.default,
    aten.batch_norm.default,
    aten.instance_norm.default,
    aten.group_norm.default,
    aten.layer_norm.default,
    ops.batch_norm,
)
"""Calls that give a tensor of its own and do not need it for their gradient, which is a tensor of its own as well."""

_NEW = (*_NEW_BOTH_WAYS, aten.add.Tensor, ops.add_bias)
"""Calls of which the first half of that is true."""


def overwrite(graph: Graph) -> None:
    """Let activations and sums be written over an operand wherever nobody can tell."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _ACTIVATIONS and _is_spare(node.args[0]) and _increases(node):
            node.target = _ACTIVATIONS[node.target]
            if _gets_new_gradient(node):
                node.target = Overwriting(node.target)
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


def _gets_new_gradient(node: Node) -> bool:
    """Whether the gradient of a large result comes from one call, which made it for this."""
    if len(node.users) != 1 or node.kwargs or math.prod(node.meta["local"]) < LARGE:
        return False
    (user,) = node.users
    made = isinstance(user.target, HaloConvolution) or user.target in _NEW_BOTH_WAYS
    return made and user.args[0] is node and user.all_input_nodes.count(node) == 1


class Overwriting:
    """An activation that is written over its operand, and whose gradient is written over that of its result."""

    def __init__(self, target: Callable[..., Tensor]) -> None:
        self.target, self.gradient = target, _GRADIENTS[target]
        self.__name__ = str(target)

    def __call__(self, x: Tensor, *slopes: float) -> Tensor:
        result: Tensor = _Overwriting.apply(x, self, slopes)
        return result


class _Overwriting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Overwriting, slopes: tuple[float, ...]) -> Tensor:
        ctx.activation, ctx.slopes = activation, slopes
        ctx.mark_dirty(x)
        activation.target(x, *slopes)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        return ctx.activation.gradient(grad, result, *ctx.slopes), None, None


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
