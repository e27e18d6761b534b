"""One rank of four dies, stops, raises or exits. The others report it, with the layer, and end.

The ranks of a launched test run this file: `python -m test_failures rank <when> <how> <folder> <timeout>`.

Every kind of failure in every phase is tested under torchrun's agent, whose ranks are forked from a process that has
imported everything. Some combinations also run under `torchrun` and `mpiexec`; `pytest -m matrix` runs all of them.
"""

import atexit
import importlib
import itertools
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.captures import FOLDER, remembered
from support.ranks import Failure, run, run_raises
from test_launch import Program, mpiexec, needs_mpi, python, start, torchrun
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import distfx
from distfx.runtime.autograd import transfers
from distfx.runtime.autograd.moves import RunMove
from distfx.runtime.comm import failure, status
from distfx.runtime.kernels import halo_convolution

WORLD = 4
TIMEOUT = float(os.environ.get("DISTFX_TEST_FAILURE_TIMEOUT", 6))  # of `init`; ranks compile a small model in less
MARGIN = 10.0  # seconds within which, after the timeout, every survivor has ended
BUSY = 240.0  # seconds for a busy machine to start the ranks
SHARED = {FOLDER: os.environ[FOLDER]} if FOLDER in os.environ else {}

# The program of the ranks.


class Net(nn.Module):
    """Two layers. The victim fails before, between or after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu())


def fail(how: str, folder: Path) -> None:
    """Fail as a victim."""
    (folder / "failure").write_text(str(time.time()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exit":
        os._exit(3)
    elif how == "leave":
        sys.exit(3)
    raise ValueError("sample 17 is broken")


def schedule_failure(when: str, how: str, folder: Path) -> None:
    """Let the victim fail when it should send the halo of the second layer, or write its part of a checkpoint."""
    begin_move = RunMove.begin

    def begin(self: RunMove, half: Any, phase: str, itemsize: int, action: Callable[[], Any]) -> Any:
        if phase == when and self.path == "second":
            fail(how, folder)
        return begin_move(self, half, phase, itemsize, action)

    def write_data(self: FileSystemWriter, *_: Any) -> Any:
        fail(how, folder)

    RunMove.begin = begin  # type: ignore[method-assign]
    if when == "checkpoint":
        FileSystemWriter.write_data = write_data  # type: ignore[method-assign]


def meet(folder: Path, name: str, rank: int) -> None:
    """Wait for the other ranks through files, so that a slow start does not count towards the timeout."""
    (folder / f"{name}{rank}").touch()
    end = time.monotonic() + BUSY
    while not all((folder / f"{name}{other}").exists() for other in range(WORLD)) and time.monotonic() < end:
        time.sleep(0.01)


def rank_of_launch() -> int:
    return int(next(os.environ[name] for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ))


def rank(when: str, how: str, path: str, timeout: str, victim: str = "2") -> None:
    folder, rank = Path(path), rank_of_launch()
    is_victim = rank == int(victim)
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    meet(folder, "start", rank)
    distfx.init(timeout=float(timeout))
    with remembered(Net):
        net = distfx.parallelize(Net(), distfx.Grid(h=WORLD))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(2, 3, 16, 16)
    net(x).sum().backward()
    optimizer.step()
    meet(folder, "ready", rank)
    if is_victim:
        schedule_failure(when, how, folder)
    net(x).sum().backward()
    if is_victim and when == "between":
        fail(how, folder)
    optimizer.step()
    dcp.save({"model": net.state_dict()}, checkpoint_id=folder / "checkpoint")
    print("all was well", flush=True)


# Launchers.


def as_a_program(*args: str) -> NoReturn:
    """Run a rank in a forked process, and end like a program: uncaught exceptions go to the hook."""
    code: Any = 0
    try:
        rank(*args)
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code or 0))


def agent(*args: str) -> None:
    """Start ranks as torchrun does, but fork them, because importing torch takes seconds."""
    importlib.import_module("torch._dynamo")  # DTensor will
    config = LaunchConfig(
        *(1, 1, WORLD),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=str(os.getpid()),
        start_method="fork",
        max_restarts=0,
    )
    elastic_launch(config, as_a_program)(*args)


def plain(*args: str) -> None:
    """Fork ranks without supervision, as under `srun`: wait for them and print their exit codes."""
    importlib.import_module("torch._dynamo")  # DTensor will
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(WORLD)}
    children = []
    for number in range(WORLD):
        if (child := os.fork()) == 0:
            os.environ["RANK"] = str(number)
            os.dup2(os.open(f"{args[2]}/err{number}", os.O_WRONLY | os.O_CREAT), 2)
            as_a_program(*args)
        children.append(child)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


# Start and supervision of the programs.


def alive(pid: int) -> bool:
    """Whether a process runs. Zombies do not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@contextmanager
def folder_of_ranks() -> Iterator[Path]:
    """A folder through which the ranks meet. At the end, kill those that are left."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            yield folder
        finally:
            for pid in pids(folder).values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def pids(folder: Path) -> dict[int, int]:
    files = {rank: folder / f"pid{rank}" for rank in range(WORLD)}
    return {rank: int(text) for rank, file in files.items() if file.exists() and (text := file.read_text())}


def watch(folder: Path, program: Program) -> None:
    """Wait until all ranks have ended, and check that it does not take too long."""
    end = time.monotonic() + BUSY
    while not (folder / "failure").exists():
        assert time.monotonic() < end, "the victim did not fail"
        assert program.process.poll() is None or (folder / "failure").exists(), (
            "the program ended before the victim failed"
        )
        time.sleep(0.02)
    begun = time.monotonic()
    while left := [rank for rank, pid in pids(folder).items() if alive(pid)]:
        taken = time.monotonic() - begun
        assert taken < TIMEOUT + MARGIN, f"alive after {taken:.1f} s: ranks {left}"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def by_plain(when: str, how: str, folder: Path, victim: int = 2) -> tuple[list[int], list[str]]:
    """The exit codes and error output of the ranks."""
    program = start(python("test_failures", "plain", when, how, str(folder), str(TIMEOUT), str(victim)), SHARED)
    try:
        watch(folder, program)
    finally:
        _, out, err = program.end(10)
        print(err)  # shown if the test fails
    return json.loads(out.splitlines()[-1]), [(folder / f"err{number}").read_text() for number in range(WORLD)]


def by_agent(when: str, how: str) -> str:
    """The output of a job that fails. It must end by itself, in time, and leave no process behind."""
    with folder_of_ranks() as folder:
        return _ended(python("test_failures", "agent", when, how, str(folder), str(TIMEOUT)), folder)


def by_launcher(launcher: Callable[..., list[str]], when: str, how: str, *options: str) -> str:
    with folder_of_ranks() as folder:
        command, *rest = launcher(WORLD, "test_failures", "rank", when, how, str(folder), str(TIMEOUT))
        return _ended([command, *options, *rest], folder)


def _ended(command: Sequence[str], folder: Path) -> str:
    program, code = start(command, SHARED), None
    try:
        watch(folder, program)
        code = program.process.wait(15)
        with pytest.raises(ProcessLookupError):
            os.killpg(program.process.pid, 0)
    finally:
        _, out, err = program.end(0)
        print(err)  # shown if the test fails
    assert code, f"exit code {code}"
    return err + out  # mpiexec prints its reason there


# Tests.

HOW = ("kill", "stop", "raise", "exit")
WHEN = ("forward", "backward", "checkpoint")
LAYER = {
    "forward": "for second [second], forward",
    "backward": "for second [second], backward",
    "checkpoint": "in torch.distributed.checkpoint",
}


def names_the_cause(text: str, when: str, how: str, victim: int = 2) -> bool:
    """Whether a survivor's message names the layer, or the checkpoint, and the peer."""
    if how == "raise" and when == "checkpoint":  # torch itself reports it on all ranks
        return bool(re.search(r"CheckpointException ranks:dict_keys\(\[2\]\)(.|\n)*ValueError: sample 17", text))
    blamed = rf"no answer from ranks? [\d, ]*\b{victim}\b"
    if how == "raise":
        blamed = rf"rank {victim} failed: ValueError: sample 17 is broken"
    elif victim == 0:
        blamed += r"|rank 0, or the launcher that hosts the store, is gone"
    elif how == "stop" and not re.search(blamed + r": process \d+ is stopped", text):
        return False  # the first rank that notices ends it, so the others may not see it stopped
    # A rank that is not a neighbour of the lost one goes on until the next collective, and names that layer.
    layer = rf"{re.escape(LAYER.get(when, ''))}|for norm \[norm\], {when}"
    return any(re.search(layer, line) and re.search(blamed, line) for line in text.splitlines())


@pytest.mark.parametrize(
    "when, how, victim", [("forward", "kill", 2), ("backward", "stop", 2), ("backward", "exit", 0)]
)
def test_processes_without_supervision(when: str, how: str, victim: int) -> None:
    with folder_of_ranks() as folder:
        codes, errors = by_plain(when, how, folder, victim)
    assert all(codes), codes
    messages = "\n".join(error for rank, error in enumerate(errors) if rank != victim)
    assert names_the_cause(messages, when, how, victim), messages
    assert "terminate called" not in messages, messages


def cells(chosen: set[tuple[str, str]]) -> list[Any]:
    """All kinds of failure in all phases. Those that are not chosen run with ``-m matrix``."""
    every = [*itertools.product(WHEN, HOW), *(cell for cell in chosen if cell[0] == "between")]
    return [pytest.param(*cell, marks=[] if cell in chosen else [pytest.mark.matrix]) for cell in every]


def assert_named(error: str, when: str, how: str) -> None:
    if how == "raise":
        assert "ValueError: sample 17 is broken" in error and error.find("ValueError") < error.find("Failures:")
    assert names_the_cause(error, when, how), error


@pytest.mark.parametrize("when, how", [*itertools.product(WHEN, HOW)])
def test_the_agent_of_torchrun(when: str, how: str) -> None:
    assert_named(by_agent(when, how), when, how)


@pytest.mark.parametrize("when, how", cells({("forward", "kill"), ("backward", "raise")}))
def test_torchrun(when: str, how: str) -> None:
    assert_named(by_launcher(torchrun, when, how), when, how)


def test_a_failure_while_the_others_do_not_wait() -> None:
    """The first message is that of the rank that failed."""
    error = by_agent("between", "raise")
    assert "ValueError: sample 17 is broken" in error and error.find("ValueError") < error.find("Failures:")


UNDER_MPI = {("backward", "stop"), ("checkpoint", "exit"), ("between", "leave")}


@needs_mpi
@pytest.mark.parametrize("when, how", cells(UNDER_MPI))
def test_mpiexec(when: str, how: str) -> None:
    """mpiexec ends all ranks as soon as one dies, before they notice."""
    error = by_launcher(mpiexec, when, how)
    if how == "raise":
        assert "ValueError: sample 17 is broken" in error
    elif how == "stop":
        assert names_the_cause(error, when, how), error
    elif how in ("kill", "exit"):
        assert "BAD TERMINATION" in error, error


KEPT = [
    pytest.param(when, how, marks=[] if (when, how) == ("backward", "kill") else [pytest.mark.matrix])
    for when, how in itertools.product(WHEN, ("kill", "exit"))
]


@needs_mpi
@pytest.mark.parametrize("when, how", KEPT)
def test_mpiexec_without_cleanup(when: str, how: str) -> None:
    """With `-disable-auto-cleanup`, the survivors report the lost rank and end the job.

    In some runs mpiexec ends them at once nevertheless, without a message.
    """
    for _ in range(3):
        error = by_launcher(mpiexec, when, how, "-disable-auto-cleanup")
        if "Traceback" in error:
            break
    assert names_the_cause(error, when, how), error


# The cause.


def reports_of_rank_1(kind: type[BaseException], *args: Any) -> list[str]:
    """The reports of rank 1, which ends by such an error."""
    if dist.get_rank() == 1:
        failure.announce_exception(kind(*args))
        failure.announce_exit()
        failure._ended_by_signal = False
    dist.barrier()
    texts = [report.text for report in status.read([1]).values()]
    dist.barrier()
    if dist.get_rank() == 1:
        status.default_store().delete_key(status.status_key(1))
    return texts


def test_a_rank_ended_by_a_signal_is_not_the_cause() -> None:
    """A stopped rank that a survivor wakes and ends must not be reported as failed or exited."""
    assert run(2, reports_of_rank_1, SignalException, "got signal: 15", signal.SIGTERM) == [[], []]
    assert run(2, reports_of_rank_1, ValueError, "sample 17") == [["ValueError: sample 17"]] * 2


# Ranks with different arguments.


def same(failures: list[Failure | None], kind: str) -> str:
    """The message, which must be the same on every rank."""
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


def frozen_on_one_rank() -> None:
    """After a first call, when everything is compiled. Frozen parameters decide which gradients are summed."""
    net = distfx.parallelize(Net(), distfx.Grid(h=2))
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    net.get_parameter("norm.bias").requires_grad_(dist.get_rank() == 0)
    net(torch.randn(2, 3, 8, 8)).sum().backward()


def frozen_before_the_first_call() -> None:
    model = Net()
    model.second.weight.requires_grad_(dist.get_rank() == 0)
    distfx.parallelize(model, distfx.Grid(h=2))


def converted_on_one_rank() -> None:
    net = distfx.parallelize(Net(), distfx.Grid(h=2))
    net(torch.randn(2, 3, 8, 8))
    if dist.get_rank() == 1:
        net.first.bfloat16()
    net(torch.randn(2, 3, 8, 8))


def different_sizes() -> None:
    distfx.Grid(h=2 + dist.get_rank())


@pytest.mark.parametrize(
    "program, words",
    [
        (different_versions, ("rank 0: distfx", "rank 1: distfx 0.0.9")),
        (different_grids, ("different grids", "rank 0: Grid(h=2)", "rank 1: Grid(w=2)")),
        (different_sizes, ("different grids", "rank 0: Grid(h=2)", "rank 1: Grid(h=3)")),
        (frozen_on_one_rank, ("rank 0: norm.bias: torch.float32, requires_grad=True", "rank 1: norm.bias")),
        (frozen_before_the_first_call, ("rank 0: second.weight requires_grad=True", "rank 1: second.weight")),
        (converted_on_one_rank, ("rank 0: first.weight: torch.float32", "rank 1: first.weight: torch.bfloat16")),
        (different_strategies, ("rank 0: strategy={'*': 'stationary-y'}", "rank 1: strategy={'*': 'stationary-x'}")),
    ],
)
def test_ranks_with_different(program: Callable[[], None], words: tuple[str, ...]) -> None:
    message = same(run_raises(2, program), "RankMismatchError")
    assert all(word in message for word in words), message


# Errors of the transport, and others.


def error_in_a_move(kind: str) -> tuple[str, str, tuple[str, ...]]:
    """Type, message and notes of an error that all ranks raise while they exchange the halo of a layer."""
    net = distfx.parallelize(Net(), distfx.Grid(h=2))
    x = torch.randn(2, 3, 8, 8)
    net(x)
    before = transfers.send_receive, halo_convolution.send_receive

    def fails(*_: Any) -> Any:
        if kind == "gloo":
            raise RuntimeError("[.../gloo/transport/tcp/pair.cc:534] Connection closed by peer")
        raise torch.OutOfMemoryError("no memory for 3 bytes")

    transfers.send_receive = halo_convolution.send_receive = fails
    try:
        net(x)
    except Exception as error:
        return type(error).__name__, str(error), tuple(getattr(error, "__notes__", ()))
    finally:
        transfers.send_receive, halo_convolution.send_receive = before
        failure._has_failed = False
    raise AssertionError("no error")


def test_other_errors_are_unchanged() -> None:
    for rank, (kind, text, notes) in enumerate(run(2, error_in_a_move, "memory")):
        assert (kind, text) == ("OutOfMemoryError", "no memory for 3 bytes")
        assert [note for note in notes if f"on rank {rank}, during" in note and "for first [first], forward" in note]


def test_transport_errors_name_the_layer() -> None:
    for kind, text, _ in run(2, error_in_a_move, "gloo"):
        assert kind == "CommunicationError" and "for first [first], forward" in text, text


# check=True.


class Log(nn.Module):
    """Not finite where its input is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.pool = nn.MaxPool2d(3, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(torch.log(self.conv(x))).mean()


def checked_loss(spoil: str) -> float:
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


def test_check_accepts_finite_values() -> None:
    assert run(2, checked_loss, "nothing") == [0.0, 0.0]


@pytest.mark.parametrize(
    "spoil, words",
    [
        ("log", ("log", "test_failures.py", "torch.log(self.conv(x))", "rank 1: 2 nan and 6 inf")),
        ("input", ("the input x", "rank 0: 1 inf", "rank 1: 1 inf")),
        ("parameter", ("conv.bias", "rank 0: 1 nan", "rank 1: 1 nan")),
    ],
)
def test_check_names_the_first_bad_node(spoil: str, words: tuple[str, ...]) -> None:
    message = same(run_raises(2, checked_loss, spoil), "NonFiniteError")
    assert all(word in message for word in words), message
    assert "rank 0" not in message or spoil != "log", message


if __name__ == "__main__":
    {"rank": rank, "agent": agent, "plain": plain}[sys.argv[1]](*sys.argv[2:])
