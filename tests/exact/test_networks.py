"""The networks of ``examples/models``, with few channels, against one process.

Outputs, all gradients, running statistics and three steps of SGD are compared, in train and in eval mode. Batches are
large enough that batch norm does not magnify rounding. Sizes are uneven where the network allows it. Each network runs
on a few grids; ``pytest -m zoo tests/exact/test_networks.py`` runs each of them on every grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from models.classic import VGG, AlexNet, LeNet
from models.convlstm import ConvLSTMCell, Nowcast
from models.cosmoflow import CosmoFlow
from models.densenet import DenseNet
from models.inception import Inception
from models.mbconv import MBConvNet
from models.mesh import MeshNet
from models.resnet import WideResNet, resnet50, wide_resnet50
from models.unet3d import UNet3d
from models.vae import VAE
from support.exact import check, grids
from support.models import cases
from torch import nn


class Network(NamedTuple):
    """How to build a network, the shape of its input, and the grids of the default run."""

    build: Callable[..., nn.Module]
    kwargs: dict[str, Any]
    shape: Any
    train: str
    eval: str
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)


MBCONV = ((1, 3, 1, 8, 1), (4, 3, 2, 12, 2), (4, 5, 2, 14, 1))
NETWORKS = {
    "cosmoflow": Network(
        CosmoFlow,
        {"side": 12, "channels": 2, "width": 4, "levels": 2, "hidden": (10, 6), "dropout": 0.0},
        (4, 2, 12, 12, 12),
        "c2d2 h3",
        "w2",
    ),
    "cosmoflow-bn": Network(
        CosmoFlow,
        {"side": 8, "width": 4, "levels": 2, "hidden": (8,), "dropout": 0.0, "batch_norm": True},
        (4, 4, 8, 8, 8),
        "n2",
        "",
    ),
    "unet3d": Network(UNet3d, {"width": 4, "levels": 2}, (4, 3, 6, 8, 10), "n2 c2d2", "h2"),
    "unet3d-trilinear": Network(
        UNet3d,
        {"width": 4, "levels": 2, "norm": "instance", "trilinear": True},
        (2, 3, 7, 9, 10),
        "d2w2",
        "c2",
    ),
    "mesh": Network(
        MeshNet,
        {"channels": 5, "widths": (6, 8, 6), "depth": 2},
        (4, 5, 33, 30),
        "h2w2 n3",
        "c2",
    ),
    "resnet50": Network(resnet50, {"classes": 5, "depths": (1, 2), "width": 6}, (8, 3, 33, 30), "c2 n2h2", "w2"),
    "wide-resnet50": Network(
        wide_resnet50, {"classes": 5, "depths": (1, 1), "width": 4, "small": True}, (6, 3, 12, 11), "c4", "n2"
    ),
    "wide-resnet": Network(WideResNet, {"depth": 1, "factor": 2, "width": 4}, (6, 3, 15, 16), "w3", ""),
    "lenet": Network(LeNet, {"hidden": (20, 12)}, (4, 1, 32, 32), "c2w2", "n2"),
    "alexnet": Network(
        AlexNet,
        {"side": 47, "width": 2, "hidden": 16, "classes": 6, "kernel": 7, "stride": 2, "dropout": 0.0},
        (3, 3, 47, 47),
        "c2 h2",
        "",
    ),
    "vgg": Network(
        VGG,
        {"side": 16, "depths": (1, 2, 1), "widths": (4, 6, 8), "hidden": 24, "classes": 7, "dropout": 0.0},
        (4, 3, 16, 16),
        "c6 n2c2",
        "h2",
    ),
    "vgg-bn": Network(
        VGG,
        {"side": 16, "depths": (1, 1), "widths": (4, 6), "hidden": 12, "batch_norm": True, "dropout": 0.0},
        (4, 3, 16, 16),
        "n2h2",
        "",
    ),
    "mbconv": Network(
        MBConvNet,
        {"stages": MBCONV, "stem": 8, "head": 20, "classes": 5, "dropout": 0.0, "drop_path": 0.0},
        (8, 3, 31, 28),
        "c2h2 w3",
        "n2",
    ),
    "densenet": Network(
        DenseNet,
        {"depths": (2, 2), "growth": 3, "stem": 6, "classes": 5},
        (8, 3, 36, 33),
        "c2 n2h2",
        "w2",
    ),
    "inception": Network(
        Inception,
        {"width": 6, "mixed": 1, "factored": 1, "classes": 5, "dropout": 0.0},
        (8, 3, 35, 34),
        "h2 n2c2",
        "c2",
    ),
    "vae": Network(
        VAE,
        {"widths": (4, 8), "latent": 3, "groups": 2, "heads": 2},
        [(2, 3, 12, 10), (2, 3, 6, 5)],
        "h2 c2",
        "n2w2",
        {"example": True},
    ),
    "convlstm": Network(
        ConvLSTMCell,
        {"inputs": 3, "hidden": 4},
        [(2, 3, 9, 8), [(2, 4, 9, 8), (2, 4, 9, 8)]],
        "n2c2h2 w2",
        "h2",
    ),
    "nowcast": Network(Nowcast, {"hidden": 4}, (2, 3, 1, 7, 8), "c2", "h2"),
}


def default_runs(mode: str) -> Iterator[tuple[str, str]]:
    """Each network with its grids for ``mode``."""
    for name, network in NETWORKS.items():
        for grid in getattr(network, mode).split():
            yield grid, name


def all_runs() -> Iterator[tuple[str, str]]:
    """Each network with every factorisation of 2, 3, 4, 6 and 8 ranks that its input allows."""
    for name, network in NETWORKS.items():
        shape = network.shape if isinstance(network.shape[0], int) else network.shape[0]
        axes = "ncdhw" if len(shape) == 5 and name != "nowcast" else "nchw"
        for ranks in (2, 3, 4, 6, 8):
            for grid in grids(ranks, axes):
                samples = next((int(grid[1]) for _ in "n" if grid[0] == "n"), 1)
                if samples <= shape[0]:
                    yield grid, name


def compare(name: str, grid: str, train: bool) -> None:
    net = NETWORKS[name]
    results = check(net.build, grid, [net.shape], kwargs=net.kwargs, train=train, sgd=3, again=True, **net.options)
    unused = {"auxiliary.weight", "auxiliary.bias"} if name == "inception" and not train else set()
    assert results[0]["idle"] == unused, "some layers have no gradient, so nothing was compared"


@cases("grid name", default_runs("train"))
def test_training(world: int, grid: str, name: str) -> None:
    compare(name, grid, train=True)


@cases("grid name", default_runs("eval"))
def test_evaluation(world: int, grid: str, name: str) -> None:
    """With running statistics. Gradients are compared too, as in fine-tuning with frozen norms."""
    compare(name, grid, train=False)


@pytest.mark.zoo
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@cases("grid name", all_runs())
def test_every_grid(world: int, grid: str, name: str, train: bool) -> None:
    compare(name, grid, train)
