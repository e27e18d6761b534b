"""One program computes the same numbers with three launchers and two transports.

The exactness suite runs over gloo by default and over mpi with `pytest --transport mpi`. This file always runs a
sample of it over mpi.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import test_convolution
import test_layers
import test_models
import test_operators
import test_parameters
import torch.distributed as dist
from support import ranks
from support.exact import ranks_of
from support.ranks import over, run
from test_launch import ROOT, mpiexec, needs_mpi, start

SAMPLE: list[tuple[Callable[..., None], str, dict[str, Any]]] = [
    (test_models.test_every_grid, "n2 c2 h2 w2 w3 n2c2 n2h2 c2h2 c2w2 h2w2 c4 h4", {}),
    (test_models.test_volumes, "d2 n2d2 c2d2", {}),
    (test_models.test_signals, "w2 c2w2", {}),
    (test_models.test_channel_algorithms, "c2 c2h2", {"strategy": "stationary-x"}),
    (test_models.test_channel_algorithms, "c2 n2c2", {"strategy": "stationary-y"}),
    (test_models.test_channel_algorithms, "c4", {"strategy": "stationary-w"}),
    (test_models.test_many_sizes_one_network, "c2h2", {}),
    (test_models.test_eval_mode, "h2w2", {}),
    (test_models.test_float32, "c2h2", {}),
    (test_convolution.test_lbann_distconv_halo_wider_than_shard, "h4", {}),
    (test_convolution.test_lbann_distconv_channels_last_input, "h2w2", {"model_too": True}),
    (test_convolution.test_distdl_transposed, "c2h2", {}),
    (test_convolution.test_distdl_circular, "w3", {}),
    (test_layers.test_squeeze_and_excite, "c2h2", {"linear": True}),
    (test_parameters.test_gradients_accumulate, "n2c2", {}),
    (test_operators.test_dropout, "c2h2", {"features": False}),
    (test_operators.test_networks, "c2 h2w2", {"model": test_operators.UNet}),
]
CASES = [(ranks_of(grid), test, {"grid": grid, **rest}) for test, grids, rest in SAMPLE for grid in grids.split()]


@pytest.fixture(scope="module")
def over_mpi() -> Iterator[None]:
    """Use ranks of mpiexec, and end them after this file unless the whole run uses them."""
    with over("mpi"):
        yield
    if ranks.transport() != "mpi":
        ranks.close("mpi")


def backend() -> str:
    return str(dist.get_backend())


@needs_mpi
@pytest.mark.parametrize("world", [2])
def test_these_ranks_are_over_mpi(over_mpi: None, world: int) -> None:
    assert run(world, backend) == ["distfx_mpi"] * world


@needs_mpi
@pytest.mark.parametrize(
    "world, test, arguments", CASES, ids=[f"{test.__name__}-{arguments['grid']}" for _, test, arguments in CASES]
)
def test_exact_over_mpi(over_mpi: None, world: int, test: Callable[..., None], arguments: dict[str, Any]) -> None:
    extra = {"world": world} if "world" in inspect.signature(test).parameters else {}
    test(**extra, **arguments)


def losses(command: Sequence[str]) -> list[float]:
    code, out, err = start(command).end(200)
    assert code == 0, err
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", out, re.MULTILINE)]


@needs_mpi
def test_one_program_three_launchers() -> None:
    program = [str(ROOT / "examples" / "train.py"), "--steps", "3"]
    by_torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *program]
    alone = losses([sys.executable, *program])
    assert len(alone) == 3
    for command in ([sys.executable, *by_torchrun], [*mpiexec(4, "")[:3], sys.executable, *program]):
        assert losses(command) == pytest.approx(alone, abs=1e-10)
