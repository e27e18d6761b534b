"""Layers other than convolutions: pooling, linear, reshapes, elementwise, padding, reductions, tokens, outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.exact import check
from support.models import ALGORITHMS, beside, cases, on, same
from support.ranks import run
from torch import Tensor, nn

import distfx

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
def test_pooling_in_1d_and_3d_and_tiny_shards(world: int, grid: str, shape: tuple[int, ...], pool: str) -> None:
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
    """The axis does not divide the channels, so the granules of the linear layer are whole channels."""
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
    """Squeeze and excite, with a gate of shape (N, C, 1, 1)."""

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
    """Sums and products of branches, one of them in place, and a branch that is used twice."""

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
    """Broadcasts between split dims, and other operators, by a rule or by a fallback."""
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
    "F.pad(x, (-1, 3, 2, -2), 'circular')",
    "F.pad(x, (-1, 0, -2, -1), 'circular')",
]


@on("h2w2", "h4")
def test_pad(world: int, grid: str) -> None:
    beside(grid, (2, 3, 8, 6), [(f"f({text!r})",) for text in PADDED], "Conv2d(3, 4, 3, padding=1)")


@pytest.mark.parametrize("layer", ["ZeroPad2d((1, 0, 2, 1))", "ReplicationPad2d(2)", "ConstantPad2d(-1, 0.0)"])
@on("c2h2", "h2w2")
def test_pad_layers_first(world: int, grid: str, layer: str) -> None:
    """Padding of the input, which a convolution then reads through its own window."""
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


class MixedOutputs(nn.Module):
    """Returns a tensor that its user modifies in place, a size, and a view of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, int, Tensor]:
        y = self.conv(x)
        return y, y.shape[2] // 2, x.flatten(1)


def sized(outputs: str) -> tuple[int, bool, tuple[int, ...]]:
    model = MixedOutputs().to(memory_format=torch.channels_last)
    net = distfx.parallelize(model, "h2", outputs=outputs)
    x = torch.randn(2, 3, 10, 8, requires_grad=True)
    y, half, flat = net(x)
    y += 1
    flat = flat * 1
    (y.sum() + flat.sum()).backward()
    return half, net.conv.weight.to_local().is_contiguous(memory_format=torch.channels_last), tuple(y.shape)


def test_outputs_may_be_modified_and_may_contain_sizes() -> None:
    assert run(2, sized, "global") == [(5, True, (2, 4, 10, 8))] * 2
    assert run(2, sized, "local") == [(5, True, (2, 4, 5, 8))] * 2


# --------------------------------------------------------------------------------------------------- tokens


class Tokens(nn.Module):
    """Attention over space: queries stay split by rows, keys and values are gathered."""

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
    """After a pixel shuffle, rows are split in pairs, until a convolution needs single rows."""

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
