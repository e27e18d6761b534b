"""Errors and warnings for users. Each message states the problem, its place, and the remedy."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

__all__ = [
    "CaptureError",
    "CommunicationError",
    "DistfxError",
    "FallbackWarning",
    "NonFiniteError",
    "RankMismatchError",
    "SizeError",
    "log_to_stderr",
    "warn",
]


def log_to_stderr(text: str) -> None:
    """Write one line to stderr, in a single call, so that the lines of several ranks do not mix."""
    sys.stderr.write(f"distfx: {text}\n")
    sys.stderr.flush()


def warn(text: str, kind: type[Warning] = UserWarning) -> None:
    """Issue a warning that refers to the line of the user's program that called distfx."""
    inside = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, kind, stacklevel=depth)


class DistfxError(ValueError):
    """An argument is invalid. All ranks raise the same error, before any communication."""


class CaptureError(DistfxError):
    """The model cannot be captured as a graph."""


class SizeError(DistfxError):
    """An input has a size for which the captured graph is not valid."""


class RankMismatchError(DistfxError):
    """The ranks passed different arguments, such as models, grids or input shapes."""


class CommunicationError(RuntimeError):
    """A message did not arrive because another rank failed, hangs or has ended. Names the layer and the ranks."""


class NonFiniteError(ArithmeticError):
    """A layer produced nan or inf under ``parallelize(..., check=True)``. All ranks raise it."""


class FallbackWarning(UserWarning):
    """Some operators fall back to replicated execution because no rule applies: every rank gathers their inputs and
    executes all of their work."""
