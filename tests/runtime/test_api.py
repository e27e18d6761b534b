"""What a user touches: one call makes a model parallel, leaves the model as it was, and can be looked into."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from support.exact import relative
from support.models import Image, Net, pair
from support.ranks import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import distfx


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


def mesh_with_an_axis_of_one() -> float:
    net, plain = pair("h2", Image)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("n", "h"))
    net = distfx.parallelize(plain, mesh)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return relative(net(distribute_tensor(x, mesh, [Replicate(), Shard(2)])), plain(x))


def test_a_mesh_may_have_axes_of_one() -> None:
    assert max(run(2, mesh_with_an_axis_of_one)) < 1e-12


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
        "halo(to_varying, dim=2, axis='h', lo=1, hi=1)  # N/n C H/h{a-1:b+1} W each(c)",
        "models.py",
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


def converted_bytes() -> tuple[int, int]:
    net, _ = pair("h2", Image)
    net.bfloat16()
    with distfx.record_comm() as ledger:
        net(torch.randn(2, 3, 8, 8).bfloat16()).sum().backward()
    return net.plan.bytes(), ledger.bytes()


def test_the_plan_of_a_converted_module_has_its_bytes() -> None:
    for planned, sent in run(2, converted_bytes):
        assert planned == sent > 0


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
    assert all("conv (Conv2d) is part of a parallel module" in message for message in messages)
    assert "(bn): BatchNorm2d(" in text and "eps=1e-05" in text


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
    return max(errors), len(net.graphs)


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
