"""Parameters and buffers as shards: DTensors on one mesh, distributed from rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distfx.grid import Grid
from distfx.ir.layout import Layout
from distfx.runtime.autograd.dtensor import make_dtensor
from distfx.runtime.comm.failure import CommunicationScope
from distfx.runtime.comm.transport import Work, send_receive
from distfx.runtime.kernels.formats import is_channels_last, new_empty

__all__ = ["distribute", "placements", "to_dtensor"]


def placements(layout: Layout, mesh: DeviceMesh) -> list[Placement]:
    """The DTensor placements of a stored parameter's layout."""
    dims = [layout.dim_of(axis) for axis in mesh.mesh_dim_names or ()]
    return [Replicate() if dim is None else Shard(dim) for dim in dims]


def to_dtensor(local: Tensor, shape: torch.Size, layout: Layout, grid: Grid) -> DTensor:
    """A DTensor of global ``shape`` that stores ``local`` as this rank's shard."""
    mesh = grid.parameter_mesh
    return make_dtensor(local, mesh, placements(layout, mesh), shape)


def distribute(value: Tensor, layout: Layout, grid: Grid, *, broadcast: bool) -> DTensor:
    """This rank's shard of ``value``, or of rank 0's ``value`` if ``broadcast``. ``value`` is not modified."""
    whole, stored = value.detach(), layout.storage()
    device = grid.device

    def shard_of(rank: int) -> Tensor:
        part = whole
        for dim, (lo, hi) in enumerate(stored.bounds(whole.shape, grid.placement(rank))):
            part = part.narrow(dim, int(lo), int(hi - lo))
        return part

    own = shard_of(grid.rank)
    shard = new_empty(own.shape, whole, is_channels_last(whole), device)
    if broadcast and grid.size > 1:
        with CommunicationScope(f"broadcast of a parameter of shape {tuple(value.shape)}"):
            shard.copy_(_shard_from_rank_0(shard_of, own, stored, grid, device))
    else:
        shard.copy_(own)
    return to_dtensor(shard, value.shape, layout, grid)


def _shard_from_rank_0(
    shard_of: Callable[[int], Tensor], own: Tensor, layout: Layout, grid: Grid, device: torch.device
) -> Tensor:
    """This rank's shard with rank 0's values. ``own``, with this rank's values, has the right shape.

    Rank 0 sends each shard to the first of the ranks that store it, which broadcasts it to the others. No rank
    receives more than its shard.
    """
    shards = grid.segment(tuple(axis for axis in grid.axes if layout.dim_of(axis) is not None))
    replicas = grid.segment(tuple(axis for axis in grid.axes if layout.dim_of(axis) is None))
    result = own.to(device, copy=True).contiguous()
    if replicas.index == 0 and shards.index == 0:
        for member in range(1, shards.size):
            other = shard_of(shards.members[member]).to(device).contiguous()
            _wait(send_receive(shards, [(member, other)] if other.numel() else [], []))
    elif replicas.index == 0:
        _wait(send_receive(shards, [], [(0, result)] if result.numel() else []))
    if replicas.size > 1 and result.numel():
        dist.broadcast(result, src=replicas.members[0], group=replicas.group)
    return result


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
