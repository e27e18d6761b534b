"""Captures that ranks share: most of a test's time is torch.export, which says the same on every rank.

Inside of ``with remembered(key):`` rank 0 captures a model and writes the result into a folder of the test run; the
other ranks, other grids and other workers of pytest read it there. All of distfx but its first pass runs on every rank.
Tests of that pass, of errors and of ranks that differ do without.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from distfx.engine import engine
from distfx.errors import CaptureError
from distfx.passes.capture.export import Capture, Mode

FOLDER = "DISTFX_TEST_CAPTURES"
"""The variable that names the folder; without it every rank captures for itself."""

PATIENCE = 600.0  # seconds for rank 0 to capture the largest model; if it fails, the pool ends all

_GRAPH = b"graph:"

_known: dict[str, Capture] = {}


@contextmanager
def remembered(*key: Any) -> Iterator[None]:
    """Capture the models that ``key`` stands for once in a run of the tests."""
    plain = engine.capture

    def capture(model: nn.Module, args: Any, kwargs: Any = None, **options: Any) -> Capture:
        mode = options["training"] if isinstance(options["training"], Mode) else Mode.of(model, options["training"])
        leaves = [
            (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in pytree.tree_leaves((args, kwargs or {}))
        ]
        leading = [leaf[0][0] for leaf in leaves if isinstance(leaf, tuple) and leaf[0]]
        ones = all(size == 1 for size in leading)  # else there is no use for batch=
        rest = (options.get("batch") if ones else None, options.get("guess"))
        full = repr((*map(_text, key), leaves, sorted(kwargs or {}), mode, rest))
        if full not in _known:
            _known[full] = _shared(full, lambda: plain(model, args, kwargs, **options))
        return _known[full]

    with patch.object(engine, "capture", capture):
        yield


def _text(key: Any) -> str:
    return f"{key.__module__}.{key.__qualname__}" if callable(key) else repr(key)


def _shared(key: str, make: Callable[[], Capture]) -> Capture:
    """What the file of this key has: rank 0 writes it, be it a capture or the error that came of it."""
    folder, alone = os.environ.get(FOLDER), not dist.is_initialized() or dist.get_world_size() == 1
    if folder is None or "<lambda>" in key or " at 0x" in key:
        return make()
    file = Path(folder) / hashlib.sha256(key.encode()).hexdigest()
    end = time.monotonic() + PATIENCE
    first = alone or dist.get_rank() == 0
    while not first and not file.exists() and time.monotonic() < end:
        time.sleep(0.01)
    if file.exists():
        data = file.read_bytes()
        made = _loads(data) if data.startswith(_GRAPH) else CaptureError(data.decode())
    else:
        try:
            made = make()
        except CaptureError as error:
            made = error
        if first:
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(_dumps(made) if isinstance(made, Capture) else str(made).encode())
            part.rename(file)
    if isinstance(made, CaptureError):
        raise made
    return made


# A graph as plain values: nodes by their names, ATen operators by theirs.


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Node):
            return "node", value.name
        if isinstance(value, torch._ops.OpOverload):
            return "op", *value.name().split("::"), value._overloadname
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.nodes: dict[str, Node] = {}

    def persistent_load(self, words: Any) -> Any:
        if words[0] == "node":
            return self.nodes[words[1]]
        _, space, name, overload = words
        return getattr(getattr(getattr(torch.ops, space), name.partition(".")[0]), overload)


def _plain(data: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(data)
    return out.getvalue()


def _dumps(capture: Capture) -> bytes:
    held = [
        *capture.module.named_parameters(remove_duplicate=False),
        *capture.module.named_buffers(remove_duplicate=False),
    ]
    tensors = {
        name: torch.empty_like(value, device="meta") if isinstance(value, nn.Parameter) else value
        for name, value in held
    }
    nodes = [
        _plain((node.op, node.name, node.target, node.args, node.kwargs, node.meta)) for node in capture.graph.nodes
    ]
    rest = {field.name: getattr(capture, field.name) for field in fields(capture) if field.name != "module"}
    return _GRAPH + _plain((tensors, nodes, rest))


def _loads(data: bytes) -> Capture:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about its own way to unpickle a LeafSpec
        tensors, nodes, rest = _Unpickler(data.removeprefix(_GRAPH)).load()
    graph, made = Graph(), dict[str, Node]()
    for each in nodes:
        reader = _Unpickler(each)
        reader.nodes = made
        op, name, target, args, kwargs, meta = reader.load()
        made[name] = graph.create_node(op, target, args, kwargs, name=name)
        made[name].meta = meta
    held = {node.target: tensors[node.target] for node in graph.find_nodes(op="get_attr")}
    return Capture(module=GraphModule(held, graph), **rest)
