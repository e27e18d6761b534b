"""Operators that multiply and add: convolutions, linear layers, matrix products, attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from distfx.ir import ops
from distfx.ir.layout import Split, Window
from distfx.ir.meta import meta
from distfx.ir.nodes import arguments
from distfx.ir.ops import LocalSize, LocalStart
from distfx.ir.symbolic import show
from distfx.rules.notation import DimPattern
from distfx.rules.rule import (
    BoundCall,
    Call,
    LocalContext,
    OpSpec,
    Rule,
    RuleChoice,
    aten,
    spec_from_dims,
    spec_from_pattern,
    unchanged,
)

__all__ = ["CONVOLUTION", "LINEAR", "MATMUL", "RULES", "TRANSPOSED", "conv_windows"]


def conv_windows(node: Node) -> list[Window]:
    """Of a convolution, or of its transpose: the formulas are those of :class:`distfx.ir.layout.Window`."""
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


def _conv_spec(rule: Rule, node: Node) -> OpSpec | None:
    spec = spec_from_pattern(rule, node)
    if spec is None:
        return None
    groups: Any = node.args[8]
    extents = dict(spec.extents) | {"g": groups}
    if node.args[6]:
        extents["c"] = meta(spec.operands[0][0]).shape[1] // groups
    else:
        extents["k"] = meta(node).shape[1] // groups
    return replace(spec, extents=extents)


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
    "n (g c) [s]..., (g k) c _..., (g k) -> n (g k) s...",
    _local_conv,
    tensors=(0, 1, 2),
    windows=conv_windows,
    build=_conv_spec,
    anchor=True,
    product=True,
    scatter="k",
    cost="space: halos. channels: reduce-scatter of y (stationary-x), all-gather of x (-y), smaller ones of both (-w); "
    "groups: nothing. Weights: one allreduce of the shard's gradient over the ranks that hold it",
)
TRANSPOSED = replace(
    CONVOLUTION,
    name="transposed convolution",
    pattern="n (g c) [s]..., (g c) k _..., (g k) -> n (g k) s...",
    cost="as convolution",
)


def _convolution(node: Node) -> Rule:
    return TRANSPOSED if node.args[6] else CONVOLUTION


def _linear_spec(rule: Rule, node: Node) -> OpSpec | None:
    """``b... c, k c, k -> b... k``: the first of the leading dims holds the samples."""
    x: Any = node.args[0]
    lead = tuple(DimPattern(("n",) if i == 0 else (f"b{i}",)) for i in range(len(meta(x).shape) - 1))
    words = [(*lead, DimPattern(("c",))), (DimPattern(("k",)), DimPattern(("c",))), (DimPattern(("k",)),)]
    operands = [(a, w) for a, w in zip(node.args, words, strict=False) if isinstance(a, Node)]
    if len(meta(operands[1][0]).shape) != 2:
        return None
    result = (*lead, DimPattern(("k",)))
    extents = {w.factors[0]: size for w, size in zip(result, meta(node).shape, strict=True)}
    extents["c"] = meta(operands[1][0]).shape[1]
    return OpSpec(rule, node, tuple(operands), result, extents)


def _check_linear(call: BoundCall) -> str | None:
    have, want = call.operand(0)[-1], call.operand(1)[1]
    if have == want:
        return None
    size = show(meta(call.spec.operands[0][0]).shape[-1])
    return (
        f"takes {want} features, but gets {have}. The model is tied to one size here: "
        f"its input {size} must equal {want}."
    )


LINEAR = Rule(
    "linear",
    "b... c, k c, k -> b... k",
    unchanged,
    build=_linear_spec,
    check=_check_linear,
    anchor=True,
    product=True,
    scatter="k",
    cost="as a 1x1 convolution",
)


def _letters_spec(
    rule: Rule, node: Node, operands: Sequence[tuple[Node, str]], result: str, whole: str = ""
) -> OpSpec | None:
    """A letter for each dim, as in an einsum; those in ``whole`` are not split, nor is a dim of one that broadcasts."""
    if any(len(set(letters)) < len(letters) for _, letters in operands):
        return None  # a diagonal
    extents: dict[str, Any] = {}
    for other, letters in operands:
        extents |= {c: size for c, size in zip(letters, meta(other).shape, strict=True) if extents.get(c, 1) == 1}

    def words(other: Node, letters: str) -> list[int | None]:
        sizes = zip(letters, meta(other).shape, strict=True)
        return [None if c in whole or (size == 1 and extents[c] != 1) else ord(c) for c, size in sizes]

    return spec_from_dims(rule, node, [(x, words(x, letters)) for x, letters in operands], words(node, result))


def _einsum_letters(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, those of an ellipsis filled in."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    widest = max([rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks, strict=True) if "..." in t] or [0])
    unnamed = [c for c in map(chr, range(0xE000, 0xE000 + widest))]  # letters that no equation has

    def filled(term: str, rank: int) -> str:
        return term.replace("...", "".join(unnamed[widest - (rank - len(term) + 3) :])) if "..." in term else term

    inside = [filled(term, rank) for term, rank in zip(terms, ranks, strict=True)]
    if arrow:
        return inside, right.replace("...", "".join(unnamed))
    once = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
    return inside, "".join(unnamed) + "".join(once)


def _einsum_spec(rule: Rule, node: Node) -> OpSpec | None:
    equation: Any = node.args[0]
    tensors: Any = node.args[1]
    inside, result = _einsum_letters(equation, [len(meta(x).shape) for x in tensors])
    return _letters_spec(rule, node, list(zip(tensors, inside, strict=True)), result)


def _matmul_spec(rule: Rule, node: Node) -> OpSpec | None:
    """``b... m c, b... c n -> b... m n``, batch dims broadcast from the right; a vector has ``c`` alone."""
    a: Any = node.args[0]
    b: Any = node.args[1]
    left, right = len(meta(a).shape), len(meta(b).shape)
    batch = "".join(map(chr, range(0xE000, 0xE000 + max(left, right, 2) - 2)))
    first = batch[len(batch) - left + 2 :] + "mc" if left > 1 else "c"
    second = batch[len(batch) - right + 2 :] + "cn" if right > 1 else "c"
    result = batch + ("m" if left > 1 else "") + ("n" if right > 1 else "")
    return _letters_spec(rule, node, [(a, first), (b, second)], result)


def _outer_spec(rule: Rule, node: Node) -> OpSpec | None:
    a: Any = node.args[0]
    b: Any = node.args[1]
    return _letters_spec(rule, node, [(a, "m"), (b, "n")], "mn")


MATMUL = Rule(
    "matrix product",
    "b... m c, b... c n -> b... m n",
    unchanged,
    build=_matmul_spec,
    product=True,
    cost="over c: an allreduce of the result",
)
OUTER = Rule("outer product", "m, n -> m n", unchanged, build=_outer_spec, cost="nothing")
EINSUM = Rule(
    "einsum",
    "as its equation says",
    unchanged,
    build=_einsum_spec,
    product=True,
    cost="over letters that are summed: an allreduce of the result; operands are gathered over letters they lack",
)


def _attention_spec(rule: Rule, node: Node) -> OpSpec | None:
    """Samples, heads and queries are split; every query sees all keys."""
    given = arguments(node)
    if given["dropout_p"]:
        return None
    rank = len(meta(node).shape)
    lead = "".join(map(chr, range(0xE000, 0xE000 + rank - 2)))
    letters = [(given[key], lead + end) for key, end in (("query", "mc"), ("key", "sc"), ("value", "sv"))]
    mask = given["attn_mask"]
    if isinstance(mask, Node):
        letters.append((mask, (lead + "ms")[-len(meta(mask).shape) :]))
    if any(len(meta(x).shape) != rank for x, _ in letters[:3]):
        return None
    return _letters_spec(rule, node, letters, lead + "mv", "scv" + (lead[-1:] if given["enable_gqa"] else ""))


def _local_attention(context: LocalContext) -> Call:
    """A causal mask counts queries from the first of the whole."""
    given = arguments(context.node)
    queries = context.layout.dims[-2]
    if not given["is_causal"] or not queries.axes:
        return unchanged(context)
    start = LocalStart(meta(context.node).shape[-2], queries)
    return ops.causal_attention, context.args[:3], {"start": start, "scale": given["scale"], "gqa": given["enable_gqa"]}


ATTENTION = Rule(
    "attention",
    "b... m _, b... _ _, b... _ _, b... m _ -> b... m _",
    _local_attention,
    build=_attention_spec,
    product=True,
    cost="an all-gather of keys and values",
)

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
    aten.scaled_dot_product_attention.default: ATTENTION,
}
