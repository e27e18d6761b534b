"""Networks for tests of plans and bytes, and the volumes of the channel algorithms in closed form."""

from __future__ import annotations

from torch import nn

N, C, K, H, W = 8, 16, 32, 12, 10
"""The middle convolution of :func:`three_convolutions` has C channels and K filters, on N images of H x W."""

INPUT = (N, 8, H, W)


def three_convolutions() -> nn.Module:
    """Three 3x3 convolutions. The one to be measured, ``1``, has a sharded input and a sharded output."""
    return nn.Sequential(
        nn.Conv2d(8, C, 3, padding=1, bias=False),
        nn.Conv2d(C, K, 3, padding=1, bias=False),
        nn.Conv2d(K, 8, 3, padding=1, bias=False),
    )


def weight_count() -> int:
    """The number of weights of :func:`three_convolutions`."""
    return sum(parameter.numel() for parameter in three_convolutions().parameters())


def volume(strategy: str, samples: int, channel_ranks: int, filter_ranks: int = 1) -> int:
    """Elements that a rank sends in each direction for the middle convolution.

    ``filter_ranks`` is the number of ranks along the factor of the channel axis that splits filters (stationary-w).
    """
    x, y = samples * C * H * W, samples * K * H * W
    return {
        "stationary-x": (channel_ranks - 1) * y // channel_ranks,
        "stationary-y": (channel_ranks - 1) * x // channel_ranks,
        "stationary-w": ((filter_ranks - 1) * x + (channel_ranks // filter_ranks - 1) * y) // channel_ranks,
    }[strategy]


VOLUMES = [
    ("c2", "stationary-x", volume("stationary-x", N, 2)),
    ("c2", "stationary-y", volume("stationary-y", N, 2)),
    ("c4", "stationary-x", volume("stationary-x", N, 4)),
    ("c4", "stationary-y", volume("stationary-y", N, 4)),
    ("c4", "stationary-w", volume("stationary-w", N, 4, 2)),
    ("n2c2", "stationary-x", volume("stationary-x", N // 2, 2)),
    ("n2c2", "stationary-y", volume("stationary-y", N // 2, 2)),
]
"""Grid, strategy, and the elements that a rank sends in each direction."""


def small_network() -> nn.Module:
    """One layer of each common kind."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=2, padding=3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 12, 1),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 5),
    )


def halving_network() -> nn.Module:
    """Five convolutions, each of which halves the image."""
    return nn.Sequential(*(nn.Conv2d(3 if i == 0 else 4, 4, 3, 2, 1) for i in range(5)))
