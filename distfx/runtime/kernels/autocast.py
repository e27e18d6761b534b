"""Autocast for kernels: on CPUs it knows ``conv2d`` and the like, but not the operators that those call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

__all__ = ["WithoutAutocast", "autocast_dtype", "autocast_operands"]


class WithoutAutocast:
    """A call that the model makes inside ``torch.autocast(enabled=False)``. It ignores the caller's autocast."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.target = target
        self.__name__ = getattr(target, "__name__", str(target))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return self.target(*args, **kwargs)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a convolution or product of ``x`` is computed: autocast's if enabled, else that of ``x``."""
    device = x.device.type
    eligible = x.is_floating_point() and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if eligible and torch.is_autocast_enabled(device) else x.dtype


def autocast_operands(x: Tensor, *others: Tensor | None) -> list[Any]:
    """The operands of a convolution, cast as autocast would; unchanged if it is disabled."""
    tensors = (x, *others)
    if not torch.is_autocast_enabled(x.device.type):
        return list(tensors)
    return [None if t is None else t.to(autocast_dtype(t)) for t in tensors]
