"""One script for every launcher: `init()` finds out who started this process, and joins the others.

| launcher | found by | ranks meet at |
|---|---|---|
| `torchrun` | `RANK` and `WORLD_SIZE`, which torchrun and many schedulers set | `MASTER_ADDR:MASTER_PORT` |
| `mpi` | variables of Open MPI, MPICH and its kin, PMIx, Cray PALS, Flux | a free port of rank 0, broadcast by MPI |
| `slurm` | `SLURM_PROCID` of `srun` | the first node, a port derived from the job's number |
| `single` | none of these | nowhere: one rank, no port |

A process group that the program has made itself is adopted as it is (`existing`). `DISTFX_LAUNCHER` or the argument
`launcher` decides where the environment misleads; `MASTER_ADDR` and `MASTER_PORT`, if set, overrule the meeting place.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distfx.errors import log_to_stderr
from distfx.runtime.comm import failure, mpi
from distfx.runtime.comm.gloo import deprioritize_polling_threads

__all__ = ["DEFAULT_TIMEOUT", "LAUNCHERS", "Launch", "expand_nodelist", "init"]

LAUNCHERS = ("torchrun", "mpi", "slurm", "single")
DEFAULT_TIMEOUT = timedelta(minutes=5)  # torch's 30 minutes are long to find out that a rank has gone
REST = 0.02  # seconds at the end, see `_leave`
FLAGS = ("DISTFX_DEBUG", "DISTFX_MPI_CUDA", "DISTFX_MPI_PROGRESS", "DISTFX_QUIET")
MAX_NODES = 2**17  # in a node list; the limit keeps a malformed list from exhausting the memory

# rank, size, local rank: as the MPI launchers tell them, before MPI itself is started.
_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH, Intel MPI, srun --mpi=pmi2
    ("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID"),  # Cray
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    ("PMIX_RANK", "", ""),  # srun --mpi=pmix, prte: the size is known to MPI only
)


@dataclass(frozen=True)
class Launch:
    """How this process was started, and what it uses. `backend` is `gloo`, `nccl` (with gloo for CPU tensors), `mpi`
    or another of torch's; `device` is where this rank computes."""

    launcher: str
    backend: str
    rank: int
    world: int
    local_rank: int
    device: torch.device


@dataclass(frozen=True)
class _Found:
    """What a launcher says of this process."""

    launcher: str
    rank: int
    world: int
    local_rank: int


_current: tuple[Launch, dist.ProcessGroup | None, timedelta | None] | None = None


def init(backend: str | None = None, timeout: float | timedelta | None = None, launcher: str | None = None) -> Launch:
    """Join the other ranks, however they were started; `Grid` calls this. Again: returns the same `Launch`.

    Args:
        backend: `"gloo"`, `"nccl"`, `"mpi"` or another that torch knows. Default: `nccl` if there are GPUs (with gloo
            for CPU tensors), else `mpi` if an MPI launcher started the ranks and mpi4py is there, else `gloo`.
        timeout: seconds (or a `timedelta`) after which an operation that does not end is an error. Default: 5 minutes.
        launcher: one of `LAUNCHERS`, where the environment misleads. Default: `DISTFX_LAUNCHER`, else found.

    Raises:
        ValueError: for what cannot work, with what to do instead.
    """
    global _current
    limit = _timeout(timeout)
    wanted = None if backend is None else _canonical(backend)
    if launcher is not None and launcher not in LAUNCHERS:
        raise ValueError(f"unknown launcher {launcher!r}; it is one of {', '.join(LAUNCHERS)}")
    if dist.is_initialized():
        if _current is None or _current[1] is not dist.group.WORLD:
            _current = (_adopt(), dist.group.WORLD, None)
            deprioritize_polling_threads()
        _agree(_current[0], wanted, launcher, limit, _current[2])
        return _current[0]

    found = _find(os.environ, launcher)
    launch = _choose(found, wanted)
    limit = limit or DEFAULT_TIMEOUT
    if launch.device.type == "cuda":
        torch.cuda.set_device(launch.device)
    if launch.backend == "mpi":
        mpi.register()
    _clean_at_exit()
    name = {"mpi": mpi.BACKEND, "nccl": "cpu:gloo,cuda:nccl"}.get(launch.backend, launch.backend)
    store = _store(found, limit)
    dist.init_process_group(name, store=store, rank=found.rank, world_size=found.world, timeout=limit)
    deprioritize_polling_threads()
    if found.world > 1:
        failure.introduce()
        failure.announce_uncaught(keeps_store=found.rank == 0 and found.launcher != "torchrun")
        if found.launcher == "mpi" and "mpi4py.MPI" in sys.modules:
            mpi.abort_on_error()
    _current = (launch, dist.group.WORLD, limit)
    if launch.rank == 0 and launch.world > 1 and os.environ.get("DISTFX_QUIET", "0") in ("", "0"):
        how = f"{launch.world} ranks by {launch.launcher}, backend {launch.backend}, device {launch.device.type}"
        log_to_stderr(how)
    return launch


# What was asked for, and whether it can be.


def _timeout(value: float | timedelta | None) -> timedelta | None:
    if value is None:
        return None
    limit = value if isinstance(value, timedelta) else timedelta(seconds=value)
    if limit <= timedelta(0):
        raise ValueError(f"timeout={value!r}: give a positive number of seconds, or nothing for {DEFAULT_TIMEOUT}")
    return limit


def _canonical(backend: str) -> str:
    """The backend's name as `Launch` has it, if there is one of that name."""
    name = backend.lower()
    if name in ("cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"):
        name = "nccl"
    if name in (mpi.BACKEND, "mpi"):
        return "mpi"
    parts = [part.partition(":")[2] for part in name.split(",")] if ":" in name else [name]
    if any(part in (mpi.BACKEND, "mpi") for part in parts):
        raise ValueError(f'backend {backend!r}: "mpi" carries CPU and GPU tensors alike; give backend="mpi" alone')
    known = [b for b in dist.Backend.backend_list if b not in ("undefined", mpi.BACKEND)]
    if any(part not in known for part in parts):
        raise ValueError(f"unknown backend {backend!r}; it is one of {', '.join(known)}")
    if "nccl" in parts and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ValueError(f"backend {backend!r} needs GPUs and a torch built for them: there are none; use gloo or mpi")
    return name


def _adopt() -> Launch:
    """Describe the process group that the program has made itself; nothing is changed."""
    name, config = str(dist.get_backend()), str(dist.get_backend_config())
    device = torch.device("cpu")
    if torch.cuda.is_available() and name != "gloo" and ("cuda:" in config or name == mpi.BACKEND):
        device = torch.device("cuda", torch.cuda.current_device())
    backend = "nccl" if "cuda:nccl" in config else {mpi.BACKEND: "mpi", "undefined": "gloo"}.get(name, name)
    return Launch("existing", backend, dist.get_rank(), dist.get_world_size(), _local_rank(os.environ), device)


def _agree(launch: Launch, backend: str | None, launcher: str | None, limit: timedelta | None, had: Any) -> None:
    """A further `init` may repeat what is so, not contradict it."""
    for what, wanted, given in (
        ("backend", backend, launch.backend),
        ("launcher", launcher, launch.launcher),
        ("timeout", limit, had),
    ):
        if wanted is not None and wanted != given:
            now = "by the program itself" if given is None or given == "existing" else f"with {what} {given}"
            raise ValueError(
                f"init({what}={str(wanted)!r}), but torch.distributed is initialised already, {now}; give {what} to "
                "the first call (before any Grid), or call torch.distributed.destroy_process_group() in between"
            )


def _choose(found: _Found, wanted: str | None) -> Launch:
    """The backend and the device."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = wanted or ("nccl" if gpus and dist.is_nccl_available() else "gloo")
    if wanted is None and backend == "gloo" and found.launcher == "mpi" and _mpi4py() is not None:
        backend = "mpi"
    if backend == "mpi":
        size = mpi.load().COMM_WORLD.Get_size()
        if size != found.world:
            raise ValueError(
                f'backend "mpi": {found.launcher} started {found.world} ranks, MPI knows of {size}; start the program '
                'with the mpiexec of the MPI that mpi4py uses, or give backend="gloo"'
            )
    if backend == "nccl" and 1 < gpus <= found.local_rank:
        raise ValueError(
            f"backend nccl needs a GPU for each rank: this is local rank {found.local_rank} and the node has {gpus} "
            'GPUs; start fewer ranks on a node, or use backend="mpi" or "gloo"'
        )
    device = torch.device("cuda", found.local_rank % gpus) if gpus and backend != "gloo" else torch.device("cpu")
    return Launch(found.launcher, backend, found.rank, found.world, found.local_rank, device)


# Who started this process.


def _find(env: Mapping[str, str], launcher: str | None) -> _Found:
    for name in FLAGS:
        if env.get(name, "") not in ("", "0", "1"):
            raise ValueError(f"{name}={env[name][:60]!r}: set it to 0 or 1")
    launcher = launcher or env.get("DISTFX_LAUNCHER") or None
    if launcher is not None and launcher not in LAUNCHERS:
        raise ValueError(f"DISTFX_LAUNCHER={launcher}: unknown launcher; it is one of {', '.join(LAUNCHERS)}")
    if launcher is None:
        launcher = _detect(env)
    if launcher == "torchrun":
        return _Found("torchrun", _number(env, "RANK"), _number(env, "WORLD_SIZE"), _local_rank(env))
    if launcher == "mpi":
        return _find_mpi(env)
    if launcher == "slurm":
        return _Found("slurm", _number(env, "SLURM_PROCID"), _slurm_tasks(env), _local_rank(env))
    return _Found("single", 0, 1, 0)


def _detect(env: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in env or ("RANK" in env and "WORLD_SIZE" in env):
        return "torchrun"
    if any(rank in env for rank, _, _ in _MPI_VARIABLES):
        return "slurm" if _by_srun(env) and _alone_in_mpi(_slurm_tasks(env)) else "mpi"
    if _by_srun(env):
        return "slurm"
    for present, missing in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if present in env:
            raise ValueError(
                f"{present}={env[present]} is set, {missing} is not: set both, with MASTER_ADDR and MASTER_PORT, as "
                f"torchrun does; or unset {present}; or set DISTFX_LAUNCHER=single"
            )
    return "single"


def _by_srun(env: Mapping[str, str]) -> bool:
    """Whether srun started this. A batch script has `SLURM_PROCID`, too, but what it runs itself is one process."""
    batch = env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env and "SLURM_STEPID" not in env
    return "SLURM_PROCID" in env and not batch


def _slurm_tasks(env: Mapping[str, str]) -> int:
    return _number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")


def _alone_in_mpi(tasks: int) -> bool:
    """Under srun: whether MPI does not see the other tasks, as when mpi4py's MPI and srun's `--mpi` do not match."""
    MPI = _mpi4py()
    return MPI is None or MPI.COMM_WORLD.Get_size() == 1 < tasks


def _find_mpi(env: Mapping[str, str]) -> _Found:
    """Rank and size from MPI itself where it can be had, from the launcher's variables where not."""
    MPI = _mpi4py()
    rank, size, _ = next((names for names in _MPI_VARIABLES if names[0] in env), ("", "", ""))
    if MPI is None:
        if not size or size not in env:
            raise ValueError("an MPI launcher is at work, the number of ranks is not known: install mpi4py")
        return _Found("mpi", _number(env, rank), _number(env, size), _local_rank(env))
    world = MPI.COMM_WORLD
    if size in env and world.Get_size() != _number(env, size):
        library = MPI.Get_library_version().splitlines()[0].strip()
        raise ValueError(
            f"the launcher says {env[size]} ranks, mpi4py {world.Get_size()}: mpi4py uses another MPI ({library}) than "
            "the mpiexec that started this; use that library's mpiexec, or torchrun"
        )
    local = _local_rank(env, default=-1)
    if local < 0:
        node = world.Split_type(MPI.COMM_TYPE_SHARED)
        local = node.Get_rank()
        node.Free()
    return _Found("mpi", world.Get_rank(), world.Get_size(), local)


def _mpi4py() -> Any:
    """The module `mpi4py.MPI`, or None where it or its library is not installed."""
    try:
        return mpi.load()
    except ValueError:
        return None


def _local_rank(env: Mapping[str, str], default: int = 0) -> int:
    names = ["LOCAL_RANK", *(local for _, _, local in _MPI_VARIABLES), "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"]
    return next((_number(env, name) for name in names if name in env), default)


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        number = int(env[name])
        if not 0 <= number < 2**31:
            raise ValueError
        return number
    except KeyError:
        raise ValueError(f"{name} is not set: it should be, by the launcher; start with it, or set {name}") from None
    except ValueError:
        raise ValueError(f"{name}={env[name][:60]!r} is not a number that a launcher would set") from None


# Where the ranks meet.


def _store(found: _Found, timeout: timedelta) -> dist.Store:
    if found.world == 1:
        return dist.HashStore()
    if found.launcher == "torchrun":
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise ValueError(f"RANK and WORLD_SIZE are set, {name} is not: set it to where rank 0 can be reached")
        store, _, _ = next(dist.rendezvous("env://", found.rank, found.world, timeout=timeout))
        return dist.PrefixStore("distfx", store)
    if found.launcher == "mpi" and _mpi4py() is not None:
        return _store_by_mpi(found, timeout)
    if found.launcher == "slurm":
        host, port = _slurm_address(os.environ)
    else:  # an MPI launcher, and no mpi4py to ask it
        host, port = "127.0.0.1", 20000 + os.getppid() % 10000  # its ranks on a node are children of one process
        local = [n for n in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS") if n in os.environ]
        if "MASTER_ADDR" not in os.environ and (not local or _number(os.environ, local[0]) != found.world):
            raise ValueError("ranks on several nodes without mpi4py: install it, or set MASTER_ADDR and MASTER_PORT")
    host = os.environ.get("MASTER_ADDR") or host
    port = _number(os.environ, "MASTER_PORT") if os.environ.get("MASTER_PORT") else port
    return dist.TCPStore(host, port, found.world, found.rank == 0, timeout=timeout)


def _store_by_mpi(found: _Found, timeout: timedelta) -> dist.Store:
    """Rank 0 listens on a port that the system finds free, and MPI tells the others: no port is ever guessed."""
    MPI = mpi.load()
    world = MPI.COMM_WORLD
    one_node = len(set(world.allgather(MPI.Get_processor_name()))) == 1
    if found.rank == 0:
        host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if one_node else _own_address())
        port = _number(os.environ, "MASTER_PORT") if os.environ.get("MASTER_PORT") else 0
        try:
            server = dist.TCPStore(host, port, found.world, True, timeout=timeout, wait_for_workers=False)
            address: tuple[str, int, str] = (host, server.port, "")
        except (RuntimeError, ValueError) as error:  # told to all, or the others would wait
            address = (host, port, str(error))
    else:
        address = ("", 0, "")
    host, port, error_text = world.bcast(address)
    if error_text:
        raise ValueError(f"rank 0 cannot listen at {host}:{port} ({error_text}); set MASTER_ADDR or MASTER_PORT")
    if found.rank == 0:
        return server
    return dist.TCPStore(host, port, found.world, False, timeout=timeout, wait_for_workers=False)


def _own_address() -> str:
    """An address of this host that others can reach: its name's, unless that is the loopback (as on Debian)."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # sends nothing: asks the system which interface it would use
        return str(probe.getsockname()[0])
    return socket.gethostname()


def _slurm_address(env: Mapping[str, str]) -> tuple[str, int]:
    """The first node of the step, and a port that follows from the numbers of job and step."""
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
    """`001-003,007` as its numbers, zeros kept."""
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

_registered = False


def _clean_at_exit() -> None:
    global _registered
    if not _registered:
        _registered = True
        atexit.register(_leave)


def _leave() -> None:
    """Leave the process group, if it is the one made here; quietly, for the program has said all it had to say.

    A thread of gloo that lets go of a tensor when Python has ended brings the process down ("terminate called without
    an active exception"). Its threads end with the group's last reference: so none is kept here, and where the program
    keeps one, they get a moment to come to rest.
    """
    global _current
    made, _current = _current, None
    if made is None or not dist.is_initialized() or made[1] is not dist.group.WORLD:
        return
    world = made[0].world
    del made
    if world > 1:
        failure.leave()
    if failure.broken():
        return
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    if world > 1:
        time.sleep(REST)
