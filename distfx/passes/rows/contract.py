"""Operators that multiply and add: convolutions, linear layers, matrix products, attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from distfx import ops
from distfx.layout import Split, Window
from distfx.ops import LocalSize, LocalStart
from distfx.passes.notation import Word
from distfx.passes.rule import Call, Choice, Row, Site, Spec, aten, dims_spec, pattern_spec, unchanged

__all__ = ["CONVOLUTION", "LINEAR", "MATMUL", "ROWS", "TRANSPOSED", "conv_windows"]


def conv_windows(node: Node) -> list[Window]:
    """Of a convolution, or of its transpose: the formulas are those of :class:`distfx.layout.Window`."""
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


LINEAR = Row(
    "linear",
    "b... c, k c, k -> b... k",
    unchanged,
    build=_linear_spec,
    anchor=True,
    scatter="k",
    cost="as a 1x1 convolution",
)


def _matmul_spec(row: Row, node: Node) -> Spec | None:
    """``b... m c, b... c n -> b... m n``, batch dims broadcast from the right."""
    a: Any = node.args[0]
    b: Any = node.args[1]
    left, right, rank = a.meta["shape"], b.meta["shape"], len(node.meta["shape"])
    if len(left) < 2 or len(right) < 2 or a is b:
        return None
    shape = node.meta["shape"]

    def batch(sizes: tuple[Any, ...]) -> list[int | None]:
        first = rank - len(sizes)
        return [first + i if size == shape[first + i] else None for i, size in enumerate(sizes[:-2])]

    operands = [(a, [*batch(left), rank - 2, rank]), (b, [*batch(right), rank, rank - 1])]
    return dims_spec(row, node, operands, list(range(rank)))


MATMUL = Row(
    "matrix product",
    "b... m c, b... c n -> b... m n",
    unchanged,
    build=_matmul_spec,
    cost="over c: an allreduce of the result",
)


def _attention_spec(row: Row, node: Node) -> Spec | None:
    """Samples, heads and queries are split; every query sees all keys."""
    q, k, v = (node.args[i] for i in range(3))
    plain = not any(node.args[3:6]) and not any(
        node.kwargs.get(key) for key in ("attn_mask", "dropout_p", "is_causal", "enable_gqa")
    )
    if not plain or len({q, k, v}) < 3:
        return None
    rank = len(node.meta["shape"])
    lead: list[int | None] = list(range(rank - 2))
    if any(x.meta["shape"][:-2] != node.meta["shape"][:-2] for x in (q, k, v)):  # type: ignore[union-attr]
        return None
    operands: Any = [(q, [*lead, rank - 2, None]), (k, [*lead, None, None]), (v, [*lead, None, None])]
    return dims_spec(row, node, operands, [*lead, rank - 2, None])


ATTENTION = Row(
    "attention",
    "b... m _, b... _ _, b... _ _ -> b... m _",
    unchanged,
    build=_attention_spec,
    cost="an all-gather of keys and values",
)

ROWS: dict[Any, Row | Choice] = {
    aten.convolution.default: Choice(_convolution, (CONVOLUTION, TRANSPOSED)),
    aten.linear.default: LINEAR,
    aten.matmul.default: MATMUL,
    aten.bmm.default: MATMUL,
    aten.mm.default: MATMUL,
    aten.scaled_dot_product_attention.default: ATTENTION,
}
