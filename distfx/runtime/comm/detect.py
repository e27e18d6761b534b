"""Which launcher started this process, and which rank it is: read from environment variables, and from MPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distfx.runtime.comm import mpi

__all__ = ["FLAGS", "LAUNCHERS", "Placement", "detect", "find_local_rank", "import_mpi4py", "read_integer"]

LAUNCHERS = ("torchrun", "mpi", "slurm", "single")
FLAGS = ("DISTFX_DEBUG", "DISTFX_MPI_CUDA", "DISTFX_MPI_PROGRESS", "DISTFX_QUIET")
"""Environment variables that are 0 or 1."""

# Rank, size and local rank, as MPI launchers set them before MPI itself is started.
MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH, Intel MPI, srun --mpi=pmi2
    ("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID"),  # Cray
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    ("PMIX_RANK", "", ""),  # srun --mpi=pmix, prte: the size is known to MPI only
)


@dataclass(frozen=True)
class Placement:
    """The rank of this process, as its launcher set it."""

    launcher: str
    rank: int
    world: int
    local_rank: int


def detect(env: Mapping[str, str], launcher: str | None) -> Placement:
    """Find this process among the ranks of its launcher: `launcher`, `DISTFX_LAUNCHER`, or the one that `env` shows."""
    for name in FLAGS:
        if env.get(name, "") not in ("", "0", "1"):
            raise ValueError(f"{name}={env[name][:60]!r}: set it to 0 or 1")
    launcher = launcher or env.get("DISTFX_LAUNCHER") or None
    if launcher is not None and launcher not in LAUNCHERS:
        raise ValueError(f"DISTFX_LAUNCHER={launcher}: unknown launcher; choose one of {', '.join(LAUNCHERS)}")
    if launcher is None:
        launcher = _detect_launcher(env)
    if launcher == "torchrun":
        return Placement("torchrun", read_integer(env, "RANK"), read_integer(env, "WORLD_SIZE"), find_local_rank(env))
    if launcher == "mpi":
        return _detect_mpi(env)
    if launcher == "slurm":
        return Placement("slurm", read_integer(env, "SLURM_PROCID"), _slurm_tasks(env), find_local_rank(env))
    return Placement("single", 0, 1, 0)


def _detect_launcher(env: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in env or ("RANK" in env and "WORLD_SIZE" in env):
        return "torchrun"
    if any(rank in env for rank, _, _ in MPI_VARIABLES):
        return "slurm" if _is_srun_task(env) and _mpi_sees_one_task(_slurm_tasks(env)) else "mpi"
    if _is_srun_task(env):
        return "slurm"
    for present, missing in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if present in env:
            raise ValueError(
                f"{present}={env[present]} is set, {missing} is not: set both, with MASTER_ADDR and MASTER_PORT, as "
                f"torchrun does; or unset {present}; or set DISTFX_LAUNCHER=single"
            )
    return "single"


def _is_srun_task(env: Mapping[str, str]) -> bool:
    """Whether srun started this process. A batch script sets `SLURM_PROCID` as well, but is one process."""
    batch = env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env and "SLURM_STEPID" not in env
    return "SLURM_PROCID" in env and not batch


def _slurm_tasks(env: Mapping[str, str]) -> int:
    return read_integer(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")


def _mpi_sees_one_task(tasks: int) -> bool:
    """Whether MPI sees only one of several tasks, because mpi4py's MPI and srun's `--mpi` do not match."""
    MPI = import_mpi4py()
    return MPI is None or MPI.COMM_WORLD.Get_size() == 1 < tasks


def _detect_mpi(env: Mapping[str, str]) -> Placement:
    """Take rank and size from MPI if mpi4py is installed, else from the launcher's variables."""
    MPI = import_mpi4py()
    rank, size, _ = next((names for names in MPI_VARIABLES if names[0] in env), ("", "", ""))
    if MPI is None:
        if not size or size not in env:
            raise ValueError("an MPI launcher started this process, but the number of ranks is unknown: install mpi4py")
        return Placement("mpi", read_integer(env, rank), read_integer(env, size), find_local_rank(env))
    world = MPI.COMM_WORLD
    mpi.unlink_job_files()
    if size in env and world.Get_size() != read_integer(env, size):
        library = MPI.Get_library_version().splitlines()[0].strip()
        raise ValueError(
            f"the launcher started {env[size]} ranks, but mpi4py sees {world.Get_size()}: mpi4py uses another MPI "
            f"({library}) than the mpiexec that started this process; use that library's mpiexec, or torchrun"
        )
    local = find_local_rank(env, default=-1)
    if local < 0:
        node = world.Split_type(MPI.COMM_TYPE_SHARED)
        local = node.Get_rank()
        node.Free()
    return Placement("mpi", world.Get_rank(), world.Get_size(), local)


def import_mpi4py() -> Any:
    """The module `mpi4py.MPI`, or None if it or its library is not installed."""
    try:
        return mpi.load()
    except ValueError:
        return None


def find_local_rank(env: Mapping[str, str], default: int = 0) -> int:
    """The number of this process among those on its node, or `default` if no launcher sets it."""
    names = ["LOCAL_RANK", *(local for _, _, local in MPI_VARIABLES), "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"]
    return next((read_integer(env, name) for name in names if name in env), default)


def read_integer(env: Mapping[str, str], name: str) -> int:
    """The value of an environment variable, or a `ValueError` that names it."""
    try:
        number = int(env[name])
        if not 0 <= number < 2**31:
            raise ValueError
        return number
    except KeyError:
        raise ValueError(f"{name} is not set: start the program with its launcher, or set {name}") from None
    except ValueError:
        raise ValueError(f"{name}={env[name][:60]!r} is not a number that a launcher would set") from None
