"""What a user touches: inputs and outputs, state dicts, optimizers, hooks, modes, inspection."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import distfx
from distfx.runtime import halves, transport
from tests.captures import remembered
from tests.exact import relative
from tests.ranks import run


class Net(nn.Module):
    """A little of everything. Its submodule's name is that of a property of the parallel module, on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 6, 3, stride=2, padding=1)
        self.fc = nn.Linear(6, 5)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.plan(x)))
        return self.fc(self.conv(x).mean((2, 3))) * self.scale


class Image(nn.Module):
    """From image to image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu()


def pair(grid: str, cls: type[nn.Module] = Net, **options: Any) -> tuple[distfx.ParallelModule, nn.Module]:
    torch.manual_seed(3)
    model = cls().double()
    with remembered(cls):
        return distfx.parallelize(model, distfx.Grid.parse(grid), **options), copy.deepcopy(model)


def local_outputs() -> float:
    net, plain = pair("n2h2", Image, outputs="local")
    torch.manual_seed(5)
    x = torch.randn(3, 3, 9, 8, dtype=torch.float64)
    y, want = net(x), plain(x)
    part = net.output_slices(0, want.shape)
    weights = torch.randn_like(want)
    (y * weights[part]).sum().backward()
    (want * weights).sum().backward()
    errors = [relative(y, want[part])]
    errors += [
        relative(p.grad.full_tensor(), q.grad) for p, q in zip(net.parameters(), plain.parameters(), strict=True)
    ]
    return max(errors)


def test_local_outputs_and_their_slices() -> None:
    assert max(run(4, local_outputs)) < 1e-12


def sharded_input(grid: str, dims: tuple[int, ...], uneven: bool) -> tuple[float, float, int]:
    net, plain = pair(grid, Image, strategy="stationary-x" if "c" in grid else "auto")
    torch.manual_seed(5)
    x = torch.randn(4, 3, 9 if uneven else 8, 8, dtype=torch.float64)
    part = net.input_slices(0, x.shape)
    local = x[part].clone().requires_grad_()
    given = DTensor.from_local(
        local, net.grid.mesh, [Shard(dim) for dim in dims], run_check=False, shape=x.shape, stride=x.stride()
    )
    whole = x.clone().requires_grad_()
    with distfx.record_comm() as ledger:
        y = net(given)
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
    given = DTensor.from_local(x, net.grid.mesh, [Replicate(), Replicate()], run_check=False)
    return relative(net(given), plain(x))


def test_a_dtensor_in_another_layout_is_brought_into_ours() -> None:
    assert max(run(4, other_sharding)) < 1e-12


def training(grid: str, name: str) -> float:
    net, plain = pair(grid)
    makers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
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


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("grid", ["n2c2", "c2h2", "c4"])
def test_optimizers_and_clipping(grid: str, name: str) -> None:
    assert max(run(4, training, grid, name)) < 1e-9


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


def rank_zero_wins(grid: str) -> float:
    torch.manual_seed(100 + torch.distributed.get_rank())
    model = Net().double().to(memory_format=torch.channels_last)
    net = distfx.parallelize(model, grid)
    torch.manual_seed(100)
    want = Net().double().state_dict()
    return max(relative(value, want[key]) for key, value in net.full_state_dict().items())


@pytest.mark.parametrize(("world", "grid"), [(2, "c2"), (3, "c3"), (4, "n2c2"), (4, "n2h2")])
def test_rank_zeros_parameters_are_taken(world: int, grid: str) -> None:
    """Each rank gathers what the ranks along its own channel axis got: all copies of all shards are compared."""
    assert max(run(world, rank_zero_wins, grid)) == 0


def model_untouched() -> bool:
    torch.manual_seed(3)
    model = Net().double()
    before = copy.deepcopy(model.state_dict())
    model.bn.eval()
    net = distfx.parallelize(model, distfx.Grid(c=2))
    net(torch.randn(2, 3, 8, 8, dtype=torch.float64)).sum().backward()
    assert model.training and not model.bn.training
    assert all(parameter.grad is None for parameter in model.parameters())
    return all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_the_users_model_is_left_as_it_was() -> None:
    assert all(run(2, model_untouched))


def autocast_runs(grid: str) -> list[tuple[torch.dtype, torch.dtype, float]]:
    """Of two networks: the dtypes of both outputs, and how far they are apart."""
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
    """Computes in the same precision as the model does, on every grid."""
    for results in run(world, autocast_runs, grid):
        for dtype, wanted, error in results:
            assert dtype == wanted == torch.bfloat16 and error < 0.05


class Pooled(nn.Module):
    """Its convolutions go without a halo; on small images some ranks have nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.up = nn.ConvTranspose2d(4, 4, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.conv(x).relu()).mean((2, 3))


def autocast_of_nothing() -> tuple[set[torch.dtype], torch.dtype, float]:
    """The dtypes that a rank sends, of the result, and how far that is from the one alone."""
    torch.manual_seed(3)
    model = Pooled()
    torch.nn.init.ones_(model.conv.weight)
    torch.nn.init.ones_(model.up.weight)
    net = distfx.parallelize(model, "h4", example_inputs=(torch.randn(2, 3, 32, 8),))
    net._engine.guessed = False
    sent = set()

    def noted(segment: Any, tensor: Tensor, op: str = "sum") -> Any:
        sent.add(tensor.dtype)
        return transport.all_reduce(segment, tensor, op)

    with torch.autocast("cpu", dtype=torch.bfloat16), patch.object(halves, "all_reduce", noted):
        y, want = net(torch.ones(2, 3, 2, 8)), model(torch.ones(2, 3, 2, 8))
    y.float().sum().backward()
    return sent, y.dtype, relative(y.float(), want.float())


def test_autocast_where_some_ranks_have_nothing() -> None:
    for sent, dtype, error in run(4, autocast_of_nothing):
        assert sent == {torch.bfloat16} and dtype == torch.bfloat16 and error < 0.02


def first_call_in_inference_mode(example: bool) -> tuple[bool, int]:
    """Of a model whose input cannot be told, or can: whether it trains after a first look at it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Upsample(scale_factor=2), nn.ReflectionPad2d(3))
    given = (torch.randn(2, 3, 8, 8),) if example else None
    net = distfx.parallelize(model if example else Unguessed(model), "h2", example_inputs=given)
    x = torch.randn(2, 3, 8, 8)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        net(x)
    y = net(x)
    y.sum().backward()
    grads = [p.grad for p in net.parameters()]
    return y.requires_grad and y.dtype == torch.float32, sum(grad is not None for grad in grads)


class Unguessed(nn.Module):
    """Its input cannot be told from a first layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2] == 8 and x.shape[3] == 8
        return self.inner(x * 2)


@pytest.mark.parametrize("example", [True, False])
def test_first_call_in_inference_mode(example: bool) -> None:
    """What is made then is made for training, too."""
    assert run(2, first_call_in_inference_mode, example) == [(True, 2)] * 2


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
    net = distfx.parallelize(model, distfx.Grid(h=2))  # rank and number of inputs are known at the first call only
    x, y = (torch.randn(2, 3, 7, 6, dtype=torch.float64) for _ in range(2))
    have, want = net(x, y), model(x, y)
    assert list(have) == list(want) and isinstance(have["pair"], tuple)
    errors = [relative(have["sum"], want["sum"])]
    errors += [relative(a, b) for a, b in zip(have["pair"], want["pair"], strict=True)]
    return max(errors)


def test_several_inputs_and_nested_outputs() -> None:
    assert max(run(2, several)) < 1e-12


def inspection() -> dict[str, Any]:
    net, _ = pair("n2c2h2")
    net(torch.randn(2, 3, 8, 10, dtype=torch.float64))
    assert distfx.Plan.from_json(net.plan.to_json()) == net.plan
    return {
        "repr": repr(net).splitlines()[0:2],
        "text": net.print_readable(print_output=False),
        "explain": distfx.explain(net),
        "json": json.loads(net.plan.to_json())["grid"],
        "layouts": {n.name: str(n.meta["layout"]) for n in net.graph_module.graph.nodes if "layout" in n.meta},
        "slices": net.input_slices(0, (4, 3, 8, 10)),
        "passes": [str(record) for record in net.passes],
    }


def test_inspection() -> None:
    results = run(8, inspection)
    first = results[0]
    assert "Net on Grid(n=2, c=2, h=2), outputs='global'" in "".join(first["repr"])
    text = first["text"]
    for words in (
        "halo(fan, dim=2, axis='h', lo=1, hi=1)  # N/n C H/h{a-1:b+1} W each(c)",
        "test_api.py",
        "self.bn(self.plan(x))",
        "all_reduce(mean, axis='h')",
        "stationary-",
        "to='replicated'",
    ):
        assert words in text, text
    assert first["json"] == "Grid(n=2, c=2, h=2)"
    assert "sends" in first["explain"] and "passes: plan" in first["explain"]
    assert [r["slices"][0] for r in results[::4]] == [slice(0, 2), slice(2, 4)]
    assert [r["slices"][2] for r in results[:2]] == [slice(0, 4), slice(4, 8)]
    assert len({r["text"] for r in results}) == 1


def single() -> float:
    net, plain = pair("n1")
    x = torch.randn(2, 3, 8, 10, dtype=torch.float64)
    with distfx.record_comm() as ledger:
        y = net(x)
        y.sum().backward()
    assert not ledger.rows
    return relative(y, plain(x))


def test_one_rank() -> None:
    assert run(1, single) == [0.0]


class Branching(nn.Module):
    """Does something else for small images, and pools with a window that may begin outside."""

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
    return max(errors), max(map(len, net._engine.compiled.values()))


def test_models_that_branch_on_sizes_have_a_graph_for_each_case() -> None:
    for error, graphs in run(2, branching):
        assert error < 1e-5 and graphs > 2


class Peculiar(nn.Module):
    """Fractions of sizes, constants of each mode, a head for training only, buffers written in a chain."""

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


def peculiar(grid: str, first: bool) -> float:
    torch.manual_seed(3)
    model = Peculiar().double().train(first)
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
def test_peculiar_models(grid: str, first: bool) -> None:
    assert max(run(2, peculiar, grid, first)) < 1e-10


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


def chunked_input() -> float:
    """DTensor cuts 8 samples into 3, 3, 2; distfx into 2, 3, 3: on one rank the shapes agree."""
    net, plain = pair("n3", Image)
    x = torch.randn(8, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = distribute_tensor(x, net.grid.mesh, [Shard(0)])
    return relative(net(given), plain(x))


def test_a_dtensor_cut_otherwise_on_some_ranks_only() -> None:
    assert max(run(3, chunked_input)) < 1e-12


class Levels(nn.Module):
    """A level with fewer rows than ranks, joined by a concatenation; a class map."""

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
    for error, same in run(4, levels):
        assert error < 1e-12 and same


def second_derivative() -> str:
    net, _ = pair("h2", Image)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    try:
        grad.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_second_derivatives_are_refused_not_wrong() -> None:
    assert all("once_differentiable" in text for text in run(2, second_derivative))


def averaged(grid: str) -> tuple[float, float]:
    """A moving average of the parameters, as torch keeps it: by a copy."""
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


def parts_say_no() -> list[str]:
    net, _ = pair("h1")
    messages = []
    for action in (lambda: net.conv.register_forward_hook(print), lambda: net.conv(torch.ones(2))):
        with pytest.raises(distfx.DistfxError) as error:
            action()
        messages.append(str(error.value))
    return [*messages, repr(net)]


def test_parts_are_not_called() -> None:
    """A hook that never runs would be a silent fault."""
    *messages, text = run(1, parts_say_no)[0]
    assert all("conv (Conv2d) is a part of a parallel module" in message for message in messages)
    assert "(bn): BatchNorm2d()" in text


def mesh_with_an_axis_of_one() -> float:
    net, plain = pair("h2", Image)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("n", "h"))
    net = distfx.parallelize(plain, mesh)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return relative(net(distribute_tensor(x, mesh, [Replicate(), Shard(2)])), plain(x))


def test_a_mesh_may_have_axes_of_one() -> None:
    assert max(run(2, mesh_with_an_axis_of_one)) < 1e-12


def uneven_shards() -> tuple[list[str], float]:
    """Of a DTensor whose parts are not the plan's."""
    net, plain = pair("h2", Image)
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = distribute_tensor(x, net.grid.mesh, [Shard(2)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        error = max(relative(net(given), plain(x)) for _ in range(2))
    return [str(each.message) for each in said if "gathered" in str(each.message)], error


def test_a_sharded_input_that_must_be_gathered_is_reported_once() -> None:
    (first, error), (second, other) = run(2, uneven_shards)
    assert len(first) == 1 and "net.input_slices" in first[0] and not second and max(error, other) < 1e-12


def converted_bytes() -> tuple[int, int]:
    net, _ = pair("h2", Image)
    net.bfloat16()
    with distfx.record_comm() as ledger:
        net(torch.randn(2, 3, 8, 8).bfloat16()).sum().backward()
    return net.plan.bytes(), ledger.bytes()


def test_the_plan_of_a_converted_module_has_its_bytes() -> None:
    for planned, sent in run(2, converted_bytes):
        assert planned == sent > 0
