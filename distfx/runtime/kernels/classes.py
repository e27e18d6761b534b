"""Class targets of losses: the value and the weight of each position's class."""

from __future__ import annotations

from torch import Tensor

__all__ = ["class_weights", "pick_class"]


def pick_class(values: Tensor, target: Tensor, ignored: int) -> Tensor:
    """At each position, the value of the class in ``target``; zero where that is ``ignored``.

    Classes are along dim 1, or along the only dim.
    """
    dim, is_ignored = min(1, values.dim() - 1), target == ignored
    index = target.masked_fill(is_ignored, 0).unsqueeze(dim)
    return values.gather(dim, index).squeeze(dim).masked_fill(is_ignored, 0)


def class_weights(target: Tensor, weight: Tensor, ignored: int) -> Tensor:
    """At each position, the weight of the class in ``target``; zero where that is ``ignored``."""
    is_ignored = target == ignored
    return weight[target.masked_fill(is_ignored, 0)].masked_fill(is_ignored, 0)
