"""Reductions. Sums and means leave partial sums; the others reduce small values inside (``ops.reduce``)."""

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
from distfx.rules.rule import Call, LocalContext, OpSpec, Rule, RuleChoice, aten, spec_from_dims, unchanged

__all__ = ["MEAN", "RULES", "SOFTMAX", "SUM", "local_mean", "reduce_inside", "reduction"]


def _reduced(node: Node) -> Sequence[int]:
    """The dims a reduction runs over, or all."""
    x: Any = node.args[0]
    dims: Any = arguments(node).get("dim")
    rank = len(meta(x).shape)
    if dims is None or dims == []:
        return range(rank)
    return sorted(d % rank for d in ([dims] if isinstance(dims, int) else dims)) if rank else []


def reduction(
    name: str,
    pattern: str,
    dims: Callable[[Node], Sequence[int]],
    *,
    local: Callable[[LocalContext], Call],
    split: bool = True,
    inside: bool = False,
    cost: str,
) -> Rule:
    """A row for a reduction over ``dims``, kept as ones or dropped. They may be split (``split``), leaving a partial
    sum, or where the operator reduces ``inside`` a result that is whole."""

    def build(rule: Rule, node: Node) -> OpSpec | None:
        x: Any = node.args[0]
        rank, over = len(meta(x).shape), set(dims(node))
        keeps = len(meta(node).shape) == rank
        result = [None if i in over else i for i in range(rank) if keeps or i not in over]
        source = [i if split or i not in over else None for i in range(rank)]
        spec = spec_from_dims(rule, node, [(x, source)], result)
        return replace(spec, inside=frozenset(f"d{i}" for i in over)) if inside else spec

    return Rule(name, pattern, local, build=build, cost=cost)


def local_mean(dims: Callable[[Node], Sequence[int]]) -> Callable[[LocalContext], Call]:
    def local(context: LocalContext) -> Call:
        if not context.layout.partial:
            return unchanged(context)
        shape = meta(context.spec.operands[0][0]).shape
        over = list(dims(context.node))
        words = {"keepdim": len(meta(context.node).shape) == len(shape), "count": product(shape[dim] for dim in over)}
        dtype = {key: value for key, value in context.node.kwargs.items() if key == "dtype"}
        return ops.mean, (context.args[0], over), words | dtype

    return local


MEAN = reduction("mean", "... -> ...", _reduced, local=local_mean(_reduced), cost="an allreduce of the result")
SUM = reduction("sum", "... -> ...", _reduced, local=unchanged, cost="an allreduce of the result")


# ---------------------------------------------------------------------------------- those that reduce inside


def reduce_inside(
    kind: str | Callable[[Node], str], dims: Callable[[Node], Sequence[int]] = _reduced, **extra: Callable[[Node], Any]
) -> Callable[[LocalContext], Call]:
    """Over split dims ``ops.reduce`` of a kind (see :mod:`distfx.runtime.kernels.reduce`), else the call itself."""

    def local(context: LocalContext) -> Call:
        node, over = context.node, list(dims(context.node))
        x, splits = context.spec.operands[0][0], context.operands[0].dims
        axes = tuple(axis for dim in over for axis in splits[dim].axes)
        if not axes:
            return unchanged(context)
        name = kind if isinstance(kind, str) else kind(node)
        shape = meta(x).shape
        words: dict[str, Any] = {"kind": name, "dims": over, "axis": axes}
        if len(meta(node).shape) == len(shape) and name not in _KEEPING:
            words["keepdim"] = True
        if name in _PLACED:
            words["start"] = [LocalStart(shape[dim], splits[dim]) for dim in over]
        if name in (*_PLACED, "var", "std"):
            words["extent"] = [shape[dim] for dim in over]
        if name in _STACKED:
            words["part"] = LocalPart(axes)
        dtype = arguments(node).get("dtype")
        if dtype is None and name in _STACKED and not meta(node).dtype.is_floating_point:
            dtype = meta(node).dtype  # integers are added as int64
        words |= {"dtype": dtype} if dtype is not None else {}
        return ops.reduce, (context.args[0],), words | {key: value(node) for key, value in extra.items()}

    return local


_KEEPING = ("softmax", "log_softmax", "cumsum", "cumprod")
_PLACED = ("max", "min", "argmax", "argmin")
_STACKED = ("prod", "cumsum", "cumprod")


def _inner(name: str, kind: str | Callable[[Node], str], cost: str, **extra: Callable[[Node], Any]) -> Rule:
    """A row of a reduction that reduces inside."""
    local = reduce_inside(kind, **extra)
    return reduction(name, "... -> ...", _reduced, local=local, inside=True, cost=cost)


def _name(node: Node) -> str:
    """``amax``, ``argmin``, ``max``, ``prod``, ``var``, ... after the operator."""
    name = str(operator_of(node)).split(".")[1].removesuffix("_mean")
    return f"a{name}" if name in ("max", "min") and not isinstance(node.target, ops.OpOutput) else name


def _correction(node: Node) -> float:
    a = arguments(node)
    if "unbiased" in a:
        return float(bool(a["unbiased"]))
    return 1.0 if a["correction"] is None else float(a["correction"])


EXTREME = _inner("greatest and least", _name, "an allreduce of the result, and one backward")
ARGUMENT = _inner("first of the greatest or least", _name, "an allreduce of the result and one of its index")
TRUTH = _inner("any, all", lambda n: {"any": "any_max", "all": "all_min"}[_name(n)], "an allreduce of a byte a result")
LOGSUMEXP = _inner("logsumexp", "logsumexp", "two allreduces of the result")
VARIANCE = _inner("variance", _name, "two allreduces of the result", order=_correction)
NORM = _inner("vector norm", "norm", "an allreduce of the result", order=lambda n: float(arguments(n)["ord"]))
PRODUCT = _inner("product", "prod", "an allreduce of every rank's result")


def _aminmax(node: Node) -> str:
    """Its two results are the least and the greatest."""
    assert isinstance(node.target, ops.OpOutput)
    return ("amin", "amax")[node.target.index]


def _picked(node: Node) -> Rule | None:
    """``max`` of a dim gives values and indices; of several (``aminmax``) both extremes."""
    if not isinstance(node.target, ops.OpOutput):
        return EXTREME
    return ARGUMENT if node.target.index == 0 else INDEX


def _moments(node: Node) -> Rule | None:
    """``var_mean`` and ``std_mean`` have the one and the other as their results."""
    assert isinstance(node.target, ops.OpOutput)
    return VARIANCE if node.target.index == 0 else MEAN


INDEX = replace(ARGUMENT, local=reduce_inside(lambda node: f"arg{_name(node)}"))
PICKED = RuleChoice(_picked, (ARGUMENT, INDEX))
MOMENTS = RuleChoice(_moments, (VARIANCE, MEAN))
AMINMAX = replace(EXTREME, local=reduce_inside(_aminmax))


# ------------------------------------------------------------------------------------- those that keep their dim


def _along(node: Node) -> Sequence[int]:
    dim: Any = node.args[1]
    return [dim % max(1, len(meta(node).shape))]


def _along_spec(split: bool) -> Callable[[Rule, Node], OpSpec | None]:
    """Every dim may be split, or all but the one it runs along."""

    def build(rule: Rule, node: Node) -> OpSpec | None:
        x: Any = node.args[0]
        words = [i if split or i not in _along(node) else None for i in range(len(meta(node).shape))]
        return spec_from_dims(rule, node, [(x, words)], words)

    return build


def _softmax_kind(node: Node) -> str:
    return "log_softmax" if "log_softmax" in str(node.target) else "softmax"


SOFTMAX = Rule(
    "softmax",
    "... -> ...",
    reduce_inside(_softmax_kind, _along),
    build=_along_spec(True),
    cost="over a split dim two allreduces of a value a row, and one backward",
)
CUMULATIVE = Rule(
    "cumulative",
    "... -> ...",
    reduce_inside(_name, _along),
    build=_along_spec(True),
    cost="over a split dim an allreduce of every rank's value a row, and one backward",
)
RANKED = Rule(
    "ranked",
    "... _ -> ... _",
    unchanged,
    build=_along_spec(False),
    cost="nothing where its dim is whole, else a gather",
)
WHOLE = reduction(
    "other reductions", "... -> ...", _reduced, local=unchanged, split=False, cost="the reduced dims are gathered"
)

RULES: dict[Any, Rule | RuleChoice] = {
    aten.mean.dim: MEAN,
    aten.mean.default: MEAN,
    aten.sum.dim_IntList: SUM,
    aten.sum.default: SUM,
    aten.amax.default: EXTREME,
    aten.amin.default: EXTREME,
    aten.max.default: EXTREME,
    aten.min.default: EXTREME,
    aten.max.dim: PICKED,
    aten.min.dim: PICKED,
    aten.aminmax.default: AMINMAX,
    aten.argmax.default: ARGUMENT,
    aten.argmin.default: ARGUMENT,
    aten.any.default: TRUTH,
    aten.any.dim: TRUTH,
    aten.any.dims: TRUTH,
    aten.all.default: TRUTH,
    aten.all.dim: TRUTH,
    aten.all.dims: TRUTH,
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
    aten.logcumsumexp.default: RANKED,
    aten.cummax.default: RANKED,
    aten.cummin.default: RANKED,
    aten.median.dim: WHOLE,
    aten.nanmedian.dim: WHOLE,
    aten.mode.default: WHOLE,
    aten.kthvalue.default: WHOLE,
}
