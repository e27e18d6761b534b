"""The errors a user can meet. Each says what was wrong, where, and what to do."""

from __future__ import annotations

import sys

__all__ = [
    "CaptureError",
    "CommunicationError",
    "DistfxError",
    "FallbackWarning",
    "NonFiniteError",
    "RankMismatchError",
    "SizeError",
    "say",
]


def say(text: str) -> None:
    """Tell the user something on stderr, in one write: lines of several ranks must not mix."""
    sys.stderr.write(f"distfx: {text}\n")
    sys.stderr.flush()


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
