"""Compare gloo and mpi on two ranks of this machine: `python benchmarks/transports.py`.

Three patterns, with the calls of `torch.distributed` that the runtime uses:

- halo: both ranks send and receive 1 KB at once (`batch_isend_irecv`), the time until both are done;
- bulk: the same with 16 MB, as the bandwidth of one direction;
- allreduce of 1 KB and of 16 MB.

Both transports run in the same two processes, in alternating blocks, so that other load on the machine affects both.
The figures are medians over all blocks. A ratio above 1 means that mpi is faster.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
SMALL, LARGE = 1 << 10, 16 << 20  # bytes
TRANSPORTS = ("gloo", "mpi")


def halo(send: torch.Tensor, recv: torch.Tensor, group: dist.ProcessGroup) -> None:
    peer = 1 - dist.get_rank()
    ops = [dist.P2POp(dist.irecv, recv, peer, group), dist.P2POp(dist.isend, send, peer, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def allreduce(send: torch.Tensor, recv: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(recv, group=group)


PATTERNS: tuple[tuple[str, Callable[..., None], int, int], ...] = (
    ("halo 1 KB", halo, SMALL, 200),
    ("halo 16 MB", halo, LARGE, 5),
    ("allreduce 1 KB", allreduce, SMALL, 200),
    ("allreduce 16 MB", allreduce, LARGE, 5),
)


def measure(blocks: int) -> dict[tuple[str, str], float]:
    """Seconds of one call, by pattern and transport."""
    ranks = list(range(dist.get_world_size()))
    groups = {name: dist.new_group(ranks, backend="distfx_mpi" if name == "mpi" else name) for name in TRANSPORTS}
    times: dict[tuple[str, str], list[float]] = {}
    for block in range(blocks + 1):  # the first warms up
        for pattern, call, size, repeats in PATTERNS:
            send, recv = torch.zeros(size // 4), torch.zeros(size // 4)
            for name, group in groups.items():
                dist.barrier()
                for _ in range(repeats):
                    start = time.perf_counter()
                    call(send, recv, group)
                    if block:
                        times.setdefault((pattern, name), []).append(time.perf_counter() - start)
    return {key: statistics.median(values) for key, values in times.items()}


def show(medians: dict[tuple[str, str], float]) -> None:
    print(f"{'pattern':<16}{'gloo':>14}{'mpi':>14}{'gloo / mpi':>12}")
    for pattern, _, size, _ in PATTERNS:
        seconds = [medians[pattern, name] for name in TRANSPORTS]
        cells = [f"{t * 1e6:.1f} us" if size == SMALL else f"{size / t / 1e9:.2f} GB/s" for t in seconds]
        print(f"{pattern:<16}{cells[0]:>14}{cells[1]:>14}{seconds[0] / seconds[1]:>11.1f}x")


def launch(blocks: int) -> int:
    """Start the two ranks with the `mpiexec` beside this Python, or on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = shutil.which("mpiexec", path=path)
    if command is None:
        sys.exit("no mpiexec: install an MPI and mpi4py, e.g. `pip install mpich mpi4py`")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DISTFX_QUIET": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = [sys.executable, __file__, "--rank", "--blocks", str(blocks)]
    return subprocess.run([command, "-n", "2", *arguments], env=env, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10, help="how often each pattern is measured on each transport")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:
        sys.exit(launch(options.blocks))
    from distfx.runtime.comm.launch import init

    init(backend="mpi", timeout=60)
    medians = measure(options.blocks)
    if dist.get_rank() == 0:
        show(medians)


if __name__ == "__main__":
    main()
