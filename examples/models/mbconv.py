"""Inverted residual blocks with squeeze and excitation, as in EfficientNet.

After Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks" (ICML 2019), Sandler et
al., "MobileNetV2" (CVPR 2018), Hu et al., "Squeeze-and-Excitation Networks" (CVPR 2018), and Huang et al., "Deep
Networks with Stochastic Depth" (ECCV 2016).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SqueezeExcite(nn.Module):
    """Scales every channel by a factor that a small network computes from the means of all channels."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.expand(F.silu(self.reduce(scale))))


class StochasticDepth(nn.Module):
    """In training, drops the branch of each sample with probability ``p``."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        kept = 1 - self.p
        mask = torch.empty(x.shape[0], 1, 1, 1, dtype=x.dtype, device=x.device).bernoulli_(kept)
        return x * (mask / kept)


class MBConv(nn.Module):
    """1x1 up, depthwise, squeeze and excitation, 1x1 down; a shortcut if the shape does not change."""

    def __init__(self, inputs: int, outputs: int, expand: int, kernel: int, stride: int, drop_path: float) -> None:
        super().__init__()
        inside = inputs * expand
        layers: list[nn.Module] = []
        if expand != 1:
            layers += [nn.Conv2d(inputs, inside, 1, bias=False), nn.BatchNorm2d(inside), nn.SiLU(inplace=True)]
        layers += [
            nn.Conv2d(inside, inside, kernel, stride, kernel // 2, groups=inside, bias=False),
            nn.BatchNorm2d(inside),
            nn.SiLU(inplace=True),
            SqueezeExcite(inside, max(1, inputs // 4)),
            nn.Conv2d(inside, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.block = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs
        self.drop_path = StochasticDepth(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        return x + self.drop_path(y) if self.residual else y


# expand, kernel, stride, outputs, repeats: EfficientNet-B0
B0 = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


class MBConvNet(nn.Module):
    """EfficientNet: a strided stem, ``stages`` of MBConv blocks, a 1x1 head, a linear classifier."""

    def __init__(
        self,
        stages: tuple[tuple[int, int, int, int, int], ...] = B0,
        stem: int = 32,
        head: int = 1280,
        classes: int = 1000,
        dropout: float = 0.2,
        drop_path: float = 0.2,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, stem, 3, 2, 1, bias=False), nn.BatchNorm2d(stem), nn.SiLU(inplace=True))
        total = sum(repeats for *_, repeats in stages)
        blocks: list[nn.Module] = []
        inputs = stem
        for expand, kernel, stride, outputs, repeats in stages:
            for i in range(repeats):
                path = drop_path * len(blocks) / total
                blocks.append(MBConv(inputs, outputs, expand, kernel, 1 if i else stride, path))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.Conv2d(inputs, head, 1, bias=False), nn.BatchNorm2d(head), nn.SiLU(inplace=True))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(head, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.blocks(self.stem(x)))
        return self.classifier(self.dropout(x.mean([2, 3])))
