"""The parameter store: the parameters and buffers of a parallel module as DTensor shards.

The module shows them under the model's own names; the engine reads them at each call. Both look them up here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distfx.grid import Grid
from distfx.ir.layout import Layout
from distfx.passes.capture.export import without_modes
from distfx.passes.pipeline import Compiled
from distfx.runtime.autograd.shards import distribute

__all__ = ["ParameterLayouts", "ParameterStore"]


class ParameterLayouts:
    """How parameters and buffers are stored: as decided by the first graph that uses them.

    Copies of a parallel module share their layouts, as they share their graphs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.known: dict[str, Layout] = {}
        self.aliases: dict[str, list[str]] = {}
        """For each name all names of the same tensor."""
        names: dict[int, list[str]] = {}
        parameters = model.named_parameters(remove_duplicate=False)
        for name, value in (*parameters, *model.named_buffers(remove_duplicate=False)):
            self.aliases[name] = names.setdefault(id(value), [])
            names[id(value)].append(name)

    def add(self, compiled: Compiled) -> None:
        """Take over the layouts of what no earlier graph has used."""
        for name, layout in compiled.parameter_layouts.items():
            self.known.setdefault(name, layout)

    def of(self, name: str, value: Tensor) -> Layout:
        """The layout of a tensor, under any of its names; replicated if no graph uses it."""
        layouts = (self.known.get(alias) for alias in self.aliases.get(name, [name]))
        return next((layout for layout in layouts if layout is not None), Layout.replicated(value.dim()))


class ParameterStore:
    """The shards of one parallel module. Each copy of the module has its own store."""

    def __init__(self, grid: Grid, layouts: ParameterLayouts) -> None:
        self.grid, self.layouts = grid, layouts
        self._slots: dict[str, tuple[dict[str, Any], str]] = {}
        """The dict and key where each tensor is registered. ``.to()`` and optimizers may replace the tensors."""
        self.is_filled = False
        """Whether the model's parameters and buffers are there."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterStore:
        copied = ParameterStore(self.grid, self.layouts)
        copied._slots = copy.deepcopy(self._slots, memo)
        copied.is_filled = self.is_filled
        return copied

    def tensors(self) -> dict[str, DTensor]:
        """Every parameter, buffer and constant by name."""
        return {name: owner[key] for name, (owner, key) in self._slots.items()}

    def fill(self, model: nn.Module, root: nn.Module) -> None:
        """Make every parameter and buffer of ``model`` a DTensor shard of rank 0's, under its own name in ``root``."""
        if self.is_filled:
            return
        shards: dict[int, Any] = {}
        persistent = set(model.state_dict(keep_vars=True))
        parameters = model.named_parameters(remove_duplicate=False)
        with without_modes():
            for name, value in (*parameters, *model.named_buffers(remove_duplicate=False)):
                layout = self.layouts.of(name, value)
                self.layouts.known.setdefault(name, layout)
                if id(value) not in shards:
                    shard: Any = distribute(value, layout, self.grid, broadcast=True)
                    if isinstance(value, nn.Parameter):
                        shard = nn.Parameter(shard, requires_grad=value.requires_grad)
                        _copy_hooks(value, shard)
                    shards[id(value)] = shard
                self._register(root, name, shards[id(value)], persistent=name in persistent)
        self.is_filled = True

    def add_constants(self, compiled: Compiled) -> None:
        """Distribute the tensors that ``forward`` creates and the graph holds. They are not part of the state dict."""
        constants = compiled.module.graph.find_nodes(op="get_attr")
        for name in (str(node.target) for node in constants):
            if name not in self._slots:
                value = compiled.capture.module.get_buffer(name)
                with without_modes():
                    shard = distribute(value, self.layouts.of(name, value), self.grid, broadcast=False)
                self._slots[name] = ({name: shard}, name)

    def shard(self, name: str, whole: Tensor) -> DTensor:
        """This rank's shard of a whole tensor that every rank has."""
        return distribute(whole, self.layouts.of(name, whole), self.grid, broadcast=False)

    def _register(self, root: nn.Module, name: str, value: Any, *, persistent: bool) -> None:
        *path, key = name.split(".")
        owner: Any = root
        for part in path:  # not by attribute: a layer may be called ``plan``
            owner = owner._modules[part]
        is_parameter = isinstance(value, nn.Parameter)
        slot: dict[str, Any] = owner._parameters if is_parameter else owner._buffers
        slot[key] = value
        if not is_parameter and not persistent:
            owner._non_persistent_buffers_set.add(key)
        self._slots[name] = (slot, key)


def _copy_hooks(value: nn.Parameter, shard: nn.Parameter) -> None:
    """Register the gradient hooks of the model's parameter on its shard."""
    if value.requires_grad:
        hooks: Mapping[int, Any] = value._backward_hooks or {}
        for hook in hooks.values():
            shard.register_hook(hook)
        for hook in (value._post_accumulate_grad_hooks or {}).values():
            shard.register_post_accumulate_grad_hook(hook)
