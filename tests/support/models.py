"""Models for tests, and decorators for the grids they run on. Ranks import the models by name.

Most models are written as text: ``check(stack, "h2", [(2, 3, 8, 8)], kwargs=layers("Conv2d(3, 4, 3)", "ReLU()"))``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distfx
from support.captures import remembered
from support.exact import check, ranks_of

ALGORITHMS = ("stationary-x", "stationary-y", "stationary-w")


def on(*grids: str) -> pytest.MarkDecorator:
    """Run a test on each of ``grids``. Adds the parameter ``world``, by which tests are sorted."""
    return pytest.mark.parametrize(("world", "grid"), [(ranks_of(g), g) for g in grids], ids=[g or "1" for g in grids])


def cases(names: str, table: Iterable[tuple[Any, ...]], at: int = 0) -> pytest.MarkDecorator:
    """Parametrise by the rows of ``table``. Column ``at`` is the grid; adds the parameter ``world``."""
    rows = [(ranks_of(row[at]), *row) for row in table]
    ids = ["-".join(" ".join(map(str, v)) if isinstance(v, tuple | list) else str(v) for v in row[1:]) for row in rows]
    return pytest.mark.parametrize(("world", *names.split()), rows, ids=ids)


class Apply(nn.Module):
    """``f("x.relu() * 2")``: an expression of the input ``x``."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def forward(self, x: Tensor) -> Any:
        return eval(self.text, {"torch": torch, "F": F, "x": x})


class Beside(nn.Module):
    """Parallel branches with one input and one output each, so that a table of cases needs one capture only."""

    def __init__(self, branches: tuple[tuple[str, ...], ...]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(stack(*texts) for texts in branches)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return tuple(branch(x) for branch in self.branches)


class Residual(nn.Module):
    """The sum of several paths over one input: ``both("Conv2d(3, 4, 3)", "Conv2d(3, 4, 1)")``."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.paths = nn.ModuleList(stack(text) for text in texts)

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = (path(x) for path in self.paths)
        for other in rest:
            first = first + other
        return first


def stack(*names: str, texts: Iterable[str] = ()) -> nn.Sequential:
    """The layers written as text, one after another; ``f`` is :class:`Apply`, ``both`` is :class:`Residual`."""
    namespace = {**vars(nn), "f": Apply, "both": Residual, "beside": Beside, "stack": stack}
    return nn.Sequential(*(eval(text, namespace) for text in (*names, *texts)))


def layers(*texts: str) -> dict[str, Any]:
    """The arguments of :func:`stack`."""
    return {"texts": texts}


def same(grid: str, shape: tuple[int, ...], *texts: str, **options: Any) -> list[dict[str, Any]]:
    """Check that the layers ``texts`` on ``grid`` equal the plain ones."""
    return check(stack, grid, [shape], kwargs=layers(*texts), **options)


def beside(grid: str, shape: tuple[int, ...], branches: Iterable[tuple[str, ...]], *first: str) -> None:
    """Check each of ``branches`` after the layers ``first``, all in one model, against the plain ones."""
    same(grid, shape, *first, f"beside({tuple(branches)!r})", example=True)


class Block(nn.Module):
    """A residual block with a strided 1x1 shortcut."""

    def __init__(self, inside: int, outside: int, stride: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class Rich(nn.Module):
    """The stem of a ResNet, a residual block, two convolutions that share an input, pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 7, 2, 3, bias=False)
        self.bn = nn.BatchNorm2d(6)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.block = Block(6, 8)
        self.left = nn.Conv2d(8, 7, 3, padding=1)
        self.right = nn.Conv2d(8, 7, 1)
        self.average = nn.AvgPool2d(3, 1, 1)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.pool(F.relu(self.bn(self.stem(x)))))
        x = self.average(self.left(x) * torch.sigmoid(self.right(x)))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Volume(nn.Module):
    """A small 3D network: convolution, batch norm, pooling, a transposed convolution and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv3d(2, 4, 3, 2, 1, bias=False)
        self.bn = nn.BatchNorm3d(4)
        self.deep = nn.Conv3d(4, 6, 3, padding=1)
        self.up = nn.ConvTranspose3d(6, 4, 2, 2)
        self.pool = nn.MaxPool3d(3, 1, 1)
        self.skip = nn.Conv3d(2, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn(self.down(x)))
        y = self.pool(self.up(torch.tanh(self.deep(y))) + self.skip(x))
        return self.head(y.mean((2, 3, 4)))


class Signal(nn.Module):
    """A small 1D network."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 6, 9, 2, 4, bias=False)
        self.bn = nn.BatchNorm1d(6)
        self.second = nn.Conv1d(6, 5, 4, dilation=2, padding="same")
        self.pool = nn.AvgPool1d(3, 2, 1)
        self.head = nn.Conv1d(5, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(F.gelu(self.second(F.relu(self.bn(self.first(x)))))))


class Plain(nn.Module):
    """Three convolutions and two linear layers, for the channel algorithms."""

    def __init__(self, channels: tuple[int, ...] = (4, 8, 12, 6), inside: int = 3) -> None:
        super().__init__()
        sizes = (inside, *channels)
        pairs = list(itertools.pairwise(sizes))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, 1 + i % 2, 1) for i, (a, b) in enumerate(pairs))
        self.hidden = nn.Linear(sizes[-1], 10)
        self.head = nn.Linear(10, 7)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.silu(conv(x))
        return self.head(torch.tanh(self.hidden(x.mean((2, 3)))))


class Net(nn.Module):
    """Convolutions, batch norm and a linear layer. One submodule is named like a property of the parallel module."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 6, 3, stride=2, padding=1)
        self.fc = nn.Linear(6, 5)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.plan(x)))
        return self.fc(self.conv(x).mean((2, 3))) * self.scale


class Image(nn.Module):
    """A network whose output is an image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu()


def pair(grid: str, cls: type[nn.Module] = Net, **options: Any) -> tuple[distfx.ParallelModule, nn.Module]:
    """A model distributed over ``grid``, and an identical plain model."""
    torch.manual_seed(3)
    model = cls().double()
    with remembered(cls):
        return distfx.parallelize(model, distfx.Grid.parse(grid), **options), copy.deepcopy(model)
