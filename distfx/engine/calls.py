"""One call of a parallel module: what must be the same on all ranks, and how its inputs are sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.fx import Node

from distfx.errors import DistfxError
from distfx.grid import Grid
from distfx.ir import ops
from distfx.ir.layout import Layout
from distfx.ir.meta import meta
from distfx.passes.capture.export import Mode, constants_of
from distfx.passes.pipeline import Compiled

__all__ = ["Call", "ParameterState", "input_layout", "is_planned_shard", "parameter_state"]

ParameterState = tuple[tuple[str, bool, torch.dtype], ...]
"""Of each parameter, buffer and constant its name, whether it requires a gradient, and its dtype."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call, in the mode that the module is in."""

    mode: Mode
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: Sequence[Tensor]
    """The tensors among the arguments, in the order of the graph's inputs."""
    is_copy: bool = False
    """Whether a copy of the parallel module is called. Ranks may have made different numbers of copies."""

    @property
    def constants(self) -> tuple[str, ...]:
        """The structure of the arguments and those that are not tensors, as text."""
        return constants_of(self.args, self.kwargs)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(tensor.shape) for tensor in self.tensors]

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [tensor.dtype for tensor in self.tensors]

    def signature(self, model: nn.Module, grid: Grid) -> tuple[str, ...]:
        """What must be the same on all ranks, one fact per line."""
        device = grid.device.type
        autocast = torch.is_autocast_enabled(device)
        return (
            f"{self.mode.describe(model)}, gradients {'on' if torch.is_grad_enabled() else 'off'}"
            f"{f', autocast to {torch.get_autocast_dtype(device)}' if autocast else ''}",
            *(
                f"input {i}: {tuple(t.shape)} {t.dtype} on {t.device.type}, requires_grad={t.requires_grad}"
                f"{f', DTensor {t.placements}' if isinstance(t, DTensor) else ''}"
                f"{f', {t.layout}' if t.layout is not torch.strided else ''}"
                for i, t in enumerate(self.tensors)
            ),
            *self.constants,
        )

    def check_inputs(self, model: nn.Module, grid: Grid) -> None:
        """Raise if an input is sparse or is not on this rank's device."""
        for number, tensor in enumerate(self.tensors):
            if tensor.layout is not torch.strided:
                raise DistfxError(
                    f"input {number} of {type(model).__name__} has layout {tensor.layout}, but distfx takes dense "
                    "tensors: give x.to_dense()"
                )
            if tensor.dim() and tensor.device.type != grid.device.type:
                raise DistfxError(
                    f"input {number} of {type(model).__name__} is on {tensor.device}, but this rank computes on "
                    f"{grid.device}: give x.to(net.grid.device)"
                )

    def graph_inputs(self, is_local: Sequence[bool]) -> list[Tensor]:
        """The inputs as the graph takes them: this rank's part of those that are sharded as planned, others whole."""
        return [
            tensor if not isinstance(tensor, DTensor) else (tensor.to_local() if local else tensor.full_tensor())
            for tensor, local in zip(self.tensors, is_local, strict=True)
        ]


def parameter_state(parameters: Mapping[str, Tensor]) -> ParameterState:
    """What may change between calls and decides what is sent."""
    return tuple((name, value.requires_grad, value.dtype) for name, value in parameters.items())


def input_layout(compiled: Compiled, name: str) -> Layout:
    """The layout in which an input is first used, after the slices that take this rank's part."""
    node: Node = next(n for n in compiled.module.graph.find_nodes(op="placeholder") if n.name == name)
    while len(node.users) == 1 and next(iter(node.users)).target is ops.slice:
        node = next(iter(node.users))
    return meta(node).layout


def is_planned_shard(tensor: Tensor, layout: Layout, grid: Grid) -> bool:
    """Whether ``tensor`` is a DTensor sharded exactly by ``layout``."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh != grid.mesh:
        return False
    local = layout.local_shape(tuple(tensor.shape), grid.placement())
    if tuple(tensor.to_local().shape) != tuple(local):
        return False
    if any(placement.is_partial() for placement in tensor.placements):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    dims = {a: p.dim if isinstance(p, Shard) else None for a, p in zip(names, tensor.placements, strict=True)}
    return all(dim == layout.dim_of(axis) for axis, dim in dims.items() if axis in grid.axes)
