"""One MPI operation in flight, and the thread that advances it while the program computes.

Every operation is a non-blocking MPI call. The `MpiWork` that it returns keeps the buffers alive and completes it.

- MPI moves data only while it is called. `wait` polls: it spins, then yields the core, then sleeps.
- While the program computes instead, a thread polls large messages and those whose future was requested. The thread
  sleeps otherwise. It does not exist if MPI forbids calls from several threads (less than `MPI.THREAD_MULTIPLE`), or
  with `DISTFX_MPI_PROGRESS=0`. `progress()` polls once, by hand.
- MPI does not report that a peer has died. A long wait asks `distfx.runtime.comm.watch` for lost ranks, and raises.
- A wait that exceeds the timeout raises an error that names the operation, its ranks, and those that did not join it.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from distfx.errors import log_to_stderr
from distfx.runtime.comm.mpi.library import load
from distfx.runtime.comm.watch import WATCH_DELAY, lost_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

    from distfx.runtime.comm.mpi.group import MpiProcessGroup

__all__ = ["MAX_IN_FLIGHT", "MpiWork", "Part", "in_flight", "progress", "stop_progress_thread"]

SPIN_POLLS = 200  # polls before a waiting rank yields its core, about 50 us
YIELD_TIME = 0.02  # seconds of yielding before it sleeps between polls
MIN_SLEEP = 5e-5  # seconds between polls of a wait: at first,
MAX_SLEEP = 2e-3  # and at last, so that a long wait leaves the core to the ranks that it waits for
LOST_GRACE = 0.5  # seconds for messages of a lost rank that are still on their way
MAX_IN_FLIGHT = 256  # operations in flight before a new one polls the others
LARGE_MESSAGE = 256 << 10  # bytes from which the progress thread takes part
PROGRESS_INTERVAL = 2e-4  # seconds between its polls

NO_TIMEOUT = timedelta(0)

_in_flight: set[MpiWork] = set()
"""All operations that are not complete. It keeps the buffers of a work that the program dropped."""


def in_flight() -> frozenset[MpiWork]:
    """The operations that are not complete."""
    return frozenset(_in_flight)


def progress() -> None:
    """Let MPI advance all operations in flight, and complete those that are done. Never blocks."""
    for work in list(_in_flight):
        work.is_completed()


class Part:
    """One MPI request, the tensors that it reads and writes, and a function that completes it (copy back, divide)."""

    __slots__ = ("buffers", "finish", "request", "status")

    def __init__(
        self,
        request: MPI.Request,
        buffers: tuple[Tensor, ...],
        finish: Callable[[], object] | None = None,
        status: MPI.Status | None = None,
    ) -> None:
        self.request, self.buffers, self.finish, self.status = request, buffers, finish, status


class MpiWork(dist.Work):
    """One operation in flight: its MPI requests, their buffers, and the peers without which it cannot complete."""

    def __init__(
        self,
        group: MpiProcessGroup,
        name: str,
        parts: Sequence[Part],
        outputs: Sequence[Tensor] = (),
        timeout: timedelta | None = None,
        sequence: int | None = None,
        peers: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self._group, self._name, self._parts, self._outputs = group, name, parts, list(outputs)
        self._timeout = group.timeout if timeout is None or timeout <= NO_TIMEOUT else timeout
        self._sequence, self._peers = sequence, peers
        self._requests = [part.request for part in parts]
        self._done = False
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future | None = None
        self._future_start = math.inf
        self._loss_time = math.inf
        device = next((t.device for t in self._outputs if t.is_cuda), None)
        self._stream = None if device is None else torch.cuda.current_stream(device)
        """The program's stream when the operation started. Copies run there, whichever thread completes it."""
        if len(_in_flight) >= MAX_IN_FLIGHT:
            progress()
        _in_flight.add(self)
        is_large = any(t.nbytes >= LARGE_MESSAGE for part in parts for t in part.buffers)
        self._progress_thread = _progress_thread() if is_large else None
        if self._progress_thread is not None:
            self._progress_thread.add(self)

    def is_completed(self) -> bool:
        """Whether the result is available. Lets MPI make progress, and completes the operation if it is done."""
        if self._done:
            return True
        if not self._advance():
            return False
        if self._future is not None:
            self._complete_future()
        return True

    def advance_in_background(self) -> bool:
        """`is_completed` for the progress thread. Also returns true if a future fails because peers or time run out.

        Runs in the inference mode of the tensors, because the thread does not inherit that of the program.
        """
        with torch.inference_mode(any(t.is_inference() for t in self._outputs)):
            done = self._advance()
        if not done and self._future is not None:
            self._error = self._waiting_error(self._future_start, self._timeout.total_seconds())
        if done or self._error is not None:
            self._complete_future()
            return True
        return False

    def _advance(self) -> bool:
        """Let MPI make progress, and return whether the operation is complete."""
        if self._lock.acquire(blocking=False):  # else another thread advances it
            try:
                if not self._done:
                    self._test()
            finally:
                self._lock.release()
        return self._done

    def _test(self) -> None:
        try:
            if len(self._requests) == 1:
                arrived = self._requests[0].Test(self._parts[0].status)
            else:
                arrived = self._group.mpi.Request.Testall(self._requests)
            if not arrived:
                return
            with torch.cuda.stream(self._stream):  # does nothing if there is no stream
                for part in self._parts:
                    if part.finish is not None:
                        part.finish()
        except Exception as error:
            self._error = dist.DistBackendError(f"mpi {self._name} of {self._group}: {error}")
            self._error.__cause__ = error
        _in_flight.discard(self)
        self._requests, self._parts = [], self._parts[:1]  # `source_rank` needs the status of a receive
        self._done = True

    def _complete_future(self) -> None:
        with self._lock:
            future = self._future
            if future is None or future.done():
                return
            if self._error is None:
                future.set_result(self._outputs)
            else:  # C++ callers see only that there is no result, so the reason would be lost
                log_to_stderr(str(self._error))
                future.set_exception(self._error)

    def _waiting_error(self, start: float, limit: float) -> dist.DistBackendError | None:
        """The error of a wait since `start` that exceeds `limit` seconds, or whose peers are lost."""
        now = time.monotonic()
        if now - start > limit:
            missing = self._group.describe_missing(self._name, self._sequence)
            return dist.DistBackendError(f"mpi {self._name} of {self._group} not done after {limit:g} s{missing}")
        if now - start < WATCH_DELAY or not self._peers:
            return None
        lost = {
            rank: report
            for rank, report in lost_ranks(self._peers).items()
            if report.kind != "exited" or not self._group.has_joined(rank, self._sequence)
        }
        self._loss_time = min(self._loss_time, now) if lost else math.inf
        if now - self._loss_time < LOST_GRACE or not lost:
            return None
        peers = "; ".join(f"rank {rank}: {report.text}" for rank, report in lost.items())
        return dist.DistBackendError(f"mpi {self._name} of {self._group} cannot complete: {peers}")

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Complete the operation. Raise `DistBackendError` if it fails, a peer is lost, or the timeout is exceeded.

        The default timeout is that of the group.
        """
        polls, start, limit = 0, 0.0, 0.0
        if self._progress_thread is not None and self._future is None:
            self._progress_thread.remove(self)  # from here on this thread polls
        while not self.is_completed():
            polls += 1
            if polls < SPIN_POLLS:
                continue
            now = time.monotonic()
            if polls == SPIN_POLLS:
                start, limit = now, (timeout if timeout > NO_TIMEOUT else self._timeout).total_seconds()
            if now - start < YIELD_TIME:
                os.sched_yield()
                continue
            if (error := self._waiting_error(start, limit)) is not None:
                raise error
            time.sleep(min(max(MIN_SLEEP, (now - start) / 1000), MAX_SLEEP))
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return True

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """For a receive: the rank in the group that sent."""
        status = self._parts[0].status
        assert status is not None, f"{self._name} has no source"
        return status.Get_source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future that the progress thread completes. Without that thread, wait and return a completed one."""
        if self._future is None:
            thread = _progress_thread()
            if thread is None:
                self.wait()
            devices: set[int | str | torch.device] = {t.device for t in self._outputs if t.is_cuda}
            self._future_start = time.monotonic()
            self._future = torch.futures.Future(devices=list(devices))
            if self._done:
                self._complete_future()
            elif thread is not None:
                thread.add(self)
        return self._future


class _ProgressThread:
    """Calls MPI while the program computes."""

    def __init__(self) -> None:
        self._works: set[MpiWork] = set()
        self._has_work = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="distfx mpi progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            self._has_work.wait()
            while self._works and not self._stopping:
                time.sleep(PROGRESS_INTERVAL)  # first, because most works are waited for at once and need no help
                for work in list(self._works):
                    if work.advance_in_background():
                        self._works.discard(work)
            self._has_work.clear()
            if self._works:  # added in between
                self._has_work.set()

    def add(self, work: MpiWork) -> None:
        self._works.add(work)
        if not self._has_work.is_set():
            self._has_work.set()

    def remove(self, work: MpiWork) -> None:
        self._works.discard(work)

    def stop(self) -> None:
        self._stopping = True
        self._has_work.set()
        self._thread.join(1)


@functools.cache
def _progress_thread() -> _ProgressThread | None:
    """The progress thread of this process, if MPI allows one."""
    MPI = load()
    allowed = MPI.Query_thread() == MPI.THREAD_MULTIPLE and os.environ.get("DISTFX_MPI_PROGRESS", "1") != "0"
    return _ProgressThread() if allowed else None


def stop_progress_thread() -> None:
    """End the progress thread, if it was started."""
    if _progress_thread.cache_info().currsize and (thread := _progress_thread()) is not None:
        thread.stop()
