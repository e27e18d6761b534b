"""Captures that ranks share, because most of a test's time is torch.export, which does the same on every rank.

Inside ``with remembered(key):`` rank 0 captures a model and writes the result into a folder of the test run. The other
ranks, other grids and other workers of pytest read it there. Every rank runs all passes but the first. Tests of
that pass, of errors and of ranks that differ do not use this module.
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
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from distfx.engine import engine
from distfx.errors import CaptureError
from distfx.ir.torch_private import OpOverload, tree_leaves
from distfx.passes.capture import Capture, Mode

FOLDER = "DISTFX_TEST_CAPTURES"
"""The environment variable that names the folder. Without it every rank captures."""

PATIENCE = 600.0
"""Seconds to wait for rank 0. The pool ends all ranks if it fails."""

_GRAPH = b"graph:"

_captures: dict[str, Capture] = {}


@contextmanager
def remembered(*key: Any) -> Iterator[None]:
    """Capture the models that ``key`` stands for once in a run of the tests."""
    original = engine.capture

    def capture(model: nn.Module, args: Any, kwargs: Any = None, **options: Any) -> Capture:
        mode = options["training"] if isinstance(options["training"], Mode) else Mode.of(model, options["training"])
        leaves = [(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in tree_leaves((args, kwargs or {}))]
        leading = [leaf[0][0] for leaf in leaves if isinstance(leaf, tuple) and leaf[0]]
        has_one_sample = all(size == 1 for size in leading)  # otherwise the capture does not depend on batch=
        rest = (options.get("batch") if has_one_sample else None, options.get("guess"))
        full_key = repr((*map(_text, key), leaves, sorted(kwargs or {}), mode, rest))
        if full_key not in _captures:
            _captures[full_key] = _shared(full_key, lambda: original(model, args, kwargs, **options))
        return _captures[full_key]

    with patch.object(engine, "capture", capture):
        yield


def _text(key: Any) -> str:
    return f"{key.__module__}.{key.__qualname__}" if callable(key) else repr(key)


def _shared(key: str, make: Callable[[], Capture]) -> Capture:
    """The capture, or the error, in the file of this key. Rank 0 writes it."""
    folder, is_alone = os.environ.get(FOLDER), not dist.is_initialized() or dist.get_world_size() == 1
    if folder is None or "<lambda>" in key or " at 0x" in key:
        return make()
    file = Path(folder) / hashlib.sha256(key.encode()).hexdigest()
    deadline = time.monotonic() + PATIENCE
    is_writer = is_alone or dist.get_rank() == 0
    while not is_writer and not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    result: Capture | CaptureError
    if file.exists():
        data = file.read_bytes()
        result = _loads(data) if data.startswith(_GRAPH) else CaptureError(data.decode())
    else:
        try:
            result = make()
        except CaptureError as error:
            result = error
        if is_writer:
            partial_file = file.with_suffix(f".{os.getpid()}")
            partial_file.write_bytes(_dumps(result) if isinstance(result, Capture) else str(result).encode())
            partial_file.rename(file)
    if isinstance(result, CaptureError):
        raise result
    return result


# A pickled graph: nodes and ATen operators are stored by name.


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Node):
            return "node", value.name
        if isinstance(value, OpOverload):
            return "op", *value.name().split("::"), value._overloadname
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.nodes: dict[str, Node] = {}

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "node":
            return self.nodes[pid[1]]
        _, namespace, name, overload = pid
        return getattr(getattr(getattr(torch.ops, namespace), name.partition(".")[0]), overload)


def _pickle(data: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(data)
    return out.getvalue()


def _dumps(capture: Capture) -> bytes:
    state = [
        *capture.module.named_parameters(remove_duplicate=False),
        *capture.module.named_buffers(remove_duplicate=False),
    ]
    tensors = {
        name: torch.empty_like(value, device="meta") if isinstance(value, nn.Parameter) else value
        for name, value in state
    }
    nodes = [
        _pickle((node.op, node.name, node.target, node.args, node.kwargs, node.meta)) for node in capture.graph.nodes
    ]
    rest = {field.name: getattr(capture, field.name) for field in fields(capture) if field.name != "module"}
    return _GRAPH + _pickle((tensors, nodes, rest))


def _loads(data: bytes) -> Capture:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns when its own LeafSpec is unpickled
        tensors, nodes, rest = _Unpickler(data.removeprefix(_GRAPH)).load()
    graph, by_name = Graph(), dict[str, Node]()
    for pickled in nodes:
        reader = _Unpickler(pickled)
        reader.nodes = by_name
        op, name, target, args, kwargs, meta = reader.load()
        by_name[name] = graph.create_node(op, target, args, kwargs, name=name)
        by_name[name].meta = meta
    state = {node.target: tensors[node.target] for node in graph.find_nodes(op="get_attr")}
    return Capture(module=GraphModule(state, graph), **rest)
