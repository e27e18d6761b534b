"""The errors a user can meet. Each says what was wrong, where, and what to do."""

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
    """Tell the user something on stderr, in one write: lines of several ranks must not mix."""
    sys.stderr.write(f"distfx: {text}\n")
    sys.stderr.flush()


def warn(text: str, kind: type[Warning] = UserWarning) -> None:
    """A warning that names the line of the user's program from which distfx was called."""
    inside = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, kind, stacklevel=depth)


class DistfxError(ValueError):
    """Something given to distfx cannot work; raised on every rank alike, before any communication."""


class CaptureError(DistfxError):
    """The model could not be turned into a graph."""


class SizeError(DistfxError):
    """An input has a size for which the graph at hand does not hold."""


class RankMismatchError(DistfxError):
    """The ranks were given different things (models, grids, input shapes)."""


class CommunicationError(RuntimeError):
    """A message did not arrive: another rank has died, hangs, or failed. Says in which layer, and which ranks."""


class NonFiniteError(ArithmeticError):
    """With ``parallelize(..., check=True)``: a layer gave nan or inf; raised on every rank alike."""


class FallbackWarning(UserWarning):
    """Some operators have no rule, or none that applies: their inputs are gathered and every rank runs them whole."""
