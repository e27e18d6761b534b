"""Activations and sums that overwrite their operand: exact results, and the memory they save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.exact import check
from support.models import on
from support.ranks import run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import distfx
from distfx.ir import ops
from distfx.runtime.kernels import in_place

aten = torch.ops.aten

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "leaky": lambda: nn.LeakyReLU(0.2),
    "leaky, negative slope": lambda: nn.LeakyReLU(-0.5),
    "hardtanh": nn.Hardtanh,
    "elu": lambda: nn.ELU(0.7),
    "elu, negative alpha": lambda: nn.ELU(-0.7),
    "selu": nn.SELU,
}
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda c: nn.Identity(),
    "batch": nn.BatchNorm2d,
    "instance": lambda c: nn.InstanceNorm2d(c, affine=True),
    "instance, not affine": nn.InstanceNorm2d,
    "group": lambda c: nn.GroupNorm(2, c),
}


class Block(nn.Module):
    """Convolution, norm, activation, a sum with the input, and an activation of the sum."""

    def __init__(self, norm: Callable[[int], nn.Module], activation: Callable[[], nn.Module], channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm, self.activation, self.again = norm(channels), activation(), activation()

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm(self.conv(x)))
        y = self.norm(self.conv(y))
        y = y + x
        return self.again(y)


class Blocks(nn.Module):
    """One block for each activation, all with the same norm."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(NORMS[norm], activation, 4) for activation in ACTIVATIONS.values())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(block(x) for block in self.blocks)


@on("", "h2", "n2c2")
@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_and_activation_is_exact(world: int, grid: str, norm: str) -> None:
    for train in (True, False):
        check(Blocks, grid, [(4, 4, 6, 5)], kwargs={"norm": norm}, loss=_weighted, train=train)


class SharedOperands(nn.Module):
    """Operands that must not be overwritten: others read them before or after, or they are inputs or buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.register_buffer("shift", torch.randn(1, 3, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.one(x)
        a = F.relu(y) + y
        z = self.two(a)
        view = z.flatten(1)
        b = F.leaky_relu(z, 0.1)
        c = view.sum(1) + b.sum((1, 2, 3))
        twice = self.one(z)
        d = twice + twice
        e = F.relu(x) + self.shift
        saved = torch.sigmoid(self.two(x))  # backward needs the result of sigmoid
        f = saved + x
        wide = self.one(x).mean(1, keepdim=True) + x
        g = self.two(x) - x
        return a, b, c, d, e, F.relu(f), wide, F.elu(g), F.relu(torch.add(self.one(x), x, alpha=2))


@on("", "h2", "n2", "c2")
def test_shared_operands_are_not_overwritten(world: int, grid: str) -> None:
    check(SharedOperands, grid, [(4, 3, 6, 5)], loss=_weighted)


def _weighted(results: Any) -> Tensor:
    return sum((result * torch.linspace(1, 2, result.numel()).view_as(result)).mean() for result in results)


def _saved_bytes(module: nn.Module, x: Tensor) -> int:
    """The bytes that autograd saves, without parameters. Each storage counts once."""
    sizes: dict[int, int] = {}
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    parameters = {shard.untyped_storage().data_ptr() for shard in shards}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = module(x)
    del result
    return sum(sizes.values())


def _compare_saved(norm: str, activation: str) -> tuple[int, int, int]:
    """The bytes that the model saves, the model with ``inplace=True``, and the parallel module."""

    def build(inplace: bool) -> nn.Module:
        layers = [(nn.Conv2d(4, 4, 3, padding=1), NORMS[norm](4), ACTIVATIONS[activation]()) for _ in range(4)]
        stack = nn.Sequential(*(layer for block in layers for layer in block))
        for module in stack.modules():
            if hasattr(module, "inplace"):
                module.inplace = inplace
        return stack

    x = torch.randn(2, 4, 32, 32)
    net = distfx.parallelize(build(False), distfx.Grid())
    net(x)
    return _saved_bytes(build(False), x), _saved_bytes(build(True), x), _saved_bytes(net, x)


@pytest.mark.parametrize("norm", ["none", "batch", "instance", "group"])
@pytest.mark.parametrize("activation", ["relu", "leaky", "elu"])
def test_one_rank_saves_no_more_than_the_in_place_model(norm: str, activation: str) -> None:
    ((copies, in_place, ours),) = run(1, _compare_saved, norm, activation)
    assert ours <= in_place
    if activation != "relu":  # which saves only its result in any case
        assert ours < 0.8 * copies


class Sums(nn.Module):
    """Sums and products of operands with different dtypes, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.conv, self.in_place = nn.Conv2d(4, 4, 3, padding=1), in_place

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a, b, c, d, e = (self.conv(x) for _ in range(5))
        wide = x.double()
        if not self.in_place:
            return F.relu(a + x), b * wide, c + wide.mean(1, keepdim=True)
        a += x
        b *= wide
        c += wide.mean(1, keepdim=True)
        d[:, 1:3] *= wide[:, :1]
        with torch.no_grad():
            e -= wide
        return F.relu(a), b, c, d, e


def _dtypes(grid: str, in_place: bool, autocast: bool) -> tuple[list[torch.dtype], list[torch.dtype]]:
    torch.manual_seed(0)
    model = Sums(in_place)
    net = distfx.parallelize(model, distfx.Grid.parse(grid) if grid else distfx.Grid())
    x = torch.randn(2, 4, 8, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        have, want = net(x), model(x)
    for mine, other in zip(have, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2, check_dtype=False)
    _weighted(have).backward()
    assert all(p.grad is not None for p in net.parameters())
    return [t.dtype for t in have], [t.dtype for t in want]


@on("", "h2", "c2")
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("in_place", [False, True], ids=["promoted", "in place"])
def test_in_place_results_keep_their_dtype(world: int, grid: str, in_place: bool, autocast: bool) -> None:
    for have, want in run(world, _dtypes, grid, in_place, autocast):
        assert have == want


class Counter(nn.Module):
    """A buffer that forward modifies. The ReLU that reads it must not overwrite it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.register_buffer("seen", torch.full((1, 3, 1, 1), -2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + F.relu(self.seen.add_(0.75))


@on("", "n2")
def test_buffers_are_not_overwritten(world: int, grid: str) -> None:
    check(Counter, grid, [(4, 3, 4, 4)] * 3)


class Large(nn.Module):
    """Activations of more than ``reuse.LARGE`` elements, returned or read by one layer, two, a sum or a view."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norm, self.elu = nn.BatchNorm2d(4), nn.ELU(0.7)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        one, two, three = self.convs
        a = F.relu(one(x))
        b = self.elu(self.norm(two(a)))
        c = F.leaky_relu(three(b), 0.1)
        d = F.relu(two(x))
        both = one(d) + two(d)
        e = F.relu(three(c)) + both
        f = F.relu(one(e)).flatten(2).cumsum(2)
        g = F.relu(three(x))
        return two(g) * g, e, f, F.relu(one(x))


def test_large_gradients_with_one_reader_are_overwritten() -> None:
    assert run(1, _in_place_activations) == [["relu_.default", "elu_.default", "leaky_relu_.default"]]


def _in_place_activations() -> list[str]:
    """The activations whose gradient is overwritten, for a large and a small image."""
    net = distfx.parallelize(Large(), distfx.Grid())
    names = []
    for size in (256, 8):
        net(torch.randn(1, 4, size, size))
        nodes = net.graph_after("reuse").graph.find_nodes(op="call_function", target=ops.activate_in_place)
        names += [str(node.kwargs["activation"]).removeprefix("aten.") for node in nodes]
    return names


@on("", "h2", "n2")
def test_large_activations_are_exact(world: int, grid: str) -> None:
    check(Large, grid, [(2, 4, 256, 256)], loss=_weighted)


@pytest.mark.parametrize("activation", [aten.relu_.default, aten.leaky_relu_.default, aten.elu_.default])
def test_the_gradient_overwrites_that_of_the_result(activation: Any) -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    result_grad = torch.randn(5, 7, dtype=torch.float64)
    (want,) = torch.autograd.grad(activation(x.clone()), x, result_grad)
    (have,) = torch.autograd.grad(in_place.InPlaceActivation(activation)(x.clone()), x, result_grad)
    assert torch.equal(have, want)
    assert have.data_ptr() == result_grad.data_ptr()
