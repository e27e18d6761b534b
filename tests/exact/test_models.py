"""Small models on every grid against one process: outputs, gradients, running statistics, predicted bytes."""

import pytest
import torch
from support.exact import check, grids
from support.models import ALGORITHMS, Plain, Rich, Signal, Volume, cases, on

CHANNEL_GRIDS = ("c2", "c3", "c4", "c6", "n2c2", "c2h2", "c4h2", "n2c4", "n2c2h2", "c2h2w2")


@on(*(grid for ranks in (1, 2, 3, 4, 6, 8) for grid in grids(ranks, "nchw")))
def test_every_grid(world: int, grid: str) -> None:
    """All splits are uneven: 8 samples, 6, 8 and 7 channels, 19 rows, 22 columns; some shards are empty."""
    check(Rich, grid, [(8, 3, 19, 22)])


@on(
    *(grid for ranks in (2, 4) for grid in grids(ranks, "ncdhw")),
    *("d2h2w2", "n2d2h2", "c2d2w2", "n2c2d2", "d4h2", "h4w2", "c4d2", "d8", "c8", "n8"),
)
def test_volumes(world: int, grid: str) -> None:
    check(Volume, grid, [(8, 2, 6, 10, 8)] if "n8" in grid else [(4, 2, 6, 10, 8)])


@on(*(grid for ranks in (1, 2, 3, 4) for grid in grids(ranks, "ncw")), "c2w3", "n2c2w2", "w8")
def test_signals(world: int, grid: str) -> None:
    check(Signal, grid, [(4, 2, 37)])


@pytest.mark.parametrize("strategy", ALGORITHMS)
@on(*CHANNEL_GRIDS)
def test_channel_algorithms(world: int, grid: str, strategy: str) -> None:
    """4, 8, 12 and 6 channels: divisible by the axis, and not."""
    results = check(Plain, grid, [(4, 3, 10, 12)], strategy=strategy)
    names = {row.algorithm for row in results[0]["rows"] if "conv" in row.op or "linear" in row.op}
    assert names == {strategy}


@pytest.mark.parametrize("strategy", ALGORITHMS)
@on("c2", "c3", "c4", "n2c2", "c2h2")
def test_channel_algorithms_uneven(world: int, grid: str, strategy: str) -> None:
    """Prime numbers of channels: no axis divides them, and some ranks of c4 have none."""
    check(Plain, grid, [(2, 3, 9, 7)], strategy=strategy, kwargs={"channels": (5, 3, 11, 7)})


@on("c4", "c6", "n2c4", "c4h2")
def test_mixed_algorithms(world: int, grid: str) -> None:
    """Each layer has another algorithm, so the order of the channel axes changes between layers."""
    strategy = {
        "convs.0": "stationary-y",
        "convs.1": "stationary-w",
        "convs.2": "stationary-x",
        "hidden": "stationary-w",
    }
    check(Plain, grid, [(2, 3, 9, 8)], strategy=strategy)


@on("", "h2", "c2", "w2", "h3", "c2h2", "h2w2", "c2h2w2")
def test_many_sizes_one_network(world: int, grid: str) -> None:
    """Odd sizes and a batch of one. Each size occurs twice, and the second time uses the cached graph."""
    check(Rich, grid, [(2, 3, 32, 32), (1, 3, 33, 17), (3, 3, 40, 47)], steps=2, again=True)


@on("n2", "n3", "n2c2", "n2h2")
def test_many_batches_one_network(world: int, grid: str) -> None:
    check(Rich, grid, [(4, 3, 24, 24), (3, 3, 24, 24), (7, 3, 21, 30), (4, 3, 24, 24)], again=True)


@cases("grid shapes", [("d2h2", [(1, 2, 4, 6, 8), (2, 2, 8, 4, 6)]), ("c2w2", [(1, 2, 6, 8, 10)])])
def test_many_volumes_one_network(world: int, grid: str, shapes: list[tuple[int, ...]]) -> None:
    check(Volume, grid, shapes, again=True)


@on("", "n2", "c2", "h2", "w3", "n2c2", "c2h2", "h2w2", "c4", "n2c2h2")
def test_eval_mode(world: int, grid: str) -> None:
    """Running statistics instead of batch statistics; a batch of 1 if samples are not split."""
    check(Rich, grid, [(2, 3, 21, 20), (2 if "n" in grid else 1, 3, 32, 30)], train=False)


@on("n2", "c2", "h2", "n2c2", "c2h2", "h2w2", "n2c2h2")
def test_float32(world: int, grid: str) -> None:
    check(Rich, grid, [(4, 3, 32, 32)], dtype=torch.float32, again=True)


@on("c2", "h2", "c2h2")
def test_input_without_gradient(world: int, grid: str) -> None:
    """The communication of the input gradient is neither performed nor predicted."""
    check(Rich, grid, [(2, 3, 32, 32)], input_grad=False)
