"""Corner cases: branches on sizes, sizes of one, state that is read twice, empty parts, unusual operands."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.exact import check, relative
from support.models import cases, pair
from support.ranks import run
from torch import Tensor, nn

import distfx


class After(nn.Module):
    """A convolution followed by one of ``FUNCTIONS``."""

    def __init__(self, name: str, channels: int = 8) -> None:
        super().__init__()
        self.conv, self.name = nn.Conv2d(3, channels, 3, padding=1), name

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        result = FUNCTIONS[self.name](self.conv(x))
        return result if isinstance(result, tuple) else (result,)


def _swap_outputs(y: Tensor) -> tuple[Tensor, ...]:
    a, b = y.relu(), y.tanh()
    return (a, b) if y.shape[0] == 1 else (b, a)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "factor of one sample": lambda y: y * (2.0 if y.shape[0] == 1 else 3.0),
    "outputs of one sample": _swap_outputs,
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
def test_models_that_branch_on_a_size_of_one(world: int, grid: str, name: str) -> None:
    check(After, grid, SIZES, kwargs={"name": name}, example=True)


def test_the_first_size_is_one() -> None:
    check(After, "c2", [SIZES[1], SIZES[0]], kwargs={"name": OF_ONE[0]}, example=True)


@cases("grid name", [(grid, name) for grid in ("c2", "h2", "c3") for name in FUNCTIONS if name not in OF_ONE])
def test_unusual_operands(world: int, grid: str, name: str) -> None:
    check(After, grid, [(2, 3, 6, 5), (3, 3, 16, 8)], kwargs={"name": name}, example=True)


def test_a_norm_of_one_channel_on_each_rank() -> None:
    check(After, "c2", [(2, 3, 6, 5)], kwargs={"name": "norm of one vector", "channels": 2})


class ReadTwice(nn.Module):
    """Reads running statistics before, between and after two uses of the norm."""

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
    """Norms whose results are unused, but whose statistics are updated."""

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


class Levels(nn.Module):
    """A concatenation of levels with fewer rows than ranks, and a class map."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, 4, 1)
        self.side = nn.Conv2d(3, 4, 1, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.cat([self.down(x), self.side(x)], 1)
        return y, y.argmax(1)


def levels() -> tuple[float, bool]:
    net, plain = pair("h4", Levels)
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (have, classes), (want, expected) = net(x), plain(x)
    have.sum().backward()
    return relative(have, want), torch.equal(classes, expected)


def test_empty_shards_in_a_concatenation_and_an_argmax() -> None:
    for error, is_equal in run(4, levels):
        assert error < 1e-12 and is_equal


class Branching(nn.Module):
    """Branches on the image size, and pools with windows that may start outside the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.pool = nn.AvgPool2d(4, 3, 2, ceil_mode=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if x.shape[2] > 20:
            x = x * 2
        return self.pool(x)


def branching() -> tuple[float, int]:
    net, plain = pair("h2", Branching)
    net.float()
    plain.float()
    errors = []
    for size in (24, 25, 26, 27, 14, 15, 24, 12):
        x = torch.randn(2, 3, size, size + 1, generator=torch.Generator().manual_seed(size))
        errors.append(relative(net(x), plain(x)))
    return max(errors), len(net.graphs)


def test_models_that_branch_on_sizes_have_a_graph_for_each_case() -> None:
    for error, graphs in run(2, branching):
        assert error < 1e-5 and graphs > 2


class ModeDependent(nn.Module):
    """Fractions of sizes, different constants in each mode, a head for training only, chained buffer writes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.aux = nn.Conv2d(8, 8, 1)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("ema", torch.zeros(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        y = self.conv(x) * (3.5 / (h * w)) * self.gain.type_as(x)
        self.ema.mul_(0.9).add_(y.detach().mean((0, 2, 3), keepdim=True))
        if self.training:
            y = self.aux(y) * torch.tensor(2.0, dtype=torch.float64)
        return y * torch.tensor(3.0, dtype=torch.float64) - self.ema.detach()


def alternate_modes(grid: str, first: bool) -> float:
    torch.manual_seed(3)
    model = ModeDependent().double().train(first)
    net, plain = distfx.parallelize(model, distfx.Grid.parse(grid)), copy.deepcopy(model)
    errors = []
    for train in (first, not first, first):
        net.train(train)
        plain.train(train)
        x = torch.randn(4, 3, 6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        have, want = net(x), plain(x)
        errors.append(relative(have, want))
        for module in (net, plain):
            module.zero_grad()
        have.square().sum().backward()
        want.square().sum().backward()
        expected = dict(plain.named_parameters())
        pairs = [(p.grad, expected[n].grad) for n, p in net.named_parameters() if expected[n].grad is not None]
        errors += [relative(a.full_tensor(), b) for a, b in pairs]
    errors += [relative(value, plain.state_dict()[key]) for key, value in net.full_state_dict().items()]
    return max(errors)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("grid", ["c2", "n2", "h2"])
def test_models_that_depend_on_the_mode(grid: str, first: bool) -> None:
    assert max(run(2, alternate_modes, grid, first)) < 1e-10
