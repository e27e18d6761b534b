"""Every other kind of layer: pooling, batch norm, linear, reshapes, elementwise, padding, reductions, parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distfx
from tests.exact import check, relative
from tests.models import beside, cases, layers, on, same, stack
from tests.ranks import run, run_raises

ALGORITHMS = ("stationary-x", "stationary-y", "stationary-w")


# -------------------------------------------------------------------------------------------------- pooling


POOLING = [
    "MaxPool2d(2)",
    "MaxPool2d(3)",
    "MaxPool2d(3, 2, 1)",
    "MaxPool2d(3, 2, 1, ceil_mode=True)",
    "MaxPool2d(2, 2, ceil_mode=True)",
    "MaxPool2d(3, 1, 1, dilation=2)",
    "MaxPool2d((2, 3), (3, 1), (1, 1), dilation=(3, 1), ceil_mode=True)",
    "MaxPool2d(1, 3)",
    "AvgPool2d(2)",
    "AvgPool2d(3, 2, 1)",
    "AvgPool2d(3, 2, 1, count_include_pad=False)",
    "AvgPool2d(3, 2, 1, ceil_mode=True)",
    "AvgPool2d(4, 3, 2, ceil_mode=True, count_include_pad=False)",
    "AvgPool2d(2, 2, ceil_mode=True)",
    "AvgPool2d(3, 2, 1, divisor_override=2)",
    "AvgPool2d(3, 2, 1, True, False, divisor_override=5)",
    "LPPool2d(2, 3, 2)",
]


@on("h2w2", "c2h2")
def test_pooling(world: int, grid: str) -> None:
    beside(grid, (2, 3, 11, 14), [(pool,) for pool in POOLING], "Conv2d(3, 3, 1)")


@cases(
    "grid shape pool",
    [
        ("w2", (2, 2, 15), "MaxPool1d(3, 2, 1)"),
        ("w3", (2, 2, 15), "MaxPool1d(4, 3, 2, dilation=2, ceil_mode=True)"),
        ("w2", (2, 2, 15), "AvgPool1d(3, 2, 1)"),
        ("w3", (2, 2, 16), "AvgPool1d(4, 3, 1, ceil_mode=True, count_include_pad=False)"),
        ("n2w2", (2, 2, 16), "AvgPool1d(5, 1, 2, ceil_mode=True)"),
        ("w4", (2, 2, 5), "MaxPool1d(5, 1, 2)"),
        ("d2", (2, 2, 7, 6, 5), "MaxPool3d(3, 2, 1)"),
        ("d2w2", (1, 2, 7, 6, 5), "MaxPool3d((2, 1, 3), (2, 3, 1), (1, 0, 1), ceil_mode=True)"),
        ("d2h2", (1, 2, 7, 6, 5), "AvgPool3d(3, 2, 1)"),
        ("h2w2", (1, 2, 7, 6, 5), "AvgPool3d(3, 2, 1, ceil_mode=True, count_include_pad=False)"),
        ("d2", (1, 2, 7, 6, 5), "AvgPool3d(2, 1, 1, divisor_override=3)"),
        ("h4", (1, 2, 5, 5), "MaxPool2d(5, 1, 2)"),
        ("h4", (1, 2, 3, 5), "MaxPool2d(3, 1, 1)"),
        ("h4", (1, 2, 6, 5), "AvgPool2d(3, 3)"),
        ("h4", (1, 2, 3, 5), "AvgPool2d(3, 1, 1, count_include_pad=False)"),
        ("c4", (1, 2, 6, 5), "MaxPool2d(2)"),
    ],
)
def test_pooling_of_other_ranks_and_tiny_shards(world: int, grid: str, shape: tuple[int, ...], pool: str) -> None:
    same(grid, shape, f"Conv{len(shape) - 2}d(2, 3, 1)", pool)


@cases(
    "grid shape pool",
    [
        ("w2", (2, 2, 9), "AdaptiveAvgPool1d(1)"),
        ("h2w2", (2, 2, 7, 6), "AdaptiveAvgPool2d(1)"),
        ("d2h2", (2, 2, 4, 5, 3), "AdaptiveAvgPool3d(1)"),
        ("h2", (2, 2, 7, 6), "AdaptiveAvgPool2d((3, 2))"),
        ("h2", (2, 2, 7, 6), "AdaptiveAvgPool2d((None, 1))"),
        ("h2w2", (2, 2, 7, 6), "AdaptiveMaxPool2d(1)"),
        ("c2h2", (2, 2, 7, 6), "AdaptiveMaxPool2d((2, 3))"),
        ("h2", (2, 2, 7, 6), "f('F.max_pool2d(x, 3, 2, 1, return_indices=True)[0]')"),
    ],
)
def test_adaptive_pooling(world: int, grid: str, shape: tuple[int, ...], pool: str) -> None:
    same(grid, shape, f"Conv{len(shape) - 2}d(2, 3, 1)", pool)


# ----------------------------------------------------------------------------------------------- batch norm


@pytest.mark.parametrize("train", (True, False), ids=("train", "eval"))
@pytest.mark.parametrize(
    "norm",
    [
        "BatchNorm2d(5)",
        "BatchNorm2d(5, affine=False)",
        "BatchNorm2d(5, track_running_stats=False)",
        "BatchNorm2d(5, affine=False, track_running_stats=False)",
        "BatchNorm2d(5, momentum=0.01, eps=1e-3)",
        "BatchNorm2d(5, momentum=1.0)",
    ],
)
@on("n2h2", "c2h2")
def test_batch_norm(world: int, grid: str, norm: str, train: bool) -> None:
    texts = ("Conv2d(3, 5, 3, padding=1, bias=False)", norm, "Conv2d(5, 3, 3)")
    check(stack, grid, [(3, 3, 6, 5), (2, 3, 5, 5)], kwargs=layers(*texts), train=train)


def cumulative() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5, momentum=None))
    distfx.parallelize(model, distfx.Grid(h=2))


def test_batch_norm_with_cumulative_average_is_refused_by_name() -> None:
    failures = run_raises(2, cumulative)
    assert len(set(failures)) == 1 and failures[0] is not None
    assert "1 is a BatchNorm2d with momentum=None" in failures[0].message and "momentum=0.1" in failures[0].message


@cases(
    "grid shape texts",
    [
        ("n2", (4, 3, 9), ("Conv1d(3, 5, 3, bias=False)", "BatchNorm1d(5)")),
        ("w3", (2, 3, 9), ("Conv1d(3, 5, 3, bias=False)", "BatchNorm1d(5)")),
        ("n2c2", (4, 6), ("Linear(6, 5, bias=False)", "BatchNorm1d(5)", "ReLU()", "Linear(5, 3)")),
        ("n3", (4, 6), ("Linear(6, 5, bias=False)", "BatchNorm1d(5)", "ReLU()", "Linear(5, 3)")),
        ("d2w2", (2, 2, 4, 3, 5), ("Conv3d(2, 3, 3, padding=1, bias=False)", "BatchNorm3d(3)")),
        ("n4", (5, 3, 2, 1), ("Conv2d(3, 4, 1, bias=False)", "BatchNorm2d(4)")),
        ("n4", (4, 3, 1, 1), ("Conv2d(3, 4, 1, bias=False)", "BatchNorm2d(4)")),
        ("h4", (2, 3, 3, 2), ("Conv2d(3, 4, 1, bias=False)", "BatchNorm2d(4)")),
        ("h4", (4, 3, 1, 1), ("Conv2d(3, 4, 1, bias=False)", "BatchNorm2d(4)")),
        ("h8", (2, 3, 3, 2), ("Conv2d(3, 4, 1, bias=False)", "BatchNorm2d(4)")),
        ("c4", (2, 3, 3, 2), ("Conv2d(3, 5, 1, bias=False)", "BatchNorm2d(5)", "Conv2d(5, 2, 1)")),
        ("c4", (2, 3, 3, 2), ("Conv2d(3, 2, 1, bias=False)", "BatchNorm2d(2)", "Conv2d(2, 3, 1)")),
        ("c2h2", (2, 3, 1, 3), ("Conv2d(3, 1, 1, bias=False)", "BatchNorm2d(1)", "Conv2d(1, 3, 1)")),
        ("h2", (2, 3, 4, 4), ("BatchNorm2d(3)", "Conv2d(3, 4, 3, padding=1)")),
        ("c2h2", (2, 3, 4, 4), ("BatchNorm2d(3)", "Conv2d(3, 4, 3, padding=1)")),
    ],
)
def test_batch_norm_of_tiny_shards(world: int, grid: str, shape: tuple[int, ...], texts: tuple[str, ...]) -> None:
    """None, one or few values on a rank; every rank; as the first layer."""
    same(grid, shape, *texts)


class FarFromZero(nn.Module):
    """Batch norm of values with a mean of 1e6: E[x^2] - E[x]^2 would lose all digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1, bias=False)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x) + 1e6)


@on("n2h2", "h4")
def test_batch_norm_is_stable(world: int, grid: str) -> None:
    """The input has lost six digits before; what is left is kept: the variance has them all."""
    results = run(world, far_from_zero, grid)
    assert max(results) < 1e-8, results


def far_from_zero(grid: str) -> float:
    torch.manual_seed(0)
    model = FarFromZero().double()
    net = distfx.parallelize(model, grid)
    x = torch.randn(4, 3, 5, 6, dtype=torch.float64)
    return relative(net(x), model(x))


class FrozenNorm(nn.Module):
    """A batch norm that stays in eval mode while the rest trains, as in detection models."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.frozen = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(6)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv2(F.relu(self.frozen(self.conv1(x)))))


@on("n2c2", "c2h2")
def test_frozen_batch_norm(world: int, grid: str) -> None:
    check(FrozenNorm, grid, [(2, 3, 6, 5)])


# --------------------------------------------------------------------------------------------------- linear


@pytest.mark.parametrize("strategy", ("auto", *ALGORITHMS))
@cases(
    "grid shape texts",
    [
        ("c2", (3, 6), ("Linear(6, 8)", "Tanh()", "Linear(8, 4)")),
        ("c3", (3, 7), ("Linear(7, 11)", "Tanh()", "Linear(11, 5, bias=False)")),
        ("c4", (3, 7), ("Linear(7, 11)", "Tanh()", "Linear(11, 2)")),
        ("n2c2", (3, 7), ("Linear(7, 5)", "Tanh()", "Linear(5, 3)")),
        ("c2", (2, 5, 6), ("Linear(6, 7)", "GELU()", "Linear(7, 4)")),
        ("n2c2", (2, 3, 5, 6), ("Linear(6, 7)", "GELU()", "Linear(7, 4)")),
    ],
)
def test_linear(world: int, grid: str, shape: tuple[int, ...], texts: tuple[str, ...], strategy: str) -> None:
    same(grid, shape, *texts, strategy=strategy)


@on("n2", "n3")
def test_linear_by_samples(world: int, grid: str) -> None:
    same(grid, (4, 6), "Linear(6, 8)", "Tanh()", "Linear(8, 4)")


# ------------------------------------------------------------------------------------------------- reshapes


FLATTENED = [
    "x.view(x.size(0), -1)",
    "x.view(x.shape[0], 4 * 8 * 8)",
    "x.view(-1, 256)",
    "x.reshape(len(x), -1)",
    "torch.flatten(x, 1)",
    "torch.flatten(x, start_dim=1, end_dim=-1)",
    "x.flatten(2).flatten(1)",
    "x.flatten(1).unsqueeze(2).squeeze(-1)",
    "x.view(x.size(0), 2, 2, 8, 8).flatten(1)",
    "x.contiguous().view(x.size(0), 4, 64).reshape(x.size(0), 256)",
    "x.permute(0, 2, 3, 1).flatten(1)",
    "x.transpose(2, 3).reshape(x.size(0), -1)",
]


@on("c2h2", "c4")
def test_flatten_to_linear(world: int, grid: str) -> None:
    beside(grid, (4, 3, 32, 32), [(f"f({text!r})", "Linear(256, 3)") for text in FLATTENED], "Conv2d(3, 4, 3, 4, 1)")


@cases(
    "grid text",
    [
        ("c2", "x.view(x.size(0), 2, 3, *x.shape[2:]).mean(2)"),
        ("c3", "x.view(x.size(0), 3, 2, *x.shape[2:]).sum(1)"),
        ("c4", "x.view(x.size(0), 2, 3, *x.shape[2:]).mean(2)"),
        ("c2", "x.view(x.size(0), 2, 3, *x.shape[2:]).transpose(1, 2).flatten(1, 2)"),  # a channel shuffle
        ("h2", "x.flatten(2)"),
        ("w2", "x.flatten(2)"),
        ("n2", "x.flatten(0, 1)"),
        ("c2", "x.flatten(0, 1)"),
        ("h2", "x.flatten()"),
        ("n2h2", "x.flatten()"),
        ("h2w2", "x.flatten(2).transpose(1, 2)"),
        ("h2", "x.unsqueeze(1)"),
        ("c2h2", "x.unsqueeze(2).squeeze(2)"),
        ("h2", "x.permute(0, 2, 3, 1)"),
        ("c2h2", "x.permute(0, 2, 3, 1).contiguous()"),
    ],
)
def test_reshape(world: int, grid: str, text: str) -> None:
    same(grid, (2, 3, 8, 6), "Conv2d(3, 6, 3, padding=1)", f"f({text!r})")


@on("n2c2", "c4")
def test_flatten_layer(world: int, grid: str) -> None:
    """One channel more than the axis divides; the linear layer then has whole channels for its granule."""
    same(
        grid, (2, 3, 28, 28), "Conv2d(3, 5, 3, 7, 1)", "ReLU()", "Flatten()", "Linear(80, 6)", "ReLU()", "Linear(6, 2)"
    )


# ---------------------------------------------------------------------------------------------- elementwise


ELEMENTWISE = [
    "ReLU()",
    "ReLU(inplace=True)",
    "SiLU(inplace=True)",
    "GELU()",
    "GELU(approximate='tanh')",
    "LeakyReLU(0.1, inplace=True)",
    "PReLU()",
    "PReLU(5)",
    "ELU()",
    "Hardswish()",
    "Hardtanh(-0.1, 0.2)",
    "Mish()",
    "Softplus()",
    "Identity()",
    "f('x * x.sigmoid() + x / 3 - 1')",
    "f('x.mul_(2).relu_()')",
    "f('x.clamp(min=-0.2).pow(2)')",
    "f('torch.where(x > 0, x, -0.5 * x)')",
    "f('torch.maximum(x, 0.1 * x)')",
    "f('x + torch.ones_like(x)')",
    "f('x * 2 if x.shape[1] == 5 else x')",
    "f('x.double().float().double()')",
]


@on("c2", "n2h2")
def test_elementwise(world: int, grid: str) -> None:
    beside(grid, (2, 3, 5, 6), [("Conv2d(3, 5, 3, padding=1)", text, "Conv2d(5, 4, 1)") for text in ELEMENTWISE])


@on("c3", "h4")
def test_prelu_slopes_of_uneven_channels(world: int, grid: str) -> None:
    same(grid, (2, 3, 5, 6), "Conv2d(3, 7, 1)", "PReLU(7)", "Conv2d(7, 4, 1)")


class Gate(nn.Module):
    """Squeeze and excite: a (N, C, 1, 1) gate."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        make = nn.Linear if linear else lambda a, b: nn.Conv2d(a, b, 1)
        self.down, self.up = make(6, 2), make(2, 6)
        self.linear = linear
        self.head = nn.Conv2d(6, 4, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.linear:
            y = self.up(F.relu(self.down(x.mean((2, 3)))))[:, :, None, None]
        else:
            y = self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1))))
        return self.head(x * y.sigmoid())


@pytest.mark.parametrize("linear", (True, False), ids=("linear", "conv"))
@on("c2h2", "h2w2")
def test_squeeze_and_excite(world: int, grid: str, linear: bool) -> None:
    check(Gate, grid, [(2, 3, 7, 6)], kwargs={"linear": linear})


class Branches(nn.Module):
    """Sums and products of branches, one of them in place; a branch used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(3, 4, 1)
        self.c = nn.Conv2d(4, 4, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        c = a * b
        c += self.c(a)
        return F.relu_(c) + b


@pytest.mark.parametrize("strategy", ("auto", *ALGORITHMS))
@on("c2h2", "n2c2")
def test_branches(world: int, grid: str, strategy: str) -> None:
    check(Branches, grid, [(2, 3, 7, 6)], strategy=strategy)


@cases(
    "grid text",
    [
        ("c2", "x * x[:, :1]"),
        ("h2", "x * x[:, :, :1]"),
        ("h2", "x - x.mean((2, 3), keepdim=True)"),
        ("c2", "x - x.mean(1, keepdim=True)"),
        ("c2h2", "x / (x.square().sum(1, keepdim=True) + 1).sqrt()"),
        ("n2c2", "x - x.mean(0)"),
        ("c2h2", "x * torch.linspace(0, 1, 6, dtype=x.dtype)"),
        ("w2", "x * torch.linspace(0, 1, 6, dtype=x.dtype)"),
        ("h2", "torch.cat([x, 2 * x], 1)"),
        ("c2", "torch.cat([x, 2 * x], 1)"),
        ("h2", "x[:, :, ::2, 1:]"),
        ("c2", "sum(x.chunk(2, 1))"),
        ("h2", "x.flip(2)"),
        ("h2", "x.cumsum(2)"),
        ("h2", "x @ x.transpose(2, 3)"),
        ("h2", "x.std((2, 3))"),
        ("h2w2", "x.amax((2, 3))"),
        ("h2", "x.roll(1, 2)"),
    ],
)
def test_other_expressions(world: int, grid: str, text: str) -> None:
    """Broadcasts between split dims, and operators without a rule: right in any case."""
    same(grid, (2, 3, 8, 6), "Conv2d(3, 4, 3, padding=1)", f"f({text!r})")


# -------------------------------------------------------------------------------------------------- padding


PADDED = [
    "F.pad(x, (1, 2))",
    "F.pad(x, (1, 2, 3, 4))",
    "F.pad(x, (1, 2, 3, 4), value=-1.5)",
    "F.pad(x, (0, 0, 0, 9))",
    "F.pad(x, (-1, -2, -2, -1))",
    "F.pad(x, (2, -2, -3, 3), value=0.5)",
    "F.pad(x, (0, 0, -7, 7))",
    "F.pad(x, (0, 1, 0, 0, 1, 2))",
    "F.pad(x, (1, 0, 1, 0, 0, 0, 1, 2))",
    "F.pad(x, (0, 0, 0, 0, -1, 1))",
    "F.pad(x, (1, 2, 3, 4), 'reflect')",
    "F.pad(x, (0, 0, 7, 7), 'reflect')",
    "F.pad(x, (1, 2, 3, 9), 'replicate')",
    "F.pad(x, (1, 2, 8, 5), 'circular')",
    "F.pad(x, (1, -1, -2, 2), 'replicate')",
]


@on("h2w2", "h4")
def test_pad(world: int, grid: str) -> None:
    beside(grid, (2, 3, 8, 6), [(f"f({text!r})",) for text in PADDED], "Conv2d(3, 4, 3, padding=1)")


@pytest.mark.parametrize("layer", ["ZeroPad2d((1, 0, 2, 1))", "ReplicationPad2d(2)", "ConstantPad2d(-1, 0.0)"])
@on("c2h2", "h2w2")
def test_pad_layers_first(world: int, grid: str, layer: str) -> None:
    """On the input itself, which a convolution then reads through its own window."""
    same(grid, (2, 3, 10, 9), layer, "Conv2d(3, 4, 3, 2)", "ReLU()", "Conv2d(4, 2, 2)")


# ----------------------------------------------------------------------------------------------- reductions


REDUCED = [
    "x.mean((2, 3))",
    "x.mean([-1, -2], keepdim=True)",
    "x.mean(2)",
    "x.mean(1)",
    "x.mean(0, keepdim=True)",
    "x.mean()",
    "x.sum((2, 3))",
    "x.sum(1, keepdim=True)",
    "x.sum(0)",
    "x.sum()",
    "x.square().mean((0, 2, 3)).sqrt()",
    "x.sum(-1).mean(-1)",
    "x.mean((2, 3)).softmax(1)",
]


@on("c4", "h2w2")
def test_reductions(world: int, grid: str) -> None:
    beside(grid, (3, 3, 5, 6), [(f"f({text!r})",) for text in REDUCED], "Conv2d(3, 5, 3, padding=1)")


# --------------------------------------------------------------------------------------- inputs and outputs


class Outputs(nn.Module):
    """Features of two levels and a pooled one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.low = nn.Conv2d(3, 4, 3, 2, 1)
        self.high = nn.Conv2d(4, 6, 3, 2, 1)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        low = self.low(x)
        high = self.high(torch.tanh(low))
        pooled = high.mean((2, 3))
        if self.kind == "dict":
            return {"low": low, "high": high, "pooled": pooled}
        return (low, high, pooled) if self.kind == "tuple" else [low, high, pooled, low.sum()]


@pytest.mark.parametrize("kind", ("tuple", "list", "dict"))
@on("c2h2", "n2c2")
def test_several_outputs(world: int, grid: str, kind: str) -> None:
    check(Outputs, grid, [(2, 3, 9, 10)], kwargs={"kind": kind})


class SameOutput(nn.Module):
    """One tensor returned twice, and the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.conv(x)
        return y, y, x


@on("c2", "h2")
def test_one_tensor_returned_twice(world: int, grid: str) -> None:
    check(SameOutput, grid, [(2, 3, 6, 6)])


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
    """Layer scale, a parameter in an expression, one used in two ways, a buffer, and a weight made in forward."""

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
    """A parameter with a dim of space."""

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
    """Weight norm, a parametrization of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


@on("n2", "c2", "h2")
def test_weight_norm(world: int, grid: str) -> None:
    check(Normalized, grid, [(2, 3, 6, 5)])


class Reparametrised(nn.Module):
    """Norms of weights, as parametrizations and as hooks: the power iteration of a spectral norm writes buffers."""

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
    """Weight standardisation with a gain, by hand or, as timm does it, by a batch norm of the weight."""

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
def test_computed_weights_are_computed_in_shards(world: int, grid: str, by_norm: bool) -> None:
    results = check(StandardisedStack, grid, [(2, 3, 8, 7)], kwargs={"by_norm": by_norm}, strategy="stationary-y")
    of_weights = [row for row in results[0]["rows"] if row.op.startswith(("batch_norm", "rsqrt"))]
    assert len(of_weights) == 2 and all("/c" in row.layout for row in of_weights), of_weights
    others = [row for row in results[0]["rows"] if row.op != "input" and "conv" not in row.op]
    assert not [move for row in others for move in row.moves if not move.startswith("fan")], others


def frozen(grid: str, names: tuple[str, ...]) -> dict[str, float]:
    """The errors of a model some of whose parameters need no gradient; one that has a gradient all the same is 1."""
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
    """Under ``no_grad`` nothing is kept for a backward pass."""
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
    """The errors of gradients that three calls have added up."""
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


# --------------------------------------------------------------------------------------------------- tokens


class Tokens(nn.Module):
    """Attention over space: rows of tokens stay where they are, keys and values are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, c, h, w = x.shape
        t = self.norm(x.flatten(2).transpose(1, 2))
        t = t + F.scaled_dot_product_attention(self.q(t), self.k(t), self.v(t))
        return self.head(t.transpose(1, 2).reshape(n, c, h, w))


class Shuffled(nn.Module):
    """What follows a pixel shuffle works on rows in pairs, until a convolution wants single ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(F.pixel_shuffle(self.up(x), 2)) * 2)


@pytest.mark.parametrize("model", [Tokens, Shuffled])
@on("h3", "n2h2", "c2h2", "h2w2")
def test_granules(world: int, grid: str, model: type[nn.Module]) -> None:
    check(model, grid, [(4, 3, 10, 9), (2, 3, 7, 8)])


def test_queries_stay_split() -> None:
    rows = {row.node: row for row in distfx.plan(Tokens(), "h2", (4, 3, 10, 9)).rows}
    attention = rows["scaled_dot_product_attention"]
    assert attention.layout == "N C/h[W] W"
    assert [move.split("(")[0] for move in attention.moves] == ["all_gather", "all_gather"]


# ---------------------------------------------------------------------------------------------------- modes


class Frozen(nn.Module):
    """Features without gradients, a norm that is kept in eval mode, a head whose output nobody uses."""

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
        module.norm.train()  # one module by itself
    compare()
    for module in (net, plain):
        module.eval()
    compare()
    assert all(module.training for module in model.modules() if module is not model.norm), (
        "the model itself was touched"
    )
    return errors


@on("n2", "h2", "c2")
def test_every_module_has_its_mode(world: int, grid: str) -> None:
    for errors in run(world, modes, grid):
        assert max(errors) < 1e-10


# ------------------------------------------------------------------------------------------ parts of a batch


def apart(grid: str, batch_norm: str, parts: list[tuple[slice, ...]]) -> tuple[float, int]:
    """Batch norms of each of ``parts`` by itself, against the plain layer on each; running statistics are averages."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()
    plain = copy.deepcopy(model)
    net = distfx.parallelize(model, grid, batch_norm=batch_norm)
    x = torch.randn(4, 3, 6, 5, dtype=torch.float64)
    errors = []
    for _ in range(2):
        for module in (net, plain):
            module.zero_grad()
        with distfx.record_comm() as ledger:
            y = net(x)
            y.square().sum().backward()
        assert net.plan.bytes() == ledger.bytes()
        norm, want, running = plain[1], torch.empty_like(y), []
        for part in parts:
            mean, var = norm.running_mean.clone(), norm.running_var.clone()
            z = F.batch_norm(plain[0](x[part]), mean, var, norm.weight, norm.bias, training=True)
            want[part] = plain[3](plain[2](z))
            running.append(torch.stack([mean, var]))
        want.square().sum().backward()
        with torch.no_grad():
            norm.running_mean, norm.running_var = torch.stack(running).mean(0)
            norm.num_batches_tracked += 1
        errors.append(relative(y, want))
        errors += [relative(net.get_parameter(n).grad.full_tensor(), p.grad) for n, p in plain.named_parameters()]
        errors += [relative(net.full_state_dict()[n], value) for n, value in plain.state_dict().items()]
    return max(errors), sum(row.bytes_forward for row in net.plan.rows if row.op == "batch_norm")


every = slice(None)
SAMPLES = [(slice(0, 2),), (slice(2, 4),)]
ROWS = [(every, every, slice(0, 3)), (every, every, slice(3, 6))]


@cases(
    "grid batch_norm parts",
    [
        ("n2", "local", SAMPLES),
        ("h2", "local", ROWS),
        ("n2h2", "local", [(n, c, h) for (n,) in SAMPLES for _, c, h in ROWS]),
        ("n2h2", "h", SAMPLES),
        ("n2h2", "n", ROWS),
        ("c2h2", "n", ROWS),
    ],
)
def test_batch_norm_of_parts(world: int, grid: str, batch_norm: str, parts: list[tuple[slice, ...]]) -> None:
    for error, _ in run(world, apart, grid, batch_norm, parts):
        assert error < 1e-10


def one_value_a_part() -> None:
    net = distfx.parallelize(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), "n2", batch_norm="local")
    net(torch.randn(3, 3, 1, 1))  # one sample for rank 0, two for rank 1


def test_a_part_needs_more_than_one_value() -> None:
    messages = {failure.message if failure else "" for failure in run_raises(2, one_value_a_part)}
    assert len(messages) == 1 and "more than one value" in messages.pop()


def test_batch_norm_of_unknown_parts_is_refused() -> None:
    with pytest.raises(distfx.DistfxError, match="it is 'global'"):
        distfx.parallelize(nn.BatchNorm2d(3), {}, batch_norm="sync")


class Sized(nn.Module):
    """Gives a size, a view of its input, and a sum, which their user writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, int, Tensor]:
        y = self.conv(x)
        return y, y.shape[2] // 2, x.flatten(1)


def sized(outputs: str) -> tuple[int, bool, tuple[int, ...]]:
    model = Sized().to(memory_format=torch.channels_last)
    net = distfx.parallelize(model, "h2", outputs=outputs)
    x = torch.randn(2, 3, 10, 8, requires_grad=True)
    y, half, flat = net(x)
    y += 1
    flat = flat * 1
    (y.sum() + flat.sum()).backward()
    return half, net.conv.weight.to_local().is_contiguous(memory_format=torch.channels_last), tuple(y.shape)


def test_outputs_are_the_users_own_and_sizes_may_be_among_them() -> None:
    assert run(2, sized, "global") == [(5, True, (2, 4, 10, 8))] * 2
    assert run(2, sized, "local") == [(5, True, (2, 4, 5, 8))] * 2
