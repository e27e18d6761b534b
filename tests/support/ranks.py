"""Ranks for tests: a pool of processes that is started when first needed and ended with the test run.

    from support.ranks import run

    def double_everywhere(x):                    # module level: workers import it by name
        dist.all_reduce(x)
        return x

    def test_it():
        assert run(2, double_everywhere, torch.ones(3))[1].sum() == 6

The parent (pytest) and each worker share a pipe. A request is a pickled `(fn, args, kwargs)`, the answer is the pickled
result or a `Failure`. Workers create and destroy process groups by requests as well. They are new processes, not forks
of one process, so each has its own hash seed, as real ranks do. A compiler that depends on the order of a set fails.

`with over("mpi"):`, or `pytest --transport mpi` for the whole run, uses a second pool. mpiexec starts its ranks, and
its process groups use the `mpi` transport. If one of these ranks is killed, mpiexec ends all of them.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

MAX_WORLD = 8
START = 120.0  # seconds for a worker to import torch, on a busy machine
RENEW = 20  # calls after which the process group is replaced
GRACE = 5.0  # seconds that the other ranks get after the first failure
COLLECTIVE = float(os.environ.get("DISTFX_TEST_TIMEOUT", 30))  # seconds until a hung collective raises by itself
TRANSPORTS = ("gloo", "mpi")

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests", "tests/unit", "tests/exact", "tests/runtime", "examples")  # as in pyproject.toml
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>

# Workers behave as if nothing had been launched, even when pytest itself runs under a launcher.
LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "HYDRA_", "HYDI_", "MPI_", "SLURM_", "TORCHELASTIC_")
LAUNCHER_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}


@dataclass(frozen=True)
class Failure:
    """The exception of one rank. Two are equal if type and message are; the traceback does not count."""

    kind: str
    message: str
    traceback: str = field(compare=False, repr=False)

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class RankError(RuntimeError):
    """Some ranks raised, died or hung. The text contains the traceback or the stack of each."""

    def __init__(self, what: str, failures: dict[int, Failure]):
        self.failures = failures
        parts = [f"rank {rank}: {each}\n{each.traceback.rstrip()}" for rank, each in sorted(failures.items())]
        super().__init__("\n\n".join([what, *parts]))


# The interface for tests.


def run(world: int, fn: Callable[..., T], /, *args: Any, timeout: float = 60, **kwargs: Any) -> list[T]:
    """Call `fn(*args, **kwargs)` on ranks 0..world-1 of an initialised process group; one result per rank.

    `fn` is a function at the top level of a module. Results are pickled, so return plain tensors and no DTensors.
    Raises `RankError` if any rank raises, dies, or is not done after `timeout` seconds.
    """
    outcomes = _pools[_transport].call(world, fn, args, kwargs, timeout)
    failures = {rank: each for rank, each in enumerate(outcomes) if isinstance(each, Failure)}
    if failures:
        raise RankError(f"{_name(fn)} failed on {len(failures)} of {world} ranks", failures)
    return outcomes


def run_raises(
    world: int, fn: Callable[..., object], /, *args: Any, timeout: float = 60, **kwargs: Any
) -> list[Failure | None]:
    """Like `run`, for tests of errors: return the exception of each rank, or None if it returned.

    Raises `RankError` if a rank died or hung.
    """
    outcomes = _pools[_transport].call(world, fn, args, kwargs, timeout)
    return [each if isinstance(each, Failure) else None for each in outcomes]


def pids() -> list[int]:
    """The process ids of the live workers, in rank order."""
    return [worker.pid for worker in _pools[_transport].workers]


def close(transport: str | None = None) -> None:
    """End all workers, or those of one transport. The next `run` starts new ones."""
    for name, pool in _pools.items():
        if transport in (None, name):
            pool.close()


def transport() -> str:
    """The transport that `run` uses."""
    return _transport


def use(transport: str) -> None:
    """From now on, use ranks of this transport."""
    global _transport
    assert transport in TRANSPORTS, transport
    _transport = transport


@contextlib.contextmanager
def over(transport: str) -> Iterator[None]:
    """Use ranks of this transport inside the block."""
    before = _transport
    use(transport)
    try:
        yield
    finally:
        use(before)


# The parent.


class Worker:
    """One process, the pipe to it, and a file into which it writes its Python stack on SIGUSR1."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        self.stacks = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the worker)
        fds = (theirs.fileno(), self.stacks.fileno())
        self.process = subprocess.Popen(
            _program(f"serve({os.getpid()}, *{fds})"),
            env=_environment(),
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,
        )
        theirs.close()
        self.pid = self.process.pid
        self.ready = False

    def code(self, patience: float) -> int | None:
        """The exit code, once there is one."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        return self.process.returncode

    def stack(self) -> str:
        """The Python stack of the worker, most recent call first. faulthandler works even inside a collective."""
        if self.ready and self.code(0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
            deadline, size = time.monotonic() + 2, -1
            while time.monotonic() < deadline and (size <= 0 or size != os.fstat(self.stacks.fileno()).st_size):
                size = os.fstat(self.stacks.fileno()).st_size
                time.sleep(0.05)
        self.stacks.seek(0)
        return self.stacks.read().decode(errors="replace")

    def end(self, patience: float) -> None:
        """Wait `patience` seconds for the worker to see the end of its pipe, then kill it and all its children."""
        self.code(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self.stacks.close()


def _program(call: str) -> list[str]:
    """The command of a worker: call a function of this file, with the module path of the parent."""
    paths = [*(str(ROOT / folder) for folder in FOLDERS), *sys.path]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}; from support import ranks; ranks.{call}"]


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in LAUNCHER_NAMES and not k.startswith(LAUNCHER_PREFIXES)}


class Job:
    """The processes of one mpiexec. They connect to a socket and send their rank and process id."""

    def __init__(self, size: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        mpiexec = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        assert mpiexec is not None, "the mpi transport needs an mpiexec: pip install mpich"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.folder / "socket"))
            listener.listen(size)
            listener.settimeout(1)
            self.process = subprocess.Popen(
                [*_dying_with_parent(), mpiexec, "-n", str(size), *_program(f"serve_mpi({str(self.folder)!r})")],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                pipes = [self._accept(listener) for _ in range(size)]
            except BaseException:
                self.end(0)
                raise
        ranks = [pickle.loads(pipe.recv_bytes()) for pipe in pipes]  # (rank, process id) of each
        order = sorted(range(size), key=lambda i: ranks[i])
        self.workers = [MpiWorker(self, *ranks[i], pipes[i]) for i in order]

    def _accept(self, listener: socket.socket) -> Connection:
        deadline = time.monotonic() + START
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                return Connection(listener.accept()[0].detach())
        raise RankError(f"mpiexec ended with {self.process.poll()} before its ranks connected", {})

    def end(self, patience: float) -> None:
        """Wait for mpiexec, which waits for its ranks. Then kill it, which ends its ranks."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _dying_with_parent() -> list[str]:
    """A prefix for commands: the kernel kills the command when this process dies."""
    code = f"import ctypes, os, sys; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {signal.SIGKILL:d}); "
    return [sys.executable, "-c", code + "os.execv(sys.argv[1], sys.argv[1:])"]


class MpiWorker(Worker):
    """One rank of a job."""

    def __init__(self, job: Job, rank: int, pid: int, pipe: Connection) -> None:
        self.job, self.process, self.pid, self.pipe = job, job.process, pid, pipe
        self.stacks = (job.folder / f"stacks{rank}").open("rb")
        self.ready = False

    def end(self, patience: float) -> None:
        self.job.end(patience)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.stacks.close()


class Pool:
    """The workers, and the process group that some of them form.

    The group is replaced when the world size changes, after a failure (messages of the failed call may still be in
    flight), and after RENEW calls, because the threads of the subgroups that grids create wake up all the time.
    """

    backend = "gloo"

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.world = 0  # size of the present group; 0 without a group
        self.groups = 0  # number of groups so far; each has its own prefix in the store
        self.calls = 0  # of the present group
        self.store: dist.TCPStore | None = None

    def call(
        self, world: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> list[Any]:
        """The result or `Failure` of each rank. If a rank returns neither, kill the ranks and raise."""
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"world={world}: the pool has 1 to {MAX_WORLD} ranks")
        request = _request(fn, args, kwargs)
        if world != self.world or self.calls >= RENEW:
            with self._killing(MAX_WORLD):
                self._join(world)
        self.calls += 1
        with self._killing(world):
            outcomes = self._ask(self.workers[:world], [request] * world, timeout, _name(fn))
        if any(isinstance(each, Failure) for each in outcomes):
            self.world = 0
        return outcomes

    def close(self) -> None:
        self._end(self.workers, patience=GRACE)
        self.store = None

    def _fresh(self, world: int) -> list[Worker]:
        """The workers that are missing for a group of `world`."""
        return [Worker() for _ in range(world - len(self.workers))]

    def _join(self, world: int) -> None:
        """Let the first `world` workers form the group, and the others leave theirs."""
        fresh = self._fresh(world)
        self.workers += fresh
        self._ask(fresh, [], START, "the start of the workers")
        for worker in fresh:
            worker.ready = True
        if self.store is None:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.world, self.groups, self.calls = 0, self.groups + 1, 0
        requests = [_request(leave)] * len(self.workers)
        for rank in range(world):
            requests[rank] = _request(join, (self.backend, self.store.port, str(self.groups), rank, world))
        outcomes = self._ask(self.workers, requests, 2 * COLLECTIVE, "creation of the process group")
        failures = {rank: each for rank, each in enumerate(outcomes) if isinstance(each, Failure)}
        if failures:
            raise RankError(f"no process group of {world} ranks", failures)
        self.world = world

    def _ask(self, workers: Sequence[Worker], requests: Sequence[bytes], timeout: float, what: str) -> list[Any]:
        """Send each worker its request, if any, and wait for one answer from each."""
        for worker, request in zip(workers, requests, strict=False):
            with contextlib.suppress(OSError):  # the worker is dead, which is handled below
                worker.pipe.send_bytes(request)
        answers: dict[int, Any] = {}
        lost: dict[int, Failure] = {}
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        started = time.monotonic()
        deadline = started + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    code = workers[rank].code(1)
                    lost[rank] = Failure("Died", f"exit code {code}", workers[rank].stack())
                if isinstance(answers.get(rank), Failure) or rank in lost:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if not waiting and not lost:
            return [answers[rank] for rank in range(len(workers))]
        after = f"not done after {time.monotonic() - started:.1f} s"
        lost |= {rank: Failure("Hung", after, workers[rank].stack()) for rank in waiting.values()}
        failed = {rank: each for rank, each in answers.items() if isinstance(each, Failure)}
        raise RankError(f"{what}: {len(lost)} of {len(workers)} ranks did not answer", failed | lost)

    @contextlib.contextmanager
    def _killing(self, world: int) -> Iterator[None]:
        """On any exception, including interrupts and timeouts of pytest, kill the ranks: their state is unknown."""
        try:
            yield
        except BaseException:
            self._end(self.workers[:world], patience=0)
            raise

    def _end(self, workers: Sequence[Worker], patience: float) -> None:
        """End these workers and with them the process group. The next call starts new ones."""
        ended = list(workers)
        self.workers = [worker for worker in self.workers if worker not in ended]
        self.world = 0
        for worker in ended:
            worker.pipe.close()  # first close all, so that they end at the same time
        for worker in ended:
            worker.end(patience)


class MpiPool(Pool):
    """The ranks of one mpiexec, which start together and end together. So it starts as many as any test needs."""

    backend = "distfx_mpi"

    def _fresh(self, world: int) -> list[Worker]:
        return [] if self.workers else list(Job(MAX_WORLD).workers)

    def _end(self, workers: Sequence[Worker], patience: float) -> None:
        super()._end(self.workers, patience)


_pools: dict[str, Pool] = {"gloo": Pool(), "mpi": MpiPool()}
_transport = "gloo"
atexit.register(close)


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _request(fn: Callable[..., object], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> bytes:
    """Pickle a call. The pickler of multiprocessing would send file descriptors of shared memory for tensors."""
    try:
        if getattr(fn, "__module__", None) == "__main__":
            raise pickle.PicklingError("it is defined in __main__")
        pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"ranks import the function by name and cannot import {_name(fn)} ({error}): "
            "define it with `def` at the top level of a test module"
        ) from None
    return pickle.dumps((fn, args, kwargs or {}))


# The worker.


def serve(parent: int, pipe_fd: int, stacks_fd: int) -> None:
    """Answer requests until the pipe is closed. The kernel kills the worker when the parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent died before prctl was called
    faulthandler.register(signal.SIGUSR1, file=stacks_fd, all_threads=True)
    torch.set_num_threads(1)
    pipe = Connection(pipe_fd)
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.send_bytes(pickle.dumps("ready"))
        while True:
            answer = _answer(pipe.recv_bytes())
            sys.stdout.flush()  # so that output appears in the test that printed it
            pipe.send_bytes(answer)
    leave()


def serve_mpi(folder: str) -> None:
    """`serve` for a rank that mpiexec started. Its parent is the proxy of mpiexec."""
    from mpi4py import MPI  # reads the launcher's variables, which are then hidden

    for name in [name for name in os.environ if name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES)]:
        del os.environ[name]
    from distfx.runtime.comm import mpi

    mpi.unlink_job_files()
    rank = MPI.COMM_WORLD.Get_rank()
    stacks = open(f"{folder}/stacks{rank}", "wb")  # noqa: SIM115 (it lives as long as the worker)
    meeting = socket.socket(socket.AF_UNIX)
    meeting.connect(f"{folder}/socket")
    pipe = Connection(meeting.detach())
    pipe.send_bytes(pickle.dumps((rank, os.getpid())))
    serve(os.getppid(), os.dup(pipe.fileno()), stacks.fileno())


def _answer(request: bytes) -> bytes:
    try:
        fn, args, kwargs = pickle.loads(request)
        torch.manual_seed(0)  # all ranks draw the same random numbers, whatever ran before
        return pickle.dumps(fn(*args, **kwargs))
    except BaseException as error:  # also pytest.fail and SystemExit: the parent reports all of them
        return pickle.dumps(Failure.of(error))


def join(backend: str, port: int, prefix: str, rank: int, world: int) -> None:
    """Destroy the old process group, if any, and join the new one."""
    leave()
    prepare(backend)
    store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=COLLECTIVE))


def prepare(backend: str) -> None:
    """Register the backend if torch does not have it."""
    if backend != "gloo":
        from distfx.runtime.comm import mpi

        mpi.register()


def leave() -> None:
    """Destroy the process group and clear the caches of its meshes: an equal mesh may follow in another group."""
    if not dist.is_initialized():
        return
    groups = sys.modules.get("distfx.runtime.comm.groups")
    if groups is not None:
        groups.clear()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        _redistribute.clear_redistribute_planner_cache()
        _redistribute._gen_transform_infos.cache_clear()
    gc.collect()  # models refer to meshes, which keep groups and their threads alive
    dist.destroy_process_group()
