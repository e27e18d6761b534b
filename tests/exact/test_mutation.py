"""Models that write into parts of tensors: boundary conditions, stencils, wavelets, straight-through estimators."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from support.exact import check, relative
from support.models import on
from support.ranks import run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distfx
from distfx.engine import engine


def boundary(x: Tensor) -> Tensor:
    """Zero at the walls."""
    y = x.clone()
    y[:, :, 0] = 0
    y[:, :, -1] = 0
    y[..., 0] = 1.5
    y[..., -1:] = y[..., -2:-1]
    return y


def stencil(x: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    result[:, :, 1:-1, 1:-1] = x[:, :, 2:, 1:-1] + x[:, :, :-2, 1:-1] - 2 * x[:, :, 1:-1, 1:-1]
    return result + x


def differences(x: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    result[..., 1:, :] = x[..., 1:, :] - x[..., :-1, :]
    result[:, 1:3] *= 2
    return result


def channels(x: Tensor) -> Tensor:
    n, _, h, w = x.shape
    result = torch.zeros(n, 4, h, w, dtype=x.dtype)
    for i in range(4):
        result[:, i] = x[:, i] * (i + 1)
    return result


def wavelet(x: Tensor) -> Tensor:
    """Even and odd rows from two halves."""
    result = torch.empty_like(x)
    result[:, :, ::2] = x[:, :, ::2] + x[:, :, 1::2]
    result[:, :, 1::2] = x[:, :, ::2] - x[:, :, 1::2]
    return result


def through_views(x: Tensor) -> Tensor:
    """Written through one view, read through others."""
    y = x * 1
    tokens = y.flatten(2)
    rows = y.permute(0, 2, 3, 1)
    tokens.transpose(1, 2).mul_(2)
    rows[:, 1:3] += 1
    return y + tokens.view_as(y) + rows.permute(0, 3, 1, 2)


def copies(x: Tensor) -> Tensor:
    """Copies from other shapes and dtypes; later writes do not change the source."""
    y, z = x * 1, x * 2
    y.copy_(z[:, :1])
    y += 1
    y[:, :, 2:4].copy_((4 * z).long()[:, :, :1])
    return y + z


def dropped(x: Tensor) -> Tensor:
    """Without training, dropout returns its argument itself."""
    y = x * 1
    z = F.dropout(y, 0.5, training=False)
    z += 1
    return z * 3 + y


def straight_through(x: Tensor) -> Tensor:
    """The values change, the gradient does not."""
    y = x * 2
    with torch.no_grad():
        y.clamp_(-0.2, 0.2)
        scale = y.abs().amax()
    return y * scale + x


def twice_without_gradient(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y.clamp_(-0.2, 0.2)
        y.mul_(3)
        y += 1
    return y * x


def up_to_a_size(x: Tensor) -> Tensor:
    """Into a larger tensor, and up to ends that are sizes."""
    n, c, h, w = x.shape
    y = x.new_zeros(n, c, h + 2, w)
    y[:, :, :h, :w] = x
    y[:, :, 1 : h + 1] += x
    return y[:, :, :h]


def by_way_of_detach(x: Tensor) -> Tensor:
    y = x * 2
    z = y.detach()
    z.clamp_(-0.2, 0.2)
    return y + x * z


def normalised(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y.div_(y.std())
        y[:, :, 0] = 0
    return y


def arithmetic(x: Tensor) -> Tensor:
    """Operators that have another overload in place."""
    y, z = x * 2, x.abs() + 0.5
    y.abs_().add_(0.1).pow_(1.5)
    z.pow_(3).clamp_(x * 0.1).lerp_(x, 0.25).addcmul_(x, x, value=0.5)
    z[:, 1:].pow_(2)
    z[:, :1].masked_fill_(x[:, :1] > 0, 0.5).div_(3)
    return y + z.sub_(x, alpha=2)


def through_copies_that_are_none(x: Tensor) -> Tensor:
    """Operators that may copy, but return views here, also of a tensor that was written before."""
    y = x * 1
    same = y.to(x.dtype).contiguous()
    y[:, :1] += 1
    tokens = y.reshape(y.shape[0], y.shape[1], -1)
    tokens[:, 1:] *= 2
    same -= 1
    y.flatten(1).mul_(3)
    return y * tokens.view_as(y) + same


def through_views_without_gradient(x: Tensor) -> Tensor:
    """The values change without the gradient, then with it, through views taken in between."""
    y = x * 2
    first = y[:, :1]
    with torch.no_grad():
        y.clamp_(-0.2, 0.2)
    flat = y.reshape(y.shape[0], -1)
    with torch.no_grad():
        y.mul_(3)
    flat += 1
    first *= 2
    z = y.detach()
    z.clamp_(-1, 1)
    y.flatten(2)[:, 1:] -= 1
    return y * x + z


def nothing(x: Tensor) -> Tensor:
    """Empty slices."""
    y = x * 1
    y[:, 1:1] += 1
    y[:, 0:0] *= 7
    y[:, 4:] = 3
    part = y[:, :2]
    part *= 2
    return y


WRITES: list[Callable[[Tensor], Tensor]] = [
    boundary,
    stencil,
    differences,
    channels,
    wavelet,
    through_views,
    copies,
    dropped,
    straight_through,
    twice_without_gradient,
    up_to_a_size,
    by_way_of_detach,
    normalised,
    arithmetic,
    through_copies_that_are_none,
    through_views_without_gradient,
    nothing,
]


class Writes(nn.Module):
    """A convolution, the writes, a convolution."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 4, 3, padding=1)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.last(globals()[self.name](self.first(x)))


@pytest.mark.parametrize("name", [write.__name__ for write in WRITES])
@on("h2", "c2", "n2", "h2w2")
def test_writes(world: int, grid: str, name: str) -> None:
    results = check(Writes, grid, [(2, 3, 10, 12), (2, 3, 8, 6)], kwargs={"name": name})
    assert not [row.op for row in results[0]["rows"] if row.fallback]
    assert not results[0]["idle"], "a gradient was lost"


class InFull(nn.Module):
    """Disables the caller's autocast for its last layer, as is common for losses and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.last(y.float())


def guarded(grid: str) -> tuple[torch.dtype, float]:
    torch.manual_seed(0)
    model: Any = InFull()
    net = distfx.parallelize(model, grid)
    x = torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, want = net(x), model(x)
        inner = model.first(x)
    exact = nn.functional.conv2d(inner.float(), model.last.weight, model.last.bias, padding=1)
    assert torch.equal(want, exact)
    y.sum().backward()
    return y.dtype, relative(y, want)


@on("h2", "c2", "n2")
def test_autocast_is_off_where_the_model_says_so(world: int, grid: str) -> None:
    """Only the first layer, in bfloat16, may differ, by the order of its sums."""
    for dtype, error in run(world, guarded, grid):
        assert dtype == torch.float32 and error < 3e-3


class Checkpointed(nn.Module):
    """Recomputes its first layer in backward. The reentrant kind of checkpoint runs it under ``no_grad``."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 4, 3, padding=1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Any = checkpoint(lambda t: self.first(t).relu(), x, use_reentrant=self.reentrant)
        return self.last(y)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore")
@on("h2", "c2")
def test_checkpoints_have_their_gradients(world: int, grid: str, reentrant: bool) -> None:
    results = check(Checkpointed, grid, [(2, 3, 8, 8)], kwargs={"reentrant": reentrant})
    assert not results[0]["idle"], "a gradient was lost"


def warnings_of_unsupported_features() -> list[str]:
    net = distfx.parallelize(Checkpointed(False), "h1")
    x = torch.randn(2, 3, 8, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net.eval()
        net(x)
        parallel = distfx.parallelize(Scaled(), "h1", example_inputs=(x, 0.0))
        with patch.object(engine, "MANY_GRAPHS", 2):
            for number in range(4):
                parallel(x, float(number))
        distfx.parallelize(Checkpointed(False), "h1")
    return [str(each.message) for each in caught]


class Scaled(nn.Module):
    def forward(self, x: Tensor, factor: float) -> Tensor:
        return F.avg_pool2d(x, 2) * factor


def test_unsupported_features_are_warned_of_once() -> None:
    (messages,) = run(1, warnings_of_unsupported_features)
    assert len([text for text in messages if "checkpoint" in text]) == 1
    assert len([text for text in messages if "Give numbers that change as tensors" in text]) == 1
