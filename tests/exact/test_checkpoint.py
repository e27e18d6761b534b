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
from unittest.mock import patch

import pytest
import torch
from support.exact import ranks_of, relative
from support.ranks import run, run_raises
from torch import nn

import distfx
from distfx.training import checkpoint

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
    loaded = distfx.load(folder, net, *parts)
    assert loaded.step == STOP and loaded.extra == {"epoch": (1, {"a": 2})}
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
    target = next(folder.glob("step-*"))
    index = target / "checkpoint.json"
    data = json.loads(index.read_text())
    shards = sorted(target.glob("*.safetensors"))
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
    for file in Path(checkpoint.__file__).parent.glob("*.py"):
        assert "pickle" not in file.read_text() and "torch.load" not in file.read_text()


# ------------------------------------------------------------------------------------------- unusual state


class Scaled(nn.Module):
    """A scalar parameter, a scalar buffer, a tied weight and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.third = nn.Conv2d(4, 4, 1)
        self.third.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("count", torch.tensor(3))
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x))) * self.scale


def unusual(grid: str, folder: str, asynchronous: bool) -> dict[str, float]:
    torch.manual_seed(2)
    net = distfx.parallelize(Scaled(), grid)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1)
    net(torch.ones(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    state = {name: value.clone() for name, value in net.full_state_dict().items()}
    moments = optimizer.state[net.scale]["exp_avg"].full_tensor().clone()
    saved = distfx.save(folder, net, optimizer, step=1, asynchronous=asynchronous)
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers(), optimizer.state[net.scale]["exp_avg"]):
            tensor.add_(1)
    if asynchronous:
        saved.wait()
    distfx.load(folder, net, optimizer)
    errors = {name: relative(value, state[name]) for name, value in net.full_state_dict().items()}
    return errors | {"exp_avg": relative(optimizer.state[net.scale]["exp_avg"].full_tensor(), moments)}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("grid", ["c2", "h2", "c3"])
def test_scalars_tied_and_frozen_parameters(grid: str, asynchronous: bool, tmp_path: Path) -> None:
    for errors in run(ranks_of(grid), unusual, grid, str(tmp_path), asynchronous):
        assert max(errors.values()) == 0, errors


EXAMPLE = (torch.ones(2, 3, 2, 2),)


def factored(folder: str) -> int:
    """Adafactor has state of another shape than its parameters. (torch's cannot update sharded ones.)"""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 4))
    net = distfx.parallelize(model, "n2", example_inputs=EXAMPLE)
    optimizer = torch.optim.Adafactor(net.parameters())
    for step in range(2):
        net(*EXAMPLE).sum().backward()
        optimizer.step()
        if step == 0:
            distfx.save(folder, net, optimizer)
            distfx.load(folder, net, optimizer)
    return len(optimizer.state)


def test_optimizer_state_of_another_shape(tmp_path: Path) -> None:
    assert run(2, factored, str(tmp_path)) == [4, 4]


def pruned(folder: str) -> tuple[list[str], int, str]:
    net = distfx.parallelize(network(), "h2")
    for step in (1000, 1001):
        distfx.save(folder, net, step=step)
    distfx.save(folder, net, step=10, keep=2)  # after a restart from an earlier step
    names = sorted(path.name for path in Path(folder).iterdir())
    torch.distributed.barrier()
    if net.grid.rank == 0:
        remains = Path(folder, "step-00000011")
        remains.mkdir()
        (remains / "shard").write_text("was being removed when the job ended")
    torch.distributed.barrier()
    saved = distfx.save(folder, net, step=11)
    return names, distfx.load(folder, net).step, Path(saved).name


def test_what_was_saved_last_is_kept_and_loaded(tmp_path: Path) -> None:
    names = ["step-00000010", "step-00001001"]
    assert run(2, pruned, str(tmp_path)) == [(names, 11, "step-00000011")] * 2


def failing_in_the_background(folder: str) -> list[str]:
    net = distfx.parallelize(network(), "h2")
    messages = []
    with patch.object(checkpoint, "_publish", side_effect=OSError("the disk is full")):
        pending = distfx.save(folder, net, asynchronous=True)
        try:
            pending.wait()
        except Exception as error:
            messages.append(str(error))
    try:
        distfx.save(folder, net)
    except Exception as error:
        messages.append(str(error))
    distfx.save(folder, net, step=1)
    return messages


def test_a_failed_save_in_the_background_is_reported_and_forgotten(tmp_path: Path) -> None:
    for messages in run(2, failing_in_the_background, str(tmp_path)):
        assert messages and "the disk is full" in messages[0]


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
            if (saved := re.match(r"saved (\d+)$", line)) and int(saved[1]) >= 3 + delay:
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
