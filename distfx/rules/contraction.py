"""Operators that multiply and add: convolutions, linear layers, matrix products, attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from distfx.ir import ops
from distfx.ir.layout import Split, Window
from distfx.ir.nodes import arguments
from distfx.ir.ops import LocalSize, LocalStart
from distfx.ir.symbolic import show
from distfx.rules.notation import Word
from distfx.rules.row import Call, Choice, Row, Site, Sized, Spec, aten, dims_spec, pattern_spec, unchanged

__all__ = ["CONVOLUTION", "LINEAR", "MATMUL", "ROWS", "TRANSPOSED", "conv_windows"]


def conv_windows(node: Node) -> list[Window]:
    """Of a convolution, or of its transpose: the formulas are those of :class:`distfx.ir.layout.Window`."""
    weight, stride, padding, dilation, transposed = (node.args[i] for i in (1, 3, 4, 5, 6))
    taps = weight.meta["shape"][2:]  # type: ignore[union-attr]
    result = []
    for k, s, p, d in zip(taps, stride, padding, dilation, strict=True):  # type: ignore[arg-type]
        reach = d * (k - 1)
        if transposed:
            result.append(Window(lo=reach - p - s + 1, hi=p + s - 1, div=s))
        else:
            result.append(Window(lo=p, hi=reach + 1 - s - p, mul=s))
    return result


def _conv_spec(row: Row, node: Node) -> Spec | None:
    spec = pattern_spec(row, node)
    if spec is None:
        return None
    groups: Any = node.args[8]
    extents = dict(spec.extents) | {"g": groups}
    if node.args[6]:
        extents["c"] = spec.operands[0][0].meta["shape"][1] // groups
    else:
        extents["k"] = node.meta["shape"][1] // groups
    return replace(spec, extents=extents)


def _local_conv(site: Site) -> Call:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = site.args
    split = site.split_space()
    if site.axes.get("g"):
        groups = LocalSize(groups, Split(site.axes["g"]))
    if transposed and any(split):
        blocks = {"split": split, "start": site.blocks(LocalStart), "size": site.blocks(LocalSize)}
        return ops.conv_transpose, (x, weight, bias, stride, padding, dilation, groups), blocks
    padding = [0 if cut else p for cut, p in zip(split, padding, strict=True)]
    return (
        aten.convolution.default,
        (x, weight, bias, stride, padding, dilation, transposed, output_padding, groups),
        {},
    )


CONVOLUTION = Row(
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


def _convolution(node: Node) -> Row:
    return TRANSPOSED if node.args[6] else CONVOLUTION


def _linear_spec(row: Row, node: Node) -> Spec | None:
    """``b... c, k c, k -> b... k``: the first of the leading dims holds the samples."""
    x: Any = node.args[0]
    lead = tuple(Word(("n",) if i == 0 else (f"b{i}",)) for i in range(len(x.meta["shape"]) - 1))
    words = [(*lead, Word(("c",))), (Word(("k",)), Word(("c",))), (Word(("k",)),)]
    operands = [(a, w) for a, w in zip(node.args, words, strict=False) if isinstance(a, Node)]
    if len(operands[1][0].meta["shape"]) != 2:
        return None
    result = (*lead, Word(("k",)))
    extents = {w.factors[0]: size for w, size in zip(result, node.meta["shape"], strict=True)}
    extents["c"] = operands[1][0].meta["shape"][1]
    return Spec(row, node, tuple(operands), result, extents)


def _check_linear(call: Sized) -> str | None:
    have, want = call.operand(0)[-1], call.operand(1)[1]
    if have == want:
        return None
    size = show(call.spec.operands[0][0].meta["shape"][-1])
    return (
        f"takes {want} features, but gets {have}. The model is tied to one size here: "
        f"its input {size} must equal {want}."
    )


LINEAR = Row(
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
    row: Row, node: Node, operands: Sequence[tuple[Node, str]], result: str, whole: str = ""
) -> Spec | None:
    """A letter for each dim, as in an einsum; those in ``whole`` are not split, nor is a dim of one that broadcasts."""
    if any(len(set(letters)) < len(letters) for _, letters in operands):
        return None  # a diagonal
    extents: dict[str, Any] = {}
    for other, letters in operands:
        extents |= {c: size for c, size in zip(letters, other.meta["shape"], strict=True) if extents.get(c, 1) == 1}

    def words(other: Node, letters: str) -> list[int | None]:
        sizes = zip(letters, other.meta["shape"], strict=True)
        return [None if c in whole or (size == 1 and extents[c] != 1) else ord(c) for c, size in sizes]

    return dims_spec(row, node, [(x, words(x, letters)) for x, letters in operands], words(node, result))


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


def _einsum_spec(row: Row, node: Node) -> Spec | None:
    equation: Any = node.args[0]
    tensors: Any = node.args[1]
    inside, result = _einsum_letters(equation, [len(x.meta["shape"]) for x in tensors])
    return _letters_spec(row, node, list(zip(tensors, inside, strict=True)), result)


def _matmul_spec(row: Row, node: Node) -> Spec | None:
    """``b... m c, b... c n -> b... m n``, batch dims broadcast from the right; a vector has ``c`` alone."""
    a: Any = node.args[0]
    b: Any = node.args[1]
    left, right = len(a.meta["shape"]), len(b.meta["shape"])
    batch = "".join(map(chr, range(0xE000, 0xE000 + max(left, right, 2) - 2)))
    first = batch[len(batch) - left + 2 :] + "mc" if left > 1 else "c"
    second = batch[len(batch) - right + 2 :] + "cn" if right > 1 else "c"
    result = batch + ("m" if left > 1 else "") + ("n" if right > 1 else "")
    return _letters_spec(row, node, [(a, first), (b, second)], result)


def _outer_spec(row: Row, node: Node) -> Spec | None:
    a: Any = node.args[0]
    b: Any = node.args[1]
    return _letters_spec(row, node, [(a, "m"), (b, "n")], "mn")


MATMUL = Row(
    "matrix product",
    "b... m c, b... c n -> b... m n",
    unchanged,
    build=_matmul_spec,
    product=True,
    cost="over c: an allreduce of the result",
)
OUTER = Row("outer product", "m, n -> m n", unchanged, build=_outer_spec, cost="nothing")
EINSUM = Row(
    "einsum",
    "as its equation says",
    unchanged,
    build=_einsum_spec,
    product=True,
    cost="over letters that are summed: an allreduce of the result; operands are gathered over letters they lack",
)


def _attention_spec(row: Row, node: Node) -> Spec | None:
    """Samples, heads and queries are split; every query sees all keys."""
    given = arguments(node)
    if given["dropout_p"]:
        return None
    rank = len(node.meta["shape"])
    lead = "".join(map(chr, range(0xE000, 0xE000 + rank - 2)))
    letters = [(given[key], lead + end) for key, end in (("query", "mc"), ("key", "sc"), ("value", "sv"))]
    mask = given["attn_mask"]
    if isinstance(mask, Node):
        letters.append((mask, (lead + "ms")[-len(mask.meta["shape"]) :]))
    if any(len(x.meta["shape"]) != rank for x, _ in letters[:3]):
        return None
    return _letters_spec(row, node, letters, lead + "mv", "scv" + (lead[-1:] if given["enable_gqa"] else ""))


def _local_attention(site: Site) -> Call:
    """A causal mask counts queries from the first of the whole."""
    given = arguments(site.node)
    queries = site.layout.dims[-2]
    if not given["is_causal"] or not queries.axes:
        return unchanged(site)
    start = LocalStart(site.node.meta["shape"][-2], queries)
    return ops.causal_attention, site.args[:3], {"start": start, "scale": given["scale"], "gqa": given["enable_gqa"]}


ATTENTION = Row(
    "attention",
    "b... m _, b... _ _, b... _ _, b... m _ -> b... m _",
    _local_attention,
    build=_attention_spec,
    product=True,
    cost="an all-gather of keys and values",
)

ROWS: dict[Any, Row | Choice] = {
    aten.convolution.default: Choice(_convolution, (CONVOLUTION, TRANSPOSED)),
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
