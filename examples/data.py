"""Synthetic data: stripes in four directions with noise. Needs no download."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def textures(count: int, size: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """``count`` images of 3 x size x size with stripes in one of four directions, and the direction of each."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=random)
    angle = labels.double() * math.pi / 4
    phase = torch.rand(count, generator=random, dtype=torch.float64) * 2 * math.pi
    grid = torch.linspace(0, 6 * math.pi, size, dtype=torch.float64)
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    waves = torch.sin(torch.cos(angle)[:, None, None] * x + torch.sin(angle)[:, None, None] * y + phase[:, None, None])
    noise = torch.randn(count, 3, size, size, generator=random, dtype=torch.float64)
    return (waves[:, None] + noise).to(dtype), labels
