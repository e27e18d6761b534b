"""Checkpoints: resumed on any grid as if never stopped, intact after a crash, and never half loaded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact import ranks_of, relative
from support.ranks import run, run_raises
from torch import nn

import distfx

STOP, END = 7, 20


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, padding=1, stride=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 5),
    ).double()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
}


def trainer(net: nn.Module, optimizer: str) -> tuple[torch.optim.Optimizer, Any]:
    made = OPTIMIZERS[optimizer](net.parameters())
    return made, torch.optim.lr_scheduler.MultiStepLR(made, [5, 12], gamma=0.5)


def steps(net: nn.Module, optimizer: Any, scheduler: Any, first: int, last: int) -> Iterator[float]:
    """Losses of training steps, each on data that depends on its number alone."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 3, 13, 12, dtype=torch.float64, generator=generator)
        y = torch.randint(5, (6,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        yield float(loss.detach())


def first_part(grid: str, folder: str, optimizer: str, asynchronous: bool = False) -> list[float]:
    net = distfx.parallelize(network(), grid)
    parts = trainer(net, optimizer)
    losses = list(steps(net, *parts, 0, STOP))
    saved = distfx.save(folder, net, *parts, step=STOP, keep=2, asynchronous=asynchronous, epoch=(1, {"a": 2}))
    losses += steps(net, *parts, STOP, END)  # goes on while the files are written
    if asynchronous:
        saved = saved.wait()
    assert saved == Path(folder, f"step-{STOP:08d}"), saved
    return losses


def second_part(grid: str, folder: str, optimizer: str) -> list[float]:
    net = distfx.parallelize(network(), grid) if grid else network()
    for parameter in net.parameters():
        parameter.data.mul_(0) if not grid else None
    parts = trainer(net, optimizer)
    checkpoint = distfx.load(folder, net, *parts)
    assert checkpoint.step == STOP and checkpoint.extra == {"epoch": (1, {"a": 2})}
    return list(steps(net, *parts, STOP, END))


RESUMED = [("c4", "sgd"), ("h3", "adamw"), ("n2", "adam"), ("c2h2", "adamw"), ("", "sgd"), ("", "adamw")]


@pytest.mark.parametrize(("grid", "optimizer"), RESUMED)
def test_training_goes_on_as_if_never_stopped(grid: str, optimizer: str, tmp_path: Path) -> None:
    want = run(4, first_part, "n2h2", str(tmp_path), optimizer)[0]
    ranks = ranks_of(grid)
    for have in run(ranks, second_part, grid, str(tmp_path), optimizer):
        assert max(abs(a - b) / b for a, b in zip(have, want[STOP:], strict=True)) < 1e-9


def test_training_goes_on_during_an_asynchronous_save(tmp_path: Path) -> None:
    want = run(2, first_part, "c2", str(tmp_path), "adamw", asynchronous=True)[0]
    have = run(2, second_part, "h2", str(tmp_path), "adamw")[0]
    assert max(abs(a - b) / b for a, b in zip(have, want[STOP:], strict=True)) < 1e-9


# ------------------------------------------------------------------------------------------------- safetensors


def save_file(grid: str, path: str) -> float:
    net = distfx.parallelize(network(), grid)
    distfx.save(path, net)
    return 0.0


def load_file(grid: str, path: str) -> dict[str, float]:
    other = network()
    for tensor in other.state_dict().values():
        tensor.zero_()
    net = distfx.parallelize(other, grid)
    distfx.load(path, net)
    want = network().state_dict()
    return {name: relative(value, want[name]) for name, value in net.full_state_dict().items()}


def test_whole_safetensors_files_have_the_models_keys(tmp_path: Path) -> None:
    from safetensors.torch import load_file as read
    from safetensors.torch import save_file as write

    path = str(tmp_path / "model.safetensors")
    run(4, save_file, "c2h2", path)
    want = network().state_dict()
    have = read(path)
    assert sorted(have) == sorted(want) and all(torch.equal(have[name], want[name]) for name in want)
    write({name: value.contiguous() for name, value in want.items()}, path)  # by somebody else
    for errors in run(2, load_file, "c2", path):
        assert max(errors.values()) == 0


# ------------------------------------------------------------------------------------- what must not be loaded


def damage(kind: str, folder: Path) -> None:
    checkpoint = next(folder.glob("step-*"))
    index = checkpoint / "checkpoint.json"
    data = json.loads(index.read_text())
    shards = sorted(checkpoint.glob("*.safetensors"))
    match kind:
        case "truncated":
            shards[0].write_bytes(shards[0].read_bytes()[:-8])
        case "missing":
            shards[0].unlink()
        case "foreign":
            index.write_text("[1, 2")
        case "another format":
            index.write_text(json.dumps(data | {"format": 99}))
        case "another model":
            data["tensors"]["0.weight"][0] = [9, 3, 3, 3]
            index.write_text(json.dumps(data))
        case "another optimizer":
            data["optimizer"]["type"] = "Adagrad"
            index.write_text(json.dumps(data))
        case "no checkpoint":
            index.unlink()


def unchanged(grid: str, folder: str) -> tuple[str, bool]:
    net = distfx.parallelize(network(), grid)
    parts = trainer(net, "sgd")
    list(steps(net, *parts, 0, 2))
    state, momenta = net.full_state_dict(), [s["momentum_buffer"].full_tensor() for s in parts[0].state.values()]
    try:
        distfx.load(folder, net, *parts)
    except distfx.DistfxError as error:
        message = str(error)
    same = all(torch.equal(value, net.full_state_dict()[name]) for name, value in state.items())
    now = [s["momentum_buffer"].full_tensor() for s in parts[0].state.values()]
    return message, same and all(torch.equal(a, b) for a, b in zip(momenta, now, strict=True))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("truncated", "is damaged: shard-00001"),
        ("missing", "is missing"),
        ("foreign", "is not the index of a checkpoint"),
        ("another format", "has format 99"),
        ("another model", "0.weight has shape (9, 3, 3, 3), in the model (8, 3, 3, 3)"),
        ("another optimizer", "has the state of Adagrad"),
        ("no checkpoint", "has no complete checkpoint"),
    ],
)
def test_a_bad_checkpoint_changes_nothing(kind: str, words: str, tmp_path: Path) -> None:
    run(2, first_part, "c2", str(tmp_path), "sgd")
    damage(kind, tmp_path)
    outcomes = run(2, unchanged, "c2", str(tmp_path))
    assert all(words in message and same for message, same in outcomes), outcomes
    assert outcomes[0] == outcomes[1], "the same error on all ranks"


def bad_arguments(kind: str, folder: str) -> None:
    net = distfx.parallelize(network(), "c2")
    optimizer, scheduler = trainer(net, "sgd")
    rank = net.grid.rank
    match kind:
        case "step":
            distfx.save(folder, net, step=-1)
        case "extra":
            distfx.save(folder, net, loader=object())
        case "stranger":
            distfx.save(folder, net, torch.optim.SGD(network().parameters(), lr=0.1))
        case "rank":
            distfx.save(folder, net, optimizer, scheduler, step=rank)
        case "folder":
            distfx.load(folder if rank else f"{folder}/nowhere", net)
        case "unwritable":
            distfx.save("/proc/nowhere/at/all", net)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("step", "step=-1"),
        ("extra", "loader has a object, which a checkpoint cannot hold"),
        ("stranger", "parameters that are not the model's"),
        ("rank", "the ranks were given different checkpoints"),
        ("folder", "has no complete checkpoint|does not exist"),
        ("unwritable", "nowhere"),
    ],
)
def test_bad_arguments_raise_on_all_ranks(kind: str, words: str, tmp_path: Path) -> None:
    failures = run_raises(2, bad_arguments, kind, str(tmp_path))
    assert all(failure is not None and re.search(words, failure.message) for failure in failures), failures


def test_loading_executes_nothing() -> None:
    source = Path(distfx.training.checkpoint.__file__).read_text()
    assert "pickle" not in source and "torch.load" not in source


# -------------------------------------------------------------------------------------- torch.save on one rank


def lone_shards(grid: str, path: str, everywhere: bool) -> str:
    """The idiom of scripts for one device: rank 0 saves its state dict, every rank loads that file."""
    net = distfx.parallelize(network(), grid)
    if everywhere:
        path = f"{path}.{net.grid.rank}"
    if everywhere or net.grid.rank == 0:
        torch.save(net.state_dict(), path)
    torch.distributed.barrier()
    state = torch.load(path, weights_only=False)
    try:
        net.load_state_dict(state)
    except distfx.DistfxError as error:
        return str(error)
    return ""


def test_the_shards_of_one_rank_are_recognised(tmp_path: Path) -> None:
    for message in run(2, lone_shards, "c2", str(tmp_path / "state.pt"), False):
        assert "has the shards of rank 0" in message and "distfx.save" in message, message


def test_each_rank_may_load_its_own_shards(tmp_path: Path) -> None:
    assert run(2, lone_shards, "c2", str(tmp_path / "state.pt"), True) == ["", ""]
    assert run(2, lone_shards, "h2", str(tmp_path / "replicated.pt"), False) == ["", ""]


# ---------------------------------------------------------------------------------------------------- crashes

PROGRAM = """
import sys, torch, distfx
from torch import nn
torch.manual_seed(1)
net = distfx.parallelize(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3)), "h2")
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
first = distfx.load(sys.argv[1], net, optimizer).step if len(sys.argv) > 2 else 0
for step in range(first, first + (3 if len(sys.argv) > 2 else 1000)):
    optimizer.zero_grad()
    net(torch.full((2, 3, 8, 8), 0.1 * step)).square().sum().backward()
    optimizer.step()
    distfx.save(sys.argv[1], net, optimizer, step=step + 1, keep=2)
    print("saved", step + 1, flush=True)
"""


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_a_killed_job_leaves_a_checkpoint(delay: int, tmp_path: Path) -> None:
    """A rank is killed at some moment of a run that saves every step, which is mostly during a save."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folder = tmp_path / "run"
    launch = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2", str(program)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DISTFX_QUIET": "1"}
    job = subprocess.Popen(
        [*launch, str(folder)], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert job.stdout is not None
        lines = iter(job.stdout.readline, "")
        for line in lines:
            if line.startswith("saved") and int(line.split()[1]) >= 3 + delay:
                break
        workers = subprocess.run(
            ["pgrep", "-f", str(program)], capture_output=True, text=True, check=False
        ).stdout.split()  # fmt: skip
        victim = max(int(pid) for pid in workers)
        time.sleep(0.003 * delay)
        os.kill(victim, signal.SIGKILL)
        job.wait(60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    again = subprocess.run(
        [*launch, str(folder), "resume"], env=env, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert again.returncode == 0, again.stderr[-2000:]
    assert again.stdout.count("saved") == 6 and len(list(folder.glob("step-*"))) == 2
    assert not list(folder.glob(".step-*"))
