"""One program, three ways to start it, two transports: the same numbers.

`python -m tests.test_transports`, started by mpiexec, is a part of the exactness suite over mpi.
"""

import re
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from tests.exact import TOLERANCE, exact
from tests.test_launch import ROOT, mpiexec, needs_mpi, start

# What is compared over mpi.


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 5, stride=2, padding=2, groups=2),
        nn.MaxPool2d(3, 2, padding=1),
        nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1),
    )


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 6),
        nn.ReLU(),
        nn.Linear(6, 5),
    )


def volumes() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 4, 3, dilation=2))


Case = tuple[Callable[[], nn.Module], str, Sequence[int], str]
IMAGE, SMALL, VOLUME = (4, 4, 13, 11), (4, 3, 9, 8), (2, 2, 9, 8, 7)
CASES: dict[int, list[Case]] = {
    2: [
        (convolutions, "h2", IMAGE, "auto"),
        (classifier, "h2", SMALL, "auto"),
        (convolutions, "c2", IMAGE, "stationary-x"),
        (convolutions, "c2", IMAGE, "stationary-y"),
        (classifier, "n2", SMALL, "auto"),
        (volumes, "d2", VOLUME, "auto"),
    ],
    4: [
        (convolutions, "n2c2", IMAGE, "auto"),
        (convolutions, "c2h2", IMAGE, "auto"),
        (convolutions, "c4", IMAGE, "stationary-w"),
        (classifier, "c4", SMALL, "auto"),
        (convolutions, "h2w2", IMAGE, "auto"),
        (volumes, "n2d2", VOLUME, "auto"),
    ],
}


def main() -> None:
    import distfx

    launch = distfx.init(timeout=120)
    assert launch.backend == "mpi", launch
    for build, grid, shape, strategy in CASES[launch.world]:
        result = exact(build, grid, [shape], strategy=strategy, steps=2)
        limit = TOLERANCE[torch.float64]
        wrong = {name: error for name, error in result["errors"].items() if not error <= limit}
        assert not wrong, f"rank {launch.rank}, {build.__name__} on {grid} with {strategy}: {wrong}"
        for predicted, counted in (*result["bytes"], *result["messages"]):
            assert predicted == counted, f"{build.__name__} on {grid}: the plan says {predicted}, the ledger {counted}"
    sys.stdout.write(f"exact on rank {launch.rank}\n")
    sys.stdout.flush()


# Tests.


@needs_mpi
@pytest.mark.parametrize("world", [2, 4])
def test_exact_over_mpi(world: int) -> None:
    code, out, err = start(mpiexec(world, "tests.test_transports")).end(200)
    assert code == 0, err
    assert all(f"exact on rank {rank}" in out for rank in range(world)), out


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


if __name__ == "__main__":
    main()
