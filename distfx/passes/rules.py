"""The rule table: for each operator, how its iteration space maps to its operands, and what it becomes on a rank.

A row's pattern (see :mod:`notation`) is all the planner needs: which factors there are, which dims they split, which
are summed over, which dims are read through windows. ``local`` turns the call into one on local tensors: windows have
brought what lies beyond the block, so padding remains only on dims that are not split.

An operator with no row is run whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from distfx import ops
from distfx.layout import Layout, Split, Window
from distfx.ops import LocalSize, LocalStart
from distfx.passes.capture import arguments
from distfx.passes.notation import Word, parse
from distfx.symbolic import Size, product

__all__ = ["TABLE", "Call", "Row", "Spec", "is_random", "spec_of"]

aten = torch.ops.aten
Words = tuple[Word, ...]
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Spec:
    """One call of an operator: its operands with their dims' factors, the factors' extents, the windows."""

    row: Row
    node: Node
    operands: tuple[tuple[Node, Words], ...]
    result: Words
    extents: Mapping[str, Size]
    windows: Mapping[str, Window] = field(default_factory=dict)
    mode: str = "constant"
    fill: float = 0.0

    @property
    def summed(self) -> frozenset[str]:
        """The factors that the result lacks."""
        have = {factor for _, words in self.operands for word in words for factor in word.factors}
        return frozenset(have - {factor for word in self.result for factor in word.factors})

    @property
    def work(self) -> Size:
        """Multiplications, about: the product of all extents."""
        return product(self.extents.values())

    def spatial(self) -> tuple[str, ...]:
        """The factors of the result's spatial dims, in order."""
        return tuple(word.factors[0] if word.factors else "" for word in self.result[2:])


LocalFn = Callable[[Spec, Mapping[str, tuple[str, ...]], Layout, tuple[Any, ...]], Call]
"""From a call, the axes of each factor, the result's layout and the local arguments, to the local call."""


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    name: str
    pattern: str
    local: LocalFn
    tensors: tuple[int, ...] = (0,)
    windows: Callable[[Node], Sequence[Window]] | None = None
    fill: Callable[[Node], float] | None = None
    mode: Callable[[Node], str] | None = None
    rank: Callable[[Node], int | None] = lambda node: node.meta["shape"].__len__() - 2
    anchor: bool = False
    """Whether the planner weighs strategies for it; others follow the layout of an operand."""
    scatter: str | None = None
    """The factor over which a partial result is scattered."""
    build: Callable[[Row, Node], Spec | None] | None = None
    cost: str = ""
    """What it communicates, in words, for the documentation."""


def spec_of(node: Node) -> Spec | None:
    """The iteration space of a call, or ``None`` if the table has no row that fits it."""
    row = TABLE.get(node.target)
    if callable(row) and not isinstance(row, Row):
        row = row(node)
    if row is None and _is_pointwise(node.target):
        row = POINTWISE
    if row is None or not isinstance(node.meta.get("shape"), tuple) or node.meta.get("many"):
        return None
    return row.build(row, node) if row.build else _from_pattern(row, node)


def _from_pattern(row: Row, node: Node) -> Spec | None:
    rank = row.rank(node)
    if rank not in (0, 1, 2, 3):
        return None
    pattern = parse(row.pattern, rank)
    operands: list[tuple[Node, Words]] = []
    extents: dict[str, Size] = {}
    for position, words in zip(row.tensors, pattern.operands, strict=True):
        operand = node.args[position] if position < len(node.args) else None
        if not isinstance(operand, Node):
            continue
        if len(operand.meta["shape"]) != len(words):
            return None
        operands.append((operand, words))
    windows = dict(
        zip(
            [w.factors[0] for w in pattern.operands[0] if w.window],
            row.windows(node) if row.windows else (),
            strict=True,
        )
    )
    for operand, words in [*operands, (node, pattern.result)]:
        for word, extent in zip(words, operand.meta["shape"], strict=True):
            if len(word.factors) == 1 and not word.window:
                extents[word.factors[0]] = extent
    groups = node.args[8] if node.target is aten.convolution.default else 1
    if "g" in {factor for _, words in operands for word in words for factor in word.factors}:
        assert isinstance(groups, int)
        extents["g"] = groups
        if node.args[6]:
            extents["c"] = operands[0][0].meta["shape"][1] // groups
        else:
            extents["k"] = node.meta["shape"][1] // groups
    return Spec(
        row,
        node,
        tuple(operands),
        pattern.result,
        extents,
        windows,
        row.mode(node) if row.mode else "constant",
        row.fill(node) if row.fill else 0.0,
    )


# ------------------------------------------------------------------------------------------------- pointwise

_ALSO_POINTWISE = {
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.type_as.default,
    aten.hardswish.default,
    aten.log_sigmoid.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.lift_fresh_copy.default,
}


def is_random(target: Any) -> bool:
    """Whether an operator draws random numbers."""
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.nondeterministic_seeded in target.tags or "dropout" in target._schema.name
    )


def _is_pointwise(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or is_random(target):
        return False
    return torch.Tag.pointwise in target.tags or target in _ALSO_POINTWISE


def _pointwise_spec(row: Row, node: Node) -> Spec | None:
    """Operands broadcast from the right: a dim of one stays whole."""
    shape = node.meta["shape"]
    operands = []
    for operand in node.all_input_nodes:
        other = operand.meta["shape"]
        first = len(shape) - len(other)
        words = [Word((f"d{first + i}",)) if size == shape[first + i] else Word(()) for i, size in enumerate(other)]
        operands.append((operand, tuple(words)))
    result = tuple(Word((f"d{i}",)) for i in range(len(shape)))
    return Spec(row, node, tuple(operands), result, {f"d{i}": size for i, size in enumerate(shape)})


def _unchanged(spec: Spec, axes: Mapping[str, tuple[str, ...]], layout: Layout, args: tuple[Any, ...]) -> Call:
    return spec.node.target, args, dict(spec.node.kwargs)


POINTWISE = Row("pointwise", "... -> ...", _unchanged, build=_pointwise_spec, cost="nothing")


# ----------------------------------------------------------------------------------------------- convolution


def _conv_windows(node: Node) -> list[Window]:
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


def _split_space(spec: Spec, axes: Mapping[str, tuple[str, ...]]) -> list[bool]:
    return [bool(axes.get(factor)) for factor in spec.spatial()]


def _blocks(spec: Spec, layout: Layout, kind: type[LocalSize]) -> list[LocalSize]:
    """Start or size of this rank's block of each spatial dim of the result."""
    shape = spec.node.meta["shape"]
    return [kind(shape[i + 2], layout.dims[i + 2]) for i in range(len(shape) - 2)]


def _local_conv(spec: Spec, axes: Mapping[str, tuple[str, ...]], layout: Layout, args: tuple[Any, ...]) -> Call:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    split = _split_space(spec, axes)
    if axes.get("g"):
        groups = LocalSize(groups, Split(axes["g"]))
    if transposed and any(split):
        return (
            ops.conv_transpose,
            (x, weight, bias, stride, padding, dilation, groups),
            {
                "split": split,
                "start": _blocks(spec, layout, LocalStart),
                "size": _blocks(spec, layout, LocalSize),
            },
        )
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
    windows=_conv_windows,
    anchor=True,
    scatter="k",
    cost="space: halos. channels: reduce-scatter of y (stationary-x), all-gather of x (-y), smaller ones of both (-w); "
    "groups: nothing. Weights: one allreduce of the shard's gradient over the ranks that hold it",
)
TRANSPOSED = Row(
    "transposed convolution",
    "n (g c) [s]..., (g c) k _..., (g k) -> n (g k) s...",
    _local_conv,
    tensors=(0, 1, 2),
    windows=_conv_windows,
    anchor=True,
    scatter="k",
    cost="as convolution",
)


def _local_linear(spec: Spec, axes: Mapping[str, tuple[str, ...]], layout: Layout, args: tuple[Any, ...]) -> Call:
    return aten.linear.default, args, {}


def _linear_spec(row: Row, node: Node) -> Spec | None:
    """``b... c, k c, k -> b... k``: the first of the leading dims holds the samples."""
    x = node.args[0]
    assert isinstance(x, Node)
    lead = [Word(("n",) if i == 0 else (f"b{i}",)) for i in range(len(x.meta["shape"]) - 1)]
    words = [(*lead, Word(("c",))), (Word(("k",)), Word(("c",))), (Word(("k",)),)]
    operands = [(a, w) for a, w in zip(node.args, words, strict=False) if isinstance(a, Node)]
    if len(operands[1][0].meta["shape"]) != 2:
        return None
    result = (*lead, Word(("k",)))
    extents = {w.factors[0]: size for w, size in zip(result, node.meta["shape"], strict=True)}
    extents["c"] = operands[1][0].meta["shape"][1]
    return Spec(row, node, tuple(operands), tuple(result), extents)


LINEAR = Row(
    "linear",
    "b... c, k c, k -> b... k",
    _local_linear,
    build=_linear_spec,
    anchor=True,
    scatter="k",
    cost="as a 1x1 convolution",
)


def _local_bias(spec: Spec, axes: Mapping[str, tuple[str, ...]], layout: Layout, args: tuple[Any, ...]) -> Call:
    return ops.add_bias, args, {"dim": spec.node.meta["bias_dim"]}


def _bias_spec(row: Row, node: Node) -> Spec | None:
    """A bias along dim 1 of a convolution's result, or along the last of a linear layer's."""
    x, bias = node.args
    assert isinstance(x, Node) and isinstance(bias, Node)
    words = tuple(Word((f"d{i}",)) for i in range(len(node.meta["shape"])))
    channel = words[node.meta["bias_dim"]]
    extents = {f"d{i}": size for i, size in enumerate(node.meta["shape"])}
    return Spec(row, node, ((x, words), (bias, (channel,))), words, extents)


BIAS = Row("bias", "n k s..., k -> n k s...", _local_bias, build=_bias_spec, cost="nothing")


def _prelu_spec(row: Row, node: Node) -> Spec | None:
    """One slope for each channel, or one for all."""
    x, slope = node.args
    assert isinstance(x, Node) and isinstance(slope, Node)
    words = tuple(Word((f"d{i}",)) for i in range(len(node.meta["shape"])))
    each = Word(("d1",)) if slope.meta["shape"] != (1,) and len(words) > 1 else Word(())
    extents = {f"d{i}": size for i, size in enumerate(node.meta["shape"])}
    return Spec(row, node, ((x, words), (slope, (each,))), words, extents)


PRELU = Row("prelu", "n c s..., c -> n c s...", _unchanged, build=_prelu_spec, cost="nothing")


# ----------------------------------------------------------------------------------------------- batch norm


def _local_batch_norm(spec: Spec, axes: Mapping[str, tuple[str, ...]], layout: Layout, args: tuple[Any, ...]) -> Call:
    node = spec.node
    training = args[5]
    over = tuple(axis for factor in ("n", *spec.spatial()) for axis in axes.get(factor, ()))
    if not training or not over:
        return aten.batch_norm.default, args, {}
    count = product(size for i, size in enumerate(node.meta["shape"]) if i != 1)
    return ops.batch_norm, args[:5], {"momentum": args[6], "eps": args[7], "axis": over, "count": count}


BATCH_NORM = Row(
    "batch norm",
    "n c s..., c, c, c, c -> n c s...",
    _local_batch_norm,
    tensors=(0, 1, 2, 3, 4),
    cost="in training two allreduces of a value per channel forward and one of two backward, over samples and space",
)


# --------------------------------------------------------------------------------------------------- pooling


def _pool_arguments(node: Node) -> dict[str, Any]:
    """Kernel, stride, padding and dilation of a pooling call for each spatial dim, with the rest by name."""
    values = arguments(node)
    rank = len(node.meta["shape"]) - 2

    def each(name: str, default: Any) -> list[int]:
        value = values.get(name)
        listed: list[int] = list(value) if isinstance(value, list | tuple) else [value]  # type: ignore[list-item]
        listed = listed if value not in (None, []) else list(default)
        return listed * rank if len(listed) == 1 else listed

    values["kernel_size"] = each("kernel_size", [1])
    values["stride"] = each("stride", values["kernel_size"])
    values["padding"] = each("padding", [0])
    values["dilation"] = each("dilation", [1])
    return values


def _pool_windows(node: Node) -> list[Window]:
    a = _pool_arguments(node)
    sizes = zip(a["kernel_size"], a["stride"], a["padding"], a["dilation"], strict=True)
    return [Window(lo=p, hi=d * (k - 1) + 1 - s - p, mul=s) for k, s, p, d in sizes]


def _local_max_pool(spec: Spec, axes: Mapping[str, tuple[str, ...]], layout: Layout, args: tuple[Any, ...]) -> Call:
    a = _pool_arguments(spec.node)
    padding = [0 if cut else p for cut, p in zip(_split_space(spec, axes), a["padding"], strict=True)]
    return spec.node.target, (args[0], a["kernel_size"], a["stride"], padding, a["dilation"], a["ceil_mode"]), {}


def _local_avg_pool(spec: Spec, axes: Mapping[str, tuple[str, ...]], layout: Layout, args: tuple[Any, ...]) -> Call:
    a = _pool_arguments(spec.node)
    split = _split_space(spec, axes)
    padding = [0 if cut else p for cut, p in zip(split, a["padding"], strict=True)]
    include, override, ceil = a["count_include_pad"], a.get("divisor_override"), a["ceil_mode"]
    uniform = override is not None or (not ceil and (include or not any(a["padding"])))
    if uniform or not any(split):
        call = (args[0], a["kernel_size"], a["stride"], padding, ceil, include)
        return spec.node.target, call if len(split) == 1 else (*call, override), {}
    x = spec.operands[0][0]
    return (
        ops.avg_pool,
        (args[0], a["kernel_size"], a["stride"], a["padding"], include),
        {
            "split": split,
            "start": _blocks(spec, layout, LocalStart),
            "size": _blocks(spec, layout, LocalSize),
            "extent": list(x.meta["shape"][2:]),
        },
    )


MAX_POOL = Row(
    "max pooling",
    "n c [s]... -> n c s...",
    _local_max_pool,
    windows=_pool_windows,
    fill=lambda node: -math.inf,
    cost="space: halos where windows cross",
)
AVG_POOL = Row(
    "average pooling",
    "n c [s]... -> n c s...",
    _local_avg_pool,
    windows=_pool_windows,
    cost="space: halos where windows cross",
)


def _reduction_spec(dims: Callable[[Node], Sequence[int]]) -> Callable[[Row, Node], Spec | None]:
    """A sum over ``dims``, kept as ones or dropped."""

    def build(row: Row, node: Node) -> Spec | None:
        x = node.args[0]
        assert isinstance(x, Node)
        rank = len(x.meta["shape"])
        over = {dim % rank for dim in dims(node)} if rank else set()
        words = tuple(Word((f"d{i}",)) for i in range(rank))
        keeps = len(node.meta["shape"]) == rank
        result = [Word(()) if i in over else word for i, word in enumerate(words) if keeps or i not in over]
        return Spec(row, node, ((x, words),), tuple(result), {f"d{i}": s for i, s in enumerate(x.meta["shape"])})

    return build


def _mean_dims(node: Node) -> Sequence[int]:
    rank = len(node.args[0].meta["shape"])  # type: ignore[union-attr]
    if node.target is aten.mean.default or len(node.args) < 2 or not node.args[1]:
        return range(rank)
    dims: Any = node.args[1]
    return [dims] if isinstance(dims, int) else list(dims)


def _local_mean(dims: Callable[[Node], Sequence[int]]) -> LocalFn:
    def local(spec: Spec, axes: Mapping[str, tuple[str, ...]], layout: Layout, args: tuple[Any, ...]) -> Call:
        node = spec.node
        if not layout.partial:
            return node.target, args, dict(node.kwargs)
        x = spec.operands[0][0]
        over = sorted(dim % len(x.meta["shape"]) for dim in dims(node))
        count = product(x.meta["shape"][dim] for dim in over)
        keepdim = len(node.meta["shape"]) == len(x.meta["shape"])
        return ops.mean, (args[0], over), {"keepdim": keepdim, "count": count}

    return local


def _global_dims(node: Node) -> Sequence[int]:
    return range(2, len(node.meta["shape"]))


MEAN = Row(
    "mean", "... -> ...", _local_mean(_mean_dims), build=_reduction_spec(_mean_dims), cost="an allreduce of the result"
)
SUM = Row("sum", "... -> ...", _unchanged, build=_reduction_spec(_mean_dims), cost="an allreduce of the result")
GLOBAL_POOL = Row(
    "global average pooling",
    "n c s... -> n c _...",
    _local_mean(_global_dims),
    build=_reduction_spec(_global_dims),
    cost="an allreduce of a value per sample and channel",
)


def _adaptive(node: Node) -> Row | None:
    """Adaptive pooling to a single value is a mean; to others its windows vary."""
    return GLOBAL_POOL if all(size == 1 for size in node.meta["shape"][2:]) else None


# --------------------------------------------------------------------------------------------- pad, reshape


def _pad_widths(node: Node) -> list[tuple[int, int]]:
    """For each dim the width before and after, from the first dim on."""
    rank = len(node.meta["shape"])
    flat: list[Any] = list(node.args[1])  # type: ignore[arg-type]
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def _pad_spec(row: Row, node: Node) -> Spec | None:
    x = node.args[0]
    assert isinstance(x, Node)
    widths = _pad_widths(node)
    if not all(isinstance(w, int) for pair in widths for w in pair):
        return None
    source = tuple(Word((f"d{i}",), window=pair != (0, 0)) for i, pair in enumerate(widths))
    result = tuple(Word((f"d{i}",)) for i in range(len(widths)))
    windows = {f"d{i}": Window(lo=lo, hi=-lo) for i, (lo, hi) in enumerate(widths) if (lo, hi) != (0, 0)}
    extents = {f"d{i}": size for i, size in enumerate(node.meta["shape"])}
    mode = str(node.args[2]) if len(node.args) > 2 else "constant"
    value = node.args[3] if len(node.args) > 3 else None
    return Spec(row, node, ((x, source),), result, extents, windows, mode, float(value or 0.0))  # type: ignore[arg-type]


def _local_pad(spec: Spec, axes: Mapping[str, tuple[str, ...]], layout: Layout, args: tuple[Any, ...]) -> Call:
    widths = [(0, 0) if axes.get(f"d{i}") else pair for i, pair in enumerate(_pad_widths(spec.node))]
    flat = [width for pair in widths[::-1] for width in pair][: len(args[1])]
    if not any(flat):
        return aten.alias.default, (args[0],), {}
    return aten.pad.default, (args[0], flat, *args[2:]), {}


PAD = Row("pad", "... -> ...", _local_pad, build=_pad_spec, cost="the rows that change their owner, in every mode")


def _same(a: Size, b: Size) -> bool:
    return a == b or (not (isinstance(a, int) and isinstance(b, int)) and sympy.simplify(a - b) == 0)


def _reshape_spec(row: Row, node: Node) -> Spec | None:
    """Runs of dims with equal products correspond; in each, the major dims on both sides share a factor."""
    x = node.args[0]
    assert isinstance(x, Node)
    before, after = list(x.meta["shape"]), list(node.meta["shape"])
    source, result = [Word(())] * len(before), [Word(())] * len(after)
    extents: dict[str, Size] = {}
    for number, (left, right) in enumerate(_runs(before, after)):
        many, few, words = (left, right, result) if len(left) >= len(right) else (right, left, source)
        own = source if words is result else result
        sizes = before if words is result else after
        if len(few) != 1:
            continue  # several to several: these dims stay whole
        names = []
        for i, dim in enumerate(many):
            names.append(f"f{number}_{i}")
            extents[names[-1]] = sizes[dim]
            own[dim] = Word((names[-1],))
        words[few[0]] = Word(tuple(names))
    return Spec(row, node, ((x, tuple(source)),), tuple(result), extents)


def _runs(before: list[Size], after: list[Size]) -> list[tuple[list[int], list[int]]]:
    """Pairs of runs of dims whose extents have the same product, dims of one left out."""
    left = [i for i, size in enumerate(before) if size != 1]
    right = [i for i, size in enumerate(after) if size != 1]
    runs: list[tuple[list[int], list[int]]] = []
    while left and right:
        take, give = [left.pop(0)], [right.pop(0)]
        while not _same(product(before[i] for i in take), product(after[i] for i in give)):
            quotient = sympy.sympify(product(after[i] for i in give)) / product(before[i] for i in take)
            grow_left = bool(quotient > 1) if quotient.is_number else quotient.as_numer_denom()[1] == 1
            if grow_left and left:
                take.append(left.pop(0))
            elif right:
                give.append(right.pop(0))
            elif left:
                take.append(left.pop(0))
            else:
                return runs
        runs.append((take, give))
    return runs


def _local_reshape(spec: Spec, axes: Mapping[str, tuple[str, ...]], layout: Layout, args: tuple[Any, ...]) -> Call:
    shape = spec.node.meta["shape"]
    sizes = [LocalSize(size, split) if split.axes else size for size, split in zip(shape, layout.dims, strict=True)]
    return aten.reshape.default, (args[0], sizes), {}


RESHAPE = Row(
    "reshape", "... -> ...", _local_reshape, build=_reshape_spec, cost="nothing where the split dim stays major"
)


# ----------------------------------------------------------------------------------------------------- table


def _convolution(node: Node) -> Row:
    return TRANSPOSED if node.args[6] else CONVOLUTION


TABLE: dict[Any, Row | Callable[[Node], Row | None]] = {
    aten.convolution.default: _convolution,
    aten.linear.default: LINEAR,
    ops.add_bias: BIAS,
    aten.prelu.default: PRELU,
    aten.batch_norm.default: BATCH_NORM,
    aten.max_pool1d.default: MAX_POOL,
    aten.max_pool2d.default: MAX_POOL,
    aten.max_pool3d.default: MAX_POOL,
    aten.avg_pool1d.default: AVG_POOL,
    aten.avg_pool2d.default: AVG_POOL,
    aten.avg_pool3d.default: AVG_POOL,
    aten.adaptive_avg_pool1d.default: _adaptive,
    aten.adaptive_avg_pool2d.default: _adaptive,
    aten.adaptive_avg_pool3d.default: _adaptive,
    aten.mean.dim: MEAN,
    aten.mean.default: MEAN,
    aten.sum.dim_IntList: SUM,
    aten.sum.default: SUM,
    aten.pad.default: PAD,
    aten.reshape.default: RESHAPE,
}
