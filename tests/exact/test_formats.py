"""Memory formats: the same numbers whether inputs and weights are stored channels last or channels first."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.exact import exact, relative
from support.models import on
from support.ranks import run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Node

import distfx
from distfx.passes import formats


class Mixed(nn.Module):
    """Convolutions of three and five channels, so that some parts have one channel; a norm; a block that permutes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, 3, 3, padding=1), nn.Conv2d(3, 5, 3, padding=1)
        self.norm, self.up = nn.BatchNorm2d(5), nn.ConvTranspose2d(5, 3, 2, 2)
        self.dense, self.head = nn.Linear(3, 3), nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(self.second(self.first(x).relu())))
        y = y + self.dense(y.permute(0, 2, 3, 1)).relu().permute(0, 3, 1, 2)
        return torch.softmax(self.head(y), dim=1)


def errors(grid: str, strategy: str) -> list[tuple[tuple[object, ...], float]]:
    """The largest relative error of output and gradients, for inputs and weights in either format."""
    largest = []
    memory_formats = (torch.contiguous_format, torch.channels_last)
    for channels, image, weights in itertools.product((1, 3), memory_formats, memory_formats):
        torch.manual_seed(3)
        model = Mixed(channels).double().to(memory_format=weights)
        net = distfx.parallelize(model, grid, strategy=strategy)
        for size in ((6, 5), (2, 6), (6, 2)):
            x = torch.randn(2, channels, *size, dtype=torch.float64).contiguous(memory_format=image)
            mine, theirs = (x.clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2))
            net.zero_grad()
            model.zero_grad()
            y, want = net(mine), model(theirs)
            for result in (y, want):
                (result * torch.linspace(-1, 1, want.numel(), dtype=torch.float64).view(want.shape)).sum().backward()
            assert mine.grad is not None and theirs.grad is not None
            each = [relative(y, want), relative(mine.grad, theirs.grad)]
            for p, q in zip(net.parameters(), model.parameters(), strict=True):
                assert isinstance(p.grad, DTensor) and isinstance(p, DTensor) and q.grad is not None
                each.append(relative(p.grad.full_tensor(), q.grad))
                strides = zip(p.grad.to_local().stride(), p.to_local().stride(), p.to_local().shape, strict=True)
                assert all(a == b for a, b, size in strides if size > 1), (
                    "a gradient has other strides than its parameter"
                )
            largest.append(((channels, image, weights, size), max(each)))
    return largest


@on("c2", "c3", "h2", "n2", "c2h2")
def test_formats(world: int, grid: str) -> None:
    for strategy in ("auto",) if "c" not in grid else ("stationary-x", "stationary-y"):
        for largest in run(world, errors, grid, strategy, timeout=120):
            wrong = [each for each in largest if not each[1] < 1e-10]
            assert not wrong, (strategy, wrong)


def keeps_formats(grid: str) -> list[bool]:
    """Whether the output has the memory format of the input, for each format."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2, padding=1))
    x = torch.randn(2, 3, 8, 8)
    net = distfx.parallelize(model, grid, outputs="local")
    return [
        net(x.contiguous(memory_format=f)).is_contiguous(memory_format=f)
        for f in (torch.channels_last, torch.contiguous_format)
    ]


@on("h2", "c2", "n2")
def test_the_format_of_the_input_is_kept(world: int, grid: str) -> None:
    assert all(all(kept) for kept in run(world, keeps_formats, grid))


class Hourglass(nn.Module):
    """Convolutions that are faster channels last, others that are not, and operators that work in either format."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.many, self.up = nn.Conv2d(8, 208, 3, stride=2, padding=1), nn.ConvTranspose2d(208, 8, 2, 2)
        self.each, self.mix, self.dense = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 4, 1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.few(x)
        z = self.up(self.many(self.norm(y).relu()).relu()) + y
        z = self.mix(self.each(z))
        return z, self.dense(z.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), z.flatten(1)


def choose_formats(grid: str) -> tuple[dict[str, Any], list[bool], dict[str, bool]]:
    """Errors in single precision, whether results are contiguous, and whether each node is channels last."""
    with patch.object(formats, "MIN_POSITIONS", 1):
        outcome = exact(Hourglass, grid, [(4, 3, 16, 14), (4, 3, 10, 16)], dtype=torch.float32)
        net = distfx.parallelize(Hourglass(), grid, outputs="local")
        results = net(torch.randn(4, 3, 16, 14))
        channels_last = {node.name: node.meta.get("channels_last", False) for node in linked_nodes(net)}
    return outcome["errors"], [y.is_contiguous() for y in results], channels_last


def linked_nodes(net: distfx.ParallelModule) -> list[Node]:
    """The nodes of the graph that the last call ran."""
    return list(net.graph_after("link").graph.nodes)


@on("n2", "h2", "c2", "c3", "h2w2", "c2h2")
def test_a_network_with_both_formats(world: int, grid: str) -> None:
    outcomes = run(world, choose_formats, grid)
    for errors, contiguous, channels_last in outcomes:
        assert max(errors.values()) < 1e-5, errors
        assert all(contiguous), "the user's input was contiguous, so the results must be"
        assert channels_last == outcomes[0][2], "ranks must agree"
        layers = {name.partition("_stationary")[0]: value for name, value in channels_last.items()}
        assert layers["few"] and layers["each"] and not layers["many"], layers


def formats_of_convolutions(shape: tuple[int, ...], channels: int, grid: str) -> set[bool]:
    """Whether convolutions run channels last."""
    model = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())
    net = distfx.parallelize(model, grid)
    net(torch.randn(shape))
    return {
        node.meta["channels_last"]
        for node in linked_nodes(net)
        if "convolution" in getattr(node.target, "__name__", "")
    }


@pytest.mark.parametrize(
    ("shape", "channels_last"), [((4, 64, 128, 32), True), ((4, 1024, 7, 7), False), ((1, 64, 16, 16), False)]
)
def test_choice_of_format(shape: tuple[int, ...], channels_last: bool) -> None:
    assert run(2, formats_of_convolutions, shape, shape[1], "h2") == [{channels_last}] * 2
