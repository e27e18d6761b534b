"""The end of a program: its exit code is right, it does not abort, and no process and no file outlives it.

The ranks of a launched test run this file: `python -m test_exits <program> <argument> <folder>`.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_launch import mpiexec, needs_mpi, start, torchrun
from torch import Tensor, nn

import distfx
from distfx.runtime.comm.launch import init

MODULES = 40
NOTICED = 10.0  # seconds in which survivors end; about 2 on an idle machine, and far less than the timeout of `init`
START = 200.0  # seconds for a busy machine to start the ranks
LOST_RANK = 1

# Programs that the ranks run.


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))


def parallelize_with_bad_input(number: int) -> Any:
    """Parallelize a module. Only every eighth call succeeds."""
    grid = distfx.Grid(h=2) if number % 2 else distfx.Grid(c=2)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: distfx.parallelize(convolutions(), grid)(torch.ones(2, 3, 8, 8)).sum().backward(),
        lambda: distfx.parallelize(convolutions(), grid)(torch.ones(2, 5, 8, 8)),
        lambda: distfx.parallelize(convolutions(), distfx.Grid(h=3)),
        lambda: distfx.parallelize(convolutions(), grid, strategy="unknown"),
        lambda: distfx.parallelize(nn.Conv1d(3, 4, 3), distfx.Grid(h=2), example_inputs=(torch.ones(2, 3, 8),)),
        lambda: distfx.parallelize(convolutions(), grid)("text"),
        lambda: distfx.parallelize(convolutions(), grid, example_inputs=(torch.ones(2, 3),)),
        lambda: distfx.parallelize(convolutions(), grid)(torch.ones(2, 3, 8)),
    )
    return calls[number % len(calls)]()


class SlowToDelete:
    """Delays the end of the interpreter. A thread that needs the interpreter lock meanwhile aborts the process."""

    sleep = staticmethod(time.sleep)

    def __del__(self) -> None:
        self.sleep(0.5)


kept: list[Any] = []
"""Objects that live until the interpreter ends, and process groups with them."""


def many_modules(ending: str, folder: str) -> None:
    """Create many parallel modules, most with bad input, keep modules and errors, and destroy the process group."""
    dist.init_process_group("gloo")
    for number in range(MODULES):
        try:
            kept.append(parallelize_with_bad_input(number))
        except (ValueError, TypeError, RuntimeError) as error:
            kept.append(error)
    errors = sum(isinstance(each, Exception) for each in kept)
    print(f"{errors} errors", flush=True)
    kept.append(SlowToDelete())
    starve_workers()
    dist.all_reduce(torch.ones(5))
    end(ending, folder)


def starve_workers() -> None:
    """Let gloo's workers run only when no other thread wants their core, so that they drop their tensors late."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            os.sched_setaffinity(int(task.name), {dist.get_rank() % (os.cpu_count() or 1)})
            if (task / "comm").read_text().strip() == "pt_gloo_runloop":
                os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


def one_module(ending: str, folder: str) -> None:
    """Train one step, and end on all ranks in the same way."""
    init(timeout=60)
    net = distfx.parallelize(convolutions(), distfx.Grid(h=-1))
    kept.extend([net, SlowToDelete()])
    net(torch.ones(2, 3, 8, 8)).sum().backward()
    end(ending, folder)


def end(ending: str, folder: str) -> None:
    if ending == "destroy":
        dist.destroy_process_group()
    elif ending == "raise":
        raise ValueError("the end")
    elif ending == "exit":
        sys.exit(3)
    elif ending == "interrupt":
        raise KeyboardInterrupt


def lose_a_rank(how: str, folder: str) -> None:
    """Train until one rank is lost, with a timeout that is much longer than the test."""
    launch = init(timeout=300)
    (Path(folder) / f"pid{launch.rank}").write_text(str(os.getpid()))
    (Path(folder) / f"segments{launch.rank}").write_text("\n".join(shared_memory()))
    net = distfx.parallelize(convolutions(), distfx.Grid(h=-1))
    x: Tensor = torch.ones(2, 3, 8, 8)
    net(x).sum().backward()
    dist.barrier()
    for step in range(1 << 20):
        if launch.rank == LOST_RANK and step == 5:
            (Path(folder) / "lost").touch()
            if how == "end":
                return
            os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(3)
        net(x).sum().backward()


def exit_early(seconds: str, folder: str) -> None:
    """The last rank ends long before the root has the result, because another rank comes late."""
    launch = init(timeout=60)
    total = torch.ones(3)
    if launch.rank == 1:
        time.sleep(float(seconds))
    dist.reduce(total, 0)
    assert launch.rank or (total == launch.world).all()


def shared_memory() -> list[str]:
    """The names of the shared memory that this process has mapped, also of memory whose name was removed."""
    names = re.findall(r" (/dev/shm/.*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return sorted({name.removesuffix(" (deleted)") for name in names})


# Tests.


def launched(command: list[str], folder: Path) -> tuple[int, str]:
    code, out, err = start(command, {"TMPDIR": str(folder), "DISTFX_QUIET": "1"}).end(START)
    assert "terminate called" not in err, err
    return code, out + err


@pytest.mark.parametrize("attempt", range(3))
def test_many_modules_and_destroy(attempt: int, tmp_path: Path) -> None:
    code, text = launched(torchrun(2, "test_exits", "many_modules", "destroy", str(tmp_path)), tmp_path)
    assert code == 0, text
    assert text.count(f"{MODULES - MODULES // 8} errors") == 2, text


@pytest.mark.parametrize(
    "ending, code", [("nothing", None), ("destroy", None), ("raise", 1), ("exit", 3), ("interrupt", -signal.SIGINT)]
)
def test_endings_under_torchrun(ending: str, code: int | None, tmp_path: Path) -> None:
    status, text = launched(torchrun(2, "test_exits", "one_module", ending, str(tmp_path)), tmp_path)
    assert (status == 0) == (code is None), text
    # torchrun ends the other rank with SIGTERM when it sees the first exit code
    codes = {int(found) for found in re.findall(r"exitcode\s*: (-?\d+)", text)} - {-signal.SIGTERM}
    assert codes == ({code} if code is not None else set()), text


@needs_mpi
@pytest.mark.parametrize(
    "ending, code", [("nothing", 0), ("destroy", 0), ("raise", 1), ("exit", 3), ("interrupt", 130)]
)
def test_endings_under_mpiexec(ending: str, code: int, tmp_path: Path) -> None:
    status, text = launched(mpiexec(2, "test_exits", "one_module", ending, str(tmp_path)), tmp_path)
    assert status == code, text


@needs_mpi
def test_a_rank_that_exits_early_is_not_lost(tmp_path: Path) -> None:
    status, text = launched(mpiexec(3, "test_exits", "exit_early", "3", str(tmp_path)), tmp_path)
    assert status == 0, text


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def assert_nothing_remains(command: list[str], folder: Path, with_segments: bool) -> None:
    """Lose a rank: the others must end soon, and no process, segment or temporary file of the job may remain."""
    temporary = folder / "tmp"
    temporary.mkdir()
    program = start(command, {"TMPDIR": str(temporary), "DISTFX_QUIET": "1"})
    pids: list[int] = []
    try:
        deadline = time.monotonic() + START
        while not (folder / "lost").exists():
            assert time.monotonic() < deadline and program.process.poll() is None, "no rank was lost"
            time.sleep(0.02)
        pids = [int(file.read_text()) for file in folder.glob("pid*")]
        deadline = time.monotonic() + NOTICED
        while any(map(is_alive, pids)) or program.process.poll() is None:
            assert time.monotonic() < deadline, f"alive: {[pid for pid in pids if is_alive(pid)]}"
            time.sleep(0.02)
        with pytest.raises(ProcessLookupError):
            os.killpg(program.process.pid, 0)
    finally:
        for pid in pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        code, _, err = program.end(0)
        print(err)  # shown if the test fails
    assert code
    segments = {name for file in folder.glob("segments*") for name in file.read_text().split("\n") if name}
    assert not with_segments or any("mpich_shm_" in name for name in segments), segments
    assert not [name for name in segments if Path(name).exists()]
    # torchrun keeps the error files of failed ranks, for the user to read
    assert not [name for name in os.listdir(temporary) if not name.startswith("torchelastic_")]


def test_a_lost_rank_under_torchrun(tmp_path: Path) -> None:
    command = torchrun(3, "test_exits", "lose_a_rank", "kill", str(tmp_path))
    assert_nothing_remains(command, tmp_path, with_segments=False)


@needs_mpi
@pytest.mark.parametrize(
    "how, options",
    [("kill", []), ("kill", ["-disable-auto-cleanup"]), ("exit", ["-disable-auto-cleanup"]), ("end", [])],
)
def test_a_lost_rank_under_mpiexec(how: str, options: list[str], tmp_path: Path) -> None:
    """With the option, mpiexec does not end the survivors: they notice the loss themselves."""
    launcher, *rest = mpiexec(3, "test_exits", "lose_a_rank", how, str(tmp_path))
    assert_nothing_remains([launcher, *options, *rest], tmp_path, with_segments=True)


if __name__ == "__main__":
    programs = {each.__name__: each for each in (many_modules, one_module, lose_a_rank, exit_early)}
    programs[sys.argv[1]](*sys.argv[2:])
