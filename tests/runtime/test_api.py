"""The public interface: one call distributes a model without modifying it, and the result can be inspected."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from support.exact import relative
from support.models import Image, Net, pair
from support.ranks import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import distfx


def parameters_of_rank_zero(grid: str) -> float:
    torch.manual_seed(100 + torch.distributed.get_rank())
    model = Net().double().to(memory_format=torch.channels_last)
    net = distfx.parallelize(model, grid)
    torch.manual_seed(100)
    want = Net().double().state_dict()
    return max(relative(value, want[key]) for key, value in net.full_state_dict().items())


@pytest.mark.parametrize(("world", "grid"), [(2, "c2"), (3, "c3"), (4, "n2c2"), (4, "n2h2")])
def test_parameters_come_from_rank_zero(world: int, grid: str) -> None:
    """Each rank gathers the shards along its own channel axis, so all copies of all shards are compared."""
    assert max(run(world, parameters_of_rank_zero, grid)) == 0


def model_is_unmodified() -> bool:
    torch.manual_seed(3)
    model = Net().double()
    before = copy.deepcopy(model.state_dict())
    model.bn.eval()
    net = distfx.parallelize(model, distfx.Grid(c=2))
    net(torch.randn(2, 3, 8, 8, dtype=torch.float64)).sum().backward()
    assert model.training and not model.bn.training
    assert all(parameter.grad is None for parameter in model.parameters())
    return all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_the_model_is_not_modified() -> None:
    assert all(run(2, model_is_unmodified))


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


def test_the_plan_follows_a_conversion() -> None:
    for planned, sent in run(2, converted_bytes):
        assert planned == sent > 0


def call_parts() -> list[str]:
    net, _ = pair("h1")
    messages = []
    for action in (lambda: net.conv.register_forward_hook(print), lambda: net.conv(torch.ones(2))):
        with pytest.raises(distfx.DistfxError) as error:
            action()
        messages.append(str(error.value))
    return [*messages, repr(net)]


def test_parts_cannot_be_called_or_hooked() -> None:
    *messages, text = run(1, call_parts)[0]
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
