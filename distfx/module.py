"""The parallel module: what ``parallelize`` returns."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from distfx.engine.calls import Call, input_layout
from distfx.engine.engine import NOT_YET, Engine
from distfx.engine.parameters import ParameterStore
from distfx.errors import DistfxError
from distfx.grid import Grid
from distfx.ir.layout import Layout
from distfx.ir.meta import meta
from distfx.ir.symbolic import evaluate_shape
from distfx.passes.bind import evaluate_layout
from distfx.passes.capture.export import Mode
from distfx.passes.pipeline import BIND, COMPILE, Compiled, PassRecord, bind_graph, plan_at
from distfx.report.plan import Plan
from distfx.report.readable import readable
from distfx.runtime.autograd.gradients import BackwardGuard, Gradients
from distfx.runtime.autograd.moves import is_alias_of_move_input

__all__ = ["ParallelModule"]


@contextmanager
def _quiet_redistribution() -> Iterator[None]:
    """DTensor warns that a dim split by two axes (``C/(c0,c1)``) takes two gathers: so it does."""
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


_FIXED = (
    "{} is an attribute of the model, and the captured graph uses the value it had at capture time: a new value would "
    "have no effect. Set it before parallelize, or make a value that changes during training a buffer or a tensor "
    "argument of forward."
)


def _fixed_names(module: nn.Module) -> frozenset[str]:
    """What the graph has fixed of a module: its plain attributes, its submodules, and ``forward``."""
    plain = (name for name in vars(module) if name != "training" and not name.startswith("_"))
    return frozenset((*plain, *module._modules, "forward"))


class _Shell(nn.Module):
    """Stands for a module of the model: it holds the parameters and the mode, while the graph computes.

    It behaves as a plain ``nn.Module``, even where the type of the model's module overrides these methods.
    """

    _engine: Engine
    _store: ParameterStore
    _path: str
    """The path of the module in the model."""
    _has_state: bool
    """Whether the module has parameters or buffers, here or in a submodule."""
    _fixed: frozenset[str]

    def _stand_for(self, path: str, module: nn.Module, engine: Engine, store: ParameterStore) -> None:
        has_state = any(True for _ in (*module.parameters(), *module.buffers()))
        self.__dict__ |= {"_engine": engine, "_store": store, "_path": path, "_has_state": has_state}
        self.__dict__["_fixed"] = _fixed_names(module)  # last: from here on __setattr__ refuses these names

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_fixed", ()):
            raise DistfxError(_FIXED.format(self._full_name(name)))
        is_state = name in self.__dict__.get("_parameters", ()) or name in self.__dict__.get("_buffers", ())
        if is_state and not isinstance(value, DTensor):
            raise DistfxError(
                f"{self._full_name(name)} is a DTensor, of which each rank has its part: write into it (copy_), or "
                "load a whole tensor with net.load_state_dict(..., strict=False)"
            )
        nn.Module.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Read plain attributes from the model: ``net.fc.out_features``."""
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if name in self.__dict__.get("_fixed", ()):
                return getattr(self._engine.model.get_submodule(self._path), name)
            raise

    def __delattr__(self, name: str) -> None:
        if name in self._fixed or name in self._parameters or name in self._buffers:
            raise DistfxError(_FIXED.format(self._full_name(name)))
        nn.Module.__delattr__(self, name)

    def _full_name(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _check_filled(self) -> None:
        """Raise if parameters do not exist yet, instead of returning an empty list."""
        if self._has_state and not self._store.is_filled:
            raise DistfxError(NOT_YET)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._store.is_filled:  # before the first call there is nothing to clear
            nn.Module.zero_grad(self, set_to_none)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._check_filled()
        return nn.Module.named_parameters(self, *args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        self._check_filled()
        return nn.Module.named_buffers(self, *args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._check_filled()
        return nn.Module.state_dict(self, *args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._check_filled()
        return nn.Module._apply(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DistfxError("a parallel module cannot be pickled: save net.full_state_dict(), or net.state_dict()")


class Part(_Shell):
    """Stands for a submodule of the model. It cannot be called."""

    @classmethod
    def of(cls, path: str, module: nn.Module, engine: Engine, store: ParameterStore) -> Part:
        """A part that is also an instance of the module's type, because programs look for ``nn.BatchNorm2d``."""
        kind: Any = type(module)
        part_type = _part_type(kind)
        part: Part = part_type.__new__(part_type)
        nn.Module.__init__(part)
        part.__dict__ |= {"_type_name": kind.__name__, "_extra_repr": module.extra_repr()}
        part._stand_for(path, module, engine, store)
        return part

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)

    def _get_name(self) -> str:
        return str(self.__dict__["_type_name"])

    def extra_repr(self) -> str:
        return str(self.__dict__["_extra_repr"])

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise DistfxError(
            f"{self._path} ({self._get_name()}) is part of a parallel module, whose graph runs as a whole: it cannot "
            "be called, and hooks on it would never run. Put hooks on the parallel module or on parameters, and let "
            "the model return the activations you want to see."
        )

    train = nn.Module.train
    requires_grad_ = nn.Module.requires_grad_
    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state
    _save_to_state_dict, _load_from_state_dict = nn.Module._save_to_state_dict, nn.Module._load_from_state_dict
    forward = _refuse
    register_forward_hook = register_forward_pre_hook = _refuse
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse


@cache
def _part_type(kind: Any) -> Any:
    try:
        return type(kind.__name__, (Part, kind), {"__module__": kind.__module__})
    except TypeError:  # a type that cannot be inherited from
        return Part


def _check_index(what: str, index: int, count: int) -> None:
    if not -count <= index < count:
        raise DistfxError(f"the model has {count} tensor {what}{'s' * (count != 1)}, so there is no {what} {index}")


class ParallelModule(_Shell):
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
        """As the model's own ``train``, which may keep a part frozen."""
        model = self._engine.model
        with Mode.of(model).on(model):
            model.train(mode)
            now = Mode.of(model)
        now.set(self._mirrors)
        return self

    # --------------------------------------------------------------------------------------------------- calls

    @torch.compiler.disable  # the graph is compiled already
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own. Plain tensors are global, the same on all ranks; DTensors are sharded already."""
        engine = self._engine
        args, kwargs = engine.bind_arguments(args, kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        prepared = engine.prepare(Call(self._mode, args, kwargs, tensors, self._is_copy), self._store, self)
        seed = engine.draw_seed(prepared.compiled)
        gradients = Gradients(prepared.parameters, prepared.runnable.buckets, seed)
        results = [_detach_alias(result) for result in prepared.runnable.run(gradients, *prepared.inputs)]
        with_gradient = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
        guard = BackwardGuard(prepared.parameters.values() if with_gradient else ())
        for result in with_gradient:
            result.register_hook(guard)
        return pytree.tree_unflatten(results, prepared.compiled.capture.out_spec)

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
        """The state dict with whole plain tensors: what the original model loads. All ranks must call it."""
        self._engine.inspect(self._mode)
        self._engine.agree_on("full_state_dict")
        with _quiet_redistribution():
            return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in self.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load DTensors of any grid, or whole plain tensors, under the original model's keys."""
        self._engine.inspect(self._mode)
        kinds = {type(value).__name__ for value in state_dict.values()}
        self._engine.agree_on(f"load_state_dict of {', '.join(sorted(kinds))}")
        own = self.state_dict()
        ready: dict[str, Any] = {}
        for name, value in state_dict.items():
            mine = own.get(name)
            if isinstance(mine, DTensor) and isinstance(value, Tensor) and mine.shape == value.shape:
                if isinstance(value, DTensor):
                    same = value.placements == mine.placements and value.device_mesh == mine.device_mesh
                    ready[name] = value if same else self._store.shard(name, value.full_tensor().to(mine.dtype))
                else:
                    ready[name] = self._store.shard(name, value.to(mine.dtype))
            else:
                ready[name] = value
        return super().load_state_dict(ready, strict=strict, assign=assign)

    def extra_repr(self) -> str:
        return f"{type(self._engine.model).__name__} on {self.grid}, outputs={self._engine.options.outputs!r}"
