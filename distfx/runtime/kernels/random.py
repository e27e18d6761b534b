"""Random operators: replicas draw identical numbers, shards draw independent ones.

Rank 0 draws one seed per forward pass from torch's default generator, so ``torch.manual_seed`` on rank 0 makes a run
reproducible. The numbers of a node depend on that seed, the node's name and the index of this rank's shard.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from distfx.runtime.autograd.gradients import Gradients

__all__ = ["Draw", "Dropout"]


def _seed(gradients: Gradients, node: str, part: int) -> int:
    text = f"{gradients.seed} {node} {part}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class Dropout:
    """Dropout of elements, or of all elements of a channel together if ``features``."""

    def __init__(self, node: str, p: float, features: bool, part: int) -> None:
        self.node, self.p, self.features, self.part = node, p, features, part
        self.__name__ = "dropout"

    def __call__(self, gradients: Gradients, x: Tensor) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(_seed(gradients, self.node, self.part))
        shape: Any = (*x.shape[:2], *(1,) * (x.dim() - 2)) if self.features else x.shape
        mask = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p, generator=generator)
        return x * mask.div_(1 - self.p) if self.p < 1 else x * mask


class Draw:
    """An ATen operator that draws from torch's default generator. Seeds the generator and restores its state."""

    def __init__(self, node: str, operator: str, part: int) -> None:
        name, overload = operator.split(".")
        self.operator = getattr(getattr(torch.ops.aten, name), overload)
        self.node, self.part = node, part
        self.__name__ = "draw"

    def __call__(self, gradients: Gradients, *args: Any, **kwargs: Any) -> Tensor:
        device = args[0].device if isinstance(args[0], Tensor) else torch.device(kwargs.get("device") or "cpu")
        generator = torch.default_generator
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[index]
        state = generator.get_state()
        try:
            generator.manual_seed(_seed(gradients, self.node, self.part))
            result: Tensor = self.operator(*args, **kwargs)
        finally:
            generator.set_state(state)
        return result
