"""Parameters that are shared, computed, normalised, frozen or used in expressions; modules in different modes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.exact import check, relative
from support.models import ALGORITHMS, cases, on, stack
from support.ranks import run
from torch import Tensor, nn

import distfx

# ------------------------------------------------------------------------------------------------ parameters


class Twice(nn.Module):
    """One convolution applied twice, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.one = nn.Conv2d(4, 6, 1)
        self.two = nn.Conv2d(4, 6, 1)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(torch.tanh(self.conv(x)))
        return self.one(x) * self.two(F.avg_pool2d(x, 3, 1, 1))


@pytest.mark.parametrize("strategy", ("auto", *ALGORITHMS))
@on("n2h2", "c4")
def test_shared_parameters(world: int, grid: str, strategy: str) -> None:
    check(Twice, grid, [(2, 4, 6, 5)], strategy=strategy)


class Scaled(nn.Module):
    """Layer scale, parameters in expressions, one used in two ways, a buffer, and a weight computed in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.beta = nn.Parameter(torch.randn(1, 5, 1, 1))
        self.alpha = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("mean", torch.rand(3, 1, 1))
        self.weight = nn.Parameter(torch.randn(4, 5, 3, 3) / 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x - self.mean)
        x = x * self.gamma[:, None, None] + self.beta * self.alpha
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, padding=1) + self.alpha * x.mean(1, keepdim=True)


@on("", "c3", "c2h2", "h2w2")
def test_parameters_in_expressions(world: int, grid: str) -> None:
    check(Scaled, grid, [(2, 3, 6, 5)])


class PositionEmbedding(nn.Module):
    """A parameter with spatial dims."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, 4, 1)
        self.where = nn.Parameter(torch.randn(1, 4, 8, 8))
        self.head = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x) + self.where)


@on("c2h2", "h3")
def test_parameter_with_space(world: int, grid: str) -> None:
    check(PositionEmbedding, grid, [(2, 3, 32, 32)])


class Normalized(nn.Module):
    """Weight norm, as a parametrization of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


@on("n2", "c2", "h2")
def test_weight_norm(world: int, grid: str) -> None:
    check(Normalized, grid, [(2, 3, 6, 5)])


class Reparametrised(nn.Module):
    """Norms of weights, as parametrizations and as hooks. The power iteration of a spectral norm writes buffers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        make = getattr(nn.utils.parametrizations, name[4:]) if name.startswith("new_") else getattr(nn.utils, name)
        self.first = make(nn.Conv2d(3, 4, 3, padding=1))
        self.last = make(nn.Conv2d(4, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", ["weight_norm", "new_spectral_norm", "spectral_norm"])
@on("c2h2", "n2c2")
def test_norms_of_weights(world: int, grid: str, name: str, train: bool) -> None:
    check(Reparametrised, grid, [(2, 3, 6, 5)], kwargs={"name": name}, train=train, steps=2)


class Standardised(nn.Conv2d):
    """Weight standardisation with a gain, written out, or as in timm by a batch norm of the weight."""

    def __init__(self, *args: Any, by_norm: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.by_norm = by_norm
        self.gain = nn.Parameter(torch.randn(self.out_channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        if self.by_norm:
            flat = w.reshape(1, self.out_channels, -1)
            w = F.batch_norm(flat, None, None, weight=self.gain.view(-1), training=True).reshape_as(w)
        else:
            var, mean = torch.var_mean(w, dim=(1, 2, 3), keepdim=True, correction=0)
            w = self.gain * (w - mean) * torch.rsqrt(var + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


class StandardisedStack(nn.Sequential):
    def __init__(self, by_norm: bool) -> None:
        first = Standardised(3, 8, 3, padding=1, by_norm=by_norm)
        super().__init__(first, nn.ReLU(), Standardised(8, 6, 3, stride=2, by_norm=by_norm))


@pytest.mark.parametrize("by_norm", [False, True])
@on("c2", "c3", "c2h2", "n2c2")
def test_computed_weights_are_sharded(world: int, grid: str, by_norm: bool) -> None:
    results = check(StandardisedStack, grid, [(2, 3, 8, 7)], kwargs={"by_norm": by_norm}, strategy="stationary-y")
    of_weights = [row for row in results[0]["rows"] if row.op.startswith(("batch_norm", "rsqrt"))]
    assert len(of_weights) == 2 and all("/c" in row.layout for row in of_weights), of_weights
    others = [row for row in results[0]["rows"] if row.op != "input" and "conv" not in row.op]
    assert not [move for row in others for move in row.moves if not move.startswith("to_varying")], others


def frozen(grid: str, names: tuple[str, ...]) -> dict[str, float]:
    """The errors of a model with frozen parameters. The error is 1 for a frozen parameter that has a gradient."""
    torch.manual_seed(5)
    texts = ("Conv2d(3, 4, 3, padding=1, bias=False)", "BatchNorm2d(4)", "ReLU()", "Conv2d(4, 5, 3, 2, 1)", "Flatten()")
    model = stack(*texts, "Linear(5 * 16 * 16, 3)").double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(names))
    plain = copy.deepcopy(model)
    net = distfx.parallelize(model, grid)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with distfx.record_comm() as ledger:
        have = net(x)
        have.square().sum().backward()
    want = plain(x)
    want.square().sum().backward()
    errors = {"output": relative(have, want), "bytes": float(abs(net.plan.bytes() - ledger.bytes()))}
    expected = dict(plain.named_parameters())
    for name, parameter in net.named_parameters():
        assert parameter.requires_grad == expected[name].requires_grad
        if expected[name].grad is None:
            errors[name] = float(parameter.grad is not None)
        else:
            errors[name] = relative(parameter.grad.full_tensor(), expected[name].grad)
    return errors


@cases(
    "grid names",
    [
        (grid, names)
        for grid in ("n2", "c2", "h2", "n2c2")
        for names in (("0", "1"), ("3",), ("5", "3"), ("0.weight", "5.bias"))
    ],
)
def test_frozen_parameters(world: int, grid: str, names: tuple[str, ...]) -> None:
    for errors in run(world, frozen, grid, names):
        assert max(errors.values()) < 1e-10, errors


@on("c2", "h2", "n2")
def test_no_gradients_at_all(world: int, grid: str) -> None:
    """Under ``no_grad`` nothing is saved for backward."""
    for error, needs in run(world, without_gradients, grid):
        assert error < 1e-12 and not needs


def without_gradients(grid: str) -> tuple[float, bool]:
    torch.manual_seed(5)
    model = stack("Conv2d(3, 4, 3, padding=1)", "BatchNorm2d(4)", "Conv2d(4, 2, 3)").double().eval()
    net = distfx.parallelize(model, grid)
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    with torch.no_grad():
        have, want = net(x), model(x)
    return relative(have, want), have.requires_grad


def accumulated(grid: str) -> dict[str, float]:
    """The errors of gradients accumulated over three calls."""
    torch.manual_seed(5)
    model = stack("Conv2d(3, 4, 3, padding=1, bias=False)", "BatchNorm2d(4)", "ReLU()", "Conv2d(4, 2, 3)").double()
    plain = copy.deepcopy(model)
    net = distfx.parallelize(model, grid)
    for batch in (2, 3, 2):
        x = torch.randn(batch, 3, 7, 6, dtype=torch.float64)
        net(x).square().sum().backward()
        plain(x).square().sum().backward()
    expected = dict(plain.named_parameters())
    return {name: relative(p.grad.full_tensor(), expected[name].grad) for name, p in net.named_parameters()}


@on("n2h2", "c2h2")
def test_gradients_accumulate(world: int, grid: str) -> None:
    for errors in run(world, accumulated, grid):
        assert max(errors.values()) < 1e-10, errors


# ---------------------------------------------------------------------------------------------------- modes


class Frozen(nn.Module):
    """Features without gradients, a norm that stays in eval mode, a head whose output is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.body, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            x = self.features(x)
            scale = x.square().mean(dim=(1, 2, 3), keepdim=True)
        y = self.norm(self.body(x)) / scale
        return y, self.other(y)


def first(y: Any) -> Tensor:
    return y[0].square().sum()


@on("n2", "c2", "h2", "n2h2")
def test_parts_without_gradient(world: int, grid: str) -> None:
    check(Frozen, grid, [(4, 3, 8, 9)], loss=first, bytes_equal=False, input_grad=False)


def modes(grid: str) -> list[float]:
    torch.manual_seed(0)
    model = Frozen().double()
    plain = copy.deepcopy(model)
    net = distfx.parallelize(model, grid)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    errors = []

    def compare() -> None:
        errors.append(relative(net(x)[0], plain(x)[0]))
        state = plain.state_dict()
        errors.extend(relative(value, state[name]) for name, value in net.full_state_dict().items())

    compare()
    for module in (net, plain):
        module.train()
    compare()
    for module in (net, plain):
        module.norm.train()  # a single module
    compare()
    for module in (net, plain):
        module.eval()
    compare()
    assert all(module.training for module in model.modules() if module is not model.norm), "the model was modified"
    return errors


@on("n2", "h2", "c2")
def test_every_module_has_its_own_mode(world: int, grid: str) -> None:
    for errors in run(world, modes, grid):
        assert max(errors) < 1e-10
