"""Gloo's polling threads, which must not keep the thread that they wait for from running.

A thread of gloo's waits for messages of each process group. When one comes while another thread holds the connection's
lock, it does not sleep but polls until it gets the lock. It has just woken, so the scheduler lets it go first; where
both share a core, the holder, interrupted inside of a ``send`` or ``recv``, goes on only when the poller's time slice
is over, milliseconds later. A thread of the batch class runs as soon as a core is free, but interrupts nobody.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["deprioritize_polling_threads"]

_POLLING = "gloo_tcp_loop"
_TASKS = Path("/proc/self/task")


def deprioritize_polling_threads() -> None:
    """Put the polling threads that there are now into the batch class; to be called when process groups were made.

    Where there is no such class, or no leave to choose it, all stays as it is.
    """
    if not hasattr(os, "SCHED_BATCH") or not _TASKS.is_dir():
        return
    for task in _TASKS.iterdir():
        with suppress(OSError):  # the thread has ended, or may not be changed
            thread = int(task.name)
            if (task / "comm").read_text().strip() == _POLLING and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
