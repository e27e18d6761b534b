"""The errors a user can meet. Each says what was wrong, where, and what to do."""

from __future__ import annotations

__all__ = ["CaptureError", "DistfxError", "FallbackWarning", "RankMismatchError"]


class DistfxError(ValueError):
    """Something given to distfx cannot work; raised on every rank alike, before any communication."""


class CaptureError(DistfxError):
    """The model could not be turned into a graph."""


class RankMismatchError(DistfxError):
    """The ranks were given different things (models, grids, input shapes)."""


class FallbackWarning(UserWarning):
    """Some operators have no rule, or none that applies: their inputs are gathered and every rank runs them whole."""
