"""The end of a program that uses MPI, and the end of the whole job after an error.

`MPI_Finalize` waits for the other ranks, so a rank that ends alone must end the job.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

from distfx.runtime.comm import failure
from distfx.runtime.comm.mpi.library import load
from distfx.runtime.comm.mpi.work import in_flight, progress, stop_progress_thread
from distfx.runtime.comm.status import call_with_timeout

if TYPE_CHECKING:
    from distfx.runtime.comm.mpi.group import MpiProcessGroup

__all__ = ["abort_on_error", "finish_at_exit", "is_exiting"]

EXIT_GRACE = 2.0  # seconds for the other ranks to reach the end of the program, too
DRAIN_TIME = 2.0  # seconds for operations that the program did not wait for
OUTPUT_DELAY = 0.5  # seconds before an abort, because mpiexec then drops all output that it has not read
INTERRUPTED = 130  # a shell's exit code for a program that Ctrl-C ended

_is_exiting = False
_exit_code = 0  # of the last sys.exit
_groups: WeakSet[MpiProcessGroup] = WeakSet()


def is_exiting() -> bool:
    return _is_exiting


def abort_on_error() -> None:
    """From now on, an uncaught exception on this rank ends the whole job, because the other ranks would wait for it.

    `sys.exit` with an error code does the same at the end of the program, unless the other ranks end as well.
    """
    MPI, previous_hook, exit_program = load(), sys.excepthook, sys.exit

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous_hook(kind, error, trace)
        if not MPI.Is_finalized():
            _abort(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)

    def record_exit_code(status: Any = None, /) -> NoReturn:
        global _exit_code
        _exit_code = status if isinstance(status, int) else int(status is not None)
        exit_program(status)

    sys.excepthook, sys.exit = hook, record_exit_code
    _register_exit()


def finish_at_exit(group: MpiProcessGroup) -> None:
    """Complete the operations of `group` at the end of the program."""
    _groups.add(group)
    _register_exit()


@functools.cache
def _register_exit() -> None:
    atexit.register(_exit)


def _abort(code: int) -> NoReturn:
    """End the job, after a pause in which the launcher reads the output of this rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(OUTPUT_DELAY)
    load().COMM_WORLD.Abort(code)
    raise SystemExit(code)  # not reached


def _publish_exit() -> None:
    for group in _groups:
        group.publish_exit()


def _exit() -> None:
    """Complete the operations in flight, or abort the job if communication has failed or this rank alone gave up.

    Communicators are left to `MPI_Finalize`.
    """
    global _is_exiting
    _is_exiting = True
    if not failure.has_failed():
        with contextlib.suppress(Exception):
            call_with_timeout(_publish_exit)
    if failure.has_failed() or (_exit_code and not failure.wait_for_exit_of_all(EXIT_GRACE)):
        _abort(_exit_code or 1)
    stop_progress_thread()
    deadline = time.monotonic() + DRAIN_TIME
    while in_flight() and time.monotonic() < deadline:
        progress()
        os.sched_yield()
