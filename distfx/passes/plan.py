"""plan: choose a strategy for every operator.

in: a captured graph, the sizes of the grid's axes, pins.   out: a :class:`Decision` for every node: which factors lie
on which axes, and by projection the layouts of all operands and of the result. No node is changed.

Projection (:func:`project`) is the whole semantics of sharding: a factor on an axis splits each dim it is the major
factor of; an operand without it is used in a different way by each rank along the axis (*varying*); a summed factor
leaves a partial sum; a windowed dim asks for a halo.

The planner is greedy, in graph order: for convolutions and linear layers it weighs every legal assignment by estimated
bytes, gradients of parameters included, and arithmetic; other operators follow the layout of an operand.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy
from torch.fx import Graph, Node

from distfx.errors import DistfxError
from distfx.ir.layout import WHOLE, Layout, Split, is_channel_axis
from distfx.ir.moves import ReduceScatter
from distfx.ir.nodes import aten, describe
from distfx.ir.route import Border, estimate, route
from distfx.ir.symbolic import Size, evaluate, evaluate_shape, product
from distfx.rules.notation import Word
from distfx.rules.registry import draws, spec_of
from distfx.rules.row import Spec

__all__ = ["ALGORITHMS", "Decision", "Decisions", "Pins", "decide", "follow_layout", "project"]

Assignment = dict[str, tuple[str, ...]]
"""The axes of each factor, major first."""

ALGORITHMS = ("auto", "stationary-x", "stationary-y", "stationary-w", "replicated")
Pins = Mapping[str, str]

FLOPS_PER_BYTE = 100.0
"""What a rank computes in the time in which it sends a byte: the price of idle ranks against communication."""
LATENCY_BYTES = 2000.0
"""What a rank sends in the time that one more message costs."""


@dataclass(frozen=True)
class Decision:
    """What becomes of one node: the layouts it needs its operands in, and the one of its result."""

    algorithm: str
    axes: Mapping[str, tuple[str, ...]]
    needs: tuple[tuple[Node, Layout], ...]
    raw: Layout
    result: Layout
    spec: Spec | None = None
    whole: bool = False
    """Whether it runs whole on every rank because no rule applies."""

    def border(self, operand: int) -> Border:
        """What the windows of an operand, by its number, need to know."""
        if self.spec is None:
            return Border({})
        node, words = self.spec.node, self.spec.operands[operand][1]
        where = {word.factors[0]: dim for dim, word in enumerate(self.spec.result) if word.factors}
        extents = {i: node.meta["shape"][where[w.factors[0]]] for i, w in enumerate(words) if w.window}
        return Border(extents, self.spec.mode, self.spec.fill)


@dataclass
class Decisions:
    """The plan of a graph: a decision for each operator, the layouts of inputs and parameters."""

    nodes: dict[Node, Decision] = field(default_factory=dict)
    layouts: dict[Node, Layout] = field(default_factory=dict)
    usable: set[str] = field(default_factory=set)
    """The axes that some operator can use."""
    trained: set[Node] = field(default_factory=set)
    """The nodes that have a gradient, if the inputs have none."""
    computed: dict[Node, None] = field(default_factory=dict)
    """The nodes that are made of parameters alone (standardised weights), in order."""

    def store(self, decision: Decision, sizes: Mapping[str, int], fixed: Collection[str]) -> None:
        """Parameters that a decision needs split are stored so, if nothing else was decided before."""
        for operand, need in decision.needs:
            free = operand.op == "get_attr" and str(operand.target) not in fixed
            if free and need.split_axes and not self.layouts[operand].split_axes:
                self.layouts[operand] = storage_layout(need, list(sizes))

    @property
    def whole(self) -> list[Node]:
        """The nodes that run whole for want of a rule."""
        return [node for node, decision in self.nodes.items() if decision.whole]


# ------------------------------------------------------------------------------------------------ projection


def project(
    spec: Spec, axes: Assignment, sizes: Mapping[str, int]
) -> tuple[tuple[tuple[Node, Layout], ...], Layout] | None:
    """The layouts of the operands and of the result (with its partial sums), or ``None`` where it is not legal."""
    used = [axis for group in axes.values() for axis in group]
    if len(set(used)) != len(used):
        return None
    needs = []
    for number, (node, words) in enumerate(spec.operands):
        dims = _splits(words, spec, axes, sizes, node.meta["shape"], number)
        if dims is None:
            return None
        split = {axis for dim in dims for axis in dim.axes}
        needs.append((node, Layout(dims, varying=frozenset(set(used) - split))))
    dims = _splits(spec.result, spec, axes, sizes, spec.node.meta["shape"], None)
    if dims is None:
        return None
    settled = {axis for dim in dims for axis in dim.axes} | {axis for f in spec.inside for axis in axes.get(f, ())}
    return tuple(needs), Layout(dims, partial=frozenset(set(used) - settled))


def _splits(
    words: Sequence[Word],
    spec: Spec,
    axes: Assignment,
    sizes: Mapping[str, int],
    shape: Sequence[Size],
    operand: int | None,
) -> tuple[Split, ...] | None:
    dims = []
    for word, extent in zip(words, shape, strict=True):
        factors = [f for f in word.factors if spec.extents.get(f) != 1] or list(word.factors[-1:])
        if not factors or not any(axes.get(f) for f in factors):
            dims.append(WHOLE)
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


def _ranks(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _granule(unit: Size, count: Size, axes: Sequence[str], sizes: Mapping[str, int]) -> Size:
    """One, where the axes divide the number of granules: the split is then the ordinary one."""
    ranks = math.prod(sizes[axis] for axis in axes)
    return 1 if isinstance(count, int) and count % ranks == 0 else unit


def follow_layout(spec: Spec, operand: int, layout: Layout, sizes: Mapping[str, int]) -> tuple[Spec, Assignment]:
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


# ------------------------------------------------------------------------------------------------ candidates


def _channel_options(spec: Spec, channel: Sequence[str], layout: Layout) -> Iterator[tuple[str, Assignment]]:
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


def _anchored(
    spec: Spec, layouts: Mapping[Node, Layout], sizes: Mapping[str, int], pin: str, hints: Mapping[sympy.Symbol, int]
) -> Iterator[tuple[str, Spec, Assignment]]:
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
    base = {f: a for f, a in base.items() if f == "n" or evaluate(spec.extents[f], hints) >= _ranks(a, sizes)}
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


# ------------------------------------------------------------------------------------------------- decisions


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

    dims = [Split((name,)) if name in sizes and fits(i, name) else WHOLE for i, name in enumerate(names)]
    return Layout((*dims, *(WHOLE,) * (len(shape) - len(dims))))


def storage_layout(need: Layout, mesh_axes: Sequence[str]) -> Layout:
    """How a parameter is stored that is needed so: as far as it is an ordinary DTensor shard of channels."""
    dims = []
    for split in need.dims:
        kept: list[str] = []
        for axis in split.axes if split.unit == 1 else ():
            if not is_channel_axis(axis) or (kept and mesh_axes.index(axis) < mesh_axes.index(kept[-1])):
                break
            kept.append(axis)
        dims.append(Split(tuple(kept)))
    return Layout(tuple(dims))


def decide(
    graph: Graph,
    sizes: Mapping[str, int],
    hints: Mapping[sympy.Symbol, int],
    pins: Pins,
    stored: Mapping[str, Layout] | None = None,
    written: frozenset[str] = frozenset(),
) -> Decisions:
    """Choose for every operator. ``sizes`` are the grid's axes; ``stored`` the parameters whose layout is fixed;
    ``written`` the buffers that are written as a whole, and so must be stored whole."""
    plan = Decisions()
    stored = stored or {}
    matched: set[str] = set()
    inputs = [node.meta["shape"] for node in graph.find_nodes(op="placeholder") if "shape" in node.meta]
    for node in graph.nodes:
        if node.op == "placeholder":
            shape = node.meta.get("shape", ())
            plan.layouts[node] = natural_layout(shape, sizes, hints, inputs)
        elif node.op == "get_attr":
            shape = node.meta["shape"]
            plan.layouts[node] = stored.get(str(node.target)) or Layout.replicated(len(shape))
            plan.trained.add(node)
        elif node.op == "call_function":
            pin = _pin(node, pins, matched)
            decision = _decide_node(node, plan, sizes, hints, pin, stored)
            plan.nodes[node] = decision
            plan.layouts[node] = decision.result
            if any(operand in plan.trained for operand in node.all_input_nodes):
                plan.trained.add(node)
            made_of = node.all_input_nodes
            if made_of and all(operand.op == "get_attr" or operand in plan.computed for operand in made_of):
                plan.computed[node] = None
            plan.store(decision, sizes, {*stored, *written})
    _split_computed(plan, sizes, {*stored, *written})
    _settle_statistics(plan, sizes, stored)
    _check_pins(graph, pins, matched)
    return plan


def _settle_statistics(plan: Decisions, sizes: Mapping[str, int], fixed: Collection[str]) -> None:
    """A batch norm writes into slices of its running statistics. Where another call has split them otherwise, they are
    stored whole; where another graph has stored them so already, this batch norm is computed as they are split.
    """
    for node, decision in plan.nodes.items():
        if node.target is not aten.batch_norm.default or decision.spec is None:
            continue
        for operand, need in decision.needs:
            stored = plan.layouts[operand]
            if operand not in node.args[3:5] or _is_slice(need, stored):
                continue
            if operand.op == "get_attr" and str(operand.target) not in fixed:
                plan.layouts[operand] = Layout.replicated(1)
                continue
            (channel,) = decision.spec.result[1].factors
            axes = dict(decision.axes) | {channel: stored.dims[0].axes}
            projected = project(decision.spec, axes, sizes)
            assert projected is not None, "a batch norm can be split along its channels"
            plan.nodes[node] = replace(decision, axes=axes, needs=projected[0], raw=projected[1], result=projected[1])
            plan.layouts[node] = projected[1]
            break


def _is_slice(part: Layout, whole: Layout) -> bool:
    """Of vectors: whether ranks find theirs in what they have."""
    (mine,), (held,) = part.dims, whole.dims
    return mine.axes[: len(held.axes)] == held.axes


def _split_computed(plan: Decisions, sizes: Mapping[str, int], fixed: Collection[str]) -> None:
    """Weights that are computed are computed in the shards that all their users need, and stored so, as others are.

    Until now they were planned whole: what they are made of is found before who uses them.
    """
    for node in reversed(plan.computed):
        decision = plan.nodes[node]
        if decision.spec is None or not node.users.keys() <= plan.nodes.keys():
            continue
        needs = [need for user in node.users for operand, need in plan.nodes[user].needs if operand is node]
        wanted = {storage_layout(need, list(sizes)) for need in needs}
        if len(wanted) != 1:
            continue
        (layout,) = wanted
        words = zip(decision.spec.result, layout.dims, strict=True)
        axes = {word.factors[0]: split.axes for word, split in words if split.axes and word.factors}
        projected = project(decision.spec, axes, sizes) if axes else None
        if projected is None or projected[1] != layout:
            continue
        if any(split.window for _, need in projected[0] for split in need.dims):
            continue
        plan.nodes[node] = replace(decision, axes=axes, needs=projected[0], raw=layout, result=layout)
        plan.layouts[node] = layout
        plan.store(plan.nodes[node], sizes, fixed)


def _pin(node: Node, pins: Pins, matched: set[str]) -> str:
    spec = spec_of(node)
    if spec is None or not spec.row.anchor:
        return "auto"
    for pattern, algorithm in pins.items():
        if fnmatch.fnmatchcase(node.meta.get("path") or node.name, pattern):
            matched.add(pattern)
            return algorithm
    return "auto"


def _check_pins(graph: Graph, pins: Pins, matched: set[str]) -> None:
    missed = [pattern for pattern in pins if pattern not in matched and pattern != "*"]
    if missed:
        layers = [
            n.meta.get("path")
            for n in graph.nodes
            if (s := spec_of(n) if n.op == "call_function" else None) and s.row.anchor
        ]
        raise DistfxError(
            f"strategy names {missed[0]!r}, which matches no convolution or linear layer. Those of this model are: "
            + ", ".join(str(layer) for layer in layers[:12])
            + (", ..." if len(layers) > 12 else "")
        )


def _decide_node(
    node: Node,
    plan: Decisions,
    sizes: Mapping[str, int],
    hints: Mapping[sympy.Symbol, int],
    pin: str,
    stored: Mapping[str, Layout],
) -> Decision:
    spec = spec_of(node)
    layouts = plan.layouts
    if spec is None:
        return _whole(node, layouts)
    if spec.row.anchor:
        plan.usable |= {axis for axis in sizes if axis in spec.extents}
        candidates = list(_anchored(spec, layouts, sizes, pin, hints))
    else:
        candidates = [
            ("", *follow_layout(spec, i, layouts[operand], sizes))
            for i, (operand, _) in enumerate(spec.operands)
            if operand.op != "get_attr"
        ]
        candidates = candidates or [("", spec, {})]
        candidates += [("", s, lean) for _, s, axes in candidates if (lean := _without_windows(s, axes)) != axes]
    best: tuple[float, Decision] | None = None
    for name, spec, axes in candidates:
        projected = project(spec, axes, sizes)
        if projected is None:
            continue
        plan.usable |= {axis for group in axes.values() for axis in group}
        needs, raw = projected
        decision = Decision(_named(name, axes) if spec.row.anchor else "", axes, needs, raw, _settle(spec, raw), spec)
        cost = _cost(decision, plan, sizes, hints, stored)
        if best is None or cost < best[0]:
            best = (cost, decision)
    return best[1] if best else _whole(node, layouts)


def _without_windows(spec: Spec, axes: Assignment) -> Assignment:
    """The assignment that leaves a channel dim whole which several operands share out (a concatenation)."""
    shared = {factor for operand, factor in spec.windows if operand}
    return {f: group for f, group in axes.items() if f not in shared}


def _named(name: str, axes: Assignment) -> str:
    """What a reader calls the strategy."""
    if name:
        return name
    used = {axis for group in axes.values() for axis in group}
    return "spatial" if used & {"d", "h", "w"} else "samples" if used else "replicated"


def _settle(spec: Spec, raw: Layout) -> Layout:
    """The result's layout once its partial sums are added up: scattered over the row's factor, or replicated."""
    layout = raw
    for axis in sorted(raw.partial):
        dim = next((i for i, word in enumerate(spec.result) if spec.row.scatter in word.factors), None)
        if dim is not None and is_channel_axis(axis):
            layout = ReduceScatter((axis,), dim).result(layout)
    return replace(layout, partial=frozenset())


def _whole(node: Node, layouts: Mapping[Node, Layout]) -> Decision:
    """Gather the operands and run the operator on every rank."""
    if draws(node):
        raise DistfxError(
            f"{describe(node)}: {node.target} draws random numbers, and has no rule yet by which ranks would draw the "
            "same ones where they must. Draw outside of the model and give the numbers as an input."
        )
    needs = tuple((operand, Layout.replicated(len(layouts[operand].dims))) for operand in node.all_input_nodes)
    shape = node.meta.get("shape", ())
    rank = 0 if node.meta.get("many") else len(shape)
    result = Layout.replicated(rank)
    splits = any(layouts[operand].split_axes for operand, _ in needs)
    return Decision("whole" if splits else "", {}, needs, result, result, None, whole=splits)


def _cost(
    decision: Decision,
    plan: Decisions,
    sizes: Mapping[str, int],
    hints: Mapping[sympy.Symbol, int],
    stored: Mapping[str, Layout],
) -> float:
    """About the bytes a rank sends for it, forward and backward, and its arithmetic in their measure."""
    spec = decision.spec
    assert spec is not None
    sent, moves = 0.0, 0
    for number, (operand, need) in enumerate(decision.needs):
        shape = evaluate_shape(operand.meta["shape"], hints)
        if operand.op == "get_attr" or operand in plan.computed:
            kept = stored.get(str(operand.target)) or storage_layout(need, list(sizes))
            over = math.prod(sizes[axis] for axis in need.varying | (need.split_axes - kept.split_axes))
            local = math.prod(shape) / math.prod(sizes[axis] for axis in kept.split_axes)
            sent += 2 * (over - 1) / over * local
            continue
        chain = route(plan.layouts[operand], need, shape, decision.border(number))
        sent += estimate(chain, plan.layouts[operand], shape, sizes, backward=operand in plan.trained)
        moves += len(chain)
    shape = evaluate_shape(spec.node.meta["shape"], hints)
    if decision.raw.partial:
        after = route(decision.raw, decision.result, shape)
        sent += estimate(after, decision.raw, shape, sizes)
        moves += len(after)
    if not spec.row.anchor:  # what is whole here will be split again, whose adjoint is a gather
        held = {axis for operand, _ in decision.needs for axis in plan.layouts[operand].split_axes}
        lost = math.prod(sizes[axis] for axis in held - {axis for group in decision.axes.values() for axis in group})
        sent += math.prod(shape) * (1 - 1 / lost)
    work = float(math.prod(max(1, evaluate(size, hints)) for size in spec.extents.values()))
    if spec.row.anchor:
        work *= math.prod(spec.operands[1][0].meta["shape"][2:])  # the kernel
    for factor, group in decision.axes.items():
        ranks = math.prod(sizes[axis] for axis in group)
        extent = max(1, evaluate(spec.extents[factor], hints))
        work *= -(-extent // ranks) / extent
    return 4 * sent + 6 * work / FLOPS_PER_BYTE + LATENCY_BYTES * moves
