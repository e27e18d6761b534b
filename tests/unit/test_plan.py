"""Plans without processes: volumes of the algorithms, chosen strategies, pins, errors, and the plan as a value.

``tests/exact/test_bytes.py`` compares plans with what a run sends.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from support.volumes import (
    INPUT,
    VOLUMES,
    C,
    N,
    W,
    halving_network,
    small_network,
    three_convolutions,
    volume,
    weight_count,
)
from torch import Tensor, nn

import distfx
from distfx.errors import DistfxError
from distfx.grid import Grid
from distfx.ir.ops import on_device
from distfx.passes.capture.export import capture
from distfx.report.plan import Plan

ABSTRACT_VOLUMES = [
    *VOLUMES,
    ("c8", "stationary-x", volume("stationary-x", N, 8)),
    ("c8", "stationary-y", volume("stationary-y", N, 8)),
    ("c8", "stationary-w", volume("stationary-w", N, 8, 2)),  # factors (2, 4), filters on c0
    ("c16", "stationary-w", volume("stationary-w", N, 16, 4)),
    ("n2c4", "stationary-w", volume("stationary-w", N // 2, 4, 2)),
    ("n8c2", "stationary-y", volume("stationary-y", N // 8, 2)),
]


@pytest.mark.parametrize(("grid", "strategy", "elements"), ABSTRACT_VOLUMES)
def test_volumes_of_the_algorithms(grid: str, strategy: str, elements: int) -> None:
    plan = distfx.plan(three_convolutions(), grid, INPUT, strategy=strategy)
    row = plan.row("1")
    assert row.algorithm == strategy
    assert row.bytes_forward == row.bytes_backward == 4 * elements
    axes = Grid.parse_abstract(grid).axes
    sample_ranks, channel_ranks = axes.get("n", 1), axes.get("c", 1)
    reduced = sum(r.bytes_backward for r in plan.rows if r.algorithm == "segmented allreduce")
    assert reduced == 4 * 2 * (sample_ranks - 1) * weight_count() // channel_ranks // sample_ranks


@pytest.mark.parametrize("rank", range(4))
def test_halo_volumes(rank: int) -> None:
    plan = distfx.plan(three_convolutions(), "h4", INPUT, rank=rank)
    row = plan.row("1")
    neighbours = 1 if rank in (0, 3) else 2
    assert plan.rank == rank and row.moves == ("halo(dim=2, axis='h', lo=1, hi=1)",)
    assert row.bytes_forward == row.bytes_backward == 4 * neighbours * N * C * W
    assert row.messages_forward == row.messages_backward == neighbours


# -- without processes


def test_needs_no_processes_and_no_memory() -> None:
    before = torch.distributed.is_initialized()
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv3d(4, 64, 3, padding=1),
            nn.BatchNorm3d(64),
            nn.ReLU(),
            nn.Conv3d(64, 4096, 3, padding=1),
            nn.Conv3d(4096, 4096, 3, padding=1),  # 1.8 GB of weights if they were allocated
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
            nn.Linear(4096, 1000),
        )
    clock = time.perf_counter()
    grid = Grid.abstract(n=8, c=8, d=4, h=4, w=4)
    assert grid.size == 4096
    plan = distfx.plan(model, grid, (64, 4, 512, 512, 512))
    middle = distfx.plan(model, grid, (64, 4, 512, 512, 512), rank=4095 - 21)
    assert time.perf_counter() - clock < 30
    assert torch.distributed.is_initialized() == before  # another test may have initialised it
    assert plan.bytes("forward") > 0 and plan.bytes("backward") > 0
    assert middle.bytes() > plan.bytes()  # rank 0 is in a corner and has fewer neighbours
    assert model[0].weight.is_meta and model.training


def test_sizes_that_do_not_divide_evenly() -> None:
    plan = distfx.plan(three_convolutions(), "h5", (1, 8, 7, 7))
    assert plan.grid == "Grid(h=5)" and plan.sizes == (("N", 1), ("H", 7), ("W", 7))


def test_one_rank_sends_nothing() -> None:
    plan = distfx.plan(small_network(), Grid.abstract(), (4, 3, 32, 32))
    assert plan.bytes() == plan.messages() == 0


def test_the_model_is_not_modified() -> None:
    model = small_network().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    distfx.plan(model, "n2c2", (4, 3, 32, 32))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_train_and_eval_have_different_plans() -> None:
    train = distfx.plan(small_network().train(), "n2h2", (4, 3, 32, 32))
    evaluate = distfx.plan(small_network().eval(), "n2h2", (4, 3, 32, 32))
    assert train.training and not evaluate.training
    assert train.row("1").bytes_forward > 0 and evaluate.row("1").bytes_forward == 0


# -- chosen strategies


@pytest.mark.parametrize("grid", ["c2", "c4", "c8", "n2c4"])
@pytest.mark.parametrize(("filters", "stride"), [(64, 1), (64, 2), (8, 2)])
def test_few_channels_are_replicated_and_filters_split(grid: str, filters: int, stride: int) -> None:
    first = nn.Conv2d(3, filters, 3, stride=stride, padding=1)
    plan = distfx.plan(nn.Sequential(first, nn.Conv2d(filters, 64, 3)), grid, (8, 3, 224, 224))
    row = plan.row("0")
    assert row.bytes_forward == row.bytes_backward == 0
    assert "C/c" in row.layout or "C/(c0,c1)" in row.layout


@pytest.mark.parametrize(("grid", "groups"), [("c2", 8), ("c4", 8), ("c4", 4), ("c2", 2), ("n2c2", 4)])
@pytest.mark.parametrize("strategy", ["auto", "stationary-x", "stationary-y"])
def test_groups_need_no_communication(grid: str, groups: int, strategy: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3, groups=groups), nn.Conv2d(16, 16, 3, groups=groups), nn.Conv2d(16, 8, 3)
    )
    plan = distfx.plan(model, grid, (8, 3, 32, 32), strategy=strategy)
    for path in ("1", "2"):
        row = plan.row(path)
        assert row.algorithm == "groups" and row.moves == ()
        assert row.bytes_forward == row.bytes_backward == 0


class SingleConcatenation(nn.Module):
    """A concatenation of one tensor, as at the start of a dense block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.cat([self.first(x)], 1))


def test_a_concatenation_of_one_tensor_moves_nothing() -> None:
    plan = distfx.plan(SingleConcatenation(), "c2", INPUT)
    (row,) = (row for row in plan.rows if "alias" in row.op or "cat" in row.op)
    assert not row.moves and row.layout == "N C/c H W", row


def test_splitting_samples_sends_gradients_only() -> None:
    plan = distfx.plan(three_convolutions(), "n4", INPUT)
    assert {row.algorithm for row in plan.rows if row.op.startswith("convolution")} == {"samples"}
    assert all(plan.row(path).bytes_forward == 0 for path in "01")  # row 2 gathers the output
    assert plan.bytes("backward") == 4 * 2 * 3 * weight_count() // 4


# -- pins


def test_pins_by_glob() -> None:
    model = nn.ModuleDict({"stem": nn.Conv2d(8, 8, 1), "body": nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1))})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body, self.head = model["stem"], model["body"], nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.stem(x)).mean((2, 3)))

    pins = {"body.1": "stationary-x", "body.*": "stationary-y", "head": "replicated"}
    plan = distfx.plan(Net(), "c2", (4, 8, 6, 6), strategy=pins)
    algorithms = {row.path: row.algorithm for row in plan.rows if row.algorithm and row.path}
    assert algorithms["body.0"] == "stationary-y"
    assert algorithms["body.1"] == "stationary-x"  # the first matching pattern counts
    assert algorithms["head"] == "replicated"
    assert algorithms["stem"] in ("stationary-x", "stationary-y")
    everything = distfx.plan(Net(), "c2", (4, 8, 6, 6), strategy="stationary-x")
    assert [everything.row(path).algorithm for path in ("stem", "body.0", "body.1", "head")] == ["stationary-x"] * 4


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("stationary", ["unknown strategy 'stationary'", "stationary-x, stationary-y, stationary-w", "auto"]),
        ({"0": "filters"}, ["unknown strategy 'filters' for '0'", "stationary-x"]),
        ({"layer4.*": "stationary-w"}, ["'layer4.*'", "matches no convolution or linear layer", "0, 1, 2"]),
        ({"0": "stationary-x", "7": "stationary-w"}, ["'7'", "0, 1, 2"]),
    ],
)
def test_wrong_pins_are_explained(strategy: Any, words: list[str]) -> None:
    with pytest.raises(DistfxError) as error:
        distfx.plan(three_convolutions(), "c2", INPUT, strategy=strategy)
    for word in words:
        assert word in str(error.value)


# -- errors


@pytest.mark.parametrize(
    ("model", "grid", "shape", "words"),
    [
        (nn.Conv2d(3, 4, 3), "d2", (4, 3, 8, 8), ["axis d", "depth", "Remove d=2"]),
        (nn.Conv1d(3, 4, 3), "h2", (4, 3, 8), ["axis h", "height", "named from the last"]),
        (nn.Linear(3, 4), "n2w2", (4, 3), ["axis w", "width"]),
        (nn.ReLU(), "n2c2", (4, 3, 8, 8), ["axis c"]),
    ],
)
def test_an_axis_that_nothing_can_use(model: nn.Module, grid: str, shape: tuple[int, ...], words: list[str]) -> None:
    with pytest.raises(DistfxError) as error:
        distfx.plan(model, grid, shape)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((4, 5, 8, 8), ["could not be captured", "(4, 5, 8, 8)"]),
        ((4, 8), ["could not be captured"]),
        ((4, 8, 1, 1), []),
    ],
)
def test_shapes_that_the_model_rejects(shape: tuple[int, ...], words: list[str]) -> None:
    with pytest.raises(DistfxError) as error:
        distfx.plan(nn.Conv2d(8, 8, 3), "n2", shape)
    for word in words:
        assert word in str(error.value)


# -- the plan as a value


def test_bad_arguments() -> None:
    with pytest.raises(distfx.DistfxError, match="a batch of 1, smaller than the grid's axis n=2"):
        distfx.plan(nn.Conv2d(3, 4, 3), "n2", (1, 3, 8, 8))
    with pytest.raises(distfx.DistfxError, match="the shape of the whole input, such as"):
        distfx.plan(nn.Conv2d(3, 4, 3), "n2", 8)  # type: ignore[arg-type]
    with pytest.raises(distfx.DistfxError, match="a grid is a distfx"):
        distfx.plan(nn.Conv2d(3, 4, 3), 2, (2, 3, 8, 8))  # type: ignore[arg-type]


def test_json_round_trip() -> None:
    plan = distfx.plan(small_network(), "n2c2h2", (4, 3, 32, 32))
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert hash(Plan.from_json(text)) == hash(plan)
    data = json.loads(text)
    assert data["grid"] == "Grid(n=2, c=2, h=2)" and len(data["rows"]) == len(plan.rows)


def test_row_lookup() -> None:
    plan = distfx.plan(small_network(), "n2h2", (4, 3, 32, 32))
    row = plan.row("0")
    assert plan.row(row.node) is row and row.path == "0" and row.op == "convolution.default"
    assert row.shape == ("N", "8", "((H - 1)//2) + 1", "((W - 1)//2) + 1")
    assert row.layout == "N/n C H/h W" and "halo" in row.moves[0]
    assert not row.fallback
    with pytest.raises(KeyError, match="no node 'nothing'"):
        plan.row("nothing")


def test_totals() -> None:
    plan = distfx.plan(small_network(), "n2h2", (4, 3, 32, 32))
    assert plan.bytes() == plan.bytes("forward") + plan.bytes("backward") > 0
    assert plan.bytes("forward") == sum(row.bytes_forward for row in plan.rows)
    assert plan.messages() == plan.messages("forward") + plan.messages("backward") > 0


def test_prints_as_a_table() -> None:
    plan = distfx.plan(small_network(), "n2h2", (4, 3, 32, 32))
    lines = str(plan).splitlines()
    assert lines[0] == "plan on Grid(n=2, h=2) (train), rank 0, N = 4, H = 32, W = 32"
    assert lines[1].split() == ["node", "algorithm", "layout", "forward", "backward", "moves"]
    assert len(lines) == len(plan.rows) + 3
    for row, line in zip(plan.rows, lines[2:], strict=False):
        assert line.startswith(row.node) and row.layout in line and all(move in line for move in row.moves)
    assert lines[-1].startswith("sends ") and f"in {plan.messages('forward')} messages" in lines[-1]


def test_fallbacks_are_marked() -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x).flatten(2)
            return torch.fft.fft(y).abs() + 1

    plan = distfx.plan(Spectrum(), "h2", (4, 3, 8, 8))
    (fallback,) = [row for row in plan.rows if row.fallback]
    assert fallback.bytes_forward > 0 and "test_plan.py" in fallback.source
    assert "(fallback)" in str(plan)


def test_space_smaller_than_its_axis_is_gathered_once() -> None:
    rows = distfx.plan(halving_network(), "h4", (2, 3, 32, 32)).rows
    convolutions = [row for row in rows if "convolution" in row.op]
    assert [row.layout for row in convolutions] == ["N C H/h W"] * 3 + ["N C H W"] * 2  # 16, 8, 4, then 2 and 1 rows
    assert [len(row.moves) for row in convolutions] == [1, 1, 1, 1, 0]
    assert "all_gather" in convolutions[3].moves[0]


def test_kinds_of_grids_and_several_inputs() -> None:
    model = distfx.with_loss(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 1)), nn.CrossEntropyLoss())
    labels = torch.zeros(4, 8, 8, dtype=torch.int64, device="meta")
    plans = [
        distfx.plan(model, grid, [(4, 3, 8, 8), labels], rank=1)
        for grid in ("n2h2", {"n": 2, "h": 2}, distfx.Grid.abstract(n=2, h=2))
    ]
    assert len({str(plan) for plan in plans}) == 1 and plans[0].bytes() > 0
    with pytest.raises(distfx.DistfxError, match=r"rank=4: .* has ranks 0 to 3"):
        distfx.plan(model, "n2h2", [(4, 3, 8, 8), labels], rank=4)


class DeviceConstant(nn.Module):
    """Creates a tensor on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * torch.arange(x.shape[3], device=x.device)


def test_constants_are_created_on_the_device_of_each_rank() -> None:
    """Device indices differ between ranks, so graphs must not contain them."""
    captured = capture(DeviceConstant(), (torch.randn(2, 3, 8, 8),), training=True)
    (constant,) = [node for node in captured.graph.nodes if "device" in node.kwargs]
    assert constant.kwargs["device"] == torch.device("cpu")
    assert on_device((constant.args, {"device": torch.device("cuda", 1)}))[1]["device"].index is None
    assert on_device((constant.args, constant.kwargs), torch.device("cuda", 3))[1]["device"] == torch.device("cuda", 3)
