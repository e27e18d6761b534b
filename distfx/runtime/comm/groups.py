"""Caches of the device meshes and process groups of grids.

The key of a segment's group is its set of ranks, so grids share groups. A new group runs one collective, because the
first point-to-point call of a group would otherwise need all its ranks.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distfx import grid as grids
from distfx.grid import Grid
from distfx.ir.layout import is_channel_axis
from distfx.runtime.comm.agreement import agree, raise_on_all_ranks
from distfx.runtime.comm.failure import CommunicationScope
from distfx.runtime.comm.gloo import deprioritize_polling_threads
from distfx.runtime.comm.launch import init

__all__ = ["clear"]


class _Groups:
    """Implementation of :class:`distfx.grid.Processes` on ``torch.distributed``."""

    def __init__(self) -> None:
        self.groups: dict[frozenset[int], Any] = {}
        self.meshes: dict[tuple[Any, ...], DeviceMesh] = {}
        self.world: Any = None
        """The default process group that the groups and meshes belong to."""

    def clear(self) -> None:
        self.groups.clear()
        self.meshes.clear()
        self.world = None

    def _discard_stale_caches(self) -> None:
        """Clear the caches if the program has destroyed the default process group and created another."""
        if self.world is not dist.group.WORLD:
            self.clear()
            self.world = dist.group.WORLD

    def start(self, read_sizes: Callable[[], dict[str, int]]) -> tuple[dict[str, int], int, int, str]:
        launch = init()
        sizes = raise_on_all_ranks(launch.world, read_sizes)
        agree(launch.world, "grids", grids.show_sizes(sizes))
        return sizes, launch.rank, launch.world, launch.device.type

    def device(self, device_type: str) -> torch.device:
        return torch.device(device_type, torch.cuda.current_device())

    def adopt_mesh(self, grid: Grid, mesh: DeviceMesh) -> None:
        self._discard_stale_caches()
        self.meshes[_key(grid)] = mesh

    def mesh(self, grid: Grid) -> DeviceMesh:
        self._discard_stale_caches()
        key = _key(grid)
        if key not in self.meshes:
            axes = grid.axes or {"n": 1}
            ranks = torch.arange(grid.size).reshape(tuple(axes.values()))
            self.meshes[key] = DeviceMesh(grid.device_type, ranks, mesh_dim_names=tuple(axes))
        return self.meshes[key]

    def parameter_mesh(self, grid: Grid) -> DeviceMesh:
        split = tuple(axis for axis in grid.axes if is_channel_axis(axis))
        if len(grid.axes) < 2 or len(split) == len(grid.axes):
            return grid.mesh
        self._discard_stale_caches()
        key = (*_key(grid), "parameters")
        if key not in self.meshes:
            if split:
                self.meshes[key] = grid.mesh[split]
            else:
                world, _ = self.group(grid, tuple(grid.axes))
                row, name = torch.arange(grid.size), "".join(grid.axes)
                self.meshes[key] = DeviceMesh.from_group(world, grid.device_type, row, mesh_dim_names=(name,))
        return self.meshes[key]

    def group(self, grid: Grid, axes: tuple[str, ...]) -> tuple[Any, bool]:
        ranks = frozenset(grid.members(axes))
        self._discard_stale_caches()
        if ranks not in self.groups:
            with CommunicationScope(f"creation of the process groups along {','.join(axes)}"):
                group: Any
                if len(axes) == 1:
                    group = grid.mesh.get_group(axes[0])
                elif grid.size == len(ranks):
                    group = dist.group.WORLD
                else:
                    partition = [sorted(members) for members in grid.partition(axes)]
                    group = dist.new_subgroups_by_enumeration(partition)[0]
                dist.all_reduce(torch.zeros(1, device=grid.device_type), group=group)
                deprioritize_polling_threads()
            self.groups[ranks] = group
        group = self.groups[ranks]
        return group, "cuda:nccl" in dist.get_backend_config(group)


def _key(grid: Grid) -> tuple[Any, ...]:
    return grid.device_type, tuple(grid.axes.items())


_groups = _Groups()
grids.connect(_groups)


def clear() -> None:
    """Drop every cached mesh and process group. Call it before the default process group is destroyed."""
    _groups.clear()


atexit.register(clear)  # the threads of gloo end with the last reference to their group
