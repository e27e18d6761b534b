"""Operators that multiply and add: convolutions, linear layers, matrix products, attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from distfx.ir import ops
from distfx.ir.layout import Split, Window
from distfx.ir.meta import meta
from distfx.ir.nodes import arguments
from distfx.ir.ops import LocalSize, LocalStart
from distfx.ir.symbolic import show
from distfx.rules.builders import einsum
from distfx.rules.rule import BoundCall, Call, LocalContext, Rule, RuleChoice, aten, unchanged

__all__ = ["CONVOLUTION", "LINEAR", "MATMUL", "RULES", "TRANSPOSED", "conv_windows"]


def conv_windows(node: Node) -> list[Window]:
    """The windows of a convolution or of its transpose, by the formulas of :class:`distfx.ir.layout.Window`."""
    weight, stride, padding, dilation, transposed = (node.args[i] for i in (1, 3, 4, 5, 6))
    taps = meta(weight).shape[2:]  # type: ignore[arg-type]
    result = []
    for k, s, p, d in zip(taps, stride, padding, dilation, strict=True):  # type: ignore[arg-type]
        reach = d * (k - 1)
        if transposed:
            result.append(Window(lo=reach - p - s + 1, hi=p + s - 1, div=s))
        else:
            result.append(Window(lo=p, hi=reach + 1 - s - p, mul=s))
    return result


def _local_conv(context: LocalContext) -> Call:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = context.args
    split = context.split_space()
    if context.axes.get("g"):
        groups = LocalSize(groups, Split(context.axes["g"]))
    if transposed and any(split):
        blocks = {"split": split, "start": context.blocks(LocalStart), "size": context.blocks(LocalSize)}
        return ops.conv_transpose, (x, weight, bias, stride, padding, dilation, groups), blocks
    padding = [0 if cut else p for cut, p in zip(split, padding, strict=True)]
    return (
        aten.convolution.default,
        (x, weight, bias, stride, padding, dilation, transposed, output_padding, groups),
        {},
    )


CONVOLUTION = Rule(
    "convolution",
    "n (g c) [s]..., (g k) c _..., ?(g k) -> n (g k) s... where g = groups",
    _local_conv,
    windows=conv_windows,
    anchor=True,
    product=True,
    scatter="k",
    cost="space: halos. Channels: reduce-scatter of y (stationary-x), all-gather of x (stationary-y), smaller ones of "
    "both (stationary-w). Groups: nothing. Weights: an allreduce of the shard's gradient over the ranks that hold it",
)
TRANSPOSED = replace(
    CONVOLUTION,
    name="transposed convolution",
    pattern="n (g c) [s]..., (g c) k _..., ?(g k) -> n (g k) s... where g = groups",
    cost="as convolution",
)


def _convolution(node: Node) -> Rule:
    return TRANSPOSED if node.args[6] else CONVOLUTION


def _check_linear(call: BoundCall) -> str | None:
    features, expected = call.operand(0)[-1], call.operand(1)[1]
    if features == expected:
        return None
    size = show(meta(call.spec.operands[0][0]).shape[-1])
    return (
        f"takes {expected} features, but gets {features}. The model is tied to one size here: "
        f"its input {size} must equal {expected}."
    )


LINEAR = Rule(
    "linear",
    "b... c, k c, ?k -> b... k",
    check=_check_linear,
    anchor=True,
    product=True,
    scatter="k",
    cost="as a 1x1 convolution",
)
MATMUL = Rule(
    "matrix product",
    "b... m? c, b... c k? -> b... m? k?",
    product=True,
    cost="over c: an allreduce of the result",
)
OUTER = Rule("outer product", "m, k -> m k", cost="nothing")
EINSUM = Rule(
    "einsum",
    build=einsum,
    product=True,
    cost="over letters that are summed: an allreduce of the result. Operands are gathered over letters they lack",
)


def _local_attention(context: LocalContext) -> Call:
    """A causal mask counts queries from the first query of the whole tensor."""
    a = arguments(context.node)
    queries = context.layout.dims[-2]
    if not a["is_causal"] or not queries.axes:
        return unchanged(context)
    start = LocalStart(meta(context.node).shape[-2], queries)
    return ops.causal_attention, context.args[:3], {"start": start, "scale": a["scale"], "gqa": a["enable_gqa"]}


ATTENTION = Rule(
    "attention",
    "b... m _, b... _ _, b... _ _, ?b... m _ -> b... m _",
    _local_attention,
    product=True,
    cost="an all-gather of keys and values",
)
GROUPED_ATTENTION = replace(
    ATTENTION,
    name="grouped-query attention",
    pattern="b... _ m _, b... _ _ _, b... _ _ _, ?b... _ m _ -> b... _ m _",
    cost="an all-gather of keys and values; heads are not split",
)


def _attention(node: Node) -> Rule | None:
    a = arguments(node)
    if a["dropout_p"]:
        return None
    return GROUPED_ATTENTION if a["enable_gqa"] else ATTENTION


RULES: dict[Any, Rule | RuleChoice] = {
    aten.convolution.default: RuleChoice(_convolution, (CONVOLUTION, TRANSPOSED)),
    aten.linear.default: LINEAR,
    aten.matmul.default: MATMUL,
    aten.bmm.default: MATMUL,
    aten.mm.default: MATMUL,
    aten.mv.default: MATMUL,
    aten.dot.default: MATMUL,
    aten.vdot.default: MATMUL,
    aten.outer.default: OUTER,
    aten.einsum.default: EINSUM,
    aten.scaled_dot_product_attention.default: RuleChoice(_attention, (ATTENTION, GROUPED_ATTENTION)),
}
