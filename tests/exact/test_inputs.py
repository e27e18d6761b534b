"""Inputs and outputs: plain tensors, DTensors in any sharding, several, nested, optional, by keyword; slices."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.exact import check, relative
from support.models import Image, cases, on, pair
from support.ranks import run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import distfx


def sharded_input(grid: str, dims: tuple[int, ...], uneven: bool) -> tuple[float, float, int]:
    net, plain = pair(grid, Image, strategy="stationary-x" if "c" in grid else "auto")
    torch.manual_seed(5)
    x = torch.randn(4, 3, 9 if uneven else 8, 8, dtype=torch.float64)
    part = net.input_slices(0, x.shape)
    local = x[part].clone().requires_grad_()
    sharded = DTensor.from_local(
        local, net.grid.mesh, [Shard(dim) for dim in dims], run_check=False, shape=x.shape, stride=x.stride()
    )
    whole = x.clone().requires_grad_()
    with distfx.record_comm() as ledger:
        y = net(sharded)
    want = plain(whole)
    y.square().sum().backward()
    want.square().sum().backward()
    assert local.grad is not None and whole.grad is not None
    assert not any(row.move == "slice" for row in ledger.rows)
    return relative(y, want), relative(local.grad, whole.grad[part]), net.plan.bytes("forward") - ledger.bytes()


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(("world", "grid", "dims"), [(4, "n2h2", (0, 2)), (2, "c2", (1,)), (4, "c2h2", (1, 2))])
def test_sharded_input(world: int, grid: str, dims: tuple[int, ...], uneven: bool) -> None:
    for output, gradient, difference in run(world, sharded_input, grid, dims, uneven):
        assert output < 1e-12 and gradient < 1e-12 and difference == 0


def other_sharding() -> float:
    net, plain = pair("n2h2", Image)
    torch.manual_seed(5)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    replicated = DTensor.from_local(x, net.grid.mesh, [Replicate(), Replicate()], run_check=False)
    return relative(net(replicated), plain(x))


def test_a_dtensor_with_another_sharding_is_redistributed() -> None:
    assert max(run(4, other_sharding)) < 1e-12


def chunked_input() -> float:
    """DTensor splits 8 samples into 3, 3, 2, but distfx into 2, 3, 3. On one rank the shapes agree."""
    net, plain = pair("n3", Image)
    x = torch.randn(8, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return relative(net(distribute_tensor(x, net.grid.mesh, [Shard(0)])), plain(x))


def test_a_dtensor_that_differs_from_the_plan_on_some_ranks_only() -> None:
    assert max(run(3, chunked_input)) < 1e-12


def uneven_shards() -> tuple[list[str], float]:
    """The warnings and the error of a call with a DTensor whose parts differ from the plan."""
    net, plain = pair("h2", Image)
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sharded = distribute_tensor(x, net.grid.mesh, [Shard(2)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = max(relative(net(sharded), plain(x)) for _ in range(2))
    return [str(each.message) for each in caught if "gathered" in str(each.message)], error


def test_a_sharded_input_that_must_be_gathered_is_reported_once() -> None:
    (first, error), (second, other) = run(2, uneven_shards)
    assert len(first) == 1 and "net.input_slices" in first[0] and not second and max(error, other) < 1e-12


class Several(nn.Module):
    """Several inputs, one of them by keyword; a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor, factor: float = 2.0) -> dict[str, Any]:
        return {"sum": self.conv(x) + factor * self.conv(y), "pair": (x * 2, y)}


def several() -> float:
    torch.manual_seed(3)
    model = Several().double()
    net = distfx.parallelize(model, distfx.Grid(h=2))  # the inputs are known at the first call only
    x, y = (torch.randn(2, 3, 7, 6, dtype=torch.float64) for _ in range(2))
    have, want = net(x, y), model(x, y)
    assert list(have) == list(want) and isinstance(have["pair"], tuple)
    errors = [relative(have["sum"], want["sum"])]
    errors += [relative(a, b) for a, b in zip(have["pair"], want["pair"], strict=True)]
    return max(errors)


def test_several_inputs_and_nested_outputs() -> None:
    assert max(run(2, several)) < 1e-12


def keywords() -> float:
    torch.manual_seed(3)
    model = Several().double()
    net = distfx.parallelize(model, distfx.Grid(h=2))
    x, y = (torch.randn(2, 3, 7, 6, dtype=torch.float64) for _ in range(2))
    errors = [relative(net(x=x, y=y)["sum"], model(x, y)["sum"]), relative(net(y=y, x=x)["sum"], model(x, y)["sum"])]
    errors += [relative(net(x, y, factor)["sum"], model(x, y, factor)["sum"]) for factor in (3.0, 5.0, 3.0)]
    return max(errors)


def test_keywords_in_any_order_and_other_arguments() -> None:
    assert max(run(2, keywords)) < 1e-12


@dataclass
class Scored:
    """A dataclass that torch.export does not know."""

    image: Tensor
    scores: dict[str, Tensor]
    nothing: Tensor | None = None


class Scores(Image):
    def forward(self, x: Tensor) -> list[Scored]:  # type: ignore[override]
        y = super().forward(x)
        return [Scored(y, {"mean": y.mean((2, 3))})]


def return_dataclasses() -> list[float]:
    torch.manual_seed(0)
    model = Scores().double()
    plain = copy.deepcopy(model)
    net = distfx.parallelize(model, distfx.Grid.parse("h2"))
    x = torch.randn(2, 3, 8, 7, dtype=torch.float64)
    (have,), (want,) = net(x), plain(x)
    assert type(have) is Scored and have.nothing is None
    have.scores["mean"].square().sum().backward()
    want.scores["mean"].square().sum().backward()
    errors = [relative(have.image, want.image), relative(have.scores["mean"], want.scores["mean"])]
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    return errors + [relative(p.grad.full_tensor(), q.grad) for p, q in pairs]


def test_dataclasses_are_returned() -> None:
    for errors in run(2, return_dataclasses):
        assert max(errors) < 1e-10


class Optional(nn.Module):
    """Optional tensors, by position, by keyword, by keyword only, in a dict or a list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Any, add: Tensor | None = None, sub: Tensor | None = None, *, mul: Any = None) -> Tensor:
        if isinstance(x, dict):
            x, add, sub = x["x"], x.get("add", add), x.get("sub", sub)
        elif isinstance(x, list):
            x, add = x[0], sum(x[1:])
        y = self.conv(x)
        y = y if add is None else y + add
        y = y if sub is None else y - 2 * sub
        return y if mul is None else y * mul


def structures(grid: str) -> list[float]:
    torch.manual_seed(3)
    model = Optional().double()
    net = distfx.parallelize(model, grid)
    x, t, u = (torch.randn(2, 3, 6, 6, dtype=torch.float64) for _ in range(3))
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {}),
        ((x, t), {}),
        ((x,), {"add": t}),
        ((x,), {"sub": t}),
        ((x,), {"mul": t}),
        ((), {"sub": t, "x": x}),
        ((x,), {"sub": u, "add": t}),
        ((x, None, t), {}),
        (({"x": x, "add": t},), {}),
        (({"x": x, "sub": t},), {}),
        (({"sub": t, "x": x},), {}),
        (([x, t],), {}),
        (([x, t, u],), {}),
    ]
    return [relative(net(*args, **kwargs), model(*args, **kwargs)) for args, kwargs in calls]


@pytest.mark.parametrize("grid", ["h2", "c2"])
def test_each_structure_of_arguments_has_its_graph(grid: str) -> None:
    for errors in run(2, structures, grid):
        assert max(errors) < 1e-12, errors


def partial_input() -> float:
    net, plain = pair("c2", Image)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    net(x)
    torch.manual_seed(4)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    return relative(net(DTensor.from_local(x / 2, net.grid.mesh, [Partial()], run_check=False)), plain(x))


def test_a_dtensor_of_partial_sums_is_summed() -> None:
    assert max(run(2, partial_input)) < 1e-12


class ScaledByVector(nn.Module):
    """Takes a vector that has no batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        return self.conv(x) * v.sum()


def short_vector() -> float:
    torch.manual_seed(4)
    model = ScaledByVector().double()
    x, v = torch.randn(4, 3, 6, 6, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    return relative(distfx.parallelize(model, "n4")(x, v), model(x, v))


def test_a_vector_is_not_a_batch() -> None:
    assert max(run(4, short_vector)) < 1e-12


class OneImage(nn.Module):
    """All layers that also take images without a batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.even = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 2, padding="same")
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.up, self.average = nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.AvgPool2d(3, 1, 1)
        self.last, self.fourth = nn.MaxPool2d(3, 2, 1), nn.AdaptiveMaxPool2d(2)
        self.whole, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, where = self.pool(self.conv(x))
        y = self.average(self.up(self.unpool(self.even(y).relu(), where)))
        return self.head(self.whole(y).flatten()), self.fourth(y), self.last(y)


@on("", "h2", "w3", "c2", "h2w2", "c2h2")
def test_images_without_a_batch(world: int, grid: str) -> None:
    results = check(OneImage, grid, [(3, 16, 14), (3, 18, 12)], example=True)
    algorithms = {row.algorithm for row in results[0]["rows"] if "convolution" in row.op}
    expected = "stationary" if "c" in grid else "spatial" if grid else "replicated"
    assert algorithms and all(expected in algorithm for algorithm in algorithms), algorithms


class Flattened(nn.Module):
    """A convolution with a flat output."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.conv, self.start = nn.Conv2d(3, 5, 3, padding=1), start

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(self.start)


def slices_of(grid: str, start: int) -> tuple[bool, str]:
    """Whether the local output is the part that ``output_slices`` names, and its error for another size."""
    torch.manual_seed(0)
    model = Flattened(start).double()
    net = distfx.parallelize(model, grid, outputs="local")
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    y, want = net(x), model(x)
    message = ""
    try:
        net.output_slices(0, (*want.shape[:-1], 77))
    except distfx.DistfxError as error:
        message = str(error)
    return torch.allclose(y, want[net.output_slices(0, want.shape)], atol=1e-12, rtol=0), message


@cases("grid start", [("c2", 1), ("h2", 2), ("c2", 2)])
def test_slices_of_a_flat_output(world: int, grid: str, start: int) -> None:
    for is_equal, message in run(world, slices_of, grid, start):
        assert is_equal and ("depends on the input" in message or (grid, start) == ("c2", 2))
