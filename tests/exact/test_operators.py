"""Operators beyond convolutions: exact under every layout that their rules allow, without fallbacks."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.exact import check, ranks_of
from support.ranks import run
from torch import Tensor, nn

import distfx
from distfx.rules.rule import Call, LocalContext


class Between(nn.Module):
    """The operator between two convolutions, so that its operand is split and has a gradient."""

    def __init__(self, operator: str, channels: int = 8, after: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.operator = OPERATORS[operator]() if operator in OPERATORS else None
        self.name = operator
        self.last = nn.Conv2d(after, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.operator(x) if self.operator is not None else FUNCTIONS[self.name](x)
        return self.last(x)


OPERATORS: dict[str, Callable[[], nn.Module]] = {
    "group_norm_4": lambda: nn.GroupNorm(4, 8),
    "group_norm_2": lambda: nn.GroupNorm(2, 8),
    "group_norm_1": lambda: nn.GroupNorm(1, 8),
    "instance_norm": lambda: nn.InstanceNorm2d(8, affine=True),
    "instance_norm_plain": lambda: nn.InstanceNorm2d(8),
}


def _channels_last_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2)


def _shuffle(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def _halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    return torch.cat([a * 2, b.relu(), a - b], 1)[:, 2:10]


def _attention(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    tokens = x.flatten(2).transpose(1, 2).reshape(n, h * w, 2, c // 2).transpose(1, 2)
    y = F.scaled_dot_product_attention(tokens, tokens * 0.5, tokens + 1)
    return y.transpose(1, 2).reshape(n, h * w, c).transpose(1, 2).reshape(n, c, h, w)


def _matmul(x: Tensor) -> Tensor:
    a = x.flatten(2)
    scores = torch.matmul(a.transpose(1, 2), a) / math.sqrt(8)
    return torch.matmul(a, scores.softmax(-1)).view_as(x)


def _similarity(f: Tensor) -> Tensor:
    return F.linear(f, f).softmax(1)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm_channels": _channels_last_norm,
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear_aligned": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
    "bilinear_odd": lambda x: F.interpolate(x, size=(13, 7), mode="bilinear"),
    "bilinear_factor": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "nearest": lambda x: F.interpolate(x, scale_factor=3, mode="nearest"),
    "nearest_down": lambda x: F.interpolate(x, size=(5, 4), mode="nearest"),
    "nearest_exact": lambda x: F.interpolate(x, size=(13, 11), mode="nearest-exact"),
    "split_cat": _halves,
    "cat_height": lambda x: torch.cat([x, x * 2, x[:, :, :3]], 2),
    "stack": lambda x: torch.stack([x[:, :4], x[:, 4:]], 2).flatten(1, 2),
    "crop": lambda x: x[:, :, 1:-2, 2:],
    "stride": lambda x: x[:, :, 1::2, ::3],
    "center_crop": lambda x: x[:, :, x.shape[2] // 4 : x.shape[2] // 4 + 5],
    "roll": lambda x: torch.roll(x, (2, -1), (2, 3)),
    "pixel_shuffle": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
    "channel_shuffle": _shuffle,
    "expand": lambda x: x * x.mean((2, 3), keepdim=True).expand_as(x),
    "softmax_channels": lambda x: x.softmax(1),
    "softmax_height": lambda x: x.log_softmax(2),
    "maximum": lambda x: x - x.amax((2, 3), keepdim=True),
    "variance": lambda x: x / (1 + x.var((1, 2, 3), keepdim=True)),
    "attention": _attention,
    "matmul": _matmul,
    "linear_of_itself": lambda x: x * F.linear(x.mean((2, 3)), x.mean((2, 3))).mean(1).view(-1, 1, 1, 1),
    "similarity": lambda x: x + _similarity(x.mean((2, 3))).sum(),
}
NAMES = [*OPERATORS, *FUNCTIONS]


@pytest.mark.parametrize("grid", ["n2c2", "h2w2"])
@pytest.mark.parametrize("name", NAMES)
def test_operator(name: str, grid: str) -> None:
    results = check(Between, grid, [(2, 3, 8, 9), (3, 3, 10, 7)], kwargs={"operator": name})
    assert not any(row.fallback for row in results[0]["rows"]), [row.node for row in results[0]["rows"] if row.fallback]


class Expressions(nn.Module):
    """A convolution, and expressions of its result ``x``, all returned: one capture for many operators."""

    def __init__(self, texts: tuple[str, ...], channels: int = 5) -> None:
        super().__init__()
        self.texts = texts
        self.conv = nn.Conv2d(3, channels, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.conv(x)
        results = (eval(text, {"torch": torch, "F": F, "x": x}) for text in self.texts)
        return tuple(t for y in results for t in (y if isinstance(y, tuple) else (y,)))


def expressions(
    grid: str, texts: tuple[str, ...], channels: int = 5, shapes: tuple[tuple[int, ...], ...] = ((2, 3, 7, 6),)
) -> None:
    """Check that all of ``texts`` are exact on ``grid``, without fallbacks."""
    results = check(Expressions, grid, list(shapes), kwargs={"texts": texts, "channels": channels}, example=True)
    rows = results[0]["rows"]
    assert not any(row.fallback for row in rows), [row.node for row in rows if row.fallback]


UNTAGGED = (
    "((x > 0) & (x < 1) | (x > 2)).to(x.dtype) * x",
    "torch.where(x > 0, x, 0.0)",
    "torch.where(x > 0, 0.0, x)",
    "x.detach() // 0.3 * x",
    "torch.multiply(x, x).subtract(1).negative()",
    "torch.greater(x, 0).to(x.dtype) * torch.special.expit(x)",
    "torch.arctan2(x, torch.rsub(x, 1))",
    "x.masked_fill(x > 0, torch.tensor(2.0, dtype=x.dtype))",
)


@pytest.mark.parametrize("grid", ["c2", "h2"])
def test_element_wise_operators_that_torch_does_not_tag(grid: str) -> None:
    expressions(grid, UNTAGGED)


SIMILARITIES = (
    "F.cosine_similarity(x.mean((2, 3), keepdim=True), x, dim=1)",
    "F.cosine_similarity(x, x.mean((2, 3), keepdim=True), dim=1)",
    "F.cosine_similarity(x.mean(2, keepdim=True), x.mean(3, keepdim=True), dim=1)",
    "F.cosine_similarity(x.permute(0, 2, 3, 1), torch.linspace(0, 1, 5, dtype=x.dtype), dim=-1)",
    "F.cosine_similarity(torch.linspace(0, 1, 5, dtype=x.dtype), x.permute(0, 2, 3, 1), dim=-1)",
)


@pytest.mark.parametrize("grid", ["c2", "h2", "n2w2"])
def test_similarities_of_operands_that_broadcast(grid: str) -> None:
    expressions(grid, SIMILARITIES)


class Frequencies(nn.Module):
    """An embedding whose gradient depends on the frequency of each index in the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.table = nn.Embedding(5, 4, scale_grad_by_freq=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y + self.table(y.detach().mean(1).mul(3).long().clamp(0, 4)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("grid", ["n2", "c2"])
def test_embedding_scaled_by_frequency(grid: str) -> None:
    check(Frequencies, grid, [(4, 3, 6, 5)])


REDUCTIONS = (
    "x.softmax(1)",
    "x.log_softmax(2)",
    "x.float().softmax(-1, dtype=torch.float64)",
    "x.logsumexp((1, 2))",
    "x.logsumexp(3, keepdim=True)",
    "x.amax((2, 3))",
    "x.amin(1) * 1.5",
    "x.relu().amax((1, 2), keepdim=True)",  # ties across ranks
    "x.max(1)[0]",
    "x.relu().min(2).values",
    "x.max(2, keepdim=True)",
    "x.max() + x.min()",
    "torch.aminmax(x)",
    "torch.aminmax(x, dim=2)",
    "x.argmax(2).double() * x.mean(2)",
    "x.relu().argmin(1, keepdim=True) * x",
    "x * x.argmax()",
)
MOMENTS = (
    "x.var((2, 3))",
    "x.var(1, unbiased=False, keepdim=True)",
    "x.std()",
    "x.std(2, correction=0)",
    "torch.var_mean(x, (1, 2))",
    "torch.std_mean(x, 2, unbiased=False)",
    "x.norm()",
    "x.norm(dim=1)",
    "x.norm(p=3, dim=(1, 2))",
    "x.norm(p=1, dim=2, keepdim=True)",
    "x.norm(p=1.5, dim=2)",
    "x.norm(p=float('inf'), dim=(1, 2))",
    "(0 * x).norm(dim=2)",
    "F.normalize(x, dim=1)",
    "x.prod(2)",
    "x.prod()",
    "x.relu().prod(1)",  # zeros
    "x.cumsum(2)",
    "x.relu().cumprod(1)",
    "(x > 0).cumsum(2) * x",
    "x * (x > 0.5).any(2, keepdim=True)",
    "x * (x > 0).all(1, keepdim=True)",
    "x * (x > 0.5).any()",
    "x * torch.count_nonzero(x.relu())",
    "x - x.amax(1, keepdim=True).detach()",
    "x.flip(2)",
    "x.flip((1, 2, 3)) * x",
)


@pytest.mark.parametrize("grid", ["c3", "h3", "n2h2", "c2h2"])
@pytest.mark.parametrize("texts", [REDUCTIONS, MOMENTS], ids=["reductions", "moments"])
def test_reductions_send_small_values(texts: tuple[str, ...], grid: str) -> None:
    """Over split dims only the outputs are gathered."""
    shapes = ((3, 3, 7, 6), (2, 3, 2, 2)) if "3" in grid else ((3, 3, 7, 6),)  # also smaller than the axis
    expressions(grid, texts, shapes=shapes)
    plan = distfx.plan(Expressions(texts), grid, (4, 3, 12, 6), outputs="local")
    moves = {move.split("(")[0] for row in plan.rows for move in row.moves}
    assert moves <= {"slice", "to_varying", "halo", "all_reduce"}, moves


POOLING = (
    "F.adaptive_avg_pool2d(x, (3, 2))",
    "F.adaptive_avg_pool2d(x, (4, 1))",
    "F.adaptive_avg_pool2d(x, (9, 8))",
    "F.adaptive_avg_pool2d(x[0], (3, 2))",
    "F.adaptive_avg_pool2d(x, 1)",
    "F.adaptive_max_pool2d(x, (3, 4))",
    "F.adaptive_max_pool2d(x.relu(), (2, 5), return_indices=True)",  # ties
    "F.adaptive_max_pool2d(x.relu(), 1, return_indices=True)",
    "F.adaptive_max_pool2d(x, 1)",
    "F.max_pool2d(x, 3, 2, 1, return_indices=True)",
    "F.max_pool2d(x.relu(), 2, return_indices=True, ceil_mode=True)",
    "F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)",
    "F.lp_pool2d(x, 2, 2)",
    "F.max_pool2d((x * 10).long(), 3, 1, 1) * x",  # integers beyond the border
    "F.local_response_norm(x, 3)",
)


@pytest.mark.parametrize("grid", ["h3", "n2w2", "c2h2"])
def test_pooling_by_position(grid: str) -> None:
    expressions(grid, POOLING, shapes=((2, 3, 7, 6), (3, 3, 6, 8)))


PRODUCTS = (
    "torch.einsum('nchw,nkhw->nck', x, x)",
    "torch.einsum('nchw,nkhw->nhwck', x, 2 * x)",
    "torch.einsum('n...w,nchw->n...c', x, x)",
    "torch.einsum('bchw->b', x)",
    "torch.baddbmm(x.flatten(2), x.flatten(2) @ x.flatten(2).mT, x.flatten(2), alpha=0.5, beta=2)",
    "torch.addmm(x[0, 0], x[0, 1], x[1, 1].t() @ x[1, 0])",
    "x[0, 0] @ x[0, 0, 0]",
    "torch.outer(x[0, 0, 0], x[1, 1, :, 2])",
    "F.rms_norm(x.flatten(2).mT, (5,))",
    "F.rms_norm(x, (6,))",
    "F.rms_norm(x, x.shape[2:])",
    "x.flatten(2).softmax(-1)",
    "x.flatten(0, 1).softmax(0)",
    "x.view(x.shape[0] * 5, -1).relu()",
    "torch.cat([x, x], 2)",
)
ATTENTION = (
    "F.scaled_dot_product_attention(x, x, x, is_causal=True)",
    "F.scaled_dot_product_attention(x.flatten(2).mT, x.flatten(2).mT, x.flatten(2).mT, is_causal=True)",
    "F.scaled_dot_product_attention(x.flatten(2).mT, x.flatten(2).mT * 2, x.flatten(2).mT, "
    "torch.ones(x.shape[2] * x.shape[3], x.shape[2] * x.shape[3], dtype=torch.bool).tril())",
    "F.scaled_dot_product_attention(x, x * 2, x, x @ x.mT)",
)


@pytest.mark.parametrize("grid", ["h3", "n2w2", "c2h2"])
@pytest.mark.parametrize("texts", [PRODUCTS, ATTENTION], ids=["products", "attention"])
def test_products(texts: tuple[str, ...], grid: str) -> None:
    expressions(grid, texts)


class Tokens(nn.Module):
    """Multi-head attention over the positions of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        tokens = x.flatten(2).transpose(1, 2)
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return x + mixed.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("grid", ["n2", "c2", "h2", "n2h2"])
def test_multihead_attention(grid: str, train: bool) -> None:
    results = check(Tokens, grid, [(2, 3, 6, 4)], train=train)
    assert not any(row.fallback for row in results[0]["rows"])


PICKS = (
    "F.grid_sample(x, F.affine_grid(x[:, :1, :2, :3].squeeze(1), x.shape, align_corners=False), align_corners=False)",
    "F.grid_sample(x, x.permute(0, 2, 3, 1)[..., :2].tanh(), align_corners=True)",
    "x.index_select(1, torch.tensor([0, 2]))",
    "x.gather(1, x.argmax(1, keepdim=True))",
    "x.gather(2, x.argmax(2, keepdim=True))",
    "x[:, [0, 2]]",
    "x[:, :, torch.tensor([0, 2])]",
    "x.sort(1)[0]",
    "x.topk(2, 1)",
    "x.topk(2, 2)[0]",
    "x.masked_fill(x > 0, 0.5)",
    "x.masked_fill(torch.ones(x.shape[2], x.shape[3], dtype=torch.bool).triu(1), -1.0)",
    "x.tril()",
    "torch.diagonal(x, 0, 2, 3)",
    "F.one_hot(x.argmax(1), 5).permute(0, 3, 1, 2) * x",
    "F.cosine_similarity(x, x * x)",
    "F.embedding(x.argmax(1), x[0, :, 0])",
)
SHAPES = (
    "F.channel_shuffle(x[:, :4], 2)",
    "x.repeat(1, 2, 1, 1)",
    "x.repeat(2, 1, 1, 2, 1)",
    "x.repeat_interleave(2, dim=2)",
    "x.tile(2, 1)",
    "F.unfold(x, 3, padding=1)",
    "F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1)",
    "x.unfold(2, 3, 2)",
    "torch.rot90(x, 1, (2, 3))",
    "torch.diff(x, dim=2)",
    "x.diff(n=2)",
    "torch.complex(x, 2 * x).conj().real * x",
    "x.flatten(1).T",
    "torch.rot90(x, 3, (1, 2))",
    "F.glu(x[:, :4], 1)",
    "x.narrow(2, 1, 3)",
    "x.narrow(2, -3, 3)",
    "x.movedim((1, 2), (3, 1))",
    "torch.hstack([x, 2 * x])",
    "F.pad(x, (1, 1, 1, 1), 'reflect')",
    "x.new_ones(x.shape[2], 1) * x",
    "x.new_full((1,), 2.0) * x",
    "x * torch.eye(x.shape[2], x.shape[3])",
    "x * torch.arange(x.shape[3]) + torch.zeros(x.shape[2], 1)",
    "x + torch.meshgrid(torch.arange(x.shape[2]), torch.arange(x.shape[3]), indexing='ij')[0]",
)


@pytest.mark.parametrize("grid", ["h3", "n2w2", "c2h2"])
@pytest.mark.parametrize("texts", [PICKS, SHAPES], ids=["picks", "shapes"])
def test_picks(texts: tuple[str, ...], grid: str) -> None:
    expressions(grid, texts)


MORE = (
    "torch.nansum(x.masked_fill(x > 1, float('nan')), (1, 2))",
    "torch.linalg.cross(x[:, :3], x[:, 1:4], dim=1)",
    "torch.cross(x[:, :, :3], x[:, :, 1:4], dim=2)",
    "torch.cdist(x, x * 2)",
    "torch.cdist(x, x)",
    "torch.bucketize(x, torch.linspace(-1, 1, 5)) * x",
    "torch.searchsorted(torch.linspace(-1, 1, 5, dtype=x.dtype), x) * x",
    "torch.searchsorted(x.detach().sort(3)[0], x) * x",
    "torch.renorm(x, 2, 1, 0.5)",
    "torch.take_along_dim(x, x.argsort(2), 2)",
    "torch.take_along_dim(x, x.argmax(1, keepdim=True), 1)",
    "F.scaled_dot_product_attention(x[:, :4], x[:, :2], x[:, 2:4], enable_gqa=True)",
)


@pytest.mark.parametrize("grid", ["h3", "n2w2", "c2h2"])
def test_searches_and_distances(grid: str) -> None:
    expressions(grid, MORE)


@torch.library.custom_op("distfx_tests::smooth", mutates_args=())
def smooth(x: Tensor, padding: int) -> Tensor:
    """The mean of three neighbours along the last dim."""
    y = F.pad(x, (padding, padding))
    return (y[..., :-2] + y[..., 1:-1] + y[..., 2:]) / 3


@smooth.register_fake
def _(x: Tensor, padding: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] + 2 * padding - 2))


def _smooth_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    spread = sum((F.pad(grad, (shift, 2 - shift)) for shift in range(3)), torch.zeros(())) / 3
    return spread[..., ctx.padding : spread.shape[-1] - ctx.padding], None


def _smooth_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.padding = inputs[1]


smooth.register_autograd(_smooth_backward, setup_context=_smooth_setup)


@distfx.register_rule(
    smooth, "... [r] -> ... r", windows=lambda a: [distfx.Window(lo=a["padding"], hi=2 - a["padding"])]
)
def _local_smooth(context: LocalContext) -> Call:
    x, padding = context.args
    return context.node.target, (x, 0 if context.is_split(-1) else padding), {}


class Smooth(nn.Module):
    """An operator from outside, with its rule, between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.distfx_tests.smooth(self.first(x), 2)
        return self.last(y)


@pytest.mark.parametrize("grid", ["w2", "c2", "n2w2", "w3"])
def test_operator_from_outside(grid: str) -> None:
    results = check(Smooth, grid, [(2, 3, 6, 8), (3, 3, 5, 7)])
    assert not any(row.fallback for row in results[0]["rows"])


class Noise(nn.Module):
    """Noise in the shape of an activation, which has no gradient, through a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y + self.second(torch.randn_like(y))


def noisy(grid: str) -> list[tuple[int, int]]:
    net = distfx.parallelize(Noise(), grid)
    with distfx.record_comm() as ledger:
        net(torch.randn(4, 3, 8, 8)).sum().backward()
    return [(net.plan.bytes(phase), ledger.bytes(phase=phase)) for phase in ("forward", "backward")]


@pytest.mark.parametrize("grid", ["h2", "c2"])
def test_noise_has_no_gradient(grid: str) -> None:
    for phases in run(2, noisy, grid):
        assert all(predicted == counted for predicted, counted in phases), phases


def dropped(grid: str, features: bool) -> list[Tensor]:
    torch.manual_seed(11 + 1000 * torch.distributed.get_rank())  # only rank 0's seed matters
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout2d(0.4) if features else nn.Dropout(0.4))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(1.0)
    net = distfx.parallelize(model, distfx.Grid.parse(grid))
    torch.manual_seed(5 + torch.distributed.get_rank())
    x = torch.ones(4, 3, 20, 20)
    first, second = net(x), net(x)
    torch.manual_seed(5 + torch.distributed.get_rank())
    again = net(x)
    net.eval()
    plain = net(x)
    net.train()
    weights = torch.ones(4, 3, 20, 20, requires_grad=True)
    y = net(weights)
    y.sum().backward()
    bias = dict(net.named_parameters())["0.bias"].grad.full_tensor()
    return [first.detach(), second.detach(), again.detach(), plain.detach(), y.detach(), bias]


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("grid", ["n2", "h2", "c2", "c2h2"])
def test_dropout(grid: str, features: bool) -> None:
    results = run(ranks_of(grid), dropped, grid, features)
    first, second, again, plain, y, bias = results[0]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), "replicas drew different masks"
    values = {round(float(v), 4) for v in first.unique()}
    assert values == {0.0, round(1 / 0.6, 4)}
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert torch.equal(plain, torch.ones_like(plain))
    kept = (first > 0).double()
    share = kept.mean() if not features else kept[:, :, 0, 0].mean()
    assert abs(float(share) - 0.6) < (0.03 if not features else 0.35)
    parts = (
        [kept[:2], kept[2:]]
        if "n" in grid
        else [kept[:, :2], kept[:, 2:]]
        if "c" in grid
        else [kept[:, :, :10], kept[:, :, 10:]]
    )
    if not (features and "h" in grid and "c" not in grid):
        assert not torch.equal(*parts), "the shards drew the same mask"
    if features:
        assert torch.equal(kept, kept[:, :, :1, :1].expand_as(kept))
    assert torch.allclose(bias, y.sum((0, 2, 3)))


class Depth(nn.Module):
    """Stochastic depth as libraries write it, or noise, applied to ones: the output shows the drawn numbers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.kind = nn.Conv2d(3, 4, 1), kind
        nn.init.zeros_(self.conv.weight)
        nn.init.ones_(self.conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        shape = (y.shape[0], 1, 1, 1)
        if self.kind == "empty":
            return y * torch.empty(shape, dtype=y.dtype, device=y.device).bernoulli_(0.5).div_(0.5)
        if self.kind == "new_empty":
            return y * y.new_empty(shape).bernoulli_(0.5)
        if self.kind == "rand":
            return y * torch.floor(0.5 + torch.rand(shape, dtype=y.dtype, device=y.device))
        return y + torch.randn_like(y)


def drawn(grid: str, kind: str) -> list[Tensor]:
    net = distfx.parallelize(Depth(kind), distfx.Grid.parse(grid))
    x, results = torch.ones(12, 3, 6, 6), []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        state = torch.default_generator.get_state()
        results.append(net(x).detach())
        after = torch.default_generator.get_state()
        torch.manual_seed(seed)
        torch.randint(2**62, (1,))  # a pass only draws its seed from the generator
        assert not torch.equal(state, after) and torch.equal(after, torch.default_generator.get_state())
    net.zero_grad()
    y = net(x)
    y.sum().backward()
    return [*results, y.detach(), dict(net.named_parameters())["conv.bias"].grad.full_tensor()]


@pytest.mark.parametrize("kind", ["empty", "new_empty", "rand", "randn_like"])
@pytest.mark.parametrize("grid", ["n2", "c2", "h2", "c2h2"])
def test_random_numbers(grid: str, kind: str) -> None:
    """Replicas draw identical numbers, shards independent ones, new ones in each pass, all determined by the seed."""
    results = run(ranks_of(grid), drawn, grid, kind)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), "replicas drew differently"
    first, second, again, y, bias = results[0]
    assert torch.equal(first, again) and not torch.equal(first, second)
    if kind == "randn_like":
        assert abs(float(first.mean()) - 1) < 0.2 and abs(float(first.std()) - 1) < 0.2
        halves = {"n": first.chunk(2, 0), "c": first.chunk(2, 1), "h": first.chunk(2, 2)}
        assert all(not torch.equal(*halves[axis]) for axis in grid if axis.isalpha()), "shards drew the same"
        assert torch.equal(bias, torch.full((4,), 12.0 * 36))
    else:
        assert torch.equal(first, first[:, :1, :1, :1].expand_as(first)), "a sample is kept or dropped as a whole"
        assert {float(v) for v in first.unique()} == {0.0, 2.0 if kind == "empty" else 1.0}
        assert torch.allclose(bias, y.sum((0, 2, 3)))


class Gated(nn.Module):
    """Squeeze-excite with an in-place activation, and a gate by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.down, self.up = nn.Conv2d(8, 3, 1), nn.Conv2d(3, 8, 1)
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.conv(x), inplace=True)
        gate = self.up(F.relu_(self.down(F.adaptive_avg_pool2d(x, 1))))
        return self.out(x * torch.sigmoid(gate))


class UNet(nn.Module):
    """Down, up, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(3, 6), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(6, 10, 3, 2, 1), nn.BatchNorm2d(10), nn.ReLU(inplace=True))
        self.up = nn.ConvTranspose2d(10, 6, 2, 2)
        self.leave = nn.Conv2d(12, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.enter(x)
        y = F.interpolate(self.up(self.down(skip)), size=skip.shape[2:], mode="bilinear", align_corners=False)
        return self.leave(torch.cat([y, skip], 1)).log_softmax(1)


@pytest.mark.parametrize("grid", ["c2h2", "h2w2", "c4", "h3"])
@pytest.mark.parametrize("model", [Gated, UNet])
def test_networks(model: type[nn.Module], grid: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", distfx.FallbackWarning)
        results = check(model, grid, [(3, 3, 12, 10), (2, 3, 9, 11)])
    assert not any(row.fallback for row in results[0]["rows"])


class Sequence(nn.Module):
    """A recurrent net after a convolution. It has no rule, so it falls back; without dropout it is not random."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 6, 5, padding=2)
        self.gru = nn.GRU(6, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.gru(self.conv(x).transpose(1, 2))[0]
        return y


@pytest.mark.parametrize("grid", ["w2", "c2", "n2"])
@pytest.mark.filterwarnings("ignore::distfx.FallbackWarning")
def test_recurrent_nets_fall_back(grid: str) -> None:
    results = check(Sequence, grid, [(2, 3, 8)], example=True)
    assert any(row.fallback for row in results[0]["rows"])


def test_model_is_deepcopied_not_changed() -> None:
    model = Gated()
    state = copy.deepcopy(model.state_dict())
    distfx.plan(model, "c2h2", (2, 3, 12, 10))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
