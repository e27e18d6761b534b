"""bind: for one input shape and one place in the grid, symbolic sizes become numbers.

in: a localised graph.   out: a :class:`Bound`: the same graph with literal numbers, on whose nodes ``meta`` has the
concrete ``shape`` (global), ``local`` shape and, for moves, ``bound`` (the halves); and the rows of the plan with the
bytes that this rank will send.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from distfx.errors import DistfxError, SizeError
from distfx.ir.layout import Coords, Layout, Split, Window
from distfx.ir.moves import Exchange, Move, Slice
from distfx.ir.nodes import describe
from distfx.ir.ops import LocalPart, LocalSize
from distfx.ir.symbolic import evaluate, evaluate_number, evaluate_shape, show
from distfx.passes.capture.export import InputSpec
from distfx.passes.verify import verify
from distfx.rules.row import Sized

if TYPE_CHECKING:
    from distfx.grid import Grid

__all__ = ["Bound", "bind", "check_batch", "match_inputs", "numbered_layout"]

Values = dict[sympy.Symbol, int]


@dataclass
class Bound:
    """A graph bound to one shape on one rank."""

    module: GraphModule
    values: Values


def match_inputs(
    specs: Sequence[InputSpec],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    any_rank: bool = False,
) -> Values:
    """The values of the symbols for inputs of these shapes; an error that says what does not fit.

    A ``SizeError`` where another capture may fit; with ``any_rank`` that includes inputs of another rank.
    """
    values: Values = {}
    if len(specs) != len(shapes):
        raise SizeError(f"the model takes {len(specs)} tensors, but was called with {len(shapes)}")
    for spec, shape, dtype in zip(specs, shapes, dtypes, strict=True):
        expected = f"({', '.join(map(show, spec.shape))})"
        if len(shape) != len(spec.shape):
            raise (SizeError if any_rank else DistfxError)(
                f"input {spec.name} has {len(shape)} dims {shape}, but the model was captured with {len(spec.shape)}: "
                f"{expected}. Give example_inputs with the rank you mean to use."
            )
        if dtype != spec.dtype:
            raise DistfxError(
                f"input {spec.name} is {dtype}, but the model was captured with {spec.dtype}: convert the input "
                f"(x.to({spec.dtype})), or convert the model before parallelize."
            )
        for dim, (size, have) in enumerate(zip(spec.shape, shape, strict=True)):
            if isinstance(size, sympy.Symbol):
                known = values.setdefault(size, have)
                if known != have:
                    raise SizeError(
                        f"input {spec.name} has {size} = {have} in dim {dim}, but another input has {known}"
                    )
            elif isinstance(size, int) and size != have:
                what = "channels" if dim == 1 else f"size in dim {dim}"
                raise SizeError(f"input {spec.name} has {have} {what}, but the model takes {size}: {expected}")
    for spec, shape in zip(specs, shapes, strict=True):
        if (whole := evaluate_shape(spec.shape, values)) != shape:
            raise DistfxError(f"input {spec.name} has shape {shape}, where the model as captured needs {whole}")
    return values


def bind(module: GraphModule, values: Values, grid: Grid, local: Collection[str] = ()) -> Bound:
    """Bind ``module`` at the grid's rank. The inputs named in ``local`` come as this rank's part already."""
    coords = grid.placement()
    for node in module.graph.nodes:  # first of all: whether a move can be bound may depend on the rank
        if node.op != "output" and "layout" in node.meta and not node.meta.get("many"):
            _check(node, _whole_shape(node, values), values, coords)
    graph = Graph()
    copies: dict[Node, Node] = {}
    parts: set[Node] = set()

    def number(value: Any) -> Any:
        if isinstance(value, LocalSize):
            return int(_numbered_size(value, values).at(coords))
        if isinstance(value, LocalPart):
            return int(value.at(coords))
        return evaluate_number(value, values) if isinstance(value, sympy.Basic) else value

    for node in module.graph.nodes:
        new = graph.node_copy(node, lambda operand: copies[operand])
        new.args, new.kwargs = map_aggregate(new.args, number), map_aggregate(new.kwargs, number)
        copies[node] = new
        if node.op == "output" or "layout" not in node.meta:
            continue
        if node.op == "placeholder" and node.name in local:
            parts.add(new)
        if node.meta.get("many"):
            continue
        shape = new.meta["shape"] = _whole_shape(node, values)
        move = node.meta.get("move")
        if isinstance(move, Move):
            source = new.args[0]
            assert isinstance(source, Node)
            operand = node.args[0]
            if source in parts and isinstance(move, Slice) and len(operand.users) == 1:  # that part has come in as such
                copies[node] = source
                source.meta |= {"layout": node.meta["layout"], "local": _local(node.meta["layout"], shape, grid)}
                graph.erase_node(new)
                continue
            if isinstance(move, Exchange):
                move = replace(move, extent=evaluate(move.extent, values), target=_numbered(move.target, values))
            if isinstance(move, Slice):
                move = replace(move, unit=evaluate(move.unit, values))
            layout = node.meta.get("part", source.meta["layout"])
            part = _local(layout, shape, grid) if "part" in node.meta else source.meta["local"]
            bound = move.bind(numbered_layout(layout, values), shape, part, grid)
            new.meta |= {"bound": bound, "local": bound.forward.after, "move": move}
            if not any(split.window for split in node.meta["layout"].dims):  # else its reader says what is to come
                new.meta["own"] = _local(node.meta["layout"], shape, grid, values)
        else:
            new.meta["local"] = _local(node.meta["layout"], shape, grid, values)
    bound_module = GraphModule(module, graph)
    verify(bound_module, "bind")
    return Bound(bound_module, values)


def _whole_shape(node: Node, values: Values) -> tuple[int, ...]:
    return evaluate_shape(node.meta["shape"], values) if node.meta.get("shape") is not None else ()


def _local(layout: Layout, shape: Sequence[int], grid: Grid, values: Values | None = None) -> tuple[int, ...]:
    layout = numbered_layout(layout, values or {})
    return tuple(int(size) for size in layout.local_shape(shape, grid.placement()))


def _numbered(split: Split, values: Values) -> Split:
    """A split whose granule and window are numbers."""
    window = split.window
    if window is not None:
        window = Window(*(evaluate(size, values) for size in (window.lo, window.hi, window.mul, window.div)))
    return replace(split, unit=evaluate(split.unit, values), window=window)


def _numbered_size(size: LocalSize, values: Values) -> LocalSize:
    return replace(size, extent=evaluate(size.extent, values), split=_numbered(size.split, values))


def numbered_layout(layout: Layout, values: Values) -> Layout:
    """A layout whose granules and windows are numbers."""
    return replace(layout, dims=tuple(_numbered(split, values) for split in layout.dims))


# -------------------------------------------------------------------------------------------------- checking


def check_batch(specs: Sequence[InputSpec], shapes: Sequence[tuple[int, ...]], samples: int) -> None:
    """Raise for a batch that is smaller than the axis over which ``samples`` ranks split it."""
    batch = max((spec.shape for spec in specs), key=len, default=())[:1]  # a short vector may be anything
    for spec, shape in zip(specs, shapes, strict=True):
        if samples > 1 and spec.shape[:1] == batch and shape and shape[0] < samples and not isinstance(batch[0], int):
            raise DistfxError(
                f"input {spec.name} has a batch of {shape[0]}, smaller than the grid's axis n={samples}: give a larger "
                "batch, or split space or channels instead of samples."
            )


def _check(node: Node, shape: tuple[int, ...], values: Values, coords: Coords) -> None:
    """Shapes that make no sense, and what the row of the operator has to say of them: the same error on all ranks."""
    decision = node.meta.get("decision")
    empty = math.prod(shape) == 0 and node.op == "call_function" and decision is not None
    if empty or any(size < 0 for size in shape):
        raise DistfxError(f"{_sizes(values)}: the result of {describe(node)} would have shape {shape}")
    if decision is None or decision.spec is None or decision.spec.row.check is None:
        return
    sized = Sized(decision.spec, node, shape, lambda s: evaluate(s, values), lambda s: _smallest(s, values, coords))
    if wrong := decision.spec.row.check(sized):
        raise DistfxError(f"{_sizes(values)}: {describe(node)} {wrong}")


def _smallest(size: Any, values: Values, coords: Coords) -> int:
    """The least that a size is on any rank."""
    if not isinstance(size, LocalSize):
        return int(evaluate(size, values))
    numbered = _numbered_size(size, values)
    ranks = {axis: coords[axis][1] for axis in size.split.axes}
    places = itertools.product(*map(range, ranks.values()))
    return min(int(numbered.at({a: (i, ranks[a]) for a, i in zip(ranks, at, strict=True)})) for at in places)


def _sizes(values: Values) -> str:
    return "with " + ", ".join(f"{symbol} = {value}" for symbol, value in values.items()) if values else "here"
