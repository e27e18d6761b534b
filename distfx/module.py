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
from torch.fx import GraphModule

from distfx.engine.engine import NOT_YET, Engine
from distfx.errors import DistfxError
from distfx.grid import Grid
from distfx.ir.layout import Layout
from distfx.ir.symbolic import evaluate_shape
from distfx.passes.bind import bind, numbered_layout
from distfx.passes.capture.export import Mode, without_modes
from distfx.passes.pipeline import Compiled, PassRecord
from distfx.report.plan import Plan
from distfx.report.predict import gradient_buckets, plan_of
from distfx.report.readable import readable
from distfx.runtime.autograd.parameters import BeforeBackward, Gradients, distribute

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


def _own(result: Any) -> Any:
    """An output that its user may write into: not one that a move passed through, which is a view of another."""
    passed = isinstance(result, Tensor) and result._is_view() and type(result.grad_fn).__name__ == "_WholeBackward"
    return result.clone() if passed else result


def _take_hooks(value: nn.Parameter, shard: nn.Parameter) -> None:
    """What the model's parameter does when its gradient comes, its shard does."""
    if value.requires_grad:
        for hook in (value._backward_hooks or {}).values():
            shard.register_hook(hook)
        for hook in (value._post_accumulate_grad_hooks or {}).values():
            shard.register_post_accumulate_grad_hook(hook)


_FIXED = (
    "{} is an attribute of the model, which its graph has fixed: a new value would have no effect. Set it before "
    "parallelize; or make what changes during training a buffer, or an argument of forward that is a tensor."
)


def _fixed(module: nn.Module) -> frozenset[str]:
    """What the graph has of a module of the model: its plain attributes, its layers, and how it computes."""
    plain = (name for name in vars(module) if name != "training" and not name.startswith("_"))
    return frozenset((*plain, *module._modules, "forward"))


class _Shell(nn.Module):
    """Holds the parameters of a module of the model, which it stands for, and its mode; the graph computes.

    It is a plain module in all that it does: what the module's type has made of these methods is left aside.
    """

    _engine: Engine
    _path: str
    """Of the module in the model."""
    _fixed: frozenset[str]

    def _stand_for(self, path: str, module: nn.Module, engine: Engine) -> None:
        self.__dict__ |= {"_engine": engine, "_path": path}
        self._awaits = any(True for _ in (*module.parameters(), *module.buffers()))
        """Whether it has parameters or buffers, once there are any."""
        self.__dict__["_fixed"] = _fixed(module)  # the last: from now on

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_fixed", ()):
            raise DistfxError(_FIXED.format(self._named(name)))
        held = name in self.__dict__.get("_parameters", ()) or name in self.__dict__.get("_buffers", ())
        if held and not isinstance(value, DTensor):
            raise DistfxError(
                f"{self._named(name)} is a DTensor, of which each rank has its part: write into it (copy_), or load it "
                "whole by net.load_state_dict(..., strict=False)"
            )
        nn.Module.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Plain attributes are the model's: ``net.fc.out_features``."""
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if name in self.__dict__.get("_fixed", ()):
                return getattr(self._engine.model.get_submodule(self._path), name)
            raise

    def __delattr__(self, name: str) -> None:
        if name in self._fixed or name in self._parameters or name in self._buffers:
            raise DistfxError(_FIXED.format(self._named(name)))
        nn.Module.__delattr__(self, name)

    def _named(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _check_made(self) -> None:
        """Before the first call of a model whose input is not known there are no parameters: not even none."""
        if self._awaits and not self._engine.adopted:
            raise DistfxError(NOT_YET)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._engine.adopted:  # before the first call there is nothing to clear
            nn.Module.zero_grad(self, set_to_none)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._check_made()
        return nn.Module.named_parameters(self, *args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        self._check_made()
        return nn.Module.named_buffers(self, *args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._check_made()
        return nn.Module.state_dict(self, *args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._check_made()
        return nn.Module._apply(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DistfxError("a parallel module cannot be pickled: save net.full_state_dict(), or net.state_dict()")


class Part(_Shell):
    """Stands for a module inside of the model. It never runs by itself."""

    @classmethod
    def of(cls, path: str, module: nn.Module, engine: Engine) -> Part:
        """A part that is an instance of the module's type, too: programs look for ``nn.BatchNorm2d``."""
        kind: Any = type(module)
        mixed = _part_type(kind)
        made: Part = mixed.__new__(mixed)
        nn.Module.__init__(made)
        made.__dict__ |= {"_kind": kind.__name__, "_shown": module.extra_repr()}
        made._stand_for(path, module, engine)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)

    def _get_name(self) -> str:
        return str(self.__dict__["_kind"])

    def extra_repr(self) -> str:
        return str(self.__dict__["_shown"])

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise DistfxError(
            f"{self._path} ({self._get_name()}) is a part of a parallel module, whose graph runs as a whole: it cannot "
            "be called, and hooks on it would never run. Put hooks on the whole, or on its parameters; have the model "
            "return what is to be looked at."
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


class ParallelModule(_Shell):
    """A model distributed over a grid: the same call, the same numbers. Made by :func:`distfx.parallelize`."""

    _engine: Engine
    _slots: dict[str, tuple[dict[str, Any], str]]
    """Where each parameter, buffer and constant lies: ``.to()`` and optimizers may replace them."""

    _mirrors: tuple[nn.Module, ...]
    """For each module of the model, in the order of ``model.modules()``, the one here that stands for it."""

    _aliases: dict[str, list[str]]
    """For each name all names of the same tensor."""

    _copied = False
    """Whether it is a copy of what ``parallelize`` made: not all ranks need make as many."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._slots = {}
        self._aliases = {}
        self._stand_for("", engine.model, engine)
        self._mirror(engine.model)
        compiled = engine.compile_together(self._mode)
        if compiled is not None:
            self._adopt(compiled)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """Without gradients, as torch copies a model; it would copy those of DTensors, but cannot parts of buckets."""
        held = {name: parameter.grad for name, parameter in self.named_parameters()}
        copied = self.__new__(type(self))
        memo[id(self)] = copied
        try:
            self.zero_grad()
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo) | {"_copied": True})
        finally:
            for name, parameter in self.named_parameters():
                parameter.grad = held[name]
        return copied

    # --------------------------------------------------------------------------------------------------- modes

    def _mirror(self, model: nn.Module) -> None:
        """A module for each of the model's, of the same name and mode; parameters and buffers come later."""
        made: dict[nn.Module, nn.Module] = {model: self}
        for path, module in model.named_modules(remove_duplicate=False):
            if path:
                owner, _, leaf = path.rpartition(".")
                parent = made[model.get_submodule(owner)]
                if module not in made:
                    made[module] = Part.of(path, module, self._engine)
                parent._modules[leaf] = made[module]
        self._mirrors = tuple(made[module] for module in model.modules())
        Mode.of(model).set(self._mirrors)

    @property
    def _mode(self) -> Mode:
        return Mode(tuple(module.training for module in self._mirrors))

    def train(self, mode: bool = True) -> ParallelModule:
        """As the model's own ``train`` does it: one that keeps a part frozen does so here."""
        model = self._engine.model
        with Mode.of(model).on(model):
            model.train(mode)
            now = Mode.of(model)
        now.set(self._mirrors)
        return self

    # ---------------------------------------------------------------------------------------------- parameters

    def _adopt(self, compiled: Compiled | None) -> dict[str, Any]:
        """Make every parameter and buffer of the model a DTensor shard of rank 0's, under its own name; once.

        Gives what there is; with ``None`` nothing is made.
        """
        if compiled is not None:
            with without_modes():
                self._make_shards(compiled)
        return {name: owner[leaf] for name, (owner, leaf) in self._slots.items()}

    def _make_shards(self, compiled: Compiled) -> None:
        if not self._slots:
            model, grid = self._engine.model, self.grid
            made: dict[int, Any] = {}
            persistent = set(model.state_dict(keep_vars=True))
            parameters = model.named_parameters(remove_duplicate=False)
            entries = [*parameters, *model.named_buffers(remove_duplicate=False)]
            names: dict[int, list[str]] = {}
            for name, value in entries:
                self._aliases[name] = names.setdefault(id(value), [])
                names[id(value)].append(name)
            for name, value in entries:
                if id(value) not in made:
                    shard: Any = distribute(value, self._layout(name, value), grid, broadcast=True)
                    if isinstance(value, nn.Parameter):
                        shard = nn.Parameter(shard, requires_grad=value.requires_grad)
                        _take_hooks(value, shard)
                    made[id(value)] = shard
                self._register(name, made[id(value)], persistent=name in persistent)
            layouts = {name: self._layout(name, value) for name, value in entries}
            self._engine.adopted = layouts
        constants = [n for n in compiled.module.graph.find_nodes(op="get_attr") if str(n.target) not in self._slots]
        for node in constants:  # made in forward, and no part of the state
            name = str(node.target)
            value = compiled.capture.module.get_buffer(name)
            own = {name: distribute(value, self._layout(name, value), self.grid, broadcast=False)}
            self._slots[name] = (own, name)

    def _layout(self, name: str, value: Tensor) -> Layout:
        """How a parameter is stored: as the first graph that was made decided."""
        stored = self._engine.stored
        known = [alias for alias in self._aliases.get(name, [name]) if alias in stored]
        return stored[known[0]] if known else Layout.replicated(value.dim())

    def _register(self, name: str, value: Any, *, persistent: bool) -> None:
        """Put a tensor where the original model has it, so that names and state dict keys are the same."""
        *path, leaf = name.split(".")
        owner: Any = self
        for part in path:  # not by attribute: a layer may be called ``plan``
            owner = owner._modules[part]
        store: dict[str, Any] = owner._parameters if isinstance(value, nn.Parameter) else owner._buffers
        store[leaf] = value
        if not isinstance(value, nn.Parameter) and not persistent:
            owner._non_persistent_buffers_set.add(leaf)
        self._slots[name] = (store, leaf)

    # --------------------------------------------------------------------------------------------------- calls

    @torch.compiler.disable  # it is compiled already
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own: plain tensors are global, the same on all ranks; DTensors are sharded already."""
        args, kwargs = self._engine.arguments(args, kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        engine, who = self._engine, ", a copy of it" if self._copied else ""
        compiled, runnable, held, inputs = engine.prepare(self._mode, args, kwargs, tensors, self._adopt, who)
        gradients = Gradients(held, runnable.buckets, engine.draw_seed(compiled))
        results = [_own(result) for result in runnable.run(gradients, *inputs)]
        wanted = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
        before = BeforeBackward(held.values() if wanted else ())
        for result in wanted:
            result.register_hook(before)
        return pytree.tree_unflatten(results, compiled.capture.out_spec)

    # ---------------------------------------------------------------------------------------------- inspection

    @property
    def grid(self) -> Grid:
        """The grid, with its channel axis factored where the plan needs that."""
        return self._engine.grid

    @property
    def graph_module(self) -> GraphModule:
        """The rewritten graph of the present mode, for every shape: ``node.meta["layout"]``, ``node.meta["shape"]``."""
        return self._engine.present(self._mode).module

    @property
    def passes(self) -> list[PassRecord]:
        """What each pass of the compiler did."""
        return self._engine.present(self._mode).passes

    def print_readable(self, print_output: bool = True) -> str:
        """Print the rewritten graph with layouts, algorithms and the source lines of the model; returns the text."""
        name = type(self._engine.model).__name__
        text = readable(self.graph_module, f"{name} on {self.grid}, {'train' if self.training else 'eval'}:")
        if print_output:
            print(text)
        return text

    @property
    def plan(self) -> Plan:
        """The plan of the present mode: at the shape of the last call, or of the example before the first."""
        engine = self._engine
        compiled = engine.present(mode := self._mode)
        if mode in engine.last:
            return engine.last[mode]
        place = self.grid.at(self.grid.rank)
        bound = bind(compiled.module, dict(compiled.capture.hints), place)
        trained = {name: parameter.requires_grad for name, parameter in engine.model.named_parameters()}
        return plan_of(compiled, bound, place, {}, trained, gradient_buckets(bound, trained, place))

    def input_slices(self, index: int, shape: Sequence[int]) -> tuple[slice, ...]:
        """This rank's part of the ``index``-th input of global ``shape``: for h5py, zarr, numpy."""
        compiled = self._engine.present(self._mode)
        layout = self._engine.input_layout(compiled, compiled.capture.inputs[index].name)
        return self._slices(layout, shape)

    def output_slices(self, index: int, shape: Sequence[int]) -> tuple[slice, ...]:
        """This rank's part of the ``index``-th output of global ``shape``: all of it, but with ``outputs="local"``."""
        results: Any = self.graph_module.graph.output_node().args[0]
        meta = results[index].meta
        layout: Layout = meta["layout"]
        if not all(isinstance(split.unit, int) for split in layout.dims):  # whole rows of an image, in a flat vector
            sizes = dict(self.plan.sizes)
            values = {symbol: sizes[str(symbol)] for symbol in self._engine.present(self._mode).capture.hints}
            known = evaluate_shape(meta["shape"], values)
            if known != tuple(shape):
                raise DistfxError(
                    f"which part of output {index} a rank has follows from the input: call the model with one that "
                    f"gives {tuple(shape)} first (that of the last call gives {known})"
                )
            layout = numbered_layout(layout, values)
        return self._slices(layout, shape)

    def _slices(self, layout: Layout, shape: Sequence[int]) -> tuple[slice, ...]:
        bounds = layout.bounds(tuple(shape), self.grid.placement())
        return tuple(slice(int(lo), int(hi)) for lo, hi in bounds)

    # --------------------------------------------------------------------------------------------- state dicts

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict with whole plain tensors: what the original model loads. All ranks must call it."""
        self._engine.present(self._mode)
        self._engine.agree_on_call("full_state_dict")
        with _quiet_redistribution():
            return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in self.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load DTensors of any grid, or whole plain tensors, under the original model's keys."""
        self._engine.present(self._mode)
        kinds = {type(value).__name__ for value in state_dict.values()}
        self._engine.agree_on_call(f"load_state_dict of {', '.join(sorted(kinds))}")
        own = self.state_dict()
        ready: dict[str, Any] = {}
        for name, value in state_dict.items():
            mine = own.get(name)
            if isinstance(mine, DTensor) and isinstance(value, Tensor) and mine.shape == value.shape:
                if isinstance(value, DTensor):
                    same = value.placements == mine.placements and value.device_mesh == mine.device_mesh
                    ready[name] = value if same else self._own_part(name, value.full_tensor(), mine)
                else:
                    ready[name] = self._own_part(name, value, mine)
            else:
                ready[name] = value
        return super().load_state_dict(ready, strict=strict, assign=assign)

    def _own_part(self, name: str, whole: Tensor, mine: DTensor) -> DTensor:
        return distribute(whole.to(mine.dtype), self._layout(name, mine), self.grid, broadcast=False)

    def extra_repr(self) -> str:
        return f"{type(self._engine.model).__name__} on {self.grid}, outputs={self._engine.outputs!r}"
