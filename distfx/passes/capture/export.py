"""capture: an unmodified ``nn.Module`` becomes an FX graph of ATen calls with symbolic sizes.

in:  a module, example inputs.   out: a :class:`Capture`, whose graph is functional, calls one convolution operator for
every kind of convolution, has no size computations (sizes stand as expressions where they are used), and on whose nodes
``meta`` has ``shape`` (global, in the input's symbols), ``dtype``, ``path`` (module) and ``source`` (line).
"""

from __future__ import annotations

import inspect
import logging
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, register_dataclass

from distfx.errors import CaptureError
from distfx.ir.ops import on_device
from distfx.ir.torch_private import NOISY_LOGGERS, inline_checkpoints, silence_export, tree_leaves, tree_map
from distfx.passes.capture.attributes import preserve_attributes
from distfx.passes.capture.autograd_functions import intercept_functions
from distfx.passes.capture.examples import constants_of, enlarge_batch, infer_inputs
from distfx.passes.capture.modes import Mode, without_modes
from distfx.passes.capture.mutation import replace_out_arguments
from distfx.passes.capture.normalize import is_impure, normalize
from distfx.passes.capture.regions import inline_regions
from distfx.passes.capture.result import Capture, InputSpec
from distfx.passes.capture.supported import check_model, check_sizes, check_supported
from distfx.passes.capture.tracing import TraceMode
from distfx.passes.capture.views import functionalize_view_writes

__all__ = [
    "Capture",
    "InputSpec",
    "Mode",
    "capture",
    "check_model",
    "check_supported",
    "constants_of",
    "infer_inputs",
    "is_impure",
    "without_modes",
]


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool | Mode,
    batch: int = 2,
    guess: bool = False,
) -> Capture:
    """Capture ``model`` in train or eval mode. The model is left as it was.

    Args:
        model: the model.
        args: example arguments.
        kwargs: example keyword arguments.
        training: train or eval mode, or the mode of each module.
        batch: the number of samples to trace if the example has one; 0 keeps sizes of one as constants.
        guess: the inputs were inferred. A model that accepts only these sizes is then an error, not a graph for them.
    """
    mode = training if isinstance(training, Mode) else Mode.of(model, training)
    check_supported(model, mode)
    examples, keywords = enlarge_batch(args, kwargs, batch)
    trace_mode = TraceMode()
    with (
        mode.on(model), _silence(), without_modes(), inline_checkpoints() as checkpoints,
        preserve_attributes(model) as modified, model.register_forward_hook(_register_dataclasses),
        intercept_functions(trace_mode), trace_mode,
    ):  # fmt: skip
        program = _export(model, examples, keywords, guess)
    module: Any = program.module(check_guards=False)
    inline_regions(module)
    replace_out_arguments(module.graph)
    functionalize_view_writes(module.graph)
    result = normalize(module, program, mode.training)
    for node in result.module.graph.nodes:  # each rank has its own GPU number
        node.args, node.kwargs = on_device((node.args, node.kwargs))
    result.constants = constants_of(examples, keywords)
    result.checkpointed, result.modified_attributes = bool(checkpoints), tuple(modified)
    check_sizes(result)
    result.module.graph.lint()
    return result


def _export(model: nn.Module, examples: tuple[Any, ...], keywords: dict[str, Any], guess: bool) -> ExportedProgram:
    """Export with every size symbolic; if that fails, with symbolic batches only; then for these sizes only."""
    first: Exception | None = None
    for symbolic_dims in (None,) if guess else (None, 1, 0):
        # Export marks its example tensors, so each attempt needs new ones.
        args, kwargs = tree_map(
            lambda v: torch.empty_like(v) if isinstance(v, torch.Tensor) else v, (examples, keywords)
        )
        try:
            shapes = _dynamic_shapes(model, args, kwargs, symbolic_dims)
            return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            first = first or error
    assert first is not None
    is_debugging = os.environ.get("DISTFX_DEBUG", "0") not in ("", "0")
    raise CaptureError(_explain(model, (examples, keywords), first, guess)) from (first if is_debugging else None)


def _dynamic_shapes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], symbolic_dims: int | None
) -> dict[str, Any]:
    """For each argument which dims are symbolic: the first ``symbolic_dims`` of each tensor, or all if ``None``."""

    def dims(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        is_symbolic = (symbolic_dims is None or i < symbolic_dims for i in range(value.dim()))
        return tuple(Dim.AUTO if symbolic else Dim.STATIC for symbolic in is_symbolic)

    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    shapes = {name: tree_map(dims, value) for name, value in bound.arguments.items()}
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            shapes |= shapes.pop(parameter.name, {})
    return shapes


def _register_dataclasses(model: nn.Module, args: Any, output: Any) -> None:
    """A forward hook that registers dataclasses in the model's output, so that export sees their fields."""
    for leaf in tree_leaves(output):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            register_dataclass(type(leaf))
            _register_dataclasses(model, args, leaf)


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress torch's logs, warnings and printed graphs: a failed capture is reported by its exception alone."""
    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), silence_export():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_PACKAGE = str(Path(__file__).parents[2])


def _explain(model: nn.Module, arguments: Any, error: Exception, guess: bool) -> str:
    """The message for a failed export: the inputs, the first line of torch's message, and the line of the model."""
    args, kwargs = tree_map(lambda v: tuple(v.shape) if isinstance(v, torch.Tensor) else v, arguments)
    inputs = ", ".join((*(repr(value)[:80] for value in args), *(f"{k}={repr(v)[:80]}" for k, v in kwargs.items())))
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename.replace("\\", "/") and not frame.filename.startswith(_PACKAGE)
    ]
    where = next((f" ({f.filename}:{f.lineno}: {f.line})" for f in reversed(frames) if f.line), "")
    condition = "If the model needs another input, give example_inputs=(x,) to parallelize; if" if guess else "If"
    return (
        f"{type(model).__name__} could not be captured with inputs {inputs}: {first_line}{where}\n"
        f"{condition} it branches on the values of tensors, torch.export cannot follow it. DISTFX_DEBUG=1 shows "
        "torch's full error."
    )
