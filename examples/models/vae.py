"""A variational autoencoder of images with attention over space, as latent diffusion models use it.

After Kingma and Welling, "Auto-Encoding Variational Bayes" (ICLR 2014), and Rombach et al., "High-Resolution Image
Synthesis with Latent Diffusion Models" (CVPR 2022): residual blocks with group norm, attention among all pixels at the
smallest size, nearest-neighbour upsampling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Group norm, SiLU and a 3x3 convolution, twice, with a shortcut."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inputs, eps=1e-6)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, outputs, eps=1e-6)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y)))
        return y + self.shortcut(x)


class Attention(nn.Module):
    """Self-attention among all pixels, with ``heads`` heads."""

    def __init__(self, channels: int, groups: int, heads: int = 1) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def _tokens(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return x.view(n, self.heads, c // self.heads, h * w).transpose(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (self._tokens(conv(y)) for conv in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(2, 3).reshape(x.shape))


class Encoder(nn.Module):
    """Residual blocks with halved size between levels. Returns mean and log variance of the latent."""

    def __init__(self, channels: int, widths: tuple[int, ...], latent: int, groups: int, heads: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 3, padding=1)]
        inputs = widths[0]
        for level, width in enumerate(widths):
            layers.append(ResidualBlock(inputs, width, groups))
            inputs = width
            if level < len(widths) - 1:
                layers.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
        layers += [Attention(inputs, groups, heads), ResidualBlock(inputs, inputs, groups)]
        self.layers = nn.Sequential(*layers, nn.GroupNorm(groups, inputs, eps=1e-6), nn.SiLU())
        self.moments = nn.Conv2d(inputs, 2 * latent, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, logarithm = self.moments(self.layers(x)).chunk(2, dim=1)
        return mean, torch.clamp(logarithm, -30.0, 20.0)


class Decoder(nn.Module):
    """The mirror image of the encoder."""

    def __init__(self, channels: int, widths: tuple[int, ...], latent: int, groups: int, heads: int) -> None:
        super().__init__()
        inputs = widths[-1]
        layers: list[nn.Module] = [
            nn.Conv2d(latent, inputs, 3, padding=1),
            ResidualBlock(inputs, inputs, groups),
            Attention(inputs, groups, heads),
        ]
        for level, width in enumerate(reversed(widths)):
            layers.append(ResidualBlock(inputs, width, groups))
            inputs = width
            if level < len(widths) - 1:
                layers += [nn.Upsample(scale_factor=2.0, mode="nearest"), nn.Conv2d(width, width, 3, padding=1)]
        self.layers = nn.Sequential(*layers, nn.GroupNorm(groups, inputs, eps=1e-6), nn.SiLU())
        self.out = nn.Conv2d(inputs, channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        return self.out(self.layers(z))


class VAE(nn.Module):
    """``(image, noise) -> (image, mean, log variance)``; without noise the mean is decoded.

    The noise is an input with the shape of the latent, so the caller controls how it is drawn.
    """

    def __init__(
        self,
        channels: int = 3,
        widths: tuple[int, ...] = (128, 256, 512, 512),
        latent: int = 4,
        groups: int = 32,
        heads: int = 1,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(channels, widths, latent, groups, heads)
        self.decoder = Decoder(channels, widths, latent, groups, heads)

    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        mean, logarithm = self.encoder(x)
        z = mean if noise is None else mean + torch.exp(0.5 * logarithm) * noise
        return self.decoder(z), mean, logarithm
