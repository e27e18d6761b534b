"""The mesh-tangling network, which predicts where the mesh of a hydrodynamics simulation will tangle.

After Dryden et al., "Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism" (IPDPS 2019),
trained there with LBANN on images of 1024 x 1024 and 2048 x 2048 with 18 channels, too large for one device. Fully
convolutional: blocks of convolution, batch norm and ReLU, the first of each block strided, and a prediction for every
remaining pixel.
"""

from __future__ import annotations

from torch import Tensor, nn


class MeshNet(nn.Module):
    """``len(widths)`` blocks of ``depth`` convolutions: depth 3 for images of 1024 pixels, 5 for 2048."""

    def __init__(
        self,
        channels: int = 18,
        widths: tuple[int, ...] = (128, 160, 192, 224, 256, 128),
        depth: int = 3,
        classes: int = 1,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels
        for block, outputs in enumerate(widths):
            for number in range(depth):
                first = number == 0
                kernel = 5 if first and block == 0 else 3
                layers += [
                    nn.Conv2d(inputs, outputs, kernel, stride=2 if first else 1, padding=kernel // 2, bias=False),
                    nn.BatchNorm2d(outputs),
                    nn.ReLU(inplace=True),
                ]
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.predict = nn.Conv2d(inputs, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(self.blocks(x))
