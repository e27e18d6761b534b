"""Numerical comparison of functions on small samples: their results and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distfx.ir.torch_private import tree_leaves

__all__ = ["Derivative", "OperandModifiedError", "cotangents", "differentiate", "is_elementwise", "try_differentiate"]


class OperandModifiedError(Exception):
    """A function wrote into an operand."""


class Derivative(NamedTuple):
    """The results of a function, and the gradients of its floating-point operands."""

    results: list[Tensor]
    gradients: list[Tensor | None]

    def equals(self, other: Derivative | None) -> bool:
        """Whether results and gradients agree. A missing gradient counts as zero."""
        if other is None or [len(group) for group in self] != [len(group) for group in other]:
            return False
        for a, b in zip((*self.results, *self.gradients), (*other.results, *other.gradients), strict=True):
            if a is None or b is None:
                if any(bool(t.any()) for t in (a, b) if t is not None):
                    return False
            elif a.shape != b.shape or not torch.allclose(a.double(), b.double(), 1e-9, 1e-12, equal_nan=True):
                return False
        return True

    def narrow(self, dim: int, start: int, length: int) -> Derivative:
        """The slice of all results and gradients along ``dim``."""
        return Derivative(
            [t.narrow(dim, start, length) for t in self.results],
            [None if t is None else t.narrow(dim, start, length) for t in self.gradients],
        )


def cotangents(results: Sequence[Tensor]) -> list[Tensor]:
    """Fixed random gradients of the results, to start backward from."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(result.shape, generator=generator, dtype=torch.float64) for result in results]


def differentiate(
    function: Callable[..., Any],
    operands: Sequence[Any],
    gradients_of_results: Sequence[Tensor] | None = None,
    *,
    may_write: bool = False,
) -> Derivative:
    """Call a function and its backward on copies of the operands."""
    originals = [value.detach() if isinstance(value, Tensor) else value for value in operands]
    leaves = [t.requires_grad_() for t in originals if isinstance(t, Tensor) and t.is_floating_point()]
    copies = [t.clone() if isinstance(t, Tensor) else t for t in originals]
    with torch.random.fork_rng(devices=[]):  # repeatable, without drawing from the user's generator
        torch.manual_seed(0)
        results = [leaf for leaf in tree_leaves(function(*copies)) if isinstance(leaf, Tensor)]
    if not may_write and any(isinstance(t, Tensor) and not t.equal(c) for t, c in zip(originals, copies, strict=True)):
        raise OperandModifiedError
    starts = gradients_of_results or cotangents(results)
    roots = [(r, start.to(r.dtype)) for r, start in zip(results, starts, strict=True) if r.requires_grad]
    gradients: Sequence[Tensor | None] = [None] * len(leaves)
    if roots:
        gradients = torch.autograd.grad([r for r, _ in roots], leaves, [start for _, start in roots], allow_unused=True)
    return Derivative([result.detach() for result in results], list(gradients))


def try_differentiate(*args: Any, **kwargs: Any) -> Derivative | None:
    """As :func:`differentiate`; ``None`` if the function cannot be called or differentiated this way."""
    try:
        return differentiate(*args, **kwargs)
    except Exception:
        return None


def is_elementwise(function: Callable[..., Any], operands: Sequence[Any], derivative: Derivative) -> bool:
    """Whether, along every dim, each half of the operands yields that half of the results and gradients."""
    results, gradients = derivative
    shapes = {tuple(value.shape) if isinstance(value, Tensor) else None for value in (*operands, *results)}
    if len(shapes) != 1 or None in shapes or len(results) != 1:
        return False
    (shape,) = shapes
    for dim, extent in enumerate(shape or ()):
        half = extent // 2
        for start, length in ((0, half), (half, extent - half)):
            slices = [value.narrow(dim, start, length) for value in operands]
            starts = [gradient.narrow(dim, start, length) for gradient in cotangents(results)]
            if not derivative.narrow(dim, start, length).equals(try_differentiate(function, slices, starts)):
                return False
    return bool(gradients)
