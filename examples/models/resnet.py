"""Residual networks, as ordinary PyTorch.

After He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016), and Zagoruyko and Komodakis, "Wide Residual
Networks" (BMVC 2016).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The identity, or a strided 1x1 convolution if the shape changes."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int = 1, inside: float = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class Bottleneck(nn.Module):
    """1x1 down, 3x3 with the stride, 1x1 up to four times the width; ``inside`` widens the 3x3."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int = 1, inside: float = 1) -> None:
        super().__init__()
        middle, outputs = int(width * inside), width * self.expansion
        self.conv1 = nn.Conv2d(inputs, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    """A stem (7x7 stride 2 and a max pool, or 3x3 for small images), stages of blocks, a linear classifier."""

    def __init__(
        self,
        depths: tuple[int, ...] = (2, 2, 2, 2),
        width: int = 64,
        classes: int = 1000,
        small: bool = False,
        block: type[BasicBlock | Bottleneck] = BasicBlock,
        inside: float = 1,
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
            blocks = []
            for i in range(depth):
                blocks.append(block(inputs, outputs, 2 if number and not i else 1, inside))
                inputs = outputs * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        return self.fc(x.mean((2, 3)))


def resnet18(classes: int = 1000) -> ResNet:
    """ResNet-18 for ImageNet."""
    return ResNet((2, 2, 2, 2), 64, classes)


def resnet50(
    classes: int = 1000, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, small: bool = False
) -> ResNet:
    """ResNet-50 for ImageNet."""
    return ResNet(depths, width, classes, small, Bottleneck)


def wide_resnet50(
    classes: int = 1000, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, factor: float = 2, small: bool = False
) -> ResNet:
    """ResNet-50 with 3x3 convolutions of ``factor`` times the channels."""
    return ResNet(depths, width, classes, small, Bottleneck, factor)


def small_resnet(classes: int = 4) -> ResNet:
    """A ResNet for images of about 32 x 32, small enough for a laptop."""
    return ResNet((1, 1), 16, classes, small=True)


class WideBlock(nn.Module):
    """Norm and ReLU before each of two 3x3 convolutions, dropout between them."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        same = stride == 1 and inputs == outputs
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x))
        short = x if self.shortcut is None else self.shortcut(y)
        y = F.relu(self.bn2(self.dropout(self.conv1(y))))
        return short + self.conv2(y)


class WideResNet(nn.Module):
    """WRN-n-k for images of 32 x 32: three stages of ``depth`` blocks, ``factor`` times as wide as usual."""

    def __init__(
        self, depth: int = 4, factor: int = 10, width: int = 16, classes: int = 10, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        blocks, inputs = [], width
        for stage in range(3):
            outputs = (width << stage) * factor
            for i in range(depth):
                blocks.append(WideBlock(inputs, outputs, 2 if stage and not i else 1, dropout))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(inputs)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.blocks(self.stem(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
