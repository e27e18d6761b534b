"""Normalisation: statistics over split dims are those of the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from distfx.rules.rule import BoundCall, Call, LocalContext, OpSpec, Rule, RuleChoice, aten, spec_from_dims, unchanged

__all__ = ["BATCH_NORM", "GROUP_NORM", "INSTANCE_NORM", "LAYER_NORM", "RMS_NORM", "RULES"]


def _axes(context: LocalContext, factors: list[str]) -> tuple[str, ...]:
    """The axes that split any of ``factors``."""
    return tuple(axis for factor in factors for axis in context.axes.get(factor, ()))


def _local_batch_norm(context: LocalContext) -> Call:
    over = _axes(context, ["n", *context.spec.spatial()])
    if not context.args[5] or not over:
        return unchanged(context)
    wanted = Meta.statistics_axes.get(context.node)  # of parallelize(batch_norm=): None for all axes
    kept = tuple(axis for axis in over if wanted is None or axis in wanted)
    count = [_size_over(context, dim, kept) for dim in range(len(context.layout.dims)) if dim != 1]
    words = {"momentum": context.args[6], "eps": context.args[7], "axis": kept, "count": count}
    rest = {"average_over": tuple(axis for axis in over if axis not in kept)} if kept != over else {}
    return ops.batch_norm, context.args[:5], words | rest


def _size_over(context: LocalContext, dim: int, axes: tuple[str, ...]) -> Any:
    """How much of a dim the ranks along ``axes`` have together."""
    size, split = meta(context.node).shape[dim], context.layout.dims[dim]
    others = tuple(axis for axis in split.axes if axis not in axes)
    if split.axes[: len(others)] != others:
        raise DistfxError(
            f"{describe(context.node)}: batch_norm={axes} takes apart a dim that {split.axes} split together"
        )
    return LocalSize(size, replace(split, axes=others)) if others else size


def _check_batch_norm(call: BoundCall) -> str | None:
    if call.node.args[5:6] == (False,):
        return None  # with running statistics
    sizes: Any = call.node.kwargs.get("count") or [size for dim, size in enumerate(call.shape) if dim != 1]
    if math.prod(map(call.least, sizes)) > 1:
        return None
    parts = ", on each part of the batch that it normalises" if "average_over" in call.node.kwargs else ""
    return f"needs more than one value per channel in training{parts}"


BATCH_NORM = Rule(
    "batch norm",
    "n c s..., c, c, c, c -> n c s...",
    _local_batch_norm,
    tensors=(0, 1, 2, 3, 4),
    check=_check_batch_norm,
    cost="in training two allreduces of a value per channel forward and one of two backward, over samples and space",
)


def _channels_spec(*positions: int) -> Callable[[Rule, Node], OpSpec | None]:
    """``n c s..., c, c -> n c s...`` with the per-channel operands at ``positions``."""

    def build(rule: Rule, node: Node) -> OpSpec | None:
        x: Any = node.args[0]
        every: list[int | None] = list(range(len(meta(node).shape)))
        given = [node.args[i] for i in positions if i < len(node.args)]
        others: list[tuple[Node, list[int | None]]] = [(a, [1]) for a in given if isinstance(a, Node)]
        return spec_from_dims(rule, node, [(x, every), *others], every)

    return build


def _local_group_norm(context: LocalContext) -> Call:
    """Channels may be split inside a group: sums are then made for all groups and added up over the channel axes."""
    x, groups = context.args[:2]
    weight, bias, eps = (*context.args[2:5], *(None,) * 3)[:3]
    shape = meta(context.node).shape
    split, space = context.axes.get("d1", ()), [f"d{i}" for i in range(2, len(shape))]
    ranks = math.prod(context.ranks[axis] for axis in split)
    inside = split if groups % ranks or shape[1] % ranks else ()
    over = (*inside, *_axes(context, space))
    if not over and not split:
        return unchanged(context)
    words = {
        "dims": list(range(2, len(shape))),
        "group": shape[1] // groups,
        "groups": groups,
        "start": LocalStart(shape[1], context.layout.dims[1]),
        "eps": 1e-5 if eps is None else eps,
        "axis": over,
        "count": product(shape[1:]) // groups,
    }
    return ops.norm, (x, weight, bias), words


GROUP_NORM = Rule(
    "group norm",
    "n (g c) s..., (g c), (g c) -> n (g c) s...",
    _local_group_norm,
    build=_channels_spec(2, 3),
    cost="three allreduces of a value per sample and group, over space, and over channels where groups are split",
)


def _instance_norm(node: Node) -> Rule | None:
    """With the statistics of the input, and no running ones."""
    return INSTANCE_NORM if node.args[5] and node.args[3] is None else None


def _local_instance_norm(context: LocalContext) -> Call:
    shape = meta(context.node).shape
    over = _axes(context, [f"d{i}" for i in range(2, len(shape))])
    if not over:
        return unchanged(context)
    words = {"dims": list(range(2, len(shape))), "eps": context.args[7], "axis": over, "count": product(shape[2:])}
    return ops.norm, (context.args[0], context.args[1], context.args[2]), words


INSTANCE_NORM = Rule(
    "instance norm",
    "n c s..., c, c -> n c s...",
    _local_instance_norm,
    build=_channels_spec(1, 2),
    cost="three allreduces of a value per sample and channel, over space",
)


def _layer_norm_spec(rule: Rule, node: Node) -> OpSpec | None:
    x: Any = node.args[0]
    normalized: Any = node.args[1]
    rank = len(meta(node).shape)
    every: list[int | None] = list(range(rank))
    given = [a for a in node.args[2:4] if isinstance(a, Node)]
    return spec_from_dims(rule, node, [(x, every), *((a, every[rank - len(normalized) :]) for a in given)], every)


def _local_layer_norm(context: LocalContext) -> Call:
    x, normalized = context.args[:2]
    weight, bias, eps = (*context.args[2:5], *(None,) * 3)[:3]
    shape = meta(context.node).shape
    dims = list(range(len(shape) - len(normalized), len(shape)))
    over = _axes(context, [f"d{i}" for i in dims])
    if not over:
        return unchanged(context)
    words = {"dims": dims, "eps": 1e-5 if eps is None else eps, "axis": over, "count": product(shape[i] for i in dims)}
    return ops.norm, (x, weight, bias), words | {"trailing": True}


LAYER_NORM = Rule(
    "layer norm",
    "... c, c, c -> ... c",
    _local_layer_norm,
    build=_layer_norm_spec,
    cost="over split dims three allreduces of a value per position",
)


def _local_rms_norm(context: LocalContext) -> Call:
    call = _local_layer_norm(context)
    if call[0] is not ops.norm:
        return call
    x, _, weight, eps = (*context.args, None, None)[:4]
    words = call[2] | {"eps": torch.finfo(meta(context.node).dtype).eps if eps is None else eps, "centre": False}
    return ops.norm, (x, weight, None), words


RMS_NORM = Rule(
    "rms norm",
    "... c, c -> ... c",
    _local_rms_norm,
    build=_layer_norm_spec,
    cost="over split dims two allreduces of a value per position",
)

RULES: dict[Any, Rule | RuleChoice] = {
    aten.batch_norm.default: BATCH_NORM,
    aten.group_norm.default: GROUP_NORM,
    aten.instance_norm.default: RuleChoice(_instance_norm, (INSTANCE_NORM,)),
    aten.layer_norm.default: LAYER_NORM,
    aten.rms_norm.default: RMS_NORM,
}
