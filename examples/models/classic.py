"""LeNet, AlexNet and VGG. Their linear layers hold most of the weights, so splitting channels and filters pays off.

After LeCun et al., "Gradient-Based Learning Applied to Document Recognition" (1998), Krizhevsky et al., "ImageNet
Classification with Deep Convolutional Neural Networks" (2012), and Simonyan and Zisserman, "Very Deep Convolutional
Networks for Large-Scale Image Recognition" (2015).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LeNet(nn.Module):
    """LeNet-5 for images of ``side`` pixels: two convolutions without padding, average pooling, three linear layers."""

    def __init__(
        self,
        side: int = 32,
        channels: int = 1,
        widths: tuple[int, int] = (6, 16),
        hidden: tuple[int, int] = (120, 84),
        classes: int = 10,
    ) -> None:
        super().__init__()
        left = ((side - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(channels, widths[0], 5)
        self.conv2 = nn.Conv2d(widths[0], widths[1], 5)
        self.pool = nn.AvgPool2d(2)
        self.fc1 = nn.Linear(widths[1] * left**2, hidden[0])
        self.fc2 = nn.Linear(hidden[0], hidden[1])
        self.fc3 = nn.Linear(hidden[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.tanh(self.conv1(x)))
        x = self.pool(torch.tanh(self.conv2(x)))
        x = x.view(x.size(0), -1)
        return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))


class AlexNet(nn.Module):
    """Five convolutions, two of them in two groups, local response norm, overlapping max pooling, linear layers.

    ``width`` scales all channels (32 gives the original 96, 256, 384, 384, 256), ``side`` is the size of the image.
    """

    def __init__(
        self,
        side: int = 227,
        width: int = 32,
        hidden: int = 4096,
        classes: int = 1000,
        kernel: int = 11,
        stride: int = 4,
        response_norm: bool = True,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        a, b, c = 3 * width, 8 * width, 12 * width
        left = (side - kernel) // stride + 1
        for _ in range(3):
            left = (left - 3) // 2 + 1

        def norm() -> nn.Module:
            return nn.LocalResponseNorm(5, k=2.0) if response_norm else nn.Identity()

        self.features = nn.Sequential(
            *(nn.Conv2d(3, a, kernel, stride), nn.ReLU(inplace=True), norm(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(a, b, 5, padding=2, groups=2), nn.ReLU(inplace=True), norm(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(b, c, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(c, c, 3, padding=1, groups=2), nn.ReLU(inplace=True)),
            *(nn.Conv2d(c, b, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
        )
        self.classifier = nn.Sequential(
            *(nn.Dropout(dropout), nn.Linear(b * left**2, hidden), nn.ReLU(inplace=True)),
            *(nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, classes)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


class VGG(nn.Module):
    """Stages of 3x3 convolutions, each ended by a max pool; two large linear layers. The default is VGG-16."""

    def __init__(
        self,
        side: int = 224,
        depths: tuple[int, ...] = (2, 2, 3, 3, 3),
        widths: tuple[int, ...] = (64, 128, 256, 512, 512),
        hidden: int = 4096,
        classes: int = 1000,
        batch_norm: bool = False,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for depth, outputs in zip(depths, widths, strict=True):
            for _ in range(depth):
                layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(outputs))
                layers.append(nn.ReLU(inplace=True))
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            *(nn.Linear(inputs * (side >> len(depths)) ** 2, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)),
            *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))
