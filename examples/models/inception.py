"""Inception: parallel branches with different kernels, concatenated.

After Szegedy et al., "Going Deeper with Convolutions" (CVPR 2015) and "Rethinking the Inception Architecture for
Computer Vision" (CVPR 2016): blocks with 1x1, 3x3, 5x5 and pooling branches, with convolutions factored into 1xk and
kx1, blocks that halve the size, and an auxiliary classifier in the middle, used in training.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNorm(nn.Sequential):
    """Convolution, batch norm, ReLU."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(outputs, eps=1e-3),
            nn.ReLU(inplace=True),
        )


class Mixed(nn.Module):
    """Four branches: 1x1; 1x1 and 5x5; 1x1 and two 3x3; average pooling and 1x1."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.outputs = 4 * width + width // 2
        self.one = ConvNorm(inputs, width, 1)
        self.five = nn.Sequential(ConvNorm(inputs, width // 2, 1), ConvNorm(width // 2, width, 5, padding=2))
        self.three = nn.Sequential(
            ConvNorm(inputs, width // 2, 1),
            ConvNorm(width // 2, width, 3, padding=1),
            ConvNorm(width, width + width // 2, 3, padding=1),
        )
        self.pooled = ConvNorm(inputs, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pooled(F.avg_pool2d(x, 3, stride=1, padding=1))
        return torch.cat([self.one(x), self.five(x), self.three(x), pooled], 1)


class Factored(nn.Module):
    """A kxk convolution, factored into 1xk and kx1."""

    def __init__(self, inputs: int, width: int, kernel: int = 7) -> None:
        super().__init__()
        self.outputs = 3 * width
        half = kernel // 2
        self.one = ConvNorm(inputs, width, 1)
        self.once = nn.Sequential(
            ConvNorm(inputs, width // 2, 1),
            ConvNorm(width // 2, width // 2, (1, kernel), padding=(0, half)),
            ConvNorm(width // 2, width, (kernel, 1), padding=(half, 0)),
        )
        self.pooled = ConvNorm(inputs, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pooled(F.max_pool2d(x, 3, stride=1, padding=1))
        return torch.cat([self.one(x), self.once(x), pooled], 1)


class Reduction(nn.Module):
    """Halves the size: a strided 3x3 convolution without padding in parallel with a max pool."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.outputs = inputs + width
        self.conv = ConvNorm(inputs, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv(x), F.max_pool2d(x, 3, stride=2)], 1)


class Inception(nn.Module):
    """A stem, mixed blocks, a reduction, factored blocks. In training returns ``(logits, auxiliary logits)``."""

    def __init__(
        self, width: int = 64, mixed: int = 3, factored: int = 4, classes: int = 1000, dropout: float = 0.5
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            ConvNorm(3, width // 2, 3, stride=2), ConvNorm(width // 2, width, 3, padding=1), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[Mixed | Factored] = []
        inputs = width
        for _ in range(mixed):
            blocks.append(Mixed(inputs, width))
            inputs = blocks[-1].outputs
        self.mixed = nn.Sequential(*blocks)
        self.auxiliary = nn.Linear(inputs, classes)
        self.reduce = Reduction(inputs, width)
        inputs = self.reduce.outputs
        blocks = []
        for _ in range(factored):
            blocks.append(Factored(inputs, width))
            inputs = blocks[-1].outputs
        self.factored = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.mixed(self.stem(x))
        auxiliary = self.auxiliary(x.mean((2, 3))) if self.training else None
        x = self.factored(self.reduce(x))
        logits = self.fc(self.dropout(F.adaptive_avg_pool2d(x, 1).flatten(1)))
        return logits if auxiliary is None else (logits, auxiliary)
