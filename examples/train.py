"""Train a small ResNet. The same script serves one process, torchrun, mpiexec and srun.

    python examples/train.py
    torchrun --nproc-per-node 4 examples/train.py --grid c2h2
    mpiexec -n 4 python examples/train.py --grid n2h2

The losses are the same on every grid, up to rounding in float64.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))

from data import textures  # type: ignore[import-not-found]
from models.resnet import small_resnet  # type: ignore[import-not-found]

import distfx

GRIDS = {1: "n1", 2: "h2", 4: "c2h2", 8: "n2c2h2"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", help="for example n2c2h2 (default: depends on the number of ranks)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()

    launch = distfx.init()
    torch.manual_seed(0)
    model = small_resnet().double().to(launch.device)
    net = distfx.parallelize(model, distfx.Grid.parse(options.grid or GRIDS.get(launch.world, "n-1")))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(options.steps):
        x, labels = textures(options.batch, 32, seed=step, dtype=torch.float64)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x.to(launch.device)), labels.to(launch.device))
        loss.backward()
        optimizer.step()
        if launch.rank == 0:
            print(f"step {step}: loss {loss.item():.12f}", flush=True)


if __name__ == "__main__":
    main()
