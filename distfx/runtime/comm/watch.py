"""A thread that looks for lost ranks while an operation takes long.

Gloo notices at once that a peer has gone, because its connection closes. MPI does not: an operation with a dead rank
waits until its timeout. So an operation that has waited for WATCH_DELAY seconds asks :func:`lost_ranks`. The thread
behind it polls the kernel for dead processes on this machine and the store for the reports of other ranks, and reports
dead processes there, so that other machines learn of them. It sleeps while no operation asks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

from distfx.runtime.comm import status
from distfx.runtime.comm.processes import find_unresponsive, nearby_ranks
from distfx.runtime.comm.status import Status

__all__ = ["WATCH_DELAY", "lost_ranks"]

WATCH_DELAY = 0.5  # seconds of waiting before an operation asks whether its peers are there
INTERVAL = 0.25  # seconds between polls
LEASE = 2.0  # seconds for which the thread goes on after it was last asked


def lost_ranks(ranks: Sequence[int]) -> dict[int, Status]:
    """The reports of those ``ranks`` that failed, died or ended, as far as known. Never blocks."""
    reports = _watcher().ask()
    return {rank: reports[rank] for rank in ranks if rank in reports}


class _Watcher:
    def __init__(self) -> None:
        self._reports: dict[int, Status] = {}
        self._version = (0, 0)
        self._lease_end = 0.0
        self._requested = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="distfx watch", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def ask(self) -> dict[int, Status]:
        self._lease_end = time.monotonic() + LEASE
        self._requested.set()
        return self._reports

    def _run(self) -> None:
        while not self._stopping:
            self._requested.wait()
            while time.monotonic() < self._lease_end and not self._stopping:
                with contextlib.suppress(Exception):  # the process group may be destroyed meanwhile
                    self._look()
                time.sleep(INTERVAL)
            self._requested.clear()

    def _look(self) -> None:
        ranks = nearby_ranks()
        for rank, state in find_unresponsive([rank for rank in ranks if rank not in self._reports]).items():
            if state.endswith("dead") and not status.read([rank]):
                status.publish(Status("dead", state), rank)
        version = (id(dist.group.WORLD), status.count_reports())  # a program may create another default group
        if version != self._version:
            self._reports = status.read(range(dist.get_world_size()))
            self._version = version

    def _stop(self) -> None:
        """End the thread before the interpreter ends: a thread that returns from C++ after that aborts the process."""
        self._stopping = True
        self._requested.set()
        self._thread.join(status.STORE_TIMEOUT)


@functools.cache
def _watcher() -> _Watcher:
    return _Watcher()
