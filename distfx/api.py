"""What a user calls first: ``parallelize``, ``plan``, ``explain``."""

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
    """Distribute an unmodified model over a grid. The result is called like the model and returns the same numbers.

    Args:
        model: the model. It is not modified. All ranks use rank 0's parameters.
        grid: a :class:`Grid`, a string such as ``"n2c2h2"``, a dict or a ``DeviceMesh``.
        example_inputs: the arguments of a call. They are needed only if the input cannot be inferred from the first
            layer. Only the number of dims and fixed sizes (channels) matter: batch and space stay symbolic.
        strategy: ``"auto"``; ``"stationary-x"``, ``"-y"``, ``"-w"`` or ``"replicated"`` for every convolution and
            linear layer; or a dict from module paths (globs) to these.
        outputs: ``"global"`` returns whole tensors, the same on all ranks; ``"local"`` returns this rank's part
            (see ``net.output_slices``).
        strict: raise, instead of warn, if an operator has no rule and falls back to replicated execution.
        check: check every value of each forward pass (inputs, parameters, buffers, results of operators and moves).
            Raises :class:`NonFiniteError` on all ranks, which names the first node with nan or inf on any rank. Inputs
            are compared across ranks. This is slow and meant for debugging. Infinities that an operator is told to
            write, as by a mask, are allowed. Backward is not checked: a parameter that it has made nan is found in the
            next forward pass.
        batch_norm: the statistics of batch norms in training: ``"global"``, of the whole batch, as on one device;
            ``"local"``, of each rank's part; or axes such as ``"hw"``, over whose ranks statistics are combined. With
            other than global statistics the results depend on the grid, and running statistics are averaged over the
            parts.
    """
    process_grid = Grid.of(grid)
    if process_grid.is_abstract:
        raise DistfxError(f"{process_grid} is abstract, without processes: plan with distfx.plan(model, grid, shape)")

    def check_arguments() -> tuple[Pins, tuple[Any, ...] | None, frozenset[str] | None]:
        if not isinstance(model, nn.Module):
            raise DistfxError(f"parallelize takes a torch.nn.Module, not {type(model).__name__}")
        if isinstance(model, ParallelModule):
            raise DistfxError("the model is parallel already: give parallelize the original model")
        check_model(model, needs_values=True)
        if outputs not in ("global", "local"):
            raise DistfxError(
                f"outputs={outputs!r}: give 'global' (whole tensors on every rank) or 'local' (this rank's part)"
            )
        example = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
        return _pins(strategy), None if example is None else tuple(example), _statistics_axes(batch_norm)

    pins, example, statistics_axes = raise_on_all_ranks(process_grid.size, check_arguments)
    process_grid = _factor_channel_axis(process_grid, pins)
    options = Options(process_grid.axes, pins, outputs, statistics_axes)
    return ParallelModule(Engine(model, process_grid, example, options, strict, check))


def plan(
    model: nn.Module,
    grid: GridLike,
    shape: Sequence[Any],
    strategy: Strategy = "auto",
    outputs: str = "global",
    rank: int = 0,
    batch_norm: str | Collection[str] = "global",
) -> Plan:
    """The plan of ``model`` for an input of global ``shape``, as seen by ``rank``. Needs no processes or memory.

    The model may be on the ``meta`` device. The grid may be abstract, or a string such as ``"n2c2h2"``. For a model
    with several inputs, ``shape`` is a sequence: for each input its shape, or a tensor with its shape and dtype (class
    labels on ``meta``).
    """
    check_model(model)
    pins = _pins(strategy)
    abstract_grid = _factor_channel_axis(Grid.of_abstract(grid), pins)
    if not 0 <= rank < abstract_grid.size:
        raise DistfxError(f"rank={rank}: {abstract_grid} has ranks 0 to {abstract_grid.size - 1}")
    abstract_grid = abstract_grid.at(rank)
    if not isinstance(shape, Sequence):
        raise DistfxError(f"shape={shape!r}: give the shape of the whole input, such as (8, 3, 224, 224)")
    examples = _examples(model, [shape] if all(isinstance(size, int) for size in shape) else shape)
    captured = capture(model, examples, training=model.training, batch=max(2, 2 * abstract_grid.axes.get("n", 1)))
    compiled = compile_graph(captured, Options(abstract_grid.axes, pins, outputs, _statistics_axes(batch_norm)))
    shapes = [tuple(e.shape) for e in examples]
    values = match_inputs(captured.inputs, shapes, [e.dtype for e in examples])
    check_batch(captured.inputs, shapes, abstract_grid.axes.get("n", 1))
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    return plan_at(compiled, abstract_grid, values, trained)


def explain(net: ParallelModule) -> str:
    """The plan as a table, the operators that fall back to replicated execution, and what each pass did."""
    plan_now = net.plan
    lines = [str(plan_now)]
    if fallbacks := [row for row in plan_now.rows if row.fallback]:
        lines.append(f"{len(fallbacks)} operators fall back to replicated execution because no rule applies:")
        lines += [f"  {row.node} {f'[{row.path}]' if row.path else ''} {row.source}" for row in fallbacks]
    lines.append("passes: " + "; ".join(str(record) for record in net.passes))
    return "\n".join(lines)


def _examples(model: nn.Module, shapes: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Uninitialized inputs on the model's device: of a shape in the model's dtype, of a tensor in its own."""
    parameter = next(model.parameters(), None)
    device = torch.device("meta") if parameter is None else parameter.device
    return tuple(
        torch.empty_like(each, device=device)
        if isinstance(each, torch.Tensor)
        else torch.empty(tuple(each), dtype=getattr(parameter, "dtype", None), device=device)
        for each in shapes
    )


def _pins(strategy: Strategy) -> Pins:
    """The pinned strategies by module path, checked."""
    pins = {"*": strategy} if isinstance(strategy, str) else dict(strategy)
    for pattern, algorithm in pins.items():
        if algorithm not in ALGORITHMS:
            raise DistfxError(
                f"unknown strategy {algorithm!r}{f' for {pattern!r}' if pattern != '*' else ''}: "
                f"give one of {', '.join(ALGORITHMS)}"
            )
    return {pattern: algorithm for pattern, algorithm in pins.items() if (pattern, algorithm) != ("*", "auto")}


def _statistics_axes(batch_norm: str | Collection[str]) -> frozenset[str] | None:
    """The axes over which batch norms are computed; ``None`` for all."""
    if batch_norm == "global":
        return None
    axes = frozenset("" if batch_norm == "local" else batch_norm)
    if axes - set("ndhw"):
        raise DistfxError(
            f"batch_norm={batch_norm!r}: give 'global' (the whole batch, as on one device), 'local' (each rank's "
            "part), or the axes among n, d, h, w over whose ranks statistics are combined"
        )
    return axes


def _factor_channel_axis(grid: Grid, pins: Pins) -> Grid:
    """The grid with its channel axis split into two factors of similar size if stationary-w may be chosen."""
    size = grid.axes.get("c", 1)
    may_be_chosen = not pins or any(algorithm in ("stationary-w", "auto") for algorithm in pins.values())
    first = max((f for f in range(1, math.isqrt(size) + 1) if size % f == 0), default=1)
    return grid.factor(first) if may_be_chosen and first > 1 else grid
