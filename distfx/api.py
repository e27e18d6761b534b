"""The calls a user makes first."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from distfx.engine.engine import Engine
from distfx.errors import DistfxError
from distfx.grid import Grid, GridLike
from distfx.module import ParallelModule
from distfx.passes.capture.export import capture, check_model
from distfx.passes.inputs import check_batch, match_inputs
from distfx.passes.pipeline import Options, compile_graph, plan_at
from distfx.planner.decisions import ALGORITHMS, Pins
from distfx.report.plan import Plan
from distfx.runtime.comm.agreement import raise_on_all_ranks

__all__ = ["explain", "parallelize", "plan"]

Strategy = str | Mapping[str, str]


def parallelize(
    model: nn.Module,
    grid: GridLike,
    example_inputs: Sequence[Any] | torch.Tensor | None = None,
    strategy: Strategy = "auto",
    outputs: str = "global",
    strict: bool = False,
    check: bool = False,
    batch_norm: str | Collection[str] = "global",
) -> ParallelModule:
    """Distribute an unmodified model over a grid. The result is called like the model and gives the same numbers.

    Args:
        model: the model; it is left as it was. Rank 0's parameters are taken.
        grid: a :class:`Grid`, a text like ``"n2c2h2"``, a dict or a ``DeviceMesh``.
        example_inputs: the arguments of a call; needed only where the input cannot be told from the first layer. Only
            ranks and fixed sizes (channels) matter: batch and space stay symbolic.
        strategy: ``"auto"``; ``"stationary-x"``, ``"-y"``, ``"-w"`` for every convolution and linear layer; or a dict
            from module paths (globs) to these.
        outputs: ``"global"``: whole, the same on all ranks; ``"local"``: this rank's part (``net.output_slices``).
        strict: raise instead of warn where an operator has no rule and would run whole on every rank.
        check: look at every value of each forward pass (inputs, parameters, buffers, results of operators and moves)
            and raise :class:`NonFiniteError` on all ranks, naming the first node with nan or inf on any of them. To
            find a fault: it is slow. Operators that are told to write infinities (masks) may; backward is not looked
            at, a parameter that it has spoilt is found by the next forward pass. Inputs are compared across the ranks.
        batch_norm: the statistics of batch norms in training: ``"global"``, of the whole batch, as on one device;
            ``"local"``, of each rank's part; or of the parts along some axes together, such as ``"hw"``. Other than
            globally, the numbers depend on the grid; running statistics are the average over the parts.
    """
    place = Grid.of(grid)
    if place.is_abstract:
        raise DistfxError(f"{place} is abstract, without processes: plan with distfx.plan(model, grid, shape)")

    def options() -> tuple[Pins, tuple[Any, ...] | None, frozenset[str] | None]:
        if not isinstance(model, nn.Module):
            raise DistfxError(f"parallelize takes a torch.nn.Module, not {type(model).__name__}")
        if isinstance(model, ParallelModule):
            raise DistfxError("the model is parallel already: give parallelize the original one")
        check_model(model, needs_values=True)
        if outputs not in ("global", "local"):
            raise DistfxError(
                f"outputs={outputs!r}: it is 'global' (whole on every rank) or 'local' (this rank's part)"
            )
        example = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
        return _pins(strategy), None if example is None else tuple(example), _statistics(batch_norm)

    pins, example, statistics = raise_on_all_ranks(place.size, options)
    place = _factored(place, pins)
    settings = Options(place.axes, pins, outputs, statistics)
    return ParallelModule(Engine(model, place, example, settings, strict, check))


def plan(
    model: nn.Module,
    grid: GridLike,
    shape: Sequence[Any],
    strategy: Strategy = "auto",
    outputs: str = "global",
    rank: int = 0,
    batch_norm: str | Collection[str] = "global",
) -> Plan:
    """The plan of ``model`` for an input of global ``shape``, as ``rank`` sees it. Needs no processes and no memory.

    ``model`` may lie on the ``meta`` device; ``grid`` may be abstract, or a text such as ``"n2c2h2"``. For a model with
    several inputs, ``shape`` has for each its shape, or a tensor of its shape and dtype (class labels, on ``meta``).
    """
    check_model(model)
    pins = _pins(strategy)
    place = _factored(Grid.of_abstract(grid), pins)
    if not 0 <= rank < place.size:
        raise DistfxError(f"rank={rank}: {place} has ranks 0 to {place.size - 1}")
    place = place.at(rank)
    first = next(model.parameters(), None)
    device = torch.device("meta") if first is None else first.device
    if not isinstance(shape, Sequence):
        raise DistfxError(f"shape={shape!r}: it is that of the whole input, such as (8, 3, 224, 224)")
    given = [shape] if all(isinstance(size, int) for size in shape) else shape
    examples = tuple(
        torch.empty_like(each, device=device)
        if isinstance(each, torch.Tensor)
        else torch.empty(tuple(each), dtype=getattr(first, "dtype", None), device=device)
        for each in given
    )
    captured = capture(model, examples, training=model.training, batch=max(2, 2 * place.axes.get("n", 1)))
    compiled = compile_graph(captured, Options(place.axes, pins, outputs, _statistics(batch_norm)))
    shapes = [tuple(e.shape) for e in examples]
    values = match_inputs(captured.inputs, shapes, [e.dtype for e in examples])
    check_batch(captured.inputs, shapes, place.axes.get("n", 1))
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    return plan_at(compiled, place, values, trained)


def explain(net: ParallelModule) -> str:
    """The plan as a table, the operators that fall back to replicated execution, and what each pass did."""
    plan_now = net.plan
    lines = [str(plan_now)]
    if fallbacks := [row for row in plan_now.rows if row.fallback]:
        lines.append(f"{len(fallbacks)} operators fall back to replicated execution because no rule applies:")
        lines += [f"  {row.node} {f'[{row.path}]' if row.path else ''} {row.source}" for row in fallbacks]
    lines.append("passes: " + "; ".join(str(record) for record in net.passes))
    return "\n".join(lines)


def _pins(strategy: Strategy) -> Pins:
    pins = {"*": strategy} if isinstance(strategy, str) else dict(strategy)
    for pattern, algorithm in pins.items():
        if algorithm not in ALGORITHMS:
            raise DistfxError(
                f"unknown strategy {algorithm!r}{f' for {pattern!r}' if pattern != '*' else ''}: "
                f"it is one of {', '.join(ALGORITHMS)}"
            )
    return {pattern: algorithm for pattern, algorithm in pins.items() if (pattern, algorithm) != ("*", "auto")}


def _statistics(batch_norm: str | Collection[str]) -> frozenset[str] | None:
    """The axes over which batch norms are computed; ``None`` for all."""
    if batch_norm == "global":
        return None
    axes = frozenset("" if batch_norm == "local" else batch_norm)
    if axes - set("ndhw"):
        raise DistfxError(
            f"batch_norm={batch_norm!r}: it is 'global' (as on one device), 'local' (each rank its part), or those of "
            "the axes n, d, h, w along which parts are taken together"
        )
    return axes


def _factored(grid: Grid, pins: Pins) -> Grid:
    """The grid with its channel axis in two factors, near each other, where stationary-w can use them."""
    size = grid.axes.get("c", 1)
    wanted = not pins or any(algorithm in ("stationary-w", "auto") for algorithm in pins.values())
    first = max((f for f in range(1, math.isqrt(size) + 1) if size % f == 0), default=1)
    return grid.factor(first) if wanted and first > 1 else grid
