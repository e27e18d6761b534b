"""The processes of the ranks: which of those on this machine are dead or stopped.

Each rank publishes its process id when it joins. The kernel then says whether that process is alive. A stopped process
would outlive the job, because a launcher's SIGTERM does not reach it until it continues. So the survivors send it
SIGTERM and wake it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch.distributed as dist

from distfx.runtime.comm.status import call_with_timeout, default_store

__all__ = ["ALL_RANKS_LIMIT", "end_stopped_ranks", "find_unresponsive", "nearby_ranks", "publish_process"]

ALL_RANKS_LIMIT = 64  # in larger worlds only some ranks are looked at
PROCESS_KEY = "distfx/process/"


@dataclass(frozen=True)
class _Process:
    machine: str
    """The boot and the namespace in which the process id is valid."""
    pid: int
    start_time: str


_processes: dict[int, _Process] = {}


def publish_process() -> None:
    """Publish this process. Read that of rank 0 at once, because it may host the store."""
    _processes.clear()
    if machine := _this_machine():
        identity = [machine, os.getpid(), _kernel_state(os.getpid())[1]]
        default_store().set(f"{PROCESS_KEY}{dist.get_rank()}", json.dumps(identity))
        _read_processes([0], wait=True)


def nearby_ranks() -> range:
    """All ranks, or in a large world those whose numbers are close to this one's: launchers fill nodes in order."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world <= ALL_RANKS_LIMIT:
        return range(world)
    return range(max(0, rank - ALL_RANKS_LIMIT // 2), min(world, rank + ALL_RANKS_LIMIT // 2))


def find_unresponsive(ranks: Sequence[int]) -> dict[int, str]:
    """Those of ``ranks`` whose process on this machine is dead or stopped, with a text that says which."""
    with contextlib.suppress(Exception):
        call_with_timeout(lambda: _read_processes(ranks))
    states = {}
    for rank in ranks:
        if rank in _processes and _processes[rank].machine == _this_machine():
            pid = _processes[rank].pid
            state, start_time = _kernel_state(pid)
            if state in ("", "Z", "X") or start_time != _processes[rank].start_time:
                states[rank] = f"process {pid} is dead"
            elif state == "T":
                states[rank] = f"process {pid} is stopped"
    return states


def end_stopped_ranks() -> None:
    """Ask stopped ranks on this machine to end, and wake them."""
    for rank, state in find_unresponsive(nearby_ranks()).items():
        if state.endswith("stopped"):
            for signal_number in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(OSError):
                    os.kill(_processes[rank].pid, signal_number)


@cache
def _this_machine() -> str:
    """A name for the boot and the namespace of process ids; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _kernel_state(pid: int) -> tuple[str, str]:
    """State and start time of a process; ``("", "")`` if it does not exist."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    return "", ""


def _read_processes(ranks: Sequence[int], wait: bool = False) -> None:
    store = default_store()
    for rank in ranks:
        if rank not in _processes and (wait or store.check([f"{PROCESS_KEY}{rank}"])):
            _processes[rank] = _Process(*json.loads(store.get(f"{PROCESS_KEY}{rank}")))
