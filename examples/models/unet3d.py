"""3D U-Net: dense segmentation of volumes.

After Cicek et al., "3D U-Net: Learning Dense Volumetric Segmentation from Sparse Annotation" (MICCAI 2016). Upsampling
is a transposed convolution, as in the paper, or trilinear interpolation and a convolution, as is common today.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORMS = {"batch": nn.BatchNorm3d, "instance": nn.InstanceNorm3d}


class DoubleConv(nn.Sequential):
    """Convolution, norm and ReLU, twice. On the way down the first convolution has half of the output channels."""

    def __init__(self, inputs: int, middle: int, outputs: int, norm: str) -> None:
        super().__init__(
            nn.Conv3d(inputs, middle, 3, padding=1, bias=False),
            NORMS[norm](middle, affine=True),
            nn.ReLU(inplace=True),
            nn.Conv3d(middle, outputs, 3, padding=1, bias=False),
            NORMS[norm](outputs, affine=True),
            nn.ReLU(inplace=True),
        )


class Up(nn.Module):
    """Upsamples to the size of the skip connection, concatenates both, and applies two convolutions."""

    def __init__(self, inputs: int, skip: int, norm: str, trilinear: bool) -> None:
        super().__init__()
        self.trilinear = trilinear
        self.up = nn.Conv3d(inputs, inputs, 1) if trilinear else nn.ConvTranspose3d(inputs, inputs, 2, stride=2)
        self.conv = DoubleConv(inputs + skip, skip, skip, norm)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        if self.trilinear:
            x = F.interpolate(self.up(x), size=skip.shape[2:], mode="trilinear", align_corners=True)
        else:
            x = self.up(x)
        return self.conv(torch.cat([skip, x], dim=1))


class UNet3d(nn.Module):
    """``levels`` resolutions, each half of the previous one, and class scores for every voxel."""

    def __init__(
        self,
        channels: int = 3,
        classes: int = 3,
        width: int = 64,
        levels: int = 4,
        norm: str = "batch",
        trilinear: bool = False,
    ) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.pool = nn.MaxPool3d(2)
        self.down = nn.ModuleList(
            DoubleConv(before, after // 2, after, norm)
            for before, after in zip([channels, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            Up(below, above, norm, trilinear) for above, below in zip(widths[-2::-1], widths[::-1], strict=False)
        )
        self.head = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for number, block in enumerate(self.down):
            x = block(self.pool(x) if number else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(x, skips.pop())
        return self.head(x)
