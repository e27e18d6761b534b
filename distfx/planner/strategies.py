"""Strategies: which factors of an operator may be assigned to which axes, and the layouts that follow.

:func:`project` defines the semantics of sharding. A factor on an axis splits each dim whose major factor it is. An
operand without that factor becomes *varying*: each rank along the axis uses it in its own way. A factor that is summed
over leaves a partial sum. A windowed dim asks for a halo.

So for a convolution (factors n, g, c, k and space) stationary-x is ``{c: axes}``, stationary-y is ``{k: axes}``, and
stationary-w puts one channel axis on c and the other on k: see :func:`channel_strategies`.
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

__all__ = [
    "algorithm_name",
    "anchor_strategies",
    "channel_strategies",
    "complete_sums",
    "follow_layout",
    "input_layout",
    "project",
    "without_windows",
]


def project(
    spec: OpSpec, assignment: Assignment, sizes: Mapping[str, int]
) -> tuple[tuple[tuple[Node, Layout], ...], Layout] | None:
    """The layouts of the operands and of the result as produced; ``None`` if the assignment is not legal.

    ``sizes`` are the sizes of the grid's axes.
    """
    used = [axis for axes in assignment.values() for axis in axes]
    if len(set(used)) != len(used):
        return None
    needs = []
    for index, (node, patterns) in enumerate(spec.operands):
        dims = _splits(patterns, spec, assignment, sizes, meta(node).shape, index)
        if dims is None:
            return None
        split_axes = {axis for split in dims for axis in split.axes}
        needs.append((node, Layout(dims, varying=frozenset(set(used) - split_axes))))
    dims = _splits(spec.result, spec, assignment, sizes, meta(spec.node).shape, None)
    if dims is None:
        return None
    complete = {axis for split in dims for axis in split.axes}
    complete |= {axis for factor in spec.inside for axis in assignment.get(factor, ())}
    return tuple(needs), Layout(dims, partial=frozenset(set(used) - complete))


def _splits(
    patterns: Sequence[DimPattern],
    spec: OpSpec,
    assignment: Assignment,
    sizes: Mapping[str, int],
    shape: Sequence[Size],
    operand: int | None,
) -> tuple[Split, ...] | None:
    """How the dims of an operand, by its index, or of the result (``None``) are split."""
    dims = []
    for pattern, extent in zip(patterns, shape, strict=True):
        factors = _factors(pattern, spec)
        if not factors or not any(assignment.get(factor) for factor in factors):
            dims.append(UNSPLIT)
            continue
        major, minor = factors[0], factors[1:]
        if any(assignment.get(factor) for factor in minor) or not assignment.get(major):
            return None  # splitting a minor factor of a merged dim would not leave one block to each rank
        window = spec.windows.get((operand, major)) if pattern.window and operand is not None else None
        if window and window.trivial and extent == spec.extents[major]:
            window = None
        unit = product(spec.extents[factor] for factor in minor)
        if major not in spec.units:
            unit = _unit(unit, spec.extents[major], assignment[major], sizes)
        elif window:
            return None  # windows count single positions, not units
        else:
            unit = unit * spec.units[major]
        dims.append(Split(assignment[major], unit, window))
    return tuple(dims)


def _factors(pattern: DimPattern, spec: OpSpec) -> list[str]:
    """The factors of a dim, without those of extent one."""
    return [f for f in pattern.factors if spec.extents.get(f) != 1] or list(pattern.factors[-1:])


def _ranks(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _unit(unit: Size, count: Size, axes: Sequence[str], sizes: Mapping[str, int]) -> Size:
    """``unit``, or one if the axes divide the number of units: the split is the ordinary one then."""
    return 1 if isinstance(count, int) and count % _ranks(axes, sizes) == 0 else unit


def follow_layout(spec: OpSpec, operand: int, layout: Layout, sizes: Mapping[str, int]) -> tuple[OpSpec, Assignment]:
    """The assignment that keeps one operand in its ``layout``, as far as the rule allows.

    The returned spec has the units in which the layout splits its dims.
    """
    _, patterns = spec.operands[operand]
    assignment: Assignment = {}
    units: dict[str, Size] = {}
    for pattern, split in zip(patterns, layout.dims, strict=True):
        factors = _factors(pattern, spec)
        if not split.axes or not factors or factors[0] in assignment:
            continue
        unit = product(spec.extents[factor] for factor in factors[1:])
        if split.unit == _unit(unit, spec.extents[factors[0]], split.axes, sizes):
            assignment[factors[0]] = split.axes
        elif len(factors) == 1 and not any(is_channel_axis(axis) for axis in split.axes):
            assignment[factors[0]], units[factors[0]] = split.axes, split.unit
    spec = replace(spec, units=units)
    if assignment and project(spec, assignment, sizes) is None:
        without_one = ({f: a for f, a in assignment.items() if f != factor} for factor in reversed(assignment))
        assignment = next((fewer for fewer in without_one if project(spec, fewer, sizes) is not None), assignment)
    while assignment and project(spec, assignment, sizes) is None:
        assignment.popitem()
    return replace(spec, units={factor: unit for factor, unit in units.items() if factor in assignment}), assignment


def channel_strategies(spec: OpSpec, axes: Sequence[str], layout: Layout) -> Iterator[tuple[str, Assignment]]:
    """Every way to put the channel axes on the factors of a convolution or linear layer, with its name.

    ``layout`` is that of x: stationary-x keeps the order in which the axes split its channels.
    """
    all_axes = tuple(axes)
    if not all_axes:
        yield "", {}
        return
    if spec.extents.get("g", 1) != 1:
        yield "groups", {"g": all_axes}
        yield "replicated", {}
        return
    order = next((split.axes for split in layout.dims[1:] if set(split.axes) == set(all_axes)), all_axes)
    yield "stationary-x", {"c": order}
    yield "stationary-y", {"k": all_axes}
    if len(all_axes) == 2:
        for major, minor in (all_axes, all_axes[::-1]):
            yield "stationary-w", {"c": (major,), "k": (minor,)}
    else:  # on one axis, stationary-w equals stationary-x or stationary-y
        yield "stationary-w", {"k": all_axes}
        yield "stationary-w", {"c": order}
    yield "replicated", {}


def anchor_strategies(
    spec: OpSpec, layouts: Mapping[Node, Layout], sizes: Mapping[str, int], pin: str, hints: Mapping[sympy.Symbol, int]
) -> Iterator[tuple[str, OpSpec, Assignment]]:
    """The strategies of a convolution or linear layer. Samples and space are split wherever they can be.

    Space that has become smaller than its axis is no longer split: it is gathered once and stays replicated.
    """
    x = spec.operands[0][0]
    spec, followed = follow_layout(spec, 0, layouts[x], sizes)
    base: Assignment = {}
    for factor, axes in followed.items():
        kept = tuple(axis for axis in axes if not is_channel_axis(axis))
        if factor not in ("c", "k", "g") and kept:
            base[factor] = kept
    used = {axis for axes in base.values() for axis in axes}
    for axis in sizes:
        if axis in spec.extents and axis not in used and axis not in base and not is_channel_axis(axis):
            base[axis] = (axis,)
    base = {f: axes for f, axes in base.items() if f == "n" or evaluate(spec.extents[f], hints) >= _ranks(axes, sizes)}
    channel_axes = [axis for axis in sizes if is_channel_axis(axis)]
    options = list(channel_strategies(spec, channel_axes, layouts[x]))
    if pin != "auto" and channel_axes:
        pinned = [option for option in options if option[0] == pin]
        options = pinned or [option for option in options if option[0] == "groups"] or options
    elif channel_axes:

        def has_enough_channels(option: Assignment) -> bool:
            return all(
                not isinstance(extent := spec.extents[f], int) or extent >= _ranks(axes, sizes)
                for f, axes in option.items()
            )

        distinct = [(name, option) for name, option in options if name != "stationary-w" or len(channel_axes) == 2]
        options = [(n, o) for n, o in distinct if n != "replicated" and has_enough_channels(o)] or distinct
    for name, option in options:
        yield name, spec, base | option


def without_windows(spec: OpSpec, assignment: Assignment) -> Assignment:
    """The assignment without the factors that several operands read through windows, as in a concatenation."""
    windowed = {factor for operand, factor in spec.windows if operand}
    return {factor: axes for factor, axes in assignment.items() if factor not in windowed}


_INPUT_AXES = {1: "n", 2: "n ", 3: "n w", 4: "n hw", 5: "n dhw"}
"""The axes that may split the dims of an input, by its rank."""


def input_layout(
    shape: Sequence[Size],
    sizes: Mapping[str, int],
    hints: Mapping[sympy.Symbol, int],
    others: Sequence[Sequence[Size]] = (),
) -> Layout:
    """The layout of an input: samples over ``n``, space over ``d``, ``h``, ``w`` where it is large enough.

    Channels stay unsplit. ``others`` are the shapes of all inputs: an input with the shape of another one without its
    channels holds a label for each position, and is split as that one.
    """

    def numbers(sizes: Sequence[Size]) -> list[int]:
        return [evaluate(size, hints) for size in sizes]

    names = _INPUT_AXES.get(len(shape), "n" if shape else "")
    for other in others:
        same_ndim = len(other) == len(shape) + 1 and len(other) in _INPUT_AXES
        if same_ndim and numbers([*other[:1], *other[2:]]) == numbers(shape):
            names = _INPUT_AXES[len(other)].replace(" ", "")

    def can_split(dim: int, name: str) -> bool:
        return shape[dim] != 1 and (name == "n" or evaluate(shape[dim], hints) >= sizes[name])

    dims = [Split((name,)) if name in sizes and can_split(i, name) else UNSPLIT for i, name in enumerate(names)]
    return Layout((*dims, *(UNSPLIT,) * (len(shape) - len(dims))))


def algorithm_name(name: str, assignment: Assignment) -> str:
    """The name of a strategy: that of its channel strategy, or what else it splits."""
    if name:
        return name
    used = {axis for axes in assignment.values() for axis in axes}
    return "spatial" if used & {"d", "h", "w"} else "samples" if used else "replicated"


def complete_sums(spec: OpSpec, produced: Layout) -> Layout:
    """The layout of a result once its partial sums are completed: scattered over channels by channel axes, if the rule
    names a factor for that, else replicated."""
    layout = produced
    for axis in sorted(produced.partial):
        dim = next((i for i, pattern in enumerate(spec.result) if spec.rule.scatter in pattern.factors), None)
        if dim is not None and is_channel_axis(axis):
            layout = ReduceScatter((axis,), dim).result(layout)
    return replace(layout, partial=frozenset())
