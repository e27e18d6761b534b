"""Match the inputs of a call with those of a captured graph."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from distfx.errors import DistfxError, SizeError
from distfx.ir.symbolic import evaluate_shape, show
from distfx.passes.capture.export import InputSpec

__all__ = ["Values", "check_batch", "match_inputs"]

Values = dict[sympy.Symbol, int]
"""The sizes that the symbols of a graph stand for in one call."""


def match_inputs(
    specs: Sequence[InputSpec],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    any_ndim: bool = False,
) -> Values:
    """The values of a graph's symbols for inputs of these shapes.

    Raises ``SizeError`` if another graph may be valid for these inputs, else ``DistfxError``. With ``any_ndim``, inputs
    with another number of dims raise ``SizeError``.
    """
    values: Values = {}
    if len(specs) != len(shapes):
        raise SizeError(f"the model takes {len(specs)} tensors, but was called with {len(shapes)}")
    for spec, shape, dtype in zip(specs, shapes, dtypes, strict=True):
        expected = f"({', '.join(map(show, spec.shape))})"
        if len(shape) != len(spec.shape):
            raise (SizeError if any_ndim else DistfxError)(
                f"input {spec.name} has {len(shape)} dims {shape}, but the model was captured with {len(spec.shape)}: "
                f"{expected}. Pass example_inputs with the number of dims you mean to use."
            )
        if dtype != spec.dtype:
            raise DistfxError(
                f"input {spec.name} is {dtype}, but the model was captured with {spec.dtype}: convert the input "
                f"(x.to({spec.dtype})), or convert the model before parallelize."
            )
        for dim, (size, actual) in enumerate(zip(spec.shape, shape, strict=True)):
            if isinstance(size, sympy.Symbol):
                known = values.setdefault(size, actual)
                if known != actual:
                    raise SizeError(
                        f"input {spec.name} has {size} = {actual} in dim {dim}, but another input has {known}"
                    )
            elif isinstance(size, int) and size != actual:
                what = "channels" if dim == 1 else f"size in dim {dim}"
                raise SizeError(f"input {spec.name} has {actual} {what}, but the model takes {size}: {expected}")
    for spec, shape in zip(specs, shapes, strict=True):
        if (expected_shape := evaluate_shape(spec.shape, values)) != shape:
            raise DistfxError(f"input {spec.name} has shape {shape}, but the captured model needs {expected_shape}")
    return values


def check_batch(specs: Sequence[InputSpec], shapes: Sequence[tuple[int, ...]], samples: int) -> None:
    """Raise if a batch has fewer samples than the axis ``n`` has ranks (``samples``)."""
    batch = max((spec.shape for spec in specs), key=len, default=())[:1]  # the input of the highest rank has the batch
    for spec, shape in zip(specs, shapes, strict=True):
        if samples > 1 and spec.shape[:1] == batch and shape and shape[0] < samples and not isinstance(batch[0], int):
            raise DistfxError(
                f"input {spec.name} has a batch of {shape[0]}, smaller than the grid's axis n={samples}: give a larger "
                "batch, or split space or channels instead of samples."
            )
