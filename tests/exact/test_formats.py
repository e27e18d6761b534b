"""Memory formats: the same numbers whether images lie channels last or first, in all or some of inputs and weights."""

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
    """Convolutions of three and five channels, of which some parts have one; a norm; and a block that permutes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, 3, 3, padding=1), nn.Conv2d(3, 5, 3, padding=1)
        self.norm, self.up = nn.BatchNorm2d(5), nn.ConvTranspose2d(5, 3, 2, 2)
        self.dense, self.last = nn.Linear(3, 3), nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(self.second(self.first(x).relu())))
        y = y + self.dense(y.permute(0, 2, 3, 1)).relu().permute(0, 3, 1, 2)
        return torch.softmax(self.last(y), dim=1)


def errors(grid: str, strategy: str) -> list[tuple[tuple[object, ...], float]]:
    """The largest relative error of output and gradients, for inputs and weights in either format, of odd sizes."""
    place, found = distfx.Grid.parse(grid), []
    kinds = (torch.contiguous_format, torch.channels_last)
    for channels, image, weights in itertools.product((1, 3), kinds, kinds):
        torch.manual_seed(3)
        model = Mixed(channels).double().to(memory_format=weights)
        net = distfx.parallelize(model, place, strategy=strategy)
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
                assert all(mine == its for mine, its, size in strides if size > 1), "a gradient lies otherwise"
            found.append(((channels, image, weights, size), max(each)))
    return found


@on("c2", "c3", "h2", "n2", "c2h2")
def test_formats(world: int, grid: str) -> None:
    for strategy in ("auto",) if "c" not in grid else ("stationary-x", "stationary-y"):
        for found in run(world, errors, grid, strategy, timeout=120):
            wrong = [each for each in found if not each[1] < 1e-10]
            assert not wrong, (strategy, wrong)


def formats_after(grid: str) -> list[bool]:
    """Whether what comes out lies channels last."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2, padding=1))
    x = torch.randn(2, 3, 8, 8)
    net = distfx.parallelize(model, grid, outputs="local")
    return [
        net(x.contiguous(memory_format=f)).is_contiguous(memory_format=f)
        for f in (torch.channels_last, torch.contiguous_format)
    ]


@on("h2", "c2", "n2")
def test_the_format_of_the_input_is_kept(world: int, grid: str) -> None:
    assert all(all(kept) for kept in run(world, formats_after, grid))


class Hourglass(nn.Module):
    """Convolutions that are faster channels last and such that are not, in turn; and what lies as it comes."""

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


def chosen(grid: str) -> tuple[dict[str, Any], list[bool], dict[str, bool]]:
    """Errors in single precision, whether results lie as ever, and the format of every node."""
    with patch.object(formats, "MIN_POSITIONS", 1):
        found = exact(Hourglass, grid, [(4, 3, 16, 14), (4, 3, 10, 16)], dtype=torch.float32)
        net = distfx.parallelize(Hourglass(), grid, outputs="local")
        results = net(torch.randn(4, 3, 16, 14))
        last = {node.name: node.meta.get("channels_last", False) for node in linked(net)}
    return found["errors"], [y.is_contiguous() for y in results], last


def linked(net: distfx.ParallelModule) -> list[Node]:
    """The nodes of the graph that ran last."""
    return list(net.graph_after("link").graph.nodes)


@on("n2", "h2", "c2", "c3", "h2w2", "c2h2")
def test_convolutions_that_are_faster_channels_last(world: int, grid: str) -> None:
    outcomes = run(world, chosen, grid)
    for errors, first, last in outcomes:
        assert max(errors.values()) < 1e-5, errors
        assert all(first), "what the user gets must lie as ever"
        assert last == outcomes[0][2], "ranks must agree"
        kinds = {name.partition("_stationary")[0]: value for name, value in last.items()}
        assert kinds["few"] and kinds["each"] and not kinds["many"], kinds


def formats_of(shape: tuple[int, ...], channels: int, grid: str) -> set[bool]:
    model = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())
    net = distfx.parallelize(model, grid)
    net(torch.randn(shape))
    return {node.meta["channels_last"] for node in linked(net) if "convolution" in getattr(node.target, "__name__", "")}


@pytest.mark.parametrize(
    ("shape", "last"), [((4, 64, 128, 32), True), ((4, 1024, 7, 7), False), ((1, 64, 16, 16), False)]
)
def test_what_is_faster_channels_last(shape: tuple[int, ...], last: bool) -> None:
    assert run(2, formats_of, shape, shape[1], "h2") == [{last}] * 2
