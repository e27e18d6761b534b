"""`init()`: detect the launcher of this process, and join the other ranks.

| launcher | detected by | ranks meet at |
|---|---|---|
| `torchrun` | `RANK` and `WORLD_SIZE`, which torchrun and many schedulers set | `MASTER_ADDR:MASTER_PORT` |
| `mpi` | variables of Open MPI, MPICH and its derivatives, PMIx, Cray PALS, Flux | a free port of rank 0, sent by MPI |
| `slurm` | `SLURM_PROCID` of `srun` | the first node, a port derived from the job id |
| `single` | none of these | one rank, no port |

If the program has initialised torch.distributed itself, its process group is used as it is (`existing`).
`DISTFX_LAUNCHER` or the argument `launcher` overrides the detection. `MASTER_ADDR` and `MASTER_PORT` override the
address at which the ranks meet.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from distfx.errors import log_to_stderr
from distfx.runtime.comm import failure, mpi
from distfx.runtime.comm.detect import LAUNCHERS, Placement, detect, find_local_rank, import_mpi4py, read_integer
from distfx.runtime.comm.gloo import deprioritize_polling_threads, wait_for_idle_workers
from distfx.runtime.comm.processes import publish_process

__all__ = ["DEFAULT_TIMEOUT", "LAUNCHERS", "Launch", "expand_nodelist", "init"]

DEFAULT_TIMEOUT = timedelta(minutes=5)  # torch's default of 30 minutes is long to notice a lost rank
MAX_NODES = 2**17  # in a node list; the limit keeps a malformed list from exhausting the memory


@dataclass(frozen=True)
class Launch:
    """How this process was started, and the backend and device that it uses.

    `backend` is `gloo`, `nccl` (with gloo for CPU tensors), `mpi` or another backend of torch. `device` is the device
    on which this rank computes.
    """

    launcher: str
    backend: str
    rank: int
    world: int
    local_rank: int
    device: torch.device


_current: tuple[Launch, dist.ProcessGroup | None, timedelta | None] | None = None


def init(backend: str | None = None, timeout: float | timedelta | None = None, launcher: str | None = None) -> Launch:
    """Join the other ranks, whichever launcher started them. `Grid` calls this. Further calls return the same value.

    Args:
        backend: `"gloo"`, `"nccl"`, `"mpi"` or another backend of torch. Default: `nccl` if there are GPUs (with gloo
            for CPU tensors), else `mpi` if an MPI launcher started the ranks and mpi4py is installed, else `gloo`.
        timeout: seconds (or a `timedelta`) after which an incomplete operation raises an error. Default: 5 minutes.
        launcher: one of `LAUNCHERS`, to override the detection. Default: `DISTFX_LAUNCHER`, else detected.

    Raises:
        ValueError: if the arguments or the environment cannot work. The message says what to do instead.
    """
    global _current
    limit = _as_timedelta(timeout)
    requested = None if backend is None else _canonical(backend)
    if launcher is not None and launcher not in LAUNCHERS:
        raise ValueError(f"unknown launcher {launcher!r}; choose one of {', '.join(LAUNCHERS)}")
    if dist.is_initialized():
        if _current is None or _current[1] is not dist.group.WORLD:
            _current = (_describe_existing(), dist.group.WORLD, None)
            deprioritize_polling_threads()
        _check_repeated_init(_current[0], requested, launcher, limit, _current[2])
        return _current[0]

    placement = detect(os.environ, launcher)
    launch = _choose_backend(placement, requested)
    limit = limit or DEFAULT_TIMEOUT
    if launch.device.type == "cuda":
        torch.cuda.set_device(launch.device)
    if launch.backend == "mpi":
        mpi.register()
    _register_exit()
    name = {"mpi": mpi.BACKEND, "nccl": "cpu:gloo,cuda:nccl"}.get(launch.backend, launch.backend)
    store = _create_store(placement, limit)
    dist.init_process_group(name, store=store, rank=placement.rank, world_size=placement.world, timeout=limit)
    deprioritize_polling_threads()
    if placement.world > 1:
        publish_process()
        failure.announce_uncaught_exceptions(hosts_store=placement.rank == 0 and placement.launcher != "torchrun")
        if placement.launcher == "mpi" and "mpi4py.MPI" in sys.modules:
            mpi.abort_on_error()
    _current = (launch, dist.group.WORLD, limit)
    if launch.rank == 0 and launch.world > 1 and os.environ.get("DISTFX_QUIET", "0") in ("", "0"):
        ranks = f"{launch.world} ranks by {launch.launcher}"
        log_to_stderr(f"{ranks}, backend {launch.backend}, device {launch.device.type}")
    return launch


# Arguments, backend and device.


def _as_timedelta(value: float | timedelta | None) -> timedelta | None:
    if value is None:
        return None
    limit = value if isinstance(value, timedelta) else timedelta(seconds=value)
    if limit <= timedelta(0):
        raise ValueError(f"timeout={value!r}: pass a positive number of seconds, or None for {DEFAULT_TIMEOUT}")
    return limit


def _canonical(backend: str) -> str:
    """The name of the backend as in `Launch`. Raise if torch does not have it."""
    name = backend.lower()
    if name in ("cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"):
        name = "nccl"
    if name in (mpi.BACKEND, "mpi"):
        return "mpi"
    parts = [part.partition(":")[2] for part in name.split(",")] if ":" in name else [name]
    if any(part in (mpi.BACKEND, "mpi") for part in parts):
        raise ValueError(f'backend {backend!r}: "mpi" sends CPU and GPU tensors; pass backend="mpi" alone')
    known = [b for b in dist.Backend.backend_list if b not in ("undefined", mpi.BACKEND)]
    if any(part not in known for part in parts):
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(known)}")
    if "nccl" in parts and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ValueError(f"backend {backend!r} needs GPUs and a torch built with CUDA; use gloo or mpi")
    return name


def _describe_existing() -> Launch:
    """The `Launch` of a program that has initialised torch.distributed itself."""
    name, config = str(dist.get_backend()), str(dist.get_backend_config())
    device = torch.device("cpu")
    if torch.cuda.is_available() and name != "gloo" and ("cuda:" in config or name == mpi.BACKEND):
        device = torch.device("cuda", torch.cuda.current_device())
    backend = "nccl" if "cuda:nccl" in config else {mpi.BACKEND: "mpi", "undefined": "gloo"}.get(name, name)
    return Launch("existing", backend, dist.get_rank(), dist.get_world_size(), find_local_rank(os.environ), device)


def _check_repeated_init(
    launch: Launch, backend: str | None, launcher: str | None, limit: timedelta | None, present_limit: timedelta | None
) -> None:
    """Raise if a further call of `init` contradicts the first one."""
    for what, requested, present in (
        ("backend", backend, launch.backend),
        ("launcher", launcher, launch.launcher),
        ("timeout", limit, present_limit),
    ):
        if requested is not None and requested != present:
            origin = "by the program itself" if present is None or present == "existing" else f"with {what} {present}"
            raise ValueError(
                f"init({what}={str(requested)!r}), but torch.distributed is initialised already, {origin}; pass {what} "
                "to the first call (before any Grid), or call torch.distributed.destroy_process_group() in between"
            )


def _choose_backend(placement: Placement, requested: str | None) -> Launch:
    """Choose the backend and the device, and raise if they cannot work."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = requested or ("nccl" if gpus and dist.is_nccl_available() else "gloo")
    if requested is None and backend == "gloo" and placement.launcher == "mpi" and import_mpi4py() is not None:
        backend = "mpi"
    if backend == "mpi":
        size = mpi.load().COMM_WORLD.Get_size()
        if size != placement.world:
            raise ValueError(
                f'backend "mpi": {placement.launcher} started {placement.world} ranks, but MPI sees {size}; start them '
                'with the mpiexec of the MPI that mpi4py uses, or pass backend="gloo"'
            )
    if backend == "nccl" and 1 < gpus <= placement.local_rank:
        raise ValueError(
            f"backend nccl needs a GPU for each rank: this is local rank {placement.local_rank}, the node has {gpus} "
            'GPUs; start fewer ranks on a node, or use backend="mpi" or "gloo"'
        )
    device = torch.device("cuda", placement.local_rank % gpus) if gpus and backend != "gloo" else torch.device("cpu")
    return Launch(placement.launcher, backend, placement.rank, placement.world, placement.local_rank, device)


# The store at which the ranks meet.


def _create_store(placement: Placement, timeout: timedelta) -> dist.Store:
    if placement.world == 1:
        return dist.HashStore()
    if placement.launcher == "torchrun":
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise ValueError(f"RANK and WORLD_SIZE are set, {name} is not: set it to the address of rank 0")
        store, _, _ = next(dist.rendezvous("env://", placement.rank, placement.world, timeout=timeout))
        return dist.PrefixStore("distfx", store)
    if placement.launcher == "mpi" and import_mpi4py() is not None:
        return _create_store_by_mpi(placement, timeout)
    if placement.launcher == "slurm":
        host, port = _slurm_address(os.environ)
    else:  # an MPI launcher without mpi4py
        host, port = "127.0.0.1", 20000 + os.getppid() % 10000  # the ranks of a node have one parent process
        local = [n for n in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS") if n in os.environ]
        if "MASTER_ADDR" not in os.environ and (not local or read_integer(os.environ, local[0]) != placement.world):
            raise ValueError("ranks on several nodes need mpi4py: install it, or set MASTER_ADDR and MASTER_PORT")
    host = os.environ.get("MASTER_ADDR") or host
    port = read_integer(os.environ, "MASTER_PORT") if os.environ.get("MASTER_PORT") else port
    return dist.TCPStore(host, port, placement.world, placement.rank == 0, timeout=timeout)


def _create_store_by_mpi(placement: Placement, timeout: timedelta) -> dist.Store:
    """Rank 0 listens on a free port that the system chooses, and MPI sends the address to the others."""
    MPI = mpi.load()
    world = MPI.COMM_WORLD
    one_node = len(set(world.allgather(MPI.Get_processor_name()))) == 1
    if placement.rank == 0:
        host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if one_node else _own_address())
        port = read_integer(os.environ, "MASTER_PORT") if os.environ.get("MASTER_PORT") else 0
        try:
            server = dist.TCPStore(host, port, placement.world, True, timeout=timeout, wait_for_workers=False)
            address: tuple[str, int, str] = (host, server.port, "")
        except (RuntimeError, ValueError) as error:  # sent to all ranks, because they would wait
            address = (host, port, str(error))
    else:
        address = ("", 0, "")
    host, port, error_text = world.bcast(address)
    if error_text:
        raise ValueError(f"rank 0 cannot listen at {host}:{port} ({error_text}); set MASTER_ADDR or MASTER_PORT")
    if placement.rank == 0:
        return server
    return dist.TCPStore(host, port, placement.world, False, timeout=timeout, wait_for_workers=False)


def _own_address() -> str:
    """An address at which other hosts reach this one: not the loopback, to which the host name maps on Debian."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # sends nothing, but selects an interface
        return str(probe.getsockname()[0])
    return socket.gethostname()


def _slurm_address(env: Mapping[str, str]) -> tuple[str, int]:
    """The first node of the step, and a port derived from the ids of job and step."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((env[name] for name in names if env.get(name)), None)
    if nodes is None and "MASTER_ADDR" not in env:
        raise ValueError("under Slurm, but SLURM_JOB_NODELIST is not set: start with srun, or set MASTER_ADDR")
    job = re.findall(r"\d+", env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or "0")
    step = re.findall(r"\d+", env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or "0")
    port = 20000 + (int(job[0] if job else 0) + 101 * int(step[0] if step else 0)) % 10000
    return (expand_nodelist(nodes)[0] if nodes else ""), port


def expand_nodelist(nodes: str) -> list[str]:
    """The hosts of a Slurm node list, without `scontrol`.

    >>> expand_nodelist("node[001-003,007],gpu5")
    ['node001', 'node002', 'node003', 'node007', 'gpu5']
    >>> expand_nodelist("r[1-2]n[08,10]-ib")
    ['r1n08-ib', 'r1n10-ib', 'r2n08-ib', 'r2n10-ib']
    """
    hosts: list[str] = []
    if len(nodes) > 2**16:
        raise ValueError(f"the node list has {len(nodes)} characters, too many; set MASTER_ADDR to the host of rank 0")
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes):
        names = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", item):
            parts = [literal] if literal else _numbers(ranges, nodes)
            if len(hosts) + len(names) * len(parts) > MAX_NODES:
                raise _too_many_nodes(nodes)
            names = [name + part for name in names for part in parts]
        hosts += names
    if not hosts:
        raise ValueError(f"cannot read the node list {nodes[:60]!r}; set MASTER_ADDR to the host of rank 0")
    return hosts


def _too_many_nodes(nodes: str) -> ValueError:
    text = f"the node list {nodes[:60]!r} has more than {MAX_NODES} nodes"
    return ValueError(f"{text}; set MASTER_ADDR to the host of rank 0")


def _numbers(ranges: str, nodes: str) -> list[str]:
    """The numbers of `001-003,007`, with their leading zeros."""
    result: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", item.strip())
        if match is None:
            raise ValueError(
                f"cannot read {item[:60]!r} in the node list {nodes[:60]!r}; set MASTER_ADDR to the host of rank 0"
            )
        low, high = match[1], match[2] or match[1]
        if len(result) + int(high) - int(low) >= MAX_NODES:
            raise _too_many_nodes(nodes)
        result += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    return result


# The end.


@functools.cache
def _register_exit() -> None:
    atexit.register(_exit)


def _exit() -> None:
    """Announce the end of the program, and destroy the process group if `init` created it.

    No reference to the group is kept here: the threads of gloo end with the last one.
    """
    global _current
    current, _current = _current, None
    if current is None or not dist.is_initialized() or current[1] is not dist.group.WORLD:
        return
    world = current[0].world
    del current
    if world > 1:
        failure.announce_exit()
    if not failure.has_failed():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


atexit.register(wait_for_idle_workers)
