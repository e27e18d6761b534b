"""Batch norm: over the whole batch, over parts of it, with tiny shards, frozen."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.exact import check, relative
from support.models import cases, layers, on, same, stack
from support.ranks import run, run_raises
from torch import Tensor, nn

import distfx

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


def test_cumulative_average_raises_an_error() -> None:
    failures = run_raises(2, cumulative)
    assert len(set(failures)) == 1 and failures[0] is not None
    assert "1 (BatchNorm2d) has momentum=None" in failures[0].message and "momentum=0.1" in failures[0].message


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
    """Ranks with no value, one value or few values; and batch norm as the first layer."""
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
    """Adding 1e6 costs the input six digits. Batch norm must not lose more."""
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


class CalledTwice(nn.Module):
    """One batch norm on replicated channels, and on channels that a convolution has split."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x) + self.bn(self.conv(x))


@on("c2", "c4", "c2h2")
def test_batch_norm_called_twice(world: int, grid: str) -> None:
    for train in (True, False):
        check(CalledTwice, grid, [(2, 4, 6, 5), (4, 4, 5, 6)], train=train)


def errors_of_eval_first(grid: str) -> list[float]:
    """Errors of a model that runs in eval mode first: that graph decides the layout of the statistics."""
    torch.manual_seed(0)
    model = CalledTwice().double().eval()
    net, plain = distfx.parallelize(model, grid), copy.deepcopy(model)
    errors = []
    for train in (False, True, False):
        x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
        net.train(train)
        plain.train(train)
        errors.append(relative(net(x), plain(x)))
    state = plain.state_dict()
    return errors + [relative(value, state[name]) for name, value in net.full_state_dict().items()]


def test_eval_before_train() -> None:
    for errors in run(4, errors_of_eval_first, "c4"):
        assert max(errors) < 1e-12


# ------------------------------------------------------------------------------------------ parts of a batch


def largest_error(grid: str, batch_norm: str, parts: list[tuple[slice, ...]]) -> float:
    """Against the plain layer on each of ``parts`` separately, with the average of the running statistics."""
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
    return max(errors)


ALL = slice(None)
SAMPLES = [(slice(0, 2),), (slice(2, 4),)]
ROWS = [(ALL, ALL, slice(0, 3)), (ALL, ALL, slice(3, 6))]


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
    assert max(run(world, largest_error, grid, batch_norm, parts)) < 1e-10


def one_value_per_part() -> None:
    net = distfx.parallelize(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), "n2", batch_norm="local")
    net(torch.randn(3, 3, 1, 1))  # one sample for rank 0, two for rank 1


def test_a_part_with_one_value_raises_an_error() -> None:
    messages = {failure.message if failure else "" for failure in run_raises(2, one_value_per_part)}
    assert len(messages) == 1 and "more than one value" in messages.pop()


def test_unknown_parts_raise_an_error() -> None:
    with pytest.raises(distfx.DistfxError, match="give 'global'"):
        distfx.parallelize(nn.BatchNorm2d(3), {}, batch_norm="sync")
