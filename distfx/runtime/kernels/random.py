"""Random operators: ranks with the same part of a tensor draw the same numbers, others independent ones.

Every pass has a seed, drawn by rank 0 from torch's default generator, so ``torch.manual_seed`` there makes a run
reproducible. A node's numbers come from that seed, the node's name, and the number of the part.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from distfx.runtime.autograd.parameters import Gradients

__all__ = ["Draw", "Dropout"]


def _seed(gradients: Gradients, node: str, part: int) -> int:
    text = f"{gradients.seed} {node} {part}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class Dropout:
    """Dropout of elements, or of whole features (channels of a sample)."""

    def __init__(self, node: str, p: float, features: bool, part: int) -> None:
        self.node, self.p, self.features, self.part = node, p, features, part
        self.__name__ = "dropout"

    def __call__(self, gradients: Gradients, x: Tensor) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(_seed(gradients, self.node, self.part))
        shape: Any = (*x.shape[:2], *(1,) * (x.dim() - 2)) if self.features else x.shape
        kept = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p, generator=generator)
        return x * kept.div_(1 - self.p) if self.p < 1 else x * kept


class Draw:
    """An ATen operator that draws from torch's default generator, which is seeded for it and put back."""

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
        before = generator.get_state()
        try:
            generator.manual_seed(_seed(gradients, self.node, self.part))
            result: Tensor = self.operator(*args, **kwargs)
        finally:
            generator.set_state(before)
        return result
