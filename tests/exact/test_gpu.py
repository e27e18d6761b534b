"""The GPU path: cuDNN kernels, NCCL moves, channels_last, autocast. Skipped without GPUs.

Each test starts torchrun with one rank per GPU. This module is also the script that the ranks run.
"""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from support.exact import ranks_of, relative
from torch import nn

import distfx

pytestmark = pytest.mark.gpu


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.ConvTranspose2d(12, 8, 4, 2, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def compare(grid: str, strategy: str, channels_last: bool) -> None:
    """Compare outputs, input gradient and parameter gradients on each rank with the same model on one GPU."""
    launch = distfx.init()
    assert launch.device.type == "cuda" and launch.backend == "nccl", launch
    torch.manual_seed(0)
    model = network().double().to(launch.device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    net = distfx.parallelize(model, distfx.Grid.parse(grid), strategy=strategy)
    x = torch.randn(4, 3, 45, 38, dtype=torch.float64, device=launch.device)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with distfx.record_comm() as ledger:
        have = net(mine)
        have.square().sum().backward()
    want = plain(theirs)
    want.square().sum().backward()
    assert have.device == x.device and ledger.bytes() == net.plan.bytes()
    assert mine.grad is not None and theirs.grad is not None
    errors = {"output": relative(have.cpu(), want.cpu()), "input": relative(mine.grad.cpu(), theirs.grad.cpu())}
    expected = dict(plain.named_parameters())
    for name, parameter in net.named_parameters():
        errors[name] = relative(parameter.grad.full_tensor().cpu(), expected[name].grad.cpu())
    assert max(errors.values()) < 1e-10, errors
    with torch.autocast("cuda", dtype=torch.bfloat16):
        mixed = net.float()(x.float())
    assert torch.isfinite(mixed).all()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("grid", "strategy"),
    [
        ("n1", "auto"),
        ("n2", "auto"),
        ("h2", "auto"),
        *(("c2", f"stationary-{kind}") for kind in "xyw"),
        ("c2h2", "auto"),
    ],
)
def test_gpu(grid: str, strategy: str, channels_last: bool) -> None:
    ranks = ranks_of(grid)
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "test_gpu", grid, strategy, str(int(channels_last))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    compare(sys.argv[1], sys.argv[2], sys.argv[3] == "1")
