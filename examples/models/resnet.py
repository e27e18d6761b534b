"""Residual networks as people write them: nothing in here knows of distfx."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, strided by a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    """A stem (7x7 stride 2 and a max pool, or 3x3 for small images), stages of blocks, a linear classifier."""

    def __init__(
        self, depths: tuple[int, ...] = (2, 2, 2, 2), width: int = 64, classes: int = 1000, small: bool = False
    ) -> None:
        super().__init__()
        if small:
            self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        else:
            pool = nn.MaxPool2d(3, 2, 1)
            self.stem = nn.Sequential(
                nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), pool
            )
        stages, inputs = [], width
        for number, depth in enumerate(depths):
            outputs = width << number
            blocks = [BasicBlock(inputs, outputs, 2 if number else 1)]
            blocks += [BasicBlock(outputs, outputs) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*blocks))
            inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        return self.fc(x.mean((2, 3)))


def resnet18(classes: int = 1000) -> ResNet:
    """ResNet-18 for ImageNet."""
    return ResNet((2, 2, 2, 2), 64, classes)


def small_resnet(classes: int = 4) -> ResNet:
    """A ResNet for images of some 32 x 32, small enough for a laptop."""
    return ResNet((1, 1), 16, classes, small=True)
