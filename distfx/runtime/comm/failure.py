"""Error reports for failed communication: which operation failed, and which ranks are the cause.

A rank whose operation fails does not know why. So it publishes its status (:mod:`distfx.runtime.comm.status`), waits
a moment for the other ranks to do the same, and names those that did not: they are dead, stopped, or busy elsewhere.
A rank that ends by an exception publishes its message. For ranks on the same machine,
:mod:`distfx.runtime.comm.processes` tells whether they are dead or stopped.

Nothing here runs as long as communication works: :class:`CommunicationScope` is a ``try`` with a description.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException

from distfx.errors import CommunicationError, log_to_stderr
from distfx.runtime.comm import status
from distfx.runtime.comm.processes import ALL_RANKS_LIMIT, end_stopped_ranks, find_unresponsive
from distfx.runtime.comm.status import Status, call_with_timeout

if TYPE_CHECKING:
    from distfx.grid import Segment

__all__ = [
    "CommunicationScope",
    "announce_exception",
    "announce_exit",
    "announce_uncaught_exceptions",
    "explain",
    "has_failed",
    "wait_for_exit_of_all",
]

REPORT_GRACE = 2.0  # seconds that a rank waits for the status of the others
EXIT_TIMEOUT = 5  # seconds after which a process whose communication failed is ended by force
TEXT_LIMIT = 2000  # characters of a published status

_has_failed = False
_ended_by_signal = False


def has_failed() -> bool:
    """Whether communication has failed in this process. If so, process groups cannot be left in an orderly way."""
    return _has_failed


@dataclass(slots=True, eq=False)
class CommunicationScope:
    """Context manager that turns a transport error inside it into a :class:`CommunicationError` with a description.

    Other errors are raised unchanged, with a note that contains the description.
    """

    what: str
    """The move or the collective."""
    node: str = ""
    path: str | None = None
    """The module path of the layer that needs it."""
    segment: Segment | None = None
    """The ranks that take part; ``None`` for all."""
    phase: str = ""

    def __enter__(self) -> CommunicationScope:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, CommunicationError) or not dist.is_initialized():
            return
        if _is_transport_error(error):
            raise CommunicationError(_report(str(self), self.members, error)) from error
        error.add_note(f"on rank {dist.get_rank()}, during {self}")

    @property
    def members(self) -> Sequence[int]:
        return range(dist.get_world_size()) if self.segment is None else self.segment.members

    def __str__(self) -> str:
        axes = f" along {','.join(self.segment.axes)}" if self.segment is not None else ""
        layer = f" for {self.node}" if self.node else ""
        path = f" [{self.path}]" if self.path else ""
        phase = f", {self.phase}" if self.phase else ""
        return f"{self.what}{axes}{layer}{path}{phase}, {_list_ranks(self.members)}"


def explain(error: BaseException) -> None:
    """Add a note with the state of the other ranks to ``error``, if it is a transport error without a report."""
    if _needs_no_report(error) or not _is_transport_error(error):
        return
    error.add_note(f"distfx: {_report(_locate(error), range(dist.get_world_size()), error)}")


def announce_exception(error: BaseException) -> None:
    """Publish that this rank fails by ``error``, unless a signal ended it: then it is not the cause."""
    global _ended_by_signal
    _ended_by_signal = _ended_by_signal or isinstance(error, SignalException)
    if _ended_by_signal or _needs_no_report(error) or _is_transport_error(error):
        return
    with contextlib.suppress(Exception):
        text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        call_with_timeout(lambda: status.publish(Status("failed", text[:TEXT_LIMIT])))


def announce_uncaught_exceptions(hosts_store: bool) -> None:
    """From now on, publish uncaught exceptions after their traceback is printed.

    ``hosts_store``: the other ranks read reports from this process, so after a failure it stays until they had time to.
    """
    previous_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explain(error)  # before printing, because mpiexec may end the job after the first line that it reads
        previous_hook(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        announce_exception(error)
        if hosts_store and _has_failed:
            time.sleep(REPORT_GRACE)

    sys.excepthook = hook


def announce_exit() -> None:
    """Publish that this rank has reached the end of the program, unless it has reported something else."""
    with contextlib.suppress(Exception):
        if not _has_failed and not _ended_by_signal and not status.read([dist.get_rank()]):
            status.publish(Status("exited", "has reached the end of the program"))


def wait_for_exit_of_all(seconds: float) -> bool:
    """Announce the exit of this rank and wait for the others. Return whether all came within ``seconds``."""
    announce_exit()
    deadline = time.monotonic() + seconds
    with contextlib.suppress(Exception):
        world = dist.get_world_size()
        while time.monotonic() < deadline:
            if call_with_timeout(status.count_reports) >= world and (
                len(call_with_timeout(lambda: status.read(range(world)))) == world
            ):
                return True
            time.sleep(0.05)
    return False


# ------------------------------------------------------------------------------------------------- the report


def _report(where: str, members: Sequence[int], error: BaseException) -> str:
    """Describe the failure on this rank and the state of the other ranks."""
    _mark_failed()
    rank, world = dist.get_rank(), dist.get_world_size()
    first_line = str(error).strip().partition("\n")[0]
    with _defer_sigterm() as sigterm:
        candidates = range(world) if world <= ALL_RANKS_LIMIT else members
        try:
            unresponsive = find_unresponsive(candidates)  # before another rank wakes and ends those that are stopped
            reports = _collect_reports(where, members, candidates, unresponsive, sigterm)
            peers = _describe_peers(rank, members, reports, unresponsive)
        except Exception:
            reports = {}
            peers = "the store does not answer: rank 0, or the launcher that hosts the store, is gone"
            if state := find_unresponsive([0]).get(0):
                peers += f" ({state})"
        where += f" failed{f' with rank {peer}' if (peer := getattr(error, 'peer', None)) is not None else ''}"
        text = f"rank {rank}: {where}: {peers}\n  {type(error).__name__}: {first_line}"
        if reports:
            with contextlib.suppress(Exception):
                call_with_timeout(lambda: status.publish(Status("waiting", f"{where}: {peers}"[:TEXT_LIMIT])))
        if sigterm.is_set():
            log_to_stderr(text)
    return text


def _collect_reports(
    where: str,
    members: Sequence[int],
    candidates: Sequence[int],
    unresponsive: Mapping[int, str],
    sigterm: threading.Event,
) -> dict[int, Status]:
    """Publish that this rank waits, and read reports until all responsive members have made one, or time is up."""
    mine = Status("waiting", where)
    reports = {dist.get_rank(): mine}
    call_with_timeout(lambda: status.publish(mine))
    deadline = time.monotonic() + REPORT_GRACE
    while True:
        last_round = time.monotonic() > deadline or sigterm.is_set()
        missing = [rank for rank in candidates if rank not in reports]
        reports |= call_with_timeout(lambda missing=missing: status.read(missing))  # type: ignore[misc]
        if last_round or all(rank in reports or rank in unresponsive for rank in members):
            return reports
        sigterm.wait(0.05)


def _describe_peers(
    rank: int, members: Sequence[int], reports: Mapping[int, Status], unresponsive: Mapping[int, str]
) -> str:
    """Name the ranks that failed or exited, then those that do not answer, then those that wait as well.

    ``unresponsive`` has the states of processes when the failure was noticed.
    """
    parts = [f"rank {peer} failed: {text}" for peer, (kind, text) in reports.items() if kind == "failed"]
    parts += [f"rank {peer} {text}" for peer, (kind, text) in reports.items() if kind == "exited"]
    dead = {peer: text for peer, (kind, text) in reports.items() if kind == "dead"}
    silent = [peer for peer in members if peer not in reports or peer in dead]
    states = find_unresponsive(silent) | dead | {peer: unresponsive[peer] for peer in silent if peer in unresponsive}
    for state in dict.fromkeys(states.values()):
        parts.append(f"no answer from {_list_ranks([peer for peer in silent if states.get(peer) == state])}: {state}")
    if rest := [peer for peer in silent if peer not in states]:
        parts.append(f"no answer from {_list_ranks(rest)}: dead, stopped, or waiting for another rank")
    waiting = {peer: text for peer, (kind, text) in reports.items() if kind == "waiting" and peer != rank}
    if waiting and not parts:
        parts.append("no rank is missing; " + "; ".join(f"rank {peer}: {text}" for peer, text in waiting.items()))
    return "; ".join(parts) or "the cause is unknown"


def _list_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _is_transport_error(error: BaseException) -> bool:
    """Whether an error comes from torch.distributed, MPI or gloo, whose errors are plain ``RuntimeError``."""
    return (
        isinstance(error, dist.DistError)
        or (isinstance(error, RuntimeError) and "/gloo/" in str(error))
        or type(error).__module__.startswith("mpi4py")
    )


def _needs_no_report(error: BaseException) -> bool:
    """Whether the other ranks know of ``error`` already, or there are none."""
    return isinstance(error, CommunicationError) or not dist.is_initialized() or dist.get_world_size() == 1


def _locate(error: BaseException) -> str:
    """Name the collective that failed, the torch function that called it, and the line of the program."""
    package, torch_distributed = Path(__file__).resolve().parents[2], Path(dist.__file__).resolve().parent
    caller, function, collective = "", "", "a collective"
    for frame, line in traceback.walk_tb(error.__traceback__):
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        if not code.co_filename.startswith(str(torch_distributed)):
            if not function and not code.co_filename.startswith(str(package)):
                caller = f"{os.path.basename(code.co_filename)}:{line}"
        elif code.co_name not in ("wrapper", "inner", "inner_func"):  # of decorators
            function = function or f"{module}.{code.co_name}"
            if module == "torch.distributed.distributed_c10d":
                collective = code.co_name
    if function.endswith(f".{collective}"):
        return f"{collective} at {caller}"
    return f"{collective} in {function} at {caller}" if function else collective


# ---------------------------------------------------------------------------------------------------- the exit


def _mark_failed() -> None:
    """From now on, make sure that the process ends: threads of a transport may wait forever for lost peers."""
    global _has_failed
    if not _has_failed:
        _has_failed = True
        atexit.register(_limit_exit_time)


def _limit_exit_time() -> None:
    with contextlib.suppress(Exception):
        end_stopped_ranks()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(EXIT_TIMEOUT)


@contextlib.contextmanager
def _defer_sigterm() -> Iterator[threading.Event]:
    """Delay a launcher's SIGTERM until the end of the block, so that the report gets out. SIGTERM sets the event."""
    received = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        received.set()

    previous: Any = signal.signal(signal.SIGTERM, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
        if received.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
