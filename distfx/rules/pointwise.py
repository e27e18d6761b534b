"""Element-wise operators, biases, per-channel slopes, dropout, and the parts of losses."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from distfx.ir import ops
from distfx.ir.meta import meta
from distfx.ir.nodes import arguments, operator_of
from distfx.ir.ops import LocalPart
from distfx.ir.torch_private import OpOverload, schema_of
from distfx.rules.rule import BoundCall, Call, LocalContext, Rule, RuleChoice, aten

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
"""Losses that are element-wise if they are not reduced."""

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
"""Element-wise operators that torch does not tag as such, most of them aliases; with all their functional overloads."""


def _returns_one_new_tensor(overload: OpOverload) -> bool:
    schema = schema_of(overload)
    is_functional = not schema.is_mutable and "out" not in schema.overload_name
    return is_functional and [str(value.type) for value in schema.returns] == ["Tensor"]


_ALSO_POINTWISE |= {
    overload
    for name in _UNTAGGED
    for overload in (getattr(getattr(aten, name), each) for each in getattr(aten, name).overloads())
    if _returns_one_new_tensor(overload)
}


def is_random(target: Any) -> bool:
    """Whether an operator draws random numbers."""
    return isinstance(target, OpOverload) and (
        torch.Tag.nondeterministic_seeded in target.tags or "dropout" in schema_of(target).name
    )


def draws(node: Node) -> bool:
    """Whether a call draws random numbers. It does not if the probability is zero, or outside training."""
    target = operator_of(node)
    if not is_random(target):
        return False
    a = arguments(node)
    probability = next((a[key] for key in ("dropout_p", "dropout", "p") if isinstance(a.get(key), int | float)), 1)
    return bool(probability) and a.get("training", a.get("train", True)) is not False


def is_pointwise(target: Any) -> bool:
    """Whether an operator computes each element of its result from one element of each operand, which broadcast."""
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable or is_random(target):
        return False
    return torch.Tag.pointwise in target.tags or target in _ALSO_POINTWISE


def _check_pointwise(call: BoundCall) -> str | None:
    shapes = [call.operand(i) for i in range(len(call.spec.operands))]
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return f"gets operands of shapes {shapes}, which do not broadcast"
    return None


POINTWISE = Rule("pointwise", "*... -> ...", check=_check_pointwise, cost="nothing")
BIAS = Rule("bias", "... k@dim, k... -> ... k@dim", cost="nothing")
PRELU = Rule("prelu", "n c ..., c -> n c ...", cost="nothing")


def _prelu(node: Node) -> Rule:
    """A slope for each channel (dim 1), or a single slope, which broadcasts, for a vector."""
    return PRELU if len(meta(node).shape) > 1 else POINTWISE


def _check_target(call: BoundCall) -> str | None:
    values, target = call.operand(0), call.operand(1)
    expected = (*values[:1], *values[2:]) if len(values) > 1 else ()
    if target == expected:
        return None
    return f"gets a target of shape {target}, but values of shape {values} need a target of shape {expected}"


TARGET_CLASS = Rule(
    "class of a target",
    "n _ ..., n ... -> n ...",
    check=_check_target,
    cost="classes are gathered if they are split",
)
SINGLE_TARGET_CLASS = Rule(
    "class of a single target", "_, ->", check=_check_target, cost="classes are gathered if they are split"
)
TARGET_WEIGHT = Rule("weight of a target", "..., _ -> ...", cost="nothing")


def _target_class(node: Node) -> Rule:
    return TARGET_CLASS if meta(node).shape else SINGLE_TARGET_CLASS


def _local_dropout(context: LocalContext) -> Call:
    """Ranks with the same part of the mask draw the same numbers, others draw independent ones."""
    features = context.node.target is aten.feature_dropout.default
    dims = context.layout.dims[:2] if features else context.layout.dims
    part = LocalPart(tuple(axis for split in dims for axis in split.axes))
    return ops.dropout, (context.args[0],), {"p": context.args[1], "features": features, "part": part}


DROPOUT = Rule("dropout", "... -> ...", _local_dropout, cost="rank 0's seed: eight bytes per pass")

RULES: dict[Any, Rule | RuleChoice] = {
    ops.add_bias: BIAS,
    ops.straight: POINTWISE,
    ops.pick_class: RuleChoice(_target_class, (TARGET_CLASS, SINGLE_TARGET_CLASS)),
    ops.class_weights: TARGET_WEIGHT,
    aten.prelu.default: RuleChoice(_prelu, (PRELU, POINTWISE)),
    aten.dropout.default: DROPOUT,
    aten.feature_dropout.default: DROPOUT,
}
