"""DenseNet: every layer takes the outputs of all layers before it.

After Huang et al., "Densely Connected Convolutional Networks" (CVPR 2017).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DenseLayer(nn.Module):
    """Norm, ReLU, 1x1, norm, ReLU, 3x3. Adds ``growth`` channels."""

    def __init__(self, inputs: int, growth: int, bottleneck: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, bottleneck * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bottleneck * growth)
        self.conv2 = nn.Conv2d(bottleneck * growth, growth, 3, padding=1, bias=False)
        self.dropout = dropout

    def forward(self, features: list[Tensor]) -> Tensor:
        y = self.conv1(F.relu(self.norm1(torch.cat(features, 1))))
        y = self.conv2(F.relu(self.norm2(y)))
        return F.dropout(y, self.dropout, self.training) if self.dropout else y


class DenseBlock(nn.ModuleList):
    """``depth`` dense layers; all features concatenated."""

    def __init__(self, depth: int, inputs: int, growth: int, bottleneck: int, dropout: float) -> None:
        super().__init__(DenseLayer(inputs + i * growth, growth, bottleneck, dropout) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """A stem, dense blocks with halved channels and size in between, a linear classifier. Default: DenseNet-121."""

    def __init__(
        self,
        depths: tuple[int, ...] = (6, 12, 24, 16),
        growth: int = 32,
        stem: int = 64,
        bottleneck: int = 4,
        classes: int = 1000,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            *(nn.Conv2d(3, stem, 7, 2, 3, bias=False), nn.BatchNorm2d(stem), nn.ReLU(inplace=True)),
            nn.MaxPool2d(3, 2, 1),
        ]
        width = stem
        for number, depth in enumerate(depths):
            layers.append(DenseBlock(depth, width, growth, bottleneck, dropout))
            width += depth * growth
            layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            if number < len(depths) - 1:
                layers += [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
                width //= 2
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))
