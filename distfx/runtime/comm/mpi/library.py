"""mpi4py, the abilities of its MPI library, and the files that the library leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["cuda_aware", "load", "unlink_job_files"]

SHARED_MEMORY = "/dev/shm/mpich_shm_"
HYDRA_PROXY = "hydra_pmi_proxy"
HYDRA_TOPOLOGY = "hydra_hwloc_xmlfile_*"  # always in /tmp

_load_time: float | None = None


def load() -> Any:
    """Import `mpi4py.MPI`, which starts MPI. Raise `ValueError` with the reason if that is impossible."""
    global _load_time
    if "mpi4py.MPI" not in sys.modules:
        _load_time = time.time()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f'backend "mpi" needs mpi4py, which cannot be imported here ({error}): '
            'install mpi4py for the MPI that starts the ranks, or use backend="gloo"'
        ) from error
    return MPI


@functools.cache
def cuda_aware() -> bool:
    """Whether MPI can access GPU memory. `DISTFX_MPI_CUDA=0` or `=1` overrides the answer of the library."""
    override = os.environ.get("DISTFX_MPI_CUDA")
    if override is not None:
        return override not in ("", "0")
    if any(os.environ.get(name) == "1" for name in ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "MVP_USE_CUDA")):
        return True
    for library in (None, sys.modules["mpi4py.MPI"].__file__ if "mpi4py.MPI" in sys.modules else None):
        try:
            return bool(ctypes.CDLL(library).MPIX_Query_cuda_support())
        except (OSError, AttributeError):
            continue
    return False


def unlink_job_files() -> None:
    """Remove the names of the files that MPICH shares between the ranks of a node, once all of them have opened them.

    MPICH removes its shared memory when it is finalized, and its launcher removes a description of the machine when the
    job ends. A killed or aborted job would leave both behind. The ranks need only the memory, which the kernel keeps
    until the last of them has ended. All ranks must call this together.
    """
    MPI = load()
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    start = node.allreduce(_load_time or 0.0, MPI.MIN)  # also a barrier: MPI is initialized on every rank of the node
    node.Free()
    with contextlib.suppress(OSError):
        for name in _mapped_segments():
            Path(name).unlink(missing_ok=True)
        if start and (topology := _own_topology_file(start, time.time())) is not None:
            topology.unlink(missing_ok=True)


def _mapped_segments() -> set[str]:
    """MPICH's shared memory that this process has mapped, hence memory of this job."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {line.split(maxsplit=5)[5] for line in lines if SHARED_MEMORY in line}
    return {name for name in names if not name.endswith(" (deleted)")}


def _own_topology_file(start: float, end: float) -> Path | None:
    """The file that the launcher of this job made while MPI was initialized, if only one file was made in that time."""
    if Path(f"/proc/{os.getppid()}/comm").read_text().strip() != HYDRA_PROXY:
        return None
    files = []
    for file in Path("/tmp").glob(HYDRA_TOPOLOGY):
        with contextlib.suppress(FileNotFoundError):
            facts = file.stat()
            if facts.st_uid == os.getuid() and start <= facts.st_mtime <= end:
                files.append(file)
    return files[0] if len(files) == 1 else None
