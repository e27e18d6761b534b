"""What a run sends: the closed-form volumes of the algorithms, and exactly what the plan predicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.exact import check, ranks_of
from support.ranks import run
from support.volumes import INPUT, VOLUMES, halving_network, small_network, three_convolutions, weight_count

import distfx
from distfx.grid import Grid


def measure(grid: str, strategy: str) -> dict[str, Any]:
    """The plan and the ledger of one step on this rank."""
    torch.manual_seed(0)
    net = distfx.parallelize(three_convolutions(), grid, strategy=strategy)
    with distfx.record_comm() as ledger:
        net(torch.randn(INPUT)).sum().backward()
    row = net.plan.row("1")
    reductions = [entry for entry in ledger.rows if entry.node.startswith("gradients")]
    phases = ("forward", "backward")
    return {
        "forward": ledger.bytes(node=row.node, phase="forward"),
        "backward": ledger.bytes(node=row.node, phase="backward"),
        "reduced": sum(entry.bytes for entry in reductions),
        "reduction axes": {entry.axis for entry in reductions},
        "ledger": [(ledger.bytes(phase=phase), ledger.messages(phase=phase)) for phase in phases],
        "plan": [(net.plan.bytes(phase), net.plan.messages(phase)) for phase in phases],
        "algorithm": row.algorithm,
        "plan without processes": distfx.plan(three_convolutions(), grid, INPUT, strategy=strategy, rank=net.grid.rank),
        "plan of the run": net.plan,
    }


@pytest.mark.parametrize(("world", "grid", "strategy", "elements"), [(ranks_of(g), g, s, e) for g, s, e in VOLUMES])
def test_volumes_of_the_algorithms(world: int, grid: str, strategy: str, elements: int) -> None:
    axes = Grid.parse_abstract(grid).axes
    sample_ranks, channel_ranks = axes.get("n", 1), axes.get("c", 1)
    for result in run(world, measure, grid, strategy):
        assert result["algorithm"] == strategy
        assert result["forward"] == result["backward"] == 4 * elements
        assert result["reduced"] == 4 * 2 * (sample_ranks - 1) * weight_count() // channel_ranks // sample_ranks
        assert result["reduction axes"] == ({"n"} if sample_ranks > 1 else set())
        assert result["plan"] == result["ledger"]
        assert result["plan without processes"] == result["plan of the run"]


@pytest.mark.parametrize(
    ("world", "grid", "strategy"),
    [(ranks_of(g), g, "auto") for g in ("n2", "c2", "h2", "n2c2", "n2h2", "c4", "h4")]
    + [(2, "c2", "stationary-x"), (4, "c4", "stationary-w"), (4, "n2c2", "stationary-y")],
)
def test_plan_equals_ledger(world: int, grid: str, strategy: str) -> None:
    check(small_network, grid, [(4, 3, 37, 32), (5, 3, 64, 33)], strategy=strategy)
    if strategy == "auto":
        return  # the strategy depends on the sizes of the example, which a plan without processes does not share
    results = check(small_network, grid, [(4, 3, 37, 32)], strategy=strategy, input_grad=False)
    model = small_network().double()
    plans = [distfx.plan(model, grid, (4, 3, 37, 32), strategy, rank=rank) for rank in range(world)]
    assert [plan.bytes() for plan in plans] == [result["bytes"][0][1] for result in results]


def plan_again_at_first_call() -> tuple[list[str], list[str], float]:
    """The layouts of the convolutions before and after the first call, and the error of its output."""
    torch.manual_seed(0)
    model = halving_network().double()
    net = distfx.parallelize(model, "h4")  # the example is inferred: 224 x 224
    before = [row.layout for row in net.plan.rows if "convolution" in row.op]
    x = torch.randn(2, 3, 32, 30, dtype=torch.float64)
    error = float((net(x) - model(x)).abs().max())
    return before, [row.layout for row in net.plan.rows if "convolution" in row.op], error


def test_an_inferred_example_is_planned_again_at_the_first_call() -> None:
    for before, after, error in run(4, plan_again_at_first_call):
        assert before == ["N C H/h W"] * 5 and after == ["N C H/h W"] * 3 + ["N C H W"] * 2
        assert error < 1e-12
