"""What each kind of reduction over a split dim sends. The kernels are in :mod:`distfx.runtime.kernels.reduce`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TRAFFIC", "Traffic"]


@dataclass(frozen=True)
class Traffic:
    """The allreduces of a reduction, forward and backward, each named by what it reduces for every result.

    ``value``: one value in the result's dtype, at least float32. ``index``: one int64. ``flag``: one byte. ``stack``: a
    value of every rank.
    """

    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()


TRAFFIC: dict[str, Traffic] = {
    "softmax": Traffic(("value", "value"), ("value",)),
    "log_softmax": Traffic(("value", "value"), ("value",)),
    "logsumexp": Traffic(("value", "value")),
    "amax": Traffic(("value",), ("value",)),
    "amin": Traffic(("value",), ("value",)),
    "max": Traffic(("value", "index")),
    "min": Traffic(("value", "index")),
    "argmax": Traffic(("value", "index")),
    "argmin": Traffic(("value", "index")),
    "any_max": Traffic(("flag",)),
    "all_min": Traffic(("flag",)),
    "var": Traffic(("value", "value")),
    "std": Traffic(("value", "value")),
    "norm": Traffic(("value",)),
    "prod": Traffic(("stack",)),
    "cumsum": Traffic(("stack",), ("stack",)),
    "cumprod": Traffic(("stack",), ("stack",)),
}
