"""Strategies: which factors of an operator may lie on which axes, and the layouts that follow.

:func:`project` holds the semantics of sharding. A factor on an axis splits each dim whose major factor it is. An
operand without that factor becomes *varying*: each rank along the axis uses it in its own way. A factor that is summed
over leaves a partial sum. A windowed dim asks for a halo.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import sympy
from torch.fx import Node

from distfx.ir.layout import UNSPLIT, Layout, Split, is_channel_axis
from distfx.ir.meta import meta
from distfx.ir.moves import ReduceScatter
from distfx.ir.symbolic import Size, evaluate, product
from distfx.planner.decisions import Assignment
from distfx.rules.notation import DimPattern
from distfx.rules.rule import OpSpec


def project(
    spec: OpSpec, axes: Assignment, sizes: Mapping[str, int]
) -> tuple[tuple[tuple[Node, Layout], ...], Layout] | None:
    """The layouts of the operands and of the result (with its partial sums), or ``None`` where it is not legal."""
    used = [axis for group in axes.values() for axis in group]
    if len(set(used)) != len(used):
        return None
    needs = []
    for number, (node, words) in enumerate(spec.operands):
        dims = _splits(words, spec, axes, sizes, meta(node).shape, number)
        if dims is None:
            return None
        split = {axis for dim in dims for axis in dim.axes}
        needs.append((node, Layout(dims, varying=frozenset(set(used) - split))))
    dims = _splits(spec.result, spec, axes, sizes, meta(spec.node).shape, None)
    if dims is None:
        return None
    settled = {axis for dim in dims for axis in dim.axes} | {axis for f in spec.inside for axis in axes.get(f, ())}
    return tuple(needs), Layout(dims, partial=frozenset(set(used) - settled))


def _splits(
    words: Sequence[DimPattern],
    spec: OpSpec,
    axes: Assignment,
    sizes: Mapping[str, int],
    shape: Sequence[Size],
    operand: int | None,
) -> tuple[Split, ...] | None:
    dims = []
    for word, extent in zip(words, shape, strict=True):
        factors = [f for f in word.factors if spec.extents.get(f) != 1] or list(word.factors[-1:])
        if not factors or not any(axes.get(f) for f in factors):
            dims.append(UNSPLIT)
            continue
        major, minor = factors[0], factors[1:]
        if any(axes.get(f) for f in minor) or not axes.get(major):
            return None  # the minor factor of a merged dim is strided: no block
        window = spec.windows.get((operand, major)) if word.window and operand is not None else None
        if window and window.trivial and extent == spec.extents[major]:
            window = None
        unit = product(spec.extents[f] for f in minor)
        if major not in spec.units:
            unit = _granule(unit, spec.extents[major], axes[major], sizes)
        elif window:
            return None  # windows speak of single positions
        else:
            unit = unit * spec.units[major]
        dims.append(Split(axes[major], unit, window))
    return tuple(dims)


def ranks_along(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _granule(unit: Size, count: Size, axes: Sequence[str], sizes: Mapping[str, int]) -> Size:
    """One, where the axes divide the number of granules: the split is then the ordinary one."""
    ranks = math.prod(sizes[axis] for axis in axes)
    return 1 if isinstance(count, int) and count % ranks == 0 else unit


def follow_layout(spec: OpSpec, operand: int, layout: Layout, sizes: Mapping[str, int]) -> tuple[OpSpec, Assignment]:
    """The assignment that keeps one operand where it is, as far as the rule allows; the spec with its granules."""
    _, words = spec.operands[operand]
    axes: Assignment = {}
    units: dict[str, Size] = {}
    for word, split in zip(words, layout.dims, strict=True):
        factors = [f for f in word.factors if spec.extents.get(f) != 1] or list(word.factors[-1:])
        if not split.axes or not factors or factors[0] in axes:
            continue
        unit = product(spec.extents[f] for f in factors[1:])
        if split.unit == _granule(unit, spec.extents[factors[0]], split.axes, sizes):
            axes[factors[0]] = split.axes
        elif len(factors) == 1 and not any(is_channel_axis(axis) for axis in split.axes):
            axes[factors[0]], units[factors[0]] = split.axes, split.unit
    spec = replace(spec, units=units)
    if axes and project(spec, axes, sizes) is None:
        one_less = ({f: a for f, a in axes.items() if f != factor} for factor in reversed(axes))
        axes = next((fewer for fewer in one_less if project(spec, fewer, sizes) is not None), axes)
    while axes and project(spec, axes, sizes) is None:
        axes.popitem()
    return replace(spec, units={factor: unit for factor, unit in units.items() if factor in axes}), axes


def _channel_options(spec: OpSpec, channel: Sequence[str], layout: Layout) -> Iterator[tuple[str, Assignment]]:
    """Every way to put the channel axes on the factors of a convolution or linear layer, by name."""
    if not channel:
        yield "", {}
        return
    groups = spec.extents.get("g", 1)
    all_axes = tuple(channel)
    if groups != 1:
        yield "groups", {"g": all_axes}
        yield "replicated", {}
        return
    have = next((s.axes for s in layout.dims[1:] if set(s.axes) == set(all_axes)), all_axes)
    yield "stationary-x", {"c": have}
    yield "stationary-y", {"k": all_axes}
    if len(channel) == 2:
        for major, minor in ((channel[0], channel[1]), (channel[1], channel[0])):
            yield "stationary-w", {"c": (major,), "k": (minor,)}
    else:
        yield "stationary-w", {"k": all_axes}
        yield "stationary-w", {"c": have}
    yield "replicated", {}


def anchor_strategies(
    spec: OpSpec, layouts: Mapping[Node, Layout], sizes: Mapping[str, int], pin: str, hints: Mapping[sympy.Symbol, int]
) -> Iterator[tuple[str, OpSpec, Assignment]]:
    """The strategies of a convolution or linear layer: samples and space split wherever they can be.

    Space that has become smaller than its axis is no longer split: it is gathered once, and all go on alike.
    """
    x = spec.operands[0][0]
    spec, followed = follow_layout(spec, 0, layouts[x], sizes)
    base = {f: a for f, a in followed.items() if f not in ("c", "k", "g")}
    base = {f: kept for f, a in base.items() if (kept := tuple(axis for axis in a if not is_channel_axis(axis)))}
    taken = {axis for group in base.values() for axis in group}
    for axis in sizes:
        if axis in spec.extents and axis not in taken and axis not in base and not is_channel_axis(axis):
            base[axis] = (axis,)
    base = {f: a for f, a in base.items() if f == "n" or evaluate(spec.extents[f], hints) >= ranks_along(a, sizes)}
    channel = [axis for axis in sizes if is_channel_axis(axis)]
    options = list(_channel_options(spec, channel, layouts[x]))
    if pin != "auto" and channel:
        fitting = [option for option in options if option[0] == pin]
        options = fitting or [option for option in options if option[0] == "groups"] or options
    elif channel:

        def fits(option: Assignment) -> bool:
            """Whether no rank is left without channels."""
            return all(
                not isinstance(extent := spec.extents[f], int) or extent >= math.prod(sizes[a] for a in group)
                for f, group in option.items()
            )

        useful = [(name, option) for name, option in options if name != "stationary-w" or len(channel) == 2]
        options = [(n, o) for n, o in useful if n != "replicated" and fits(o)] or useful
    for name, option in options:
        yield name, spec, base | option


def without_windows(spec: OpSpec, axes: Assignment) -> Assignment:
    """The assignment that leaves a channel dim whole which several operands share out (a concatenation)."""
    shared = {factor for operand, factor in spec.windows if operand}
    return {f: group for f, group in axes.items() if f not in shared}


_DIMS = {1: "n", 2: "n ", 3: "n w", 4: "n hw", 5: "n dhw"}
"""The axes that may split an input, by its rank."""


def natural_layout(
    shape: Sequence[Size],
    sizes: Mapping[str, int],
    hints: Mapping[sympy.Symbol, int],
    others: Sequence[Sequence[Size]] = (),
) -> Layout:
    """How an input comes in: samples over ``n``, space over ``d``, ``h``, ``w`` if there is enough; channels whole.

    One that has the sizes of another of the inputs, ``others``, but for its channels is a label for each position.
    """

    def numbers(sizes: Sequence[Size]) -> list[int]:
        return [evaluate(size, hints) for size in sizes]

    names = _DIMS.get(len(shape), "n" if shape else "")
    for other in others:
        if len(other) == len(shape) + 1 and numbers([*other[:1], *other[2:]]) == numbers(shape) and len(other) in _DIMS:
            names = _DIMS[len(other)].replace(" ", "")

    def fits(dim: int, name: str) -> bool:
        return shape[dim] != 1 and (name == "n" or evaluate(shape[dim], hints) >= sizes[name])

    dims = [Split((name,)) if name in sizes and fits(i, name) else UNSPLIT for i, name in enumerate(names)]
    return Layout((*dims, *(UNSPLIT,) * (len(shape) - len(dims))))


def algorithm_name(name: str, axes: Assignment) -> str:
    """What a reader calls the strategy."""
    if name:
        return name
    used = {axis for group in axes.values() for axis in group}
    return "spatial" if used & {"d", "h", "w"} else "samples" if used else "replicated"


def complete_sums(spec: OpSpec, produced: Layout) -> Layout:
    """The result's layout once its partial sums are added up: scattered over the row's factor, or replicated."""
    layout = produced
    for axis in sorted(produced.partial):
        dim = next((i for i, word in enumerate(spec.result) if spec.rule.scatter in word.factors), None)
        if dim is not None and is_channel_axis(axis):
            layout = ReduceScatter((axis,), dim).result(layout)
    return replace(layout, partial=frozenset())
