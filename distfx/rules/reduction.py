"""Reductions. Sums and means leave partial sums; the others exchange small values themselves (``ops.reduce``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from distfx.ir import ops
from distfx.ir.meta import meta
from distfx.ir.nodes import arguments, operator_of
from distfx.ir.ops import LocalPart, LocalStart
from distfx.ir.symbolic import product
from distfx.rules.rule import Call, LocalContext, Rule, RuleChoice, aten, unchanged

__all__ = ["MEAN", "RULES", "SOFTMAX", "SUM", "local_mean", "reduce_inside"]

Dims = Callable[[Node], Sequence[int]]


def _reduced_dims(node: Node) -> Sequence[int]:
    """The dims in argument ``dim``, or all."""
    x: Any = node.args[0]
    dims: Any = arguments(node).get("dim")
    ndim = len(meta(x).shape)
    if dims is None or dims == []:
        return range(ndim)
    return sorted(d % ndim for d in ([dims] if isinstance(dims, int) else dims)) if ndim else []


def local_mean(dims: Dims) -> Callable[[LocalContext], Call]:
    """A mean over ``dims``. If they are split, each rank divides its sum by the global count."""

    def local(context: LocalContext) -> Call:
        if not context.layout.partial:
            return unchanged(context)
        shape = meta(context.spec.operands[0][0]).shape
        over = list(dims(context.node))
        options = {"keepdim": len(meta(context.node).shape) == len(shape), "count": product(shape[dim] for dim in over)}
        dtype = {key: value for key, value in context.node.kwargs.items() if key == "dtype"}
        return ops.mean, (context.args[0], over), options | dtype

    return local


SUM = Rule("sum", "... r@dim -> ... _@dim?", cost="an allreduce of the result")
MEAN = replace(SUM, name="mean", local=local_mean(_reduced_dims))


# ------------------------------------------------------------------------ reductions that complete themselves

_KEEP_DIMS = ("softmax", "log_softmax", "cumsum", "cumprod")
"""The kinds whose result has the shape of the operand."""
_NEED_POSITIONS = ("max", "min", "argmax", "argmin")
"""The kinds that need the global positions of elements."""
_NEED_EVERY_PART = ("prod", "cumsum", "cumprod")
"""The kinds that need a value from each rank, by the number of its part."""


def reduce_inside(
    kind: str | Callable[[Node], str], dims: Dims = _reduced_dims, **options: Callable[[Node], Any]
) -> Callable[[LocalContext], Call]:
    """``ops.reduce`` of a kind (see :mod:`distfx.runtime.kernels.reduce`) if ``dims`` are split, else the same call."""

    def local(context: LocalContext) -> Call:
        node, over = context.node, list(dims(context.node))
        x, splits = context.spec.operands[0][0], context.operands[0].dims
        axes = tuple(axis for dim in over for axis in splits[dim].axes)
        if not axes:
            return unchanged(context)
        name = kind if isinstance(kind, str) else kind(node)
        shape = meta(x).shape
        values: dict[str, Any] = {"kind": name, "dims": over, "axis": axes}
        if len(meta(node).shape) == len(shape) and name not in _KEEP_DIMS:
            values["keepdim"] = True
        if name in _NEED_POSITIONS:
            values["start"] = [LocalStart(shape[dim], splits[dim]) for dim in over]
        if name in (*_NEED_POSITIONS, "var", "std"):
            values["extent"] = [shape[dim] for dim in over]
        if name in _NEED_EVERY_PART:
            values["part"] = LocalPart(axes)
        dtype = arguments(node).get("dtype")
        if dtype is None and name in _NEED_EVERY_PART and not meta(node).dtype.is_floating_point:
            dtype = meta(node).dtype  # integers are added as int64
        values |= {"dtype": dtype} if dtype is not None else {}
        return ops.reduce, (context.args[0],), values | {key: value(node) for key, value in options.items()}

    return local


def _name(node: Node) -> str:
    """The kind of reduction, from the operator's name: ``amax``, ``argmin``, ``max``, ``prod``, ``var``, ..."""
    name = str(operator_of(node)).split(".")[1].removesuffix("_mean")
    return f"a{name}" if name in ("max", "min") and not isinstance(node.target, ops.OpOutput) else name


def _correction(node: Node) -> float:
    a = arguments(node)
    if "unbiased" in a:
        return float(bool(a["unbiased"]))
    return 1.0 if a["correction"] is None else float(a["correction"])


def _complete(name: str, kind: str | Callable[[Node], str], cost: str, **options: Callable[[Node], Any]) -> Rule:
    """The rule of a reduction whose result is complete on every rank."""
    return Rule(name, "... r!@dim -> ... _@dim?", reduce_inside(kind, **options), cost=cost)


EXTREMES = _complete("maximum and minimum", _name, "an allreduce of the result, and one backward")
EXTREME_VALUE = _complete("values of max and min", _name, "an allreduce of the result and one of its index")
EXTREME_INDEX = _complete("argmax, argmin", _name, "an allreduce of the result and one of its index")
ANY_ALL = _complete(
    "any, all",
    lambda node: {"any": "any_max", "all": "all_min"}[_name(node)],
    "an allreduce of one byte per element of the result",
)
LOGSUMEXP = _complete("logsumexp", "logsumexp", "two allreduces of the result")
VARIANCE = _complete("variance", _name, "two allreduces of the result", order=_correction)
NORM = _complete("vector norm", "norm", "an allreduce of the result", order=lambda n: float(arguments(n)["ord"]))
PRODUCT = _complete("product", "prod", "an allreduce of every rank's result")


def _aminmax_kind(node: Node) -> str:
    assert isinstance(node.target, ops.OpOutput)
    return ("amin", "amax")[node.target.index]


def _values_or_indices(node: Node) -> Rule:
    """``max`` and ``min`` of a dim return values and indices."""
    if not isinstance(node.target, ops.OpOutput):
        return EXTREMES
    return EXTREME_VALUE if node.target.index == 0 else INDEX_OUTPUT


def _variance_or_mean(node: Node) -> Rule:
    assert isinstance(node.target, ops.OpOutput)
    return VARIANCE if node.target.index == 0 else MEAN


AMINMAX = replace(EXTREMES, local=reduce_inside(_aminmax_kind))
INDEX_OUTPUT = replace(EXTREME_INDEX, local=reduce_inside(lambda node: f"arg{_name(node)}"))
VALUES_AND_INDICES = RuleChoice(_values_or_indices, (EXTREME_VALUE, INDEX_OUTPUT))
MOMENTS = RuleChoice(_variance_or_mean, (VARIANCE, MEAN))


# ------------------------------------------------------------------------------ operators that keep their dims


def _dim(node: Node) -> Sequence[int]:
    return [arguments(node)["dim"] % max(1, len(meta(node).shape))]


def _softmax_kind(node: Node) -> str:
    return "log_softmax" if "log_softmax" in str(node.target) else "softmax"


SOFTMAX = Rule(
    "softmax",
    "... -> ...",
    reduce_inside(_softmax_kind, _dim),
    cost="over a split dim two allreduces of a value per row, and one backward",
)
CUMULATIVE = Rule(
    "cumulative sum and product",
    "... -> ...",
    reduce_inside(_name, _dim),
    cost="over a split dim an allreduce of every rank's value per row, and one backward",
)
UNSPLIT_DIM = Rule(
    "cumulative extremes",
    "... _@dim -> ... _@dim",
    cost="nothing if that dim is not split; otherwise it is gathered",
)
UNSPLIT_REDUCTION = Rule(
    "median and mode", "... _@dim -> ... _@dim?", cost="the reduced dim is gathered if it is split"
)
RENORM = Rule("renorm", "_... r@dim -> _... r@dim", cost="nothing if only that dim is split; others are gathered")

RULES: dict[Any, Rule | RuleChoice] = {
    aten.mean.dim: MEAN,
    aten.mean.default: MEAN,
    aten.sum.dim_IntList: SUM,
    aten.sum.default: SUM,
    aten.nansum.default: SUM,
    aten.amax.default: EXTREMES,
    aten.amin.default: EXTREMES,
    aten.max.default: EXTREMES,
    aten.min.default: EXTREMES,
    aten.max.dim: VALUES_AND_INDICES,
    aten.min.dim: VALUES_AND_INDICES,
    aten.aminmax.default: AMINMAX,
    aten.argmax.default: EXTREME_INDEX,
    aten.argmin.default: EXTREME_INDEX,
    aten.any.default: ANY_ALL,
    aten.any.dim: ANY_ALL,
    aten.any.dims: ANY_ALL,
    aten.all.default: ANY_ALL,
    aten.all.dim: ANY_ALL,
    aten.all.dims: ANY_ALL,
    aten.logsumexp.default: LOGSUMEXP,
    aten.var.default: VARIANCE,
    aten.var.correction: VARIANCE,
    aten.var.dim: VARIANCE,
    aten.std.default: VARIANCE,
    aten.std.correction: VARIANCE,
    aten.std.dim: VARIANCE,
    aten.var_mean.default: MOMENTS,
    aten.var_mean.correction: MOMENTS,
    aten.var_mean.dim: MOMENTS,
    aten.std_mean.default: MOMENTS,
    aten.std_mean.correction: MOMENTS,
    aten.std_mean.dim: MOMENTS,
    aten.linalg_vector_norm.default: NORM,
    aten.prod.default: PRODUCT,
    aten.prod.dim_int: PRODUCT,
    aten.softmax.int: SOFTMAX,
    aten.log_softmax.int: SOFTMAX,
    aten._softmax.default: SOFTMAX,
    aten._log_softmax.default: SOFTMAX,
    aten.cumsum.default: CUMULATIVE,
    aten.cumprod.default: CUMULATIVE,
    aten.logcumsumexp.default: UNSPLIT_DIM,
    aten.cummax.default: UNSPLIT_DIM,
    aten.cummin.default: UNSPLIT_DIM,
    aten.median.dim: UNSPLIT_REDUCTION,
    aten.nanmedian.dim: UNSPLIT_REDUCTION,
    aten.mode.default: UNSPLIT_REDUCTION,
    aten.kthvalue.default: UNSPLIT_REDUCTION,
    aten.renorm.default: RENORM,
}
