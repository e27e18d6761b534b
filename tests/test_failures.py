"""Failing well: one rank of four dies, stops, raises or leaves; the others say so, in which layer, and end.

The ranks of a launched test run this file: `python -m tests.test_failures <when> <how> <folder> <victim>`.
"""

import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import distfx
from distfx.runtime.functions import RunMove
from tests.ranks import Failure, run, run_raises
from tests.test_launch import Program, mpiexec, needs_mpi, python, start, torchrun

WORLD = 4
TIMEOUT = 6.0  # of `init`: seconds, enough for a busy machine to compile a small model on all ranks
MARGIN = 10.0  # seconds within which, after the timeout, every survivor has ended
BUSY = 120.0  # seconds for a busy machine to start the ranks

# What the ranks do.


class Net(nn.Module):
    """Two layers; the victim meets its fate before, between or after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu())


def fate(how: str, folder: Path) -> None:
    """What becomes of the victim."""
    (folder / "fate").write_text(str(time.time()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exit":
        os._exit(3)
    elif how == "leave":
        sys.exit(3)
    raise ValueError("sample 17 is broken")


def doom(when: str, how: str, folder: Path) -> None:
    """Let the victim meet its fate in the middle of a pass, when the second layer's halo is due."""
    start_move = RunMove.start

    def start(self: RunMove, half: Any, x: Tensor, phase: str) -> Any:
        if phase == when and self.path == "second":
            fate(how, folder)
        return start_move(self, half, x, phase)

    RunMove.start = start  # type: ignore[method-assign]


def meet(folder: Path, name: str, rank: int) -> None:
    """Wait for the other ranks without the means under test: the timeout is not for a slow start."""
    (folder / f"{name}{rank}").touch()
    end = time.monotonic() + BUSY
    while not all((folder / f"{name}{other}").exists() for other in range(WORLD)) and time.monotonic() < end:
        time.sleep(0.01)


def rank_of_launch() -> int:
    return int(next(os.environ[name] for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ))


def main(when: str, how: str, path: str, victim: str = "2") -> None:
    folder, rank = Path(path), rank_of_launch()
    doomed = rank == int(victim)
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    meet(folder, "start", rank)
    distfx.init(timeout=TIMEOUT)
    net = distfx.parallelize(Net(), distfx.Grid(h=WORLD))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(2, 3, 16, 16)
    net(x).sum().backward()
    optimizer.step()
    meet(folder, "ready", rank)
    if doomed:
        doom(when, how, folder)
    net(x).sum().backward()
    if doomed and when == "between":
        fate(how, folder)
    optimizer.step()
    if doomed and when == "checkpoint":
        fate(how, folder)
    dcp.save({"model": net.state_dict()}, checkpoint_id=folder / "checkpoint")
    print("all was well", flush=True)


# Starting and watching them.


def alive(pid: int) -> bool:
    """Whether a process is there: one that has ended and was not yet waited for is not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@contextmanager
def folder_of_ranks() -> Iterator[Path]:
    """A folder for the ranks to meet in; none of them is left when it goes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            yield folder
        finally:
            for pid in pids(folder).values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def pids(folder: Path) -> dict[int, int]:
    found = {rank: folder / f"pid{rank}" for rank in range(WORLD)}
    return {rank: int(text) for rank, file in found.items() if file.exists() and (text := file.read_text())}


def watch(folder: Path, spared: int | None = None) -> None:
    """Wait until the ranks have ended, all but the one that is `spared`: in time."""
    end = time.monotonic() + BUSY
    while not (folder / "fate").exists():
        assert time.monotonic() < end, "the victim was never reached"
        time.sleep(0.02)
    begun = time.monotonic()
    wanted = {rank: pid for rank, pid in pids(folder).items() if rank != spared}
    while left := [rank for rank, pid in wanted.items() if alive(pid)]:
        taken = time.monotonic() - begun
        assert taken < TIMEOUT + MARGIN, f"alive after {taken:.1f} s: ranks {left}"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def by_plain(when: str, how: str, folder: Path, victim: int = 2) -> tuple[list[int], list[str]]:
    """Four processes that nobody looks after, as under `srun`: exit codes and messages of each."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(WORLD)}
    command = python("tests.test_failures", when, how, str(folder), str(victim))
    programs = [start(command, {**meeting, "RANK": str(rank)}) for rank in range(WORLD)]
    try:
        watch(folder, spared=victim if how == "stop" else None)
    finally:
        ends = [program.end(0.5) for program in programs]
    return [code for code, _, _ in ends], [err for _, _, err in ends]


def by_launcher(program: Program, folder: Path, survivors_only: bool = False) -> tuple[int, str]:
    """Exit code and messages. A stopped rank is sent SIGTERM by torchrun, which it takes when it goes on (or it is
    killed, after 30 s)."""
    try:
        watch(folder, spared=2 if survivors_only else None)
        if survivors_only:
            time.sleep(1)
            os.kill(pids(folder)[2], signal.SIGCONT)
    finally:
        code, _, err = program.end(15)
    assert not any(alive(pid) for pid in pids(folder).values())
    return code, err


# Tests.


def names_the_cause(text: str, when: str, how: str, victim: int = 2) -> bool:
    """Whether a survivor's message has the layer and the peer."""
    layer = {"forward": "for second [second], forward", "backward": "for second [second], backward"}.get(when, "")
    blamed = rf"no word from ranks? [\d, ]*\b{victim}\b"
    if how == "raise":
        blamed = rf"rank {victim} failed: ValueError: sample 17 is broken"
    elif victim == 0:
        blamed += r"|rank 0, or the launcher that keeps it, is gone"
    return any(layer in line and re.search(blamed, line) for line in text.splitlines())


@pytest.mark.parametrize(
    "when, how, victim",
    [
        ("forward", "kill", 2),
        ("backward", "stop", 2),
        ("backward", "raise", 2),
        ("checkpoint", "exit", 2),
        ("backward", "exit", 0),
    ],
)
def test_processes_that_nobody_looks_after(when: str, how: str, victim: int) -> None:
    with folder_of_ranks() as folder:
        codes, errors = by_plain(when, how, folder, victim)
    assert all(codes), codes
    survivors = [error for rank, error in enumerate(errors) if rank != victim]
    assert any(names_the_cause(error, when, how, victim) for error in survivors), "\n".join(survivors)
    assert not any("terminate called" in error for error in survivors), "\n".join(survivors)
    if how == "raise":
        assert "ValueError: sample 17 is broken" in errors[victim]


@pytest.mark.parametrize("when, how", [("backward", "kill"), ("forward", "stop"), ("between", "raise")])
def test_torchrun(when: str, how: str) -> None:
    with folder_of_ranks() as folder:
        program = start(torchrun(WORLD, "tests.test_failures", when, how, str(folder)))
        code, error = by_launcher(program, folder, survivors_only=how == "stop")
    assert code != 0
    if how == "raise":
        assert "ValueError: sample 17 is broken" in error and error.find("ValueError") < error.find("Failures:")
    else:
        assert names_the_cause(error, when, how), error


@needs_mpi
@pytest.mark.parametrize(
    "when, how",
    [("forward", "kill"), ("backward", "stop"), ("checkpoint", "exit"), ("forward", "raise"), ("between", "leave")],
)
def test_mpiexec(when: str, how: str) -> None:
    with folder_of_ranks() as folder:
        program = start(mpiexec(WORLD, "tests.test_failures", when, how, str(folder)))
        code, error = by_launcher(program, folder)
    assert code != 0
    if how == "raise":
        assert "ValueError: sample 17 is broken" in error
    elif how == "stop":  # else mpiexec ends the survivors before they find out
        assert names_the_cause(error, when, how), error


# Ranks that were given different things.


def same(failures: list[Failure | None], kind: str) -> str:
    """The one message that every rank raised."""
    assert len(set(failures)) == 1 and failures[0] is not None, failures
    assert failures[0].kind.rpartition(".")[2] == kind, failures[0]
    return failures[0].message


def different_versions() -> None:
    before, odd = distfx.__version__, dist.get_rank() == 1
    distfx.__version__ = "0.0.9" if odd else before
    try:
        distfx.parallelize(Net(), distfx.Grid(h=-1))
    finally:
        distfx.__version__ = before


def different_grids() -> None:
    distfx.parallelize(Net(), distfx.Grid.parse(("h2", "w2")[dist.get_rank()]))


def different_strategies() -> None:
    distfx.parallelize(Net(), distfx.Grid(c=2), strategy="stationary-x" if dist.get_rank() else "stationary-y")


def different_sizes() -> None:
    distfx.Grid(h=2 + dist.get_rank())


@pytest.mark.parametrize(
    "given, words",
    [
        (different_versions, ("rank 0: distfx", "rank 1: distfx 0.0.9")),
        (different_grids, ("different grids", "rank 0: Grid(h=2)", "rank 1: Grid(w=2)")),
        (different_sizes, ("different grids", "rank 0: Grid(h=2)", "rank 1: Grid(h=3)")),
        (different_strategies, ("rank 0: strategy={'*': 'stationary-y'}", "rank 1: strategy={'*': 'stationary-x'}")),
    ],
)
def test_ranks_with_different(given: Callable[[], None], words: tuple[str, ...]) -> None:
    message = same(run_raises(2, given), "RankMismatchError")
    assert all(word in message for word in words), message


# check=True.


class Log(nn.Module):
    """Not finite where its input is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.pool = nn.MaxPool2d(3, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(torch.log(self.conv(x))).mean()


def looked_at(spoil: str) -> float:
    model = Log().double()
    with torch.no_grad():
        model.conv.weight.fill_(1.0)
        model.conv.bias.zero_()
    x = torch.ones(1, 1, 8, 8, dtype=torch.float64)
    net = distfx.parallelize(model, distfx.Grid(h=-1), check=True)
    if spoil == "log":
        x[0, 0, 5, 2], x[0, 0, 6, :3] = -1.0, 0.0  # nan, and three -inf: in two channels each
    elif spoil == "input":
        x[0, 0, 0, 0] = torch.inf
    elif spoil == "parameter":
        with torch.no_grad():
            net.get_parameter("conv.bias").to_local()[0] = torch.nan
    loss = net(x)
    loss.backward()
    return float(loss)


def test_check_lets_what_is_finite_pass() -> None:
    assert run(2, looked_at, "nothing") == [0.0, 0.0]


@pytest.mark.parametrize(
    "spoil, words",
    [
        ("log", ("log", "test_failures.py", "torch.log(self.conv(x))", "rank 1: 2 nan and 6 inf")),
        ("input", ("the input x", "rank 0: 1 inf", "rank 1: 1 inf")),
        ("parameter", ("conv.bias", "rank 0: 1 nan", "rank 1: 1 nan")),
    ],
)
def test_check_names_the_first_bad_node(spoil: str, words: tuple[str, ...]) -> None:
    message = same(run_raises(2, looked_at, spoil), "NonFiniteError")
    assert all(word in message for word in words), message
    assert "rank 0" not in message or spoil != "log", message


if __name__ == "__main__":
    main(*sys.argv[1:])
