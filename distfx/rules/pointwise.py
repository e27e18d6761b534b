"""Element-wise operators, and what goes with them: biases, per-channel slopes, dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from distfx.ir import ops
from distfx.ir.meta import meta
from distfx.ir.nodes import arguments, operator_of
from distfx.ir.ops import LocalPart
from distfx.rules.rule import BoundCall, Call, LocalContext, OpSpec, Rule, aten, spec_from_dims, unchanged

__all__ = ["BIAS", "DROPOUT", "ELEMENTWISE_LOSSES", "POINTWISE", "PRELU", "RULES", "draws", "is_pointwise", "is_random"]

ELEMENTWISE_LOSSES = {
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.kl_div.default,
    aten.soft_margin_loss.default,
}
"""Losses that are pointwise where they are not reduced."""

_ALSO_POINTWISE = {
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.hardswish.default,
    aten.log_sigmoid.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.complex.default,
    aten.polar.default,
    aten.real.default,
    aten._conj.default,
    aten.lift_fresh_copy.default,
    aten.imag.default,
    *ELEMENTWISE_LOSSES,
}

_UNTAGGED = (
    *("__and__", "__or__", "__xor__", "where", "floor_divide", "rsub", "masked_fill", "special_expit", "absolute"),
    *("multiply", "subtract", "divide", "true_divide", "negative", "clip", "fix", "greater", "greater_equal", "less"),
    *("less_equal", "not_equal", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh"),
)
"""Operators, most of them other names of tagged ones, that torch does not tag as element-wise; each with all its forms
that give a new tensor."""

_ALSO_POINTWISE |= {
    form
    for name in _UNTAGGED
    for form in (getattr(getattr(aten, name), overload) for overload in getattr(aten, name).overloads())
    if len(form._schema.returns) == 1 and not form._schema.is_mutable and "out" not in form._overloadname
    and str(form._schema.returns[0].type) == "Tensor"
}  # fmt: skip


def is_random(target: Any) -> bool:
    """Whether an operator draws random numbers."""
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.nondeterministic_seeded in target.tags or "dropout" in target._schema.name
    )


def draws(node: Node) -> bool:
    """Whether a call draws random numbers: not with a probability of zero, nor outside of training."""
    target = operator_of(node)
    if not is_random(target):
        return False
    given = arguments(node)
    chance = next((given[key] for key in ("dropout_p", "dropout", "p") if isinstance(given.get(key), int | float)), 1)
    return bool(chance) and given.get("training", given.get("train", True)) is not False


def is_pointwise(target: Any) -> bool:
    """Whether an operator works on each element by itself, broadcasting its operands."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or is_random(target):
        return False
    return torch.Tag.pointwise in target.tags or target in _ALSO_POINTWISE


def _pointwise_spec(rule: Rule, node: Node) -> OpSpec | None:
    """Operands broadcast from the right: a dim of one stays whole."""
    shape = meta(node).shape
    operands: list[tuple[Node, list[int | None]]] = []
    for operand in node.all_input_nodes:
        other = meta(operand).shape
        first = len(shape) - len(other)
        if first < 0:
            return None
        numbers = [None if size == 1 and shape[first + i] != 1 else first + i for i, size in enumerate(other)]
        operands.append((operand, numbers))
    return spec_from_dims(rule, node, operands, list(range(len(shape))))


def _check_pointwise(call: BoundCall) -> str | None:
    shapes = [call.operand(i) for i in range(len(call.spec.operands))]
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return f"meets shapes {shapes}, which do not match"
    return None


POINTWISE = Rule("pointwise", "... -> ...", unchanged, build=_pointwise_spec, check=_check_pointwise, cost="nothing")


def _bias_spec(rule: Rule, node: Node) -> OpSpec | None:
    """A bias along dim 1 of a convolution's result, or along the last of a linear layer's."""
    x, bias = node.args
    assert isinstance(x, Node) and isinstance(bias, Node)
    every = list(range(len(meta(node).shape)))
    return spec_from_dims(rule, node, [(x, every), (bias, [every[meta(node).bias_dim]])], every)


def _local_bias(context: LocalContext) -> Call:
    return ops.add_bias, context.args, {"dim": meta(context.node).bias_dim}


BIAS = Rule("bias", "n k s..., k -> n k s...", _local_bias, build=_bias_spec, cost="nothing")


def _prelu_spec(rule: Rule, node: Node) -> OpSpec | None:
    """One slope for each channel, or one for all."""
    x, slope = node.args
    assert isinstance(x, Node) and isinstance(slope, Node)
    every = list(range(len(meta(node).shape)))
    each = 1 if meta(slope).shape != (1,) and len(every) > 1 else None
    return spec_from_dims(rule, node, [(x, every), (slope, [each])], every)


PRELU = Rule("prelu", "n c s..., c -> n c s...", unchanged, build=_prelu_spec, cost="nothing")


def _pick_spec(rule: Rule, node: Node) -> OpSpec | None:
    """Every position looks up one of its classes."""
    values, target = node.args[:2]
    assert isinstance(values, Node) and isinstance(target, Node)
    every: list[int | None] = list(range(len(meta(node).shape)))
    return spec_from_dims(rule, node, [(values, [*every[:1], None, *every[1:]]), (target, every)], every)


def _check_pick(call: BoundCall) -> str | None:
    values, target = call.operand(0), call.operand(1)
    want = (*values[:1], *values[2:]) if len(values) > 1 else ()
    if target == want:
        return None
    return f"meets a target of shape {target} and values of shape {values}: one class for each position is {want}"


PICK = Rule(
    "class of a target",
    "n _ s..., n s... -> n s...",
    unchanged,
    build=_pick_spec,
    check=_check_pick,
    cost="classes are gathered if split",
)


def _class_weights_spec(rule: Rule, node: Node) -> OpSpec | None:
    target, weight = node.args[:2]
    assert isinstance(target, Node) and isinstance(weight, Node)
    every: list[int | None] = list(range(len(meta(node).shape)))
    return spec_from_dims(rule, node, [(target, every), (weight, [None])], every)


CLASS_WEIGHTS = Rule("weight of a target", "..., _ -> ...", unchanged, build=_class_weights_spec, cost="nothing")


def _dropout_spec(rule: Rule, node: Node) -> OpSpec | None:
    x = node.args[0]
    assert isinstance(x, Node)
    every = list(range(len(meta(node).shape)))
    return spec_from_dims(rule, node, [(x, every)], every)


def _local_dropout(context: LocalContext) -> Call:
    """Ranks with the same part of the mask draw the same one, others independent ones."""
    features = context.node.target is aten.feature_dropout.default
    dims = context.layout.dims[:2] if features else context.layout.dims
    part = LocalPart(tuple(axis for split in dims for axis in split.axes))
    return ops.dropout, (context.args[0],), {"p": context.args[1], "features": features, "part": part}


DROPOUT = Rule("dropout", "... -> ...", _local_dropout, build=_dropout_spec, cost="eight bytes a pass: rank 0's seed")

RULES: dict[Any, Rule] = {
    ops.add_bias: BIAS,
    ops.straight: POINTWISE,
    ops.pick_class: PICK,
    ops.class_weights: CLASS_WEIGHTS,
    aten.prelu.default: PRELU,
    aten.dropout.default: DROPOUT,
    aten.feature_dropout.default: DROPOUT,
}
