"""Normalization: statistics over split dims are those of the whole tensor."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from distfx.errors import DistfxError
from distfx.ir import ops
from distfx.ir.meta import Meta, meta
from distfx.ir.nodes import describe
from distfx.ir.ops import LocalSize, LocalStart
from distfx.ir.symbolic import product
from distfx.rules.rule import BoundCall, Call, LocalContext, Rule, RuleChoice, aten, unchanged

__all__ = ["BATCH_NORM", "GROUP_NORM", "INSTANCE_NORM", "LAYER_NORM", "RMS_NORM", "RULES"]


def _local_batch_norm(context: LocalContext) -> Call:
    over = context.axes_of([dim for dim in range(len(context.layout.dims)) if dim != 1])
    if not context.args[5] or not over:
        return unchanged(context)
    selected = Meta.statistics_axes.get(context.node)  # parallelize(batch_norm=); None selects all axes
    axes = tuple(axis for axis in over if selected is None or axis in selected)
    count = [_size_over(context, dim, axes) for dim in range(len(context.layout.dims)) if dim != 1]
    options = {"momentum": context.args[6], "eps": context.args[7], "axis": axes, "count": count}
    others = {"average_over": tuple(axis for axis in over if axis not in axes)} if axes != over else {}
    return ops.batch_norm, context.args[:5], options | others


def _size_over(context: LocalContext, dim: int, axes: tuple[str, ...]) -> Any:
    """The extent of a dim over all ranks along ``axes``."""
    size, split = meta(context.node).shape[dim], context.layout.dims[dim]
    others = tuple(axis for axis in split.axes if axis not in axes)
    if split.axes[: len(others)] != others:
        raise DistfxError(
            f"{describe(context.node)}: batch_norm={axes} selects axes that are not the last ones of those that "
            f"split one dim, {split.axes}"
        )
    return LocalSize(size, replace(split, axes=others)) if others else size


def _check_batch_norm(call: BoundCall) -> str | None:
    if call.node.args[5:6] == (False,):
        return None  # it uses running statistics
    sizes: Any = call.node.kwargs.get("count") or [size for dim, size in enumerate(call.shape) if dim != 1]
    if math.prod(map(call.least, sizes)) > 1:
        return None
    where = ", in each part of the batch that has its own statistics" if "average_over" in call.node.kwargs else ""
    return f"needs more than one value per channel in training{where}"


BATCH_NORM = Rule(
    "batch norm",
    "n c s..., ?c, ?c, ?c, ?c -> n c s...",
    _local_batch_norm,
    check=_check_batch_norm,
    cost="in training two allreduces of a value per channel forward and one of two backward, over samples and space",
)


def _local_group_norm(context: LocalContext) -> Call:
    """If channels are split inside a group, each rank computes sums for all groups, reduced over the channel axes."""
    x, groups = context.args[:2]
    weight, bias, eps = (*context.args[2:5], *(None,) * 3)[:3]
    shape = meta(context.node).shape
    split, space = context.axes_of([1]), list(range(2, len(shape)))
    ranks = math.prod(context.ranks[axis] for axis in split)
    inside = split if groups % ranks or shape[1] % ranks else ()
    over = (*inside, *context.axes_of(space))
    if not over and not split:
        return unchanged(context)
    options = {
        "dims": space,
        "group": shape[1] // groups,
        "groups": groups,
        "start": LocalStart(shape[1], context.layout.dims[1]),
        "eps": 1e-5 if eps is None else eps,
        "axis": over,
        "count": product(shape[1:]) // groups,
    }
    return ops.norm, (x, weight, bias), options


GROUP_NORM = Rule(
    "group norm",
    "n c ..., ?c, ?c -> n c ...",
    _local_group_norm,
    cost="three allreduces of a value per sample and group, over space, and over channels where groups are split",
)


def _instance_norm(node: Node) -> Rule | None:
    """Only with the statistics of the input, and without running statistics."""
    return INSTANCE_NORM if node.args[5] and node.args[3] is None else None


def _local_instance_norm(context: LocalContext) -> Call:
    shape = meta(context.node).shape
    space = list(range(2, len(shape)))
    over = context.axes_of(space)
    if not over:
        return unchanged(context)
    options = {"dims": space, "eps": context.args[7], "axis": over, "count": product(shape[2:])}
    return ops.norm, (context.args[0], context.args[1], context.args[2]), options


INSTANCE_NORM = Rule(
    "instance norm",
    "n c ..., ?c, ?c, ?c, ?c -> n c ...",
    _local_instance_norm,
    cost="three allreduces of a value per sample and channel, over space",
)


def _local_layer_norm(context: LocalContext) -> Call:
    x, normalized = context.args[:2]
    weight, bias, eps = (*context.args[2:5], *(None,) * 3)[:3]
    shape = meta(context.node).shape
    dims = list(range(len(shape) - len(normalized), len(shape)))
    over = context.axes_of(dims)
    if not over:
        return unchanged(context)
    count = product(shape[i] for i in dims)
    options = {"dims": dims, "eps": 1e-5 if eps is None else eps, "axis": over, "count": count, "trailing": True}
    return ops.norm, (x, weight, bias), options


LAYER_NORM = Rule(
    "layer norm",
    "... c..., ?c..., ?c... -> ... c... where c... = normalized_shape",
    _local_layer_norm,
    cost="over split dims three allreduces of a value per position",
)


def _local_rms_norm(context: LocalContext) -> Call:
    call = _local_layer_norm(context)
    if call[0] is not ops.norm:
        return call
    x, _, weight, eps = (*context.args, None, None)[:4]
    options = call[2] | {"eps": torch.finfo(meta(context.node).dtype).eps if eps is None else eps, "centre": False}
    return ops.norm, (x, weight, None), options


RMS_NORM = Rule(
    "rms norm",
    "... c..., ?c... -> ... c... where c... = normalized_shape",
    _local_rms_norm,
    cost="over split dims two allreduces of a value per position",
)

RULES: dict[Any, Rule | RuleChoice] = {
    aten.batch_norm.default: BATCH_NORM,
    aten.group_norm.default: GROUP_NORM,
    aten.instance_norm.default: RuleChoice(_instance_norm, (INSTANCE_NORM,)),
    aten.layer_norm.default: LAYER_NORM,
    aten.rms_norm.default: RMS_NORM,
}
