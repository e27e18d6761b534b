"""CosmoFlow: cosmological parameters from a cube of dark matter.

After Mathuriya et al., "CosmoFlow: Using Deep Learning to Learn the Universe at Scale" (SC 2018), in the form of the
MLPerf HPC benchmark and of Oyama et al., "The Case for Strong Scaling in Deep Learning" (2020): each level halves the
cube and doubles the channels until a few voxels are left, then three linear layers.
"""

from __future__ import annotations

import itertools

from torch import Tensor, nn


class CosmoFlow(nn.Module):
    """Levels of convolution, leaky ReLU and max pooling; linear layers with dropout; a tanh at the end.

    ``side`` is that of the input cube, divisible by ``2**levels``: 128 or 512 in the papers.
    """

    def __init__(
        self,
        side: int = 128,
        channels: int = 4,
        width: int = 32,
        levels: int = 5,
        hidden: tuple[int, ...] = (128, 64),
        targets: int = 4,
        dropout: float = 0.5,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels
        for level in range(levels):
            outputs = width << level
            layers.append(nn.Conv3d(inputs, outputs, 3, padding=1, bias=not batch_norm))
            if batch_norm:
                layers.append(nn.BatchNorm3d(outputs))
            layers += [nn.LeakyReLU(0.3), nn.MaxPool3d(2)]
            inputs = outputs
        self.features = nn.Sequential(*layers)
        sizes = [inputs * (side >> levels) ** 3, *hidden]
        head: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            head += [nn.Linear(before, after), nn.LeakyReLU(0.3), nn.Dropout(dropout)]
        self.head = nn.Sequential(nn.Flatten(), *head, nn.Linear(sizes[-1], targets), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x)) * 1.2
