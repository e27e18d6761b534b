"""Time stacks of convolutions, forward and backward: one process, DDP, and distfx on several grids, in one run.

    python benchmarks/layers.py [--rounds 15] [--cases a,b,o]

(a) six 3x3 convolutions with ReLU, 64 channels, 4 x 128 x 128: much space, few weights.
(b) three 3x3 convolutions of 1024 channels on 7 x 7, batch 4: many weights, little space.
(o) the overhead of the rewritten graph on one rank, against the plain model. A copy of the plain model takes part to
    measure the noise: it does the same work with weights stored elsewhere in memory.

DDP also runs with channels last, which distfx chooses by itself for convolutions with few channels on CPUs.

Every rank holds the part of the input that it works on. Each round runs all contenders in a new order, so that all
share noise and cache effects. Times are those of the slowest rank. The columns are: the median over the rounds; its
ratio to DDP; a bootstrap interval that contains the ratio with a probability of 90 %; and the ratio of the fastest
quarters, because disturbances only make a step slower. The allocator keeps freed memory, because page faults would
otherwise take up to a tenth of a step. Bytes and messages are what rank 0 sends in a step. Saved is what autograd saves
on rank 0 for backward.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """The part of the input that this rank works on, as a data loader would read it. The grid has one axis."""
    slices = net.input_slices(0, x.shape)
    dims = [dim for dim, part in enumerate(slices) if part != slice(0, x.shape[dim])]
    if not dims:
        return x
    part, placements = x[slices].clone(), [Shard(dims[0])]
    return DTensor.from_local(part, net.grid.mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


@dataclass(frozen=True)
class Contender:
    """A model, this rank's input, and its number of threads. The model is ``None`` if this rank has nothing to do."""

    model: nn.Module | None
    x: Tensor
    threads: int = 1

    def step(self) -> None:
        """Forward and backward."""
        if self.model is not None:
            self.model(self.x).sum().backward()

    def clear(self) -> None:
        """Clear the gradients, as between the steps of training."""
        if self.model is not None:
            self.model.zero_grad()


def contenders(make: Callable[[], nn.Module], x: Tensor, rank: int) -> dict[str, Contender]:
    def ours(grid: str, strategy: str = "auto") -> Contender:
        net = distfx.parallelize(make(), distfx.Grid.parse(grid), strategy=strategy, outputs="local")
        return Contender(net, own_part(net, x))

    return {
        "one process, 2 threads": Contender(make() if rank == 0 else None, x, 2),
        "DDP, 2 ranks": Contender(nn.parallel.DistributedDataParallel(make()), x.chunk(2)[rank].clone()),
        "DDP, channels last": Contender(
            nn.parallel.DistributedDataParallel(make().to(memory_format=torch.channels_last)),
            x.chunk(2)[rank].contiguous(memory_format=torch.channels_last),
        ),
        "distfx h2": ours("h2"),
        "distfx n2": ours("n2"),
        "distfx c2 stationary-x": ours("c2", "stationary-x"),
        "distfx c2 stationary-y": ours("c2", "stationary-y"),
        "distfx c2 stationary-w": ours("c2", "stationary-w"),
    }


def saved_bytes(contender: Contender) -> int:
    """Bytes that autograd saves for backward, including parameters. Each storage counts once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if contender.model is not None:
            contender.model(contender.x)
    return sum(storages.values())


def step_time(contender: Contender) -> float:
    """Seconds of one step on the slowest rank, measured from a barrier."""
    contender.clear()
    torch.set_num_threads(contender.threads)
    dist.barrier()
    clock = time.perf_counter()
    contender.step()
    seconds = torch.tensor([time.perf_counter() - clock], dtype=torch.float64)
    torch.set_num_threads(1)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def worker(rank: int, world: int, path: str, rounds: int, cases: str) -> None:
    os.environ["DISTFX_QUIET"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    for case in cases:
        title, shape, make = CASES[case]
        torch.manual_seed(0)
        runs = contenders(make, torch.randn(shape), rank)
        times: dict[str, list[float]] = {name: [] for name in runs}
        order = random.Random(0)  # the same on both ranks
        for number in range(rounds + 2):
            for name in order.sample(list(runs), len(runs)):
                seconds = step_time(runs[name])
                if number >= 2:  # the first two rounds warm up
                    times[name].append(seconds)
        report(title, times, runs, sum(p.numel() * p.element_size() for p in make().parameters()), rank)
    dist.destroy_process_group()


def fastest_quarter(values: Sequence[float]) -> float:
    """The mean of the fastest quarter of ``values``."""
    return statistics.mean(sorted(values)[: max(1, len(values) // 4)])


def interval(one: Sequence[float], other: Sequence[float], draws: int = 1000) -> str:
    """A 90 % bootstrap interval of the ratio of the medians."""
    generator, rounds = random.Random(0), range(len(one))
    ratios = []
    for _ in range(draws):
        sample = generator.choices(rounds, k=len(rounds))
        ratios.append(statistics.median(one[i] for i in sample) / statistics.median(other[i] for i in sample))
    ratios.sort()
    return f"{ratios[draws // 20]:.2f}-{ratios[-draws // 20 - 1]:.2f}"


def report(title: str, times: dict[str, list[float]], runs: dict[str, Contender], weights: int, rank: int) -> None:
    medians = {name: statistics.median(values) for name, values in times.items()}
    quarters = {name: fastest_quarter(values) for name, values in times.items()}
    ddp = "DDP, 2 ranks"
    heads = f"{'':26}{'median s':>10}{'DDP / it':>10}{'90 % in':>12}{'fastest':>10}"
    heads += f"{'sent':>12}{'messages':>10}{'saved':>10}"
    lines = [f"\n{title}", heads]
    for name, contender in runs.items():
        saved = saved_bytes(contender)
        with distfx.record_comm() as ledger:
            contender.step()
        sent, messages = f"{ledger.bytes() / 1e6:.2f} MB", str(ledger.messages())
        if name.startswith("DDP"):
            sent, messages = f"{weights / 1e6:.2f} MB", "-"
        if name.startswith("one"):
            sent, messages = "-", "-"
        bounds = interval(times[ddp], times[name])
        ratios = f"{medians[ddp] / medians[name]:10.2f}{bounds:>12}{quarters[ddp] / quarters[name]:10.2f}"
        lines.append(f"{name:26}{medians[name]:10.4f}{ratios}{sent:>12}{messages:>10}{saved / 1e6:7.0f} MB")
    if rank == 0:
        print("\n".join(lines), flush=True)


def overhead(rounds: int) -> None:
    """Time the rewritten graph on one rank against the plain model, both with all threads."""
    os.environ["DISTFX_QUIET"] = "1"
    print("\none rank: distfx against the plain model")
    for case, (title, shape, make) in CASES.items():
        torch.manual_seed(0)
        x = torch.randn(shape)
        plain = make()
        models = {"plain": plain, "copy": copy.deepcopy(plain), "distfx": distfx.parallelize(plain, distfx.Grid())}
        times: dict[str, list[float]] = {name: [] for name in models}
        order = random.Random(0)
        for number in range(rounds + 2):
            for name in order.sample(list(models), len(models)):
                model = models[name]
                model.zero_grad()
                clock = time.perf_counter()
                model(x).sum().backward()
                if number >= 2:
                    times[name].append(time.perf_counter() - clock)
        median = statistics.median(times["plain"])
        print(f"({case}) {title}: plain {median:.4f} s; differences of medians and of fastest quarters:")
        for name in ("copy", "distfx"):
            measures = [statistics.median, fastest_quarter]
            differences = ", ".join(f"{100 * (m(times[name]) / m(times['plain']) - 1):+.1f} %" for m in measures)
            print(f"    {name:8}{differences}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps per contender (default 15)")
    parser.add_argument("--cases", default="a,b,o", help="cases to run, of a, b, o (default a,b,o)")
    options = parser.parse_args()
    if KEEP.items() - os.environ.items():  # glibc reads these when a process starts
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
