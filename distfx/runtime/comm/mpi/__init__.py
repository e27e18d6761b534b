"""The `mpi` transport: a `torch.distributed` backend on mpi4py, for any MPI library.

torch's own MPI backend needs a torch that was compiled against one MPI, and the wheels have none. This backend is a
Python `ProcessGroup`, so `DeviceMesh`, `DTensor`, functional collectives, checkpoints and point-to-point calls work on
it unchanged. torch reserves the name `mpi`, so the backend is registered as `distfx_mpi`, and
`distfx.init(backend="mpi")` maps the name.

- `library`: mpi4py, what the MPI library can do, and the files that it leaves behind
- `datatypes`: the MPI types and operations for torch dtypes
- `work`: one operation in flight, and the thread that advances it while the program computes
- `group`: the process group with its collectives
- `exit`: the end of the program, and the end of the job after an error

Importing this package does not start MPI. mpi4py is imported when the first group is created.
"""

from distfx.runtime.comm.mpi.exit import abort_on_error
from distfx.runtime.comm.mpi.group import BACKEND, MpiProcessGroup, register
from distfx.runtime.comm.mpi.library import cuda_aware, load, unlink_job_files
from distfx.runtime.comm.mpi.work import MpiWork, progress

__all__ = [
    "BACKEND",
    "MpiProcessGroup",
    "MpiWork",
    "abort_on_error",
    "cuda_aware",
    "load",
    "progress",
    "register",
    "unlink_job_files",
]
