"""Checkpoints: sharded, safe to load, valid on any grid.

    distfx.save("runs/a", net, optimizer, scheduler, step=100, keep=3)
    checkpoint = distfx.load("runs/a", net, optimizer, scheduler)      # the latest; checkpoint.step == 100

A folder holds one checkpoint per step. Each rank writes its shards to a safetensors file, through
``torch.distributed.checkpoint``. Everything that is not a tensor is JSON. So loading never executes code from a file.

A checkpoint is written into a hidden folder next to its target and becomes visible by a rename, after every file was
synced. A crash at any moment leaves the earlier checkpoints as they were.

A path that ends with ``.safetensors`` is one file with whole tensors under the model's keys, without optimizer state.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import zeros as distributed_zeros
from torch.optim import Optimizer

from distfx.errors import DistfxError
from distfx.module import ParallelModule
from distfx.runtime.comm.agreement import agree, host_group, raise_on_all_ranks
from distfx.training.random_state import RandomState, write_random_state
from distfx.training.values import decode, dtype_of, encode

__all__ = ["Checkpoint", "PendingSave", "load", "save"]

INDEX = "checkpoint.json"
FORMAT = 1
_STEP = re.compile(r"step-(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class Checkpoint:
    """What :func:`load` read besides tensors."""

    path: Path
    step: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The further keyword arguments of :func:`save`."""


class PendingSave:
    """A save in the background. Wait for it before the program ends."""

    def __init__(self, path: Path, future: Future[Any]) -> None:
        self.path, self._future = path, future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> Path:
        """Block until the checkpoint is visible; raises if it could not be written."""
        with _readable_errors(f"the checkpoint {self.path} could not be written"):
            self._future.result()
        return self.path


def save(
    path: str | os.PathLike[str],
    net: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    *,
    step: int = 0,
    keep: int | None = None,
    asynchronous: bool = False,
    **extra: Any,
) -> Path | PendingSave:
    """Write a checkpoint. All ranks must call it.

    Args:
        path: a folder for the checkpoints of a run, or a file that ends with ``.safetensors``.
        net: a parallel module, or a plain model in one process.
        optimizer: its state is saved as well.
        scheduler: anything with ``state_dict()`` of numbers, strings, lists and dicts.
        step: the number of the training step. A checkpoint of the same step is replaced.
        keep: how many of the latest checkpoints to keep; ``None`` for all.
        asynchronous: copy the tensors and write in the background, on a process group that training does not use.
            Returns a :class:`PendingSave`.
        extra: values that :func:`load` returns, such as the position in the data: numbers, strings, lists and dicts, or
            objects whose ``state_dict()`` consists of these.
    """
    global _pending
    folder = Path(path)
    if folder.suffix == ".safetensors":
        state = {"optimizer": optimizer, "scheduler": scheduler, "keep": keep, "asynchronous": asynchronous or None}
        return _save_file(folder, net, state | extra | ({"step": step} if step else {}))
    ranks = _Ranks.of(net)

    def collect() -> tuple[dict[str, Tensor], dict[str, Any]]:
        _check_number("step", step, 0, "the number of the training step")
        if keep is not None:
            _check_number("keep", keep, 1, "how many checkpoints to keep, or None for all")
        tensors, optimizer_index = _collect(net, optimizer)
        return tensors, {
            "format": FORMAT,
            "torch": str(torch.__version__),
            "step": step,
            "ranks": ranks.size,
            "grid": repr(net.grid) if isinstance(net, ParallelModule) else None,
            "tensors": {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()},
            "optimizer": optimizer_index,
            "scheduler": None if scheduler is None else encode(scheduler.state_dict(), "scheduler"),
            "extra": {
                name: encode(value.state_dict() if hasattr(value, "state_dict") else value, name)
                for name, value in extra.items()
            },
        }

    _finish_pending()
    tensors, index = raise_on_all_ranks(ranks.size, collect)
    agree(ranks.size, "checkpoints", f"save to {folder}\n{json.dumps(index, sort_keys=True, indent=1)}")
    staging = folder / f".step-{step:08d}.incomplete"
    target = ranks.from_first(lambda: _prepare(folder, staging, step))
    raise_on_all_ranks(ranks.size, lambda: write_random_state(staging, ranks.rank))
    writer = _Writer(staging, lambda: _publish(staging, target, index, keep))
    if not asynchronous:
        with _readable_errors(f"the checkpoint {target} could not be written"):
            dcp.save(tensors, storage_writer=writer, no_dist=ranks.size == 1)
        return target
    group = _background_group() if ranks.size > 1 else None
    snapshot = {name: tensor.detach().clone() for name, tensor in tensors.items()}  # dcp does not copy all of them
    future: Any = dcp.async_save(snapshot, storage_writer=writer, process_group=group, no_dist=ranks.size == 1)
    _pending = PendingSave(target, future)
    return _pending


def load(
    path: str | os.PathLike[str],
    net: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    *,
    step: int | None = None,
) -> Checkpoint:
    """Read a checkpoint, on any grid and number of ranks, or into a plain model in one process.

    All ranks must call it. If something is missing, truncated or does not match, this raises one error on all ranks and
    changes nothing.

    Args:
        path: a folder of checkpoints (the latest is read, or that of ``step``), one of these checkpoints, or a file
            that ends with ``.safetensors``.
        net: a parallel module, or a plain model in one process.
        optimizer: must have the parameter groups that it had when it was saved.
        scheduler: anything with ``load_state_dict``.
        step: which checkpoint to read.
    """
    source = Path(path)
    if source.suffix == ".safetensors":
        return _load_file(source, net, optimizer, scheduler)
    ranks = _Ranks.of(net)
    _finish_pending()

    def read() -> tuple[Path, dict[str, Any], _Targets, RandomState]:
        folder = _find(source, step)
        index = _read_index(folder)
        if scheduler is not None and index["scheduler"] is None:
            raise DistfxError(f"{folder} has no scheduler: load without one")
        return folder, index, _Targets.of(index, folder, net, optimizer), RandomState.read(folder, ranks.rank)

    folder, index, targets, random_state = raise_on_all_ranks(ranks.size, read)
    agree(ranks.size, "checkpoints", f"load from {folder.name}\n{json.dumps(index, sort_keys=True, indent=1)}")
    reader = dcp.HuggingFaceStorageReader(str(folder))
    with _readable_errors(f"the checkpoint {folder} could not be read"):
        dcp.load(targets.buffers, storage_reader=reader, no_dist=ranks.size == 1)
    targets.finish()
    if scheduler is not None:
        scheduler.load_state_dict(decode(index["scheduler"]))
    random_state.restore()
    return Checkpoint(folder, index["step"], {name: decode(value) for name, value in index["extra"].items()})


# -------------------------------------------------------------------------------------------------------- ranks


@contextmanager
def _readable_errors(what: str) -> Iterator[None]:
    """Turn the exception that ``torch.distributed.checkpoint`` raises on all ranks into one sentence."""
    try:
        yield
    except dcp.CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
        texts = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
        raise DistfxError(f"{what}: {texts}") from error


_pending: PendingSave | None = None
"""The save that is being written in the background."""


def _finish_pending() -> None:
    """Wait for a save in the background: another one would mix its messages, and a load would see it half written."""
    global _pending
    pending, _pending = _pending, None
    if pending is not None:
        pending.wait()


_group: tuple[Any, Any] | None = None


@dataclass(frozen=True)
class _Ranks:
    rank: int
    size: int

    @classmethod
    def of(cls, net: nn.Module) -> _Ranks:
        if importlib.util.find_spec("safetensors") is None:
            raise DistfxError("checkpoints need the package safetensors: pip install 'distfx[checkpoint]'")
        if not isinstance(net, nn.Module):
            raise DistfxError(f"a checkpoint takes a parallel module or a torch.nn.Module, not {type(net).__name__}")
        return cls(net.grid.rank, net.grid.size) if isinstance(net, ParallelModule) else cls(0, 1)

    def from_first(self, action: Callable[[], Path]) -> Path:
        """The result of ``action``, which rank 0 alone runs."""
        result = [raise_on_all_ranks(self.size, lambda: str(action()) if self.rank == 0 else "")]
        if self.size > 1:
            dist.broadcast_object_list(result, src=0, group=host_group())
        return Path(result[0])


def _background_group() -> Any:
    """A process group that nothing else uses: ``async_save`` on the default one would hang."""
    global _group
    if _group is None or _group[0] is not dist.group.WORLD:
        _group = (dist.group.WORLD, dist.new_group(backend="gloo"))
    return _group[1]


# ------------------------------------------------------------------------------------------------------ writing


class _Writer(dcp.HuggingFaceStorageWriter):
    """Each rank writes its shards into one safetensors file; the coordinator publishes when all are written."""

    def __init__(self, folder: Path, publish: Callable[[], None]) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._publish = publish

    def finish(self, metadata: Any, results: Any) -> None:
        self._publish()


def _prepare(folder: Path, staging: Path, step: int) -> Path:
    """Make the staging folder, and choose the name of the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(".step-*.incomplete"):
        shutil.rmtree(stale)
    staging.mkdir()
    for path in _step_folders(folder):
        if not (path / INDEX).is_file():  # was being removed when a job ended
            shutil.rmtree(path)
    same = [serial for number, serial, _ in _checkpoints(folder) if number == step]
    return folder / (f"step-{step:08d}.{max(same) + 1}" if same else f"step-{step:08d}")


def _publish(staging: Path, target: Path, index: Mapping[str, Any], keep: int | None) -> None:
    """Write the index, make the checkpoint visible, and remove those that it replaces."""
    files = {file.name: file.stat().st_size for file in sorted(staging.iterdir())}
    with open(staging / INDEX, "w") as file:
        json.dump(dict(index) | {"files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(staging)
    os.rename(staging, target)
    _sync(target.parent)
    others = [(number, path) for number, _, path in _checkpoints(target.parent) if path != target]
    replaced = [path for number, path in others if number == index["step"]]
    earlier = [path for number, path in others if number != index["step"]]
    surplus = max(0, len(earlier) - keep + 1) if keep is not None else 0
    for path in [*replaced, *sorted(earlier, key=lambda path: (path / INDEX).stat().st_mtime)[:surplus]]:
        (path / INDEX).unlink()  # first: what is only half removed is not a checkpoint any more
        shutil.rmtree(path)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checkpoints(folder: Path) -> list[tuple[int, int, Path]]:
    """Every complete checkpoint in a folder: step, serial number and path, ordered by step."""
    names = ((path, _STEP.fullmatch(path.name)) for path in _step_folders(folder) if (path / INDEX).is_file())
    return sorted((int(m[1]), int(m[2] or 0), path) for path, m in names if m)


def _step_folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _STEP.fullmatch(path.name)] if folder.is_dir() else []


def _collect(net: nn.Module, optimizer: Optimizer | None) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The tensors of a model and its optimizer by name, and what else the optimizer has."""
    tensors = {name: value for name, value in net.state_dict().items() if isinstance(value, Tensor)}
    stored: set[int] = set()
    for name, value in tensors.items():  # safetensors does not take tensors that share memory, such as tied weights
        address = _local(value).untyped_storage().data_ptr()
        if address in stored:
            tensors[name] = value.detach().clone()
        stored.add(address)
    if others := [name for name in net.state_dict() if name not in tensors]:
        raise DistfxError(f"the state dict has {others[0]}, which is not a tensor, so a checkpoint cannot hold it")
    if optimizer is None:
        return tensors, None
    names = _parameter_names(net, optimizer)
    groups, state = [], {}
    for group in optimizer.param_groups:
        options = {key: encode(value, f"the optimizer's {key}") for key, value in group.items() if key != "params"}
        groups.append({"params": [names[id(p)] for p in group["params"]], "options": options})
        for parameter in group["params"]:
            name, values, sharded = names[id(parameter)], dict[str, Any](), list[str]()
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, DTensor) or (isinstance(value, Tensor) and value.dim()):
                    tensors[_slot(name, key)] = value
                    sharded.append(key)
                else:
                    values[key] = encode(value, f"the optimizer's {key} of {name}")
            state[name] = {"values": values, "tensors": sharded}
    return tensors, {"type": type(optimizer).__name__, "groups": groups, "state": state}


def _slot(parameter: str, key: str) -> str:
    return f"optimizer/{parameter}/{key}"


def _parameter_names(net: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if strangers:
        raise DistfxError(
            f"the optimizer has {len(strangers)} parameters that are not the model's: make it from net.parameters(), "
            "after parallelize"
        )
    return names


# ------------------------------------------------------------------------------------------------------ reading


def _find(source: Path, step: int | None) -> Path:
    if (source / INDEX).is_file():
        if step is not None:
            raise DistfxError(f"{source} is one checkpoint: give the folder that holds it to choose a step")
        return source
    complete = _checkpoints(source)
    if not complete:
        what = "has no complete checkpoint" if source.is_dir() else "does not exist"
        raise DistfxError(f"{source} {what}: give the folder that distfx.save wrote to")
    if step is None:
        return max((path for _, _, path in complete), key=lambda path: (path / INDEX).stat().st_mtime_ns)
    matching = [path for number, _, path in complete if number == step]
    if not matching:
        known = ", ".join(str(number) for number, _, _ in complete[-8:])
        raise DistfxError(f"{source} has no checkpoint of step {step}; it has {known}")
    return matching[-1]


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_text())
        version, files = index["format"], dict(index["files"])
        complete = isinstance(index["tensors"], dict) and isinstance(index["extra"], dict) and "optimizer" in index
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DistfxError(f"{folder / INDEX} is not the index of a checkpoint ({type(error).__name__})") from None
    if version != FORMAT or not complete:
        raise DistfxError(f"{folder} has format {version!r}, but this version of distfx reads format {FORMAT}")
    for name, size in files.items():
        actual = (folder / name).stat().st_size if (folder / name).is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise DistfxError(f"the checkpoint {folder} is damaged: {name} {state}. Load an earlier one (step=).")
    return dict(index)


@dataclass
class _Targets:
    """New tensors that a checkpoint is read into, and what they replace once all of them were read."""

    tensors: dict[str, Tensor]
    """The model's own."""
    buffers: dict[str, Tensor]
    """What the checkpoint is read into."""
    optimizer: Optimizer | None = None
    state: dict[Any, dict[str, Any]] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, index: Mapping[str, Any], folder: Path, net: nn.Module, optimizer: Optimizer | None) -> _Targets:
        """Check that the checkpoint matches the model and the optimizer."""
        tensors = {name: value for name, value in net.state_dict().items() if isinstance(value, Tensor)}
        stored = {name: shape for name, (shape, _) in index["tensors"].items() if not name.startswith("optimizer/")}
        _check_names(folder, stored, tensors)
        buffers = {name: torch.empty_like(value) for name, value in tensors.items()}
        if optimizer is None:
            return cls(tensors, buffers)
        if index["optimizer"] is None:
            raise DistfxError(f"{folder} has no optimizer state: load without an optimizer")
        targets = cls(tensors, buffers, optimizer)
        targets._add_optimizer(index, folder, net, optimizer)
        return targets

    def _add_optimizer(self, index: Mapping[str, Any], folder: Path, net: nn.Module, optimizer: Optimizer) -> None:
        names, saved = _parameter_names(net, optimizer), index["optimizer"]
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        if saved["type"] != type(optimizer).__name__ or [group["params"] for group in saved["groups"]] != groups:
            raise DistfxError(
                f"{folder} has the state of {saved['type']} with {len(saved['groups'])} parameter groups, but the "
                f"optimizer is {type(optimizer).__name__} with {len(groups)}: use the same optimizer and groups"
            )
        self.options = [decode(group["options"]) for group in saved["groups"]]
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            name = names[id(parameter)]
            values = {key: decode(value) for key, value in saved["state"].get(name, {}).get("values", {}).items()}
            for key in saved["state"].get(name, {}).get("tensors", ()):
                shape, dtype = index["tensors"][_slot(name, key)]
                values[key] = _zeros(shape, dtype_of(dtype), parameter)
                self.buffers[_slot(name, key)] = values[key]
            self.state[parameter] = values

    def finish(self) -> None:
        """Copy what was read into the model, and give the optimizer its state."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                _local(tensor).copy_(_local(self.buffers[name]))
        if self.optimizer is None:
            return
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            group.update(options)
        for parameter, values in self.state.items():
            if values:
                self.optimizer.state[parameter] = values
            else:
                self.optimizer.state.pop(parameter, None)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _zeros(shape: list[int], dtype: torch.dtype, parameter: Tensor) -> Tensor:
    """Optimizer state for a parameter: sharded as the parameter is if it has its shape, else replicated."""
    if tuple(shape) == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype).detach()
    if isinstance(parameter, DTensor):
        return distributed_zeros(shape, dtype=dtype, device_mesh=parameter.device_mesh)
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


def _check_names(folder: Path, stored: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    problems = [f"{name} is missing" for name in tensors if name not in stored]
    problems += [f"{name} is not in the model" for name in stored if name not in tensors]
    problems += [
        f"{name} has shape {tuple(stored[name])}, in the model {tuple(value.shape)}"
        for name, value in tensors.items()
        if name in stored and tuple(stored[name]) != tuple(value.shape)
    ]
    if problems:
        more = f" and {len(problems) - 4} more differences" if len(problems) > 4 else ""
        raise DistfxError(f"{folder} does not match the model: {'; '.join(problems[:4])}{more}")


# ------------------------------------------------------------------------------------------------ one whole file


def _save_file(path: Path, net: nn.Module, state: Mapping[str, Any]) -> Path:
    ranks = _Ranks.of(net)

    def check() -> None:
        for name in (name for name, value in state.items() if value is not None):
            raise DistfxError(f"{path} holds the model's tensors alone: give a folder to save {name} as well")

    raise_on_all_ranks(ranks.size, check)
    agree(ranks.size, "checkpoints", f"save to {path}")
    whole = net.full_state_dict() if isinstance(net, ParallelModule) else net.state_dict()

    def write() -> Path:
        from safetensors.torch import save_file

        staging = path.with_name(f".{path.name}.incomplete")
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.detach().cpu().contiguous().clone() for name, t in whole.items() if isinstance(t, Tensor)}
        save_file(tensors, str(staging), metadata={"format": "pt"})
        with open(staging, "rb") as file:
            os.fsync(file.fileno())
        os.rename(staging, path)
        return path

    return ranks.from_first(write)


def _load_file(path: Path, net: nn.Module, optimizer: Any, scheduler: Any) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    ranks = _Ranks.of(net)

    def read() -> dict[str, Tensor]:
        if optimizer is not None or scheduler is not None:
            raise DistfxError(f"{path} holds the model's tensors alone: load it without optimizer and scheduler")
        try:
            tensors = load_file(str(path))
        except (OSError, SafetensorError) as error:
            raise DistfxError(f"{path} is not a whole safetensors file: {error}") from None
        present = {name: value for name, value in net.state_dict().items() if isinstance(value, Tensor)}
        _check_names(path, {name: value.shape for name, value in tensors.items()}, present)
        return tensors

    tensors = raise_on_all_ranks(ranks.size, read)
    net.load_state_dict(tensors)
    return Checkpoint(path, 0)


def _check_number(name: str, value: Any, least: int, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DistfxError(f"{name}={value!r}: give {meaning}, at least {least}")
