"""Times convolution stacks, forward and backward, in one run: one process, DDP, and distfx on several grids.

    python benchmarks/layers.py [--rounds 15] [--cases a,b,o]

(a) six 3x3 convolutions with ReLU, 64 channels, 4 x 128 x 128: much space, few weights.
(b) three 3x3 convolutions of 1024 channels on 7 x 7, batch 4: many weights, little space.
(o) the overhead of the rewritten graph on one rank, against the plain model.

Every rank has the part of the input that it works on. Rounds are interleaved, so that noise hits every contender alike;
figures are medians over rounds of the slowest rank. The allocator keeps freed memory: otherwise up to a tenth of a step
is page faults, which hit now one, now another. Bytes and messages are what rank 0 sends in a step; saved is what
autograd keeps on rank 0 between forward and backward.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import distfx

KEEP = {
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}


def stack(channels: int, layers: int) -> nn.Sequential:
    """``layers`` 3x3 convolutions with ReLU."""
    blocks = [(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


CASES: dict[str, tuple[str, tuple[int, ...], Callable[[], nn.Module]]] = {
    "a": ("6 x (conv3x3 + ReLU), 4 x 64 x 128 x 128", (4, 64, 128, 128), lambda: stack(64, 6)),
    "b": ("3 x (conv3x3 + ReLU), 4 x 1024 x 7 x 7", (4, 1024, 7, 7), lambda: stack(1024, 3)),
}


def own_part(net: distfx.ParallelModule, x: Tensor) -> Tensor:
    """What a rank of a grid of one axis works on, as a data loader would read it."""
    slices = net.input_slices(0, x.shape)
    dims = [dim for dim, part in enumerate(slices) if part != slice(0, x.shape[dim])]
    if not dims:
        return x
    mine, placed = x[slices].clone(), [Shard(dims[0])]
    return DTensor.from_local(mine, net.grid.mesh, placed, run_check=False, shape=x.shape, stride=x.stride())


def contenders(make: Callable[[], nn.Module], x: Tensor, rank: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """For each name a forward pass and the threads each rank may use; ``None`` where a rank has nothing to do."""

    def plain() -> Callable[[], Any]:
        model = make()
        return lambda: model(x)

    def ddp() -> Callable[[], Any]:
        model = nn.parallel.DistributedDataParallel(make())
        part = x.chunk(2)[rank].clone()
        return lambda: model(part)

    def ours(grid: str, strategy: str = "auto") -> Callable[[], Any]:
        net = distfx.parallelize(make(), distfx.Grid.parse(grid), strategy=strategy, outputs="local")
        part = own_part(net, x)
        return lambda: net(part)

    return {
        "one process, 2 threads": (plain() if rank == 0 else (lambda: None), 2),
        "DDP, 2 ranks": (ddp(), 1),
        "distfx h2": (ours("h2"), 1),
        "distfx n2": (ours("n2"), 1),
        "distfx c2 stationary-x": (ours("c2", "stationary-x"), 1),
        "distfx c2 stationary-y": (ours("c2", "stationary-y"), 1),
        "distfx c2 stationary-w": (ours("c2", "stationary-w"), 1),
    }


def saved_bytes(forward: Callable[[], Any]) -> int:
    """What autograd keeps for backward, each storage once; parameters too."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(kept.values())


def step_time(forward: Callable[[], Any], threads: int) -> float:
    """One step, from a barrier to the end of the slowest rank."""
    torch.set_num_threads(threads)
    dist.barrier()
    clock = time.perf_counter()
    y = forward()
    if y is not None:
        y.sum().backward()
    spent = torch.tensor([time.perf_counter() - clock], dtype=torch.float64)
    torch.set_num_threads(1)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def worker(rank: int, world: int, path: str, rounds: int, cases: str) -> None:
    os.environ["DISTFX_QUIET"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    for case in cases:
        title, shape, make = CASES[case]
        torch.manual_seed(0)
        runs = contenders(make, torch.randn(shape), rank)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds + 2):
            for name, (forward, threads) in runs.items():
                spent = step_time(forward, threads)
                if number >= 2:
                    times[name].append(spent)
        report(title, times, runs, sum(p.numel() * p.element_size() for p in make().parameters()), rank)
    dist.destroy_process_group()


def report(title: str, times: dict[str, list[float]], runs: dict[str, Any], weights: int, rank: int) -> None:
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians["DDP, 2 ranks"]
    lines = [f"\n{title}", f"{'':26}{'median s':>10}{'DDP / it':>10}{'sent':>12}{'messages':>10}{'saved':>10}"]
    for name, (forward, _) in runs.items():
        saved = saved_bytes(forward)
        with distfx.record_comm() as ledger:
            y = forward()
            if y is not None:
                y.sum().backward()
        sent, messages = f"{ledger.bytes() / 1e6:.2f} MB", str(ledger.messages())
        if name.startswith("DDP"):
            sent, messages = f"{weights / 1e6:.2f} MB", "-"
        if name.startswith("one"):
            sent, messages = "-", "-"
        lines.append(
            f"{name:26}{medians[name]:10.4f}{base / medians[name]:10.2f}{sent:>12}{messages:>10}{saved / 1e6:7.0f} MB"
        )
    if rank == 0:
        print("\n".join(lines), flush=True)


def overhead(rounds: int) -> None:
    """The rewritten graph on one rank against the plain model, both with all threads."""
    os.environ["DISTFX_QUIET"] = "1"
    print("\none rank, distfx against the plain model")
    for case, (title, shape, make) in CASES.items():
        torch.manual_seed(0)
        x = torch.randn(shape)
        plain = make()
        net = distfx.parallelize(plain, distfx.Grid())
        times: dict[str, list[float]] = {"plain": [], "distfx": []}
        for number in range(rounds + 2):
            for name, model in (
                (("plain", plain), ("distfx", net)) if number % 2 else (("distfx", net), ("plain", plain))
            ):
                model.zero_grad()
                clock = time.perf_counter()
                model(x).sum().backward()
                if number >= 2:
                    times[name].append(time.perf_counter() - clock)
        ratio = statistics.median(b / a for a, b in zip(times["plain"], times["distfx"], strict=True))
        medians = [statistics.median(times[name]) for name in ("plain", "distfx")]
        over = f"{100 * (ratio - 1):+.1f} % (median of ratios)"
        print(f"({case}) {title}: {medians[0]:.4f} s plain, {medians[1]:.4f} s distfx, {over}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="steps that are timed for each contender (default 15)")
    parser.add_argument("--cases", default="a,b,o", help="which of a, b, o to run (default a,b,o)")
    options = parser.parse_args()
    if KEEP.items() - os.environ.items():  # glibc reads them when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP)
    cases = options.cases.split(",")
    if "o" in cases:
        overhead(options.rounds)
    shared = "".join(case for case in cases if case in CASES)
    if shared:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (2, os.path.join(folder, "store"), options.rounds, shared)
            torch.multiprocessing.spawn(worker, args=arguments, nprocs=2)


if __name__ == "__main__":
    main()
