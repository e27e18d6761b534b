"""The parallel module: what ``parallelize`` returns."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from distfx.engine.calls import Call, input_layout
from distfx.engine.engine import Engine
from distfx.engine.parameters import ParameterStore
from distfx.engine.shells import Part, Shell
from distfx.errors import DistfxError
from distfx.grid import Grid
from distfx.ir.layout import Layout
from distfx.ir.meta import meta
from distfx.ir.symbolic import evaluate_shape
from distfx.ir.torch_private import tree_leaves, tree_unflatten
from distfx.passes.bind import evaluate_layout
from distfx.passes.capture.export import Mode
from distfx.passes.pipeline import BIND, COMPILE, Compiled, PassRecord, bind_graph, plan_at
from distfx.report.plan import Plan
from distfx.report.readable import readable
from distfx.runtime.autograd.gradients import BackwardGuard, Gradients
from distfx.runtime.autograd.moves import is_alias_of_move_input
from distfx.runtime.comm.agreement import raise_on_all_ranks

__all__ = ["ParallelModule"]

_ORIGIN = "distfx rank"
"""Key of a state dict's metadata: the rank whose shards it has."""


@contextmanager
def _quiet_redistribution() -> Iterator[None]:
    """Suppress DTensor's warning that a dim split by two axes (``C/(c0,c1)``) takes two gathers."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _detach_alias(result: Any) -> Any:
    """Clone an output that aliases an internal tensor, so that callers may modify it in place."""
    return result.clone() if isinstance(result, Tensor) and is_alias_of_move_input(result) else result


def _check_index(what: str, index: int, count: int) -> None:
    if not -count <= index < count:
        raise DistfxError(f"the model has {count} tensor {what}{'s' * (count != 1)}, so there is no {what} {index}")


class ParallelModule(Shell):
    """A model distributed over a grid: the same call, the same numbers. Made by :func:`distfx.parallelize`."""

    _mirrors: tuple[nn.Module, ...]
    """For each module of the model, in the order of ``model.modules()``, the module here that stands for it."""

    _is_copy = False
    """Whether it was copied from what ``parallelize`` made. Ranks may have made different numbers of copies."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._stand_for("", engine.model, engine, ParameterStore(engine.grid, engine.layouts))
        self._mirror(engine.model)
        if engine.compile_on_all_ranks(self._mode) is not None:
            self._store.fill(engine.model, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """Copy without gradients: these are views of buckets, which DTensor cannot copy."""
        gradients = {name: parameter.grad for name, parameter in self.named_parameters()}
        copied = self.__new__(type(self))
        memo[id(self)] = copied
        try:
            self.zero_grad()
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo) | {"_is_copy": True})
        finally:
            for name, parameter in self.named_parameters():
                parameter.grad = gradients[name]
        return copied

    # --------------------------------------------------------------------------------------------------- modes

    def _mirror(self, model: nn.Module) -> None:
        """Make a part for each module of the model, with the same name and mode and no parameters yet."""
        parts: dict[nn.Module, nn.Module] = {model: self}
        for path, module in model.named_modules(remove_duplicate=False):
            if path:
                owner, _, leaf = path.rpartition(".")
                parent = parts[model.get_submodule(owner)]
                if module not in parts:
                    parts[module] = Part.of(path, module, self._engine, self._store)
                parent._modules[leaf] = parts[module]
        self._mirrors = tuple(parts[module] for module in model.modules())
        Mode.of(model).set(self._mirrors)

    @property
    def _mode(self) -> Mode:
        return Mode(tuple(module.training for module in self._mirrors))

    def train(self, mode: bool = True) -> ParallelModule:
        """Like the model's own ``train``, which may keep a part frozen."""
        model = self._engine.model
        with Mode.of(model).on(model):
            model.train(mode)
            now = Mode.of(model)
        now.set(self._mirrors)
        return self

    # --------------------------------------------------------------------------------------------------- calls

    @torch.compiler.disable  # the graph is compiled already
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Like the model's own. Plain tensors are global, the same on all ranks; DTensors are sharded already."""
        engine = self._engine
        try:
            args, kwargs = engine.bind_arguments(args, kwargs)
        except TypeError as error:
            engine.reject_call(error, self._is_copy)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        prepared = engine.prepare(Call(self._mode, args, kwargs, tensors, self._is_copy), self._store, self)
        seed = engine.draw_seed(prepared.compiled)
        gradients = Gradients(prepared.parameters, prepared.runnable.buckets, seed)
        results = [_detach_alias(result) for result in prepared.runnable.run(gradients, *prepared.inputs)]
        with_gradient = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
        guard = BackwardGuard(prepared.parameters.values() if with_gradient else ())
        for result in with_gradient:
            result.register_hook(guard)
        return tree_unflatten(results, prepared.compiled.capture.out_spec)

    # ---------------------------------------------------------------------------------------------- inspection

    @property
    def grid(self) -> Grid:
        """The grid, with its channel axis factored where the plan needs that."""
        return self._engine.grid

    @property
    def graph_module(self) -> GraphModule:
        """The rewritten graph of the present mode, for every shape: ``node.meta["layout"]``, ``node.meta["shape"]``."""
        return self._compiled.module

    @property
    def graphs(self) -> list[GraphModule]:
        """All rewritten graphs of the present mode: more than one if the model branches on sizes or constants."""
        return [compiled.module for compiled in self._engine.modes[self._mode].graphs]

    @property
    def passes(self) -> list[PassRecord]:
        """What each pass of the compiler did: those of the graph, then those of the last call's shape."""
        last_call = self._engine.modes[self._mode].last_call
        return [*self._compiled.passes, *(last_call.passes if last_call is not None else ())]

    @property
    def _compiled(self) -> Compiled:
        return self._engine.inspect(self._mode)

    def graph_after(self, name: str) -> GraphModule:
        """The graph of the present mode after the pass ``name``, for example ``"insert"`` or ``"fuse"``.

        Passes from ``"bind"`` on show the shape of the last call, or of the example before the first call. Nothing is
        communicated.
        """
        compile_names, bind_names = ([each.name for each in passes] for passes in (COMPILE, BIND))
        if name == "capture":
            return self._compiled.capture.module
        if name in compile_names:
            return self._compiled.after(name)
        if name not in bind_names:
            raise DistfxError(
                f"no pass is called {name!r}: they are capture, {', '.join((*compile_names, *bind_names))}"
            )
        last_call = self._engine.modes[self._mode].last_call
        if last_call is None:
            last_call = bind_graph(self._compiled, self._abstract_grid, self._compiled.capture.hints, self._trained)
        return last_call.after(name)

    def print_readable(self, print_output: bool = True, after: str | None = None) -> str:
        """Print the rewritten graph with layouts, algorithms and the source lines of the model; returns the text.

        ``after`` shows the graph as one pass left it; see :meth:`graph_after`.
        """
        module = self.graph_module if after is None else self.graph_after(after)
        title = f"{type(self._engine.model).__name__} on {self.grid}, {'train' if self.training else 'eval'}"
        text = readable(module, f"{title}:" if after is None else f"{title}, after {after}:")
        if print_output:
            print(text)
        return text

    @property
    def plan(self) -> Plan:
        """The plan of the present mode: at the shape of the last call, or of the example before the first call."""
        compiled, last_call = self._compiled, self._engine.modes[self._mode].last_call
        if last_call is not None and last_call.plan is not None:
            return last_call.plan
        return plan_at(compiled, self._abstract_grid, compiled.capture.hints, self._trained)

    @property
    def _abstract_grid(self) -> Grid:
        return self.grid.at(self.grid.rank)

    @property
    def _trained(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._engine.model.named_parameters()}

    def input_slices(self, index: int, shape: Sequence[int]) -> tuple[slice, ...]:
        """This rank's part of the ``index``-th input of global ``shape``: for h5py, zarr, numpy."""
        compiled = self._compiled
        _check_index("input", index, len(compiled.capture.inputs))
        return self._slices(input_layout(compiled, compiled.capture.inputs[index].name), shape)

    def output_slices(self, index: int, shape: Sequence[int]) -> tuple[slice, ...]:
        """This rank's part of the ``index``-th output of global ``shape``: all of it unless ``outputs="local"``."""
        results: Any = self.graph_module.graph.output_node().args[0]
        _check_index("output", index, len(results))
        output: Node = results[index]
        layout = meta(output).layout
        if not all(isinstance(split.unit, int) for split in layout.dims):  # whole rows of an image, in a flat vector
            sizes = dict(self.plan.sizes)
            values = {symbol: sizes[str(symbol)] for symbol in self._compiled.capture.hints}
            known = evaluate_shape(meta(output).shape, values)
            if known != tuple(shape):
                raise DistfxError(
                    f"the part of output {index} that a rank has depends on the input: call the model with an input "
                    f"that gives {tuple(shape)} first (the last call gave {known})"
                )
            layout = evaluate_layout(layout, values)
        return self._slices(layout, shape)

    def _slices(self, layout: Layout, shape: Sequence[int]) -> tuple[slice, ...]:
        if len(shape) != len(layout.dims):
            raise DistfxError(f"shape {tuple(shape)} has {len(shape)} dims, but the tensor has {len(layout.dims)}")
        bounds = layout.bounds(tuple(shape), self.grid.placement())
        return tuple(slice(int(lo), int(hi)) for lo, hi in bounds)

    # --------------------------------------------------------------------------------------------- state dicts

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict with whole plain tensors, which the original model can load. All ranks must call it."""
        self._engine.inspect(self._mode)
        self._engine.agree_on("full_state_dict")
        with _quiet_redistribution():
            return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in self.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load DTensors of any grid, or whole plain tensors, under the original model's keys."""
        self._engine.inspect(self._mode)
        kinds = {type(value).__name__ for value in state_dict.values()}
        self._engine.agree_on(f"load_state_dict of {', '.join(sorted(kinds))}")
        raise_on_all_ranks(self.grid.size, lambda: self._check_origin(state_dict))
        present = self.state_dict()
        shards = {name: self._as_shard(name, value, present.get(name)) for name, value in state_dict.items()}
        return super().load_state_dict(shards, strict=strict, assign=assign)

    def _check_origin(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if the state dict has the shards of another rank, because it was saved there and loaded here."""
        origin = getattr(state_dict, "_metadata", {}).get(_ORIGIN, self.grid.rank)
        shards = [v for v in state_dict.values() if isinstance(v, DTensor) and any(p.is_shard() for p in v.placements)]
        if shards and origin != self.grid.rank:
            raise DistfxError(
                f"this state dict has the shards of rank {origin}, and is loaded on rank {self.grid.rank}: a file that "
                "one rank writes with torch.save(net.state_dict()) holds that rank's part only. Use distfx.save and "
                "distfx.load, or save net.full_state_dict()."
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like the model's own, with DTensors. It remembers the rank whose shards it has."""
        state = super().state_dict(*args, **kwargs)
        if hasattr(state, "_metadata"):
            state._metadata[_ORIGIN] = self.grid.rank
        return state

    def _as_shard(self, name: str, value: Any, present: Any) -> Any:
        """``value`` sharded as ``present``, the tensor of that name here, is."""
        if not isinstance(present, DTensor) or not isinstance(value, Tensor) or present.shape != value.shape:
            return value
        if not isinstance(value, DTensor):
            return self._store.shard(name, value.to(present.dtype))
        if value.placements == present.placements and value.device_mesh == present.device_mesh:
            return value
        return self._store.shard(name, value.full_tensor().to(present.dtype))

    def extra_repr(self) -> str:
        return f"{type(self._engine.model).__name__} on {self.grid}, outputs={self._engine.options.outputs!r}"
