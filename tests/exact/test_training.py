"""Training: optimizers, averages, gradients and hooks, state dicts, modes, dtypes and autocast, as on one device."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from support.exact import relative
from support.models import Image, Net, pair
from support.ranks import run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import distfx
from distfx.runtime.autograd import transfers
from distfx.runtime.comm import transport


def training(grid: str, name: str) -> float:
    net, plain = pair(grid)
    makers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    }
    optimizers = [makers[name](module.parameters()) for module in (net, plain)]
    norms: list[float] = []
    for step in range(3):
        torch.manual_seed(step)
        x, labels = torch.randn(4, 3, 8, 10, dtype=torch.float64), torch.randint(5, (4,))
        for module, optimizer in zip((net, plain), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(module(x), labels).backward()
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            optimizer.step()
    state = plain.state_dict()
    errors = [relative(value, state[key]) for key, value in net.full_state_dict().items()]
    errors += [abs(a - b) / b for a, b in zip(norms[::2], norms[1::2], strict=True)]
    return max(errors)


@pytest.mark.parametrize("name", ["sgd", "adamw", "fused"])
@pytest.mark.parametrize("grid", ["n2c2", "c2h2", "c4"])
def test_optimizers_and_clipping(grid: str, name: str) -> None:
    assert max(run(4, training, grid, name)) < 1e-9


def fused(grid: str, channels_last: bool) -> float:
    """One step of a fused optimizer, which assumes that gradients have the memory format of their parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model.double())
    net = distfx.parallelize(model, grid)
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    for module in (net, plain):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1, fused=True)
        module(x).square().sum().backward()
        optimizer.step()
    biases = ("0.bias", "1.bias")  # before a batch norm: zero except for rounding, by which Adam divides
    state = plain.state_dict()
    return max(relative(v, state[k]) for k, v in net.full_state_dict().items() if k not in biases)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("grid", ["n2", "h2", "c2"])
def test_gradients_have_the_memory_format_of_their_parameters(grid: str, channels_last: bool) -> None:
    assert max(run(2, fused, grid, channels_last)) < 1e-9


def averaged(grid: str) -> tuple[float, float]:
    """A moving average of the parameters, which torch keeps in a deep copy of the module."""
    net, plain = pair(grid)
    x = torch.randn(4, 3, 8, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    averages, outputs = [], []
    for module in (net, plain):
        average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
            average.update_parameters(module)
        averages.append(average)
        outputs.append(torch.cat([average(x), module(x)]))
    whole = averages[0].module.full_state_dict()
    return (
        relative(*outputs),
        max(relative(whole[name], value) for name, value in averages[1].module.state_dict().items()),
    )


@pytest.mark.parametrize("grid", ["c2", "h2"])
def test_copies_for_moving_averages(grid: str) -> None:
    assert all(output < 1e-12 and state < 1e-12 for output, state in run(2, averaged, grid))


def accumulation(grid: str) -> float:
    """Two backward passes add up; ``autograd.grad`` and hooks see finished gradients."""
    net, plain = pair(grid)
    torch.manual_seed(5)
    inputs = [torch.randn(4, 3, 8, 10, dtype=torch.float64) for _ in range(2)]
    seen: dict[str, list[Tensor]] = {}
    for name, parameter in net.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(grad.full_tensor().clone()))
    hooked: dict[str, list[Tensor]] = {}
    for name, parameter in plain.named_parameters():
        parameter.register_hook(lambda grad, name=name: hooked.setdefault(name, []).append(grad.clone()))
    for module in (net, plain):
        for x in inputs:
            module(x).square().sum().backward()
    expected = dict(plain.named_parameters())
    errors = [relative(p.grad.full_tensor(), expected[n].grad) for n, p in net.named_parameters()]
    errors += [relative(a, b) for name in hooked for a, b in zip(seen[name], hooked[name], strict=True)]
    ours = torch.autograd.grad(net(inputs[0]).square().sum(), list(net.parameters()))
    theirs = torch.autograd.grad(plain(inputs[0]).square().sum(), list(plain.parameters()))
    errors += [relative(a.full_tensor(), b) for a, b in zip(ours, theirs, strict=True)]
    return max(errors)


@pytest.mark.parametrize("grid", ["n2", "c2", "h2"])
def test_accumulation_hooks_and_autograd_grad(grid: str) -> None:
    assert max(run(2, accumulation, grid)) < 1e-11


def two_passes_before_backward() -> float:
    net, plain = pair("n2")
    torch.manual_seed(5)
    inputs = [torch.randn(4, 3, size, 10, dtype=torch.float64) for size in (8, 6)]
    for module in (net, plain):
        torch.stack([module(x).square().sum() for x in inputs]).sum().backward()
    expected = dict(plain.named_parameters())
    return max(relative(p.grad.full_tensor(), expected[n].grad) for n, p in net.named_parameters())


def test_two_forward_passes_before_one_backward() -> None:
    assert max(run(2, two_passes_before_backward)) < 1e-11


def second_derivative() -> str:
    net, _ = pair("h2", Image)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    try:
        grad.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_second_derivatives_raise() -> None:
    assert all("once_differentiable" in text for text in run(2, second_derivative))


def state_dicts(grid: str, other: str) -> float:
    net, plain = pair(grid)
    x = torch.randn(4, 3, 8, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    net(x)
    plain(x)
    keys = list(plain.state_dict())
    assert list(net.state_dict()) == keys and "scale" not in keys
    assert all(isinstance(value, DTensor) for value in net.state_dict().values())
    full = net.full_state_dict()
    errors = [relative(full[key], plain.state_dict()[key]) for key in keys]
    fresh = Net().double()
    fresh.load_state_dict(full)
    errors.append(relative(fresh.eval()(x), plain.eval()(x)))
    torch.manual_seed(99)
    second = distfx.parallelize(Net().double(), distfx.Grid.parse(other))
    second.load_state_dict(net.state_dict())
    errors += [relative(second.full_state_dict()[key], full[key]) for key in keys]
    second.load_state_dict({key: value * 2 for key, value in full.items()})
    errors += [relative(second.full_state_dict()[key], full[key] * 2) for key in keys]
    try:
        second.load_state_dict({"nonsense": torch.zeros(1)})
    except RuntimeError as error:
        assert "nonsense" in str(error)
    else:
        raise AssertionError("a wrong state dict was loaded")
    return max(errors)


@pytest.mark.parametrize(("grid", "other"), [("n2c2", "c4"), ("c4", "h2w2"), ("c2h2", "n4")])
def test_state_dicts_move_between_grids_and_models(grid: str, other: str) -> None:
    assert max(run(4, state_dicts, grid, other)) < 1e-12


def modes() -> float:
    net, plain = pair("c2h2")
    torch.manual_seed(5)
    x = torch.randn(4, 3, 8, 10, dtype=torch.float64)
    errors = []
    for train in (True, False, True, False):
        net.train(train)
        plain.train(train)
        with torch.set_grad_enabled(train):
            errors.append(relative(net(x), plain(x)))
        assert net.plan.training == train
    errors += [relative(net.full_state_dict()[k], v) for k, v in plain.state_dict().items()]
    return max(errors)


def test_train_and_eval_share_parameters() -> None:
    assert max(run(4, modes)) < 1e-12


def conversion() -> float:
    net, plain = pair("c2h2")
    net.float()
    plain.float()
    torch.manual_seed(5)
    x = torch.randn(4, 3, 8, 10)
    y, want = net(x), plain(x)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())
    return relative(y, want)


def test_to_another_dtype() -> None:
    assert max(run(4, conversion)) < 1e-5


def autocast_runs(grid: str) -> list[tuple[torch.dtype, torch.dtype, float]]:
    """For two networks: the dtypes of both outputs, and their relative error."""
    results = []
    x = torch.randn(4, 3, 8, 10, generator=torch.Generator().manual_seed(1))
    for cls in (Net, Image):
        net, plain = pair(grid, cls)
        net.float()
        plain.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, want = net(x), plain(x)
        y.float().sum().backward()
        results.append((y.dtype, want.dtype, relative(y.float(), want.float())))
    return results


@pytest.mark.parametrize("world, grid", [(1, "n1"), (2, "n2"), (2, "c2"), (2, "h2"), (4, "c2h2")])
def test_autocast(world: int, grid: str) -> None:
    """The precision is that of the plain model, on every grid."""
    for results in run(world, autocast_runs, grid):
        for dtype, expected, error in results:
            assert dtype == expected == torch.bfloat16 and error < 0.05


class Pooled(nn.Module):
    """Convolutions without halos. On small images some ranks have empty parts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.up = nn.ConvTranspose2d(4, 4, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.conv(x).relu()).mean((2, 3))


def autocast_with_empty_parts() -> tuple[set[torch.dtype], torch.dtype, float]:
    """The dtypes that this rank sends, the dtype of the result, and its error."""
    torch.manual_seed(3)
    model = Pooled()
    torch.nn.init.ones_(model.conv.weight)
    torch.nn.init.ones_(model.up.weight)
    net = distfx.parallelize(model, "h4", example_inputs=(torch.randn(2, 3, 32, 8),))
    sent = set()

    def record_dtype(segment: Any, tensor: Tensor, op: str = "sum") -> Any:
        sent.add(tensor.dtype)
        return transport.all_reduce(segment, tensor, op)

    with torch.autocast("cpu", dtype=torch.bfloat16), patch.object(transfers, "all_reduce", record_dtype):
        y, want = net(torch.ones(2, 3, 2, 8)), model(torch.ones(2, 3, 2, 8))
    y.float().sum().backward()
    return sent, y.dtype, relative(y.float(), want.float())


def test_autocast_where_some_ranks_have_empty_parts() -> None:
    for sent, dtype, error in run(4, autocast_with_empty_parts):
        assert sent == {torch.bfloat16} and dtype == torch.bfloat16 and error < 0.02


class Uninferable(nn.Module):
    """A model whose input cannot be inferred from its first layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2] == 8 and x.shape[3] == 8
        return self.inner(x * 2)


def first_call_in_inference_mode(example: bool) -> tuple[bool, int]:
    """Whether the model trains after a first call in inference mode, and the number of gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Upsample(scale_factor=2), nn.ReflectionPad2d(3))
    example_inputs = (torch.randn(2, 3, 8, 8),) if example else None
    net = distfx.parallelize(model if example else Uninferable(model), "h2", example_inputs=example_inputs)
    x = torch.randn(2, 3, 8, 8)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        net(x)
    y = net(x)
    y.sum().backward()
    grads = [p.grad for p in net.parameters()]
    return y.requires_grad and y.dtype == torch.float32, sum(grad is not None for grad in grads)


@pytest.mark.parametrize("example", [True, False])
def test_first_call_in_inference_mode(example: bool) -> None:
    """Graphs and parameters that are created in inference mode serve training, too."""
    assert run(2, first_call_in_inference_mode, example) == [(True, 2)] * 2
