"""Gloo's threads: the polling threads of its connections, and the workers of its process groups.

**Polling threads.** Each process group has a thread that waits for messages. If a message comes while another thread
holds the connection's lock, the polling thread spins until it gets the lock. The scheduler runs it first, because it
has just woken. If both share a core, the owner of the lock, interrupted inside a ``send`` or ``recv``, continues only
milliseconds later, when the time slice of the polling thread is over. A thread of the batch class runs as soon as a
core is free, but does not interrupt others.

**Workers.** Each process group has threads that run its collectives. A worker wakes the program first and drops its
reference to the tensors afterwards. If the program ends in between, the worker releases Python objects while the
interpreter ends, and the process aborts ("terminate called without an active exception"). Destroying the process group
does not help if the program, a module or a traceback still refers to it, because the workers end with the last
reference.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["deprioritize_polling_threads", "wait_for_idle_workers"]

POLLING_THREAD = "gloo_tcp_loop"
WORKER_THREAD = "pt_gloo_runloop"
TASKS = Path("/proc/self/task")

SAMPLE_INTERVAL = 0.005  # seconds; the interpreter lock is free in between
IDLE_SAMPLES = 3  # equal samples after which a sleeping thread counts as idle
IDLE_TIMEOUT = 2.0  # seconds; a worker may be stuck in a collective that never ends


def deprioritize_polling_threads() -> None:
    """Move the present polling threads to the batch class. Call it after process groups were created.

    Does nothing if the system has no such class, or does not permit it.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for task in _threads(POLLING_THREAD):
        with suppress(OSError):  # the thread has ended, or may not be changed
            thread = int(task.name)
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def wait_for_idle_workers() -> None:
    """Wait until all workers sleep. Call it at the end of the program, when no collective is in flight.

    A worker that waits for the interpreter lock sleeps, too, but gets the lock between two samples. So a worker is idle
    if it sleeps and was not scheduled for some samples.
    """
    deadline = time.monotonic() + IDLE_TIMEOUT
    previous: list[str] = []
    equal_samples = 0
    while time.monotonic() < deadline:
        sample = [_activity(task) for task in _threads(WORKER_THREAD)]
        if all(state.startswith("S") for state in sample) and sample == previous:
            equal_samples += 1
        else:
            equal_samples = 0
        if not sample or equal_samples == IDLE_SAMPLES:
            return
        previous = sample
        time.sleep(SAMPLE_INTERVAL)


def _threads(name: str) -> list[Path]:
    """The threads of this process with that name."""
    threads = []
    if TASKS.is_dir():
        for task in TASKS.iterdir():
            with suppress(OSError):
                if (task / "comm").read_text().strip() == name:
                    threads.append(task)
    return sorted(threads)


def _activity(task: Path) -> str:
    """The state of a thread ("S": sleeping), its number, and how often it was scheduled."""
    with suppress(OSError, IndexError):
        lines = (task / "status").read_text().splitlines()
        state = next(line.split()[1] for line in lines if line.startswith("State:"))
        return " ".join([state, task.name, *(line.split()[1] for line in lines if "ctxt_switches" in line)])
    return "S ended"
