"""Train a ResNet on 4 ranks of this machine and compare it with one process.

    torchrun --nproc-per-node 4 examples/demo.py        (or: make demo)

Prints the rewritten graph, compares the first steps (loss, all gradients, running statistics) with the same model in
one process, continues training, and prints what was sent.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from data import textures  # type: ignore[import-not-found]
from models.resnet import small_resnet  # type: ignore[import-not-found]

import distfx


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def largest_error(net: distfx.ParallelModule, plain: nn.Module) -> float:
    """The largest relative difference of any gradient, parameter or running statistic."""
    expected = plain.state_dict()
    pairs = [(value, expected[name]) for name, value in net.full_state_dict().items()]
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    pairs += [(p.grad.full_tensor(), gradients[name]) for name, p in net.named_parameters()]
    return max(float((a - b).double().norm() / b.double().norm().clamp(min=1e-30)) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="c2h2", help="default c2h2: channels and height, each split in two")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    launch = distfx.init(backend="gloo")  # on CPUs even if there are GPUs, so that four ranks run on any machine
    log = print if launch.rank == 0 else lambda *_: None

    torch.manual_seed(0)
    model = small_resnet().double()
    plain = copy.deepcopy(model)
    net = distfx.parallelize(model, distfx.Grid.parse(options.grid))
    log("The rewritten graph of the unmodified model:\n")
    log(net.print_readable(print_output=False))

    log("\nComparison with the same model in one process, float64:")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    worst = 0.0
    for number in range(3):
        x, labels = textures(8, 32, seed=number, dtype=torch.float64)
        a, b = step(net, optimizer, x, labels), step(plain, plain_optimizer, x, labels)
        error = max(largest_error(net, plain), abs(float(a - b)))
        worst = max(worst, error)
        losses = f"loss {float(a):.12f} on {net.grid}, {float(b):.12f} in one process"
        log(f"  step {number}: {losses}; largest error {error:.1e}")

    log(f"\nTraining on {net.grid}:")
    clock = time.perf_counter()
    for number in range(3, options.steps):
        x, labels = textures(8, 32, seed=number, dtype=torch.float64)
        with distfx.record_comm() as ledger:
            loss = step(net, optimizer, x, labels)
        if number % 10 == 0 or number == options.steps - 1:
            log(f"  step {number}: loss {float(loss):.4f}")
    seconds = (time.perf_counter() - clock) / max(1, options.steps - 3)
    net.eval()
    x, labels = textures(64, 32, seed=10_000, dtype=torch.float64)
    with torch.no_grad():
        accuracy = float((net(x).argmax(1) == labels).double().mean())
    net.train()
    log(f"  {seconds * 1e3:.0f} ms per step; accuracy on new images {accuracy:.0%} (chance: 25%)")
    log(f"\nA rank sends {ledger.bytes() / 1e3:.0f} kB in {ledger.messages()} messages per step, as planned:")
    log(distfx.explain(net))
    ok = worst < 1e-10 and ledger.bytes() == net.plan.bytes()
    log(f"\n{'OK' if ok else 'FAILED'}: largest error against one process {worst:.1e}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
