"""What models seldom do: sizes of one that are a case apart, state read twice, empty parts, odd operands. All exact."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from support.exact import check
from support.models import cases
from support.ranks import run
from torch import Tensor, nn

import distfx


class After(nn.Module):
    """A convolution, and something done to its result."""

    def __init__(self, name: str, channels: int = 8) -> None:
        super().__init__()
        self.conv, self.name = nn.Conv2d(3, channels, 3, padding=1), name

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        result = FUNCTIONS[self.name](self.conv(x))
        return result if isinstance(result, tuple) else (result,)


def _turned(y: Tensor) -> tuple[Tensor, ...]:
    a, b = y.relu(), y.tanh()
    return (a, b) if y.shape[0] == 1 else (b, a)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "factor of one sample": lambda y: y * (2.0 if y.shape[0] == 1 else 3.0),
    "outputs of one sample": _turned,
    "dim of one sample": lambda y: y.softmax(1 if y.shape[0] == 1 else 2),
    "shift of one row": lambda y: torch.roll(y, 1 if y.shape[2] > 1 else 3, 3),
    "samples apart": lambda y: torch.stack(list(y.unbind(0)[::-1])).tanh(),
    "sum over samples": lambda y: torch.stack([y[i] for i in range(y.shape[0])]).sum(0, keepdim=True),
    "new of one channel": lambda y: y * y[:, :1].new_full((1,), 3.0),
    "new of one row": lambda y: y * y[:, :, :1].new_ones(1) + y[:, :1, :1].new_zeros(1),
    "greatest bool": lambda y: y * (y > 0).max(1, keepdim=True)[0] * (y > 0).max(2, keepdim=True)[0],
    "least bool": lambda y: y * (y > 0).min(2, keepdim=True)[0],
    "conv of itself": lambda y: F.conv2d(y, y),
    "only infinities": lambda y: (
        F.max_pool2d(y.masked_fill(y < 100, -torch.inf), 3, 1, 1, return_indices=True)[1] * y.detach() + y
    ),
    "only infinities, dilated": lambda y: (
        F.max_pool2d(y.masked_fill(y < 100, -torch.inf), 2, 2, 1, 3, return_indices=True)[1] + 0 * y.sum()
    ),
    "nearest, same size": lambda y: F.interpolate(y, scale_factor=1.3, mode="nearest"),
    "nearest, by 2.3": lambda y: F.interpolate(y, scale_factor=2.3, mode="nearest"),
    "nearest-exact, by 1.3": lambda y: F.interpolate(y, scale_factor=1.3, mode="nearest-exact"),
    "nearest-exact, to size": lambda y: F.interpolate(y, (41, 29), mode="nearest-exact"),
    "norm of vectors": lambda y: F.group_norm(y.mean((2, 3)), 2),
    "norm of one vector": lambda y: F.group_norm(y.mean((2, 3)), 1),
}

SIZES = [(2, 3, 6, 5), (1, 3, 6, 5), (2, 3, 1, 5), (3, 3, 8, 7)]
OF_ONE = ("factor of one sample", "outputs of one sample", "dim of one sample", "shift of one row", "samples apart")


@cases("grid name", [(grid, name) for grid in ("c2", "h2") for name in (*OF_ONE, "sum over samples")])
def test_sizes_of_one_are_a_case_apart(world: int, grid: str, name: str) -> None:
    check(After, grid, SIZES, kwargs={"name": name}, example=True)


def test_the_first_size_is_one() -> None:
    check(After, "c2", [SIZES[1], SIZES[0]], kwargs={"name": OF_ONE[0]}, example=True)


@cases("grid name", [(grid, name) for grid in ("c2", "h2", "c3") for name in FUNCTIONS if name not in OF_ONE])
def test_odd_operands(world: int, grid: str, name: str) -> None:
    check(After, grid, [(2, 3, 6, 5), (3, 3, 16, 8)], kwargs={"name": name}, example=True)


def test_a_norm_of_one_channel_on_each_rank() -> None:
    check(After, "c2", [(2, 3, 6, 5)], kwargs={"name": "norm of one vector", "channels": 2})


class ReadTwice(nn.Module):
    """Running statistics, read before, between and after two uses of the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mean = self.norm.running_mean
        assert mean is not None
        a, c = mean * 2, mean.mean()
        y = self.norm(self.conv(x))
        b, d = mean * 3, mean.mean()
        return self.norm(y + d), a, b, c, mean.amax()


class Unused(nn.Module):
    """Norms whose results nobody reads, but whose statistics count."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.one, self.all = nn.InstanceNorm2d(8, track_running_stats=True), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        self.one(y), self.all(y)
        return y


@cases("grid model", [(grid, model) for grid in ("c2", "h2", "n2", "c2h2") for model in (ReadTwice, Unused)])
def test_statistics(world: int, grid: str, model: type[nn.Module]) -> None:
    check(model, grid, [(4, 3, 6, 5)], steps=2)


class Flat(nn.Module):
    def __init__(self, start: int) -> None:
        super().__init__()
        self.conv, self.start = nn.Conv2d(3, 5, 3, padding=1), start

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(self.start)


def slices_of(grid: str, start: int) -> tuple[bool, str]:
    """Whether the local output is the part that is said; and what is said of a size that was not seen."""
    torch.manual_seed(0)
    model = Flat(start).double()
    net = distfx.parallelize(model, grid, outputs="local")
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    y, want = net(x), model(x)
    said = ""
    try:
        net.output_slices(0, (*want.shape[:-1], 77))
    except distfx.DistfxError as error:
        said = str(error)
    return torch.allclose(y, want[net.output_slices(0, want.shape)], atol=1e-12, rtol=0), said


@cases("grid start", [("c2", 1), ("h2", 2), ("c2", 2)])
def test_slices_of_a_flat_output(world: int, grid: str, start: int) -> None:
    for right, said in run(world, slices_of, grid, start):
        assert right and ("follows from the input" in said or (grid, start) == ("c2", 2))
