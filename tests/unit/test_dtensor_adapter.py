"""The private parts of torch behind `distfx.runtime.autograd.dtensor` exist and behave as assumed."""

from __future__ import annotations

from typing import Any

import torch
from support.ranks import run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from distfx.grid import Grid
from distfx.runtime.autograd.dtensor import is_batched, local_parts, local_tensor, make_dtensor, spec_of, wrap


def shard_of(shape: tuple[int, ...]) -> tuple[Tensor, DTensor]:
    """A local tensor on one of two ranks, and the DTensor that is split by dim 0 and stores it."""
    mesh = Grid.parse("c2").parameter_mesh
    local = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    return local, make_dtensor(local, mesh, [Shard(0)], torch.Size((2 * shape[0], *shape[1:])))


def check_storage() -> None:
    local, tensor = shard_of((2, 3))
    assert type(tensor) is DTensor and not tensor.requires_grad
    assert local_tensor(tensor) is local
    assert tensor.shape == (4, 3) and tensor.stride() == (3, 1) and tuple(tensor.placements) == (Shard(0),)
    assert torch.equal(tensor.full_tensor(), torch.cat([local, local]))
    parts = list(local_parts([tensor, local]))
    assert parts[0] is local and parts[1] is local
    parameter = nn.Parameter(tensor)
    assert isinstance(parameter, DTensor) and local_tensor(parameter).data_ptr() == local.data_ptr()
    with torch.no_grad():
        parameter.add_(1)
    assert local_tensor(parameter)[0, 0] == 1.0


def test_a_dtensor_stores_the_given_tensor() -> None:
    run(2, check_storage)


def check_strides() -> None:
    """`from_local` changes the strides of dims of size one: `make_dtensor` exists to keep them."""
    local = torch.empty_strided((2, 1, 3, 3), (9, 1, 3, 1))
    mesh = Grid.parse("c2").parameter_mesh
    viewing = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    assert local_tensor(viewing).stride() != local.stride(), "make_dtensor may use from_local"
    tensor = make_dtensor(local, mesh, [Replicate()], local.shape)
    assert local_tensor(tensor).stride() == (9, 1, 3, 1)
    assert tensor.stride() == (9, 9, 3, 1)


def test_strides_of_the_shard_are_kept() -> None:
    run(2, check_strides)


def check_spec() -> None:
    local, tensor = shard_of((2, 3))
    other = wrap(2 * local, spec_of(tensor))
    assert other.placements == tensor.placements and other.device_mesh == tensor.device_mesh
    assert other.shape == tensor.shape and other.stride() == tensor.stride() and not other.requires_grad
    assert torch.equal((tensor + other).full_tensor(), 3 * torch.cat([local, local]))


def test_a_spec_places_another_tensor_in_the_same_way() -> None:
    run(2, check_spec)


def check_versions() -> None:
    """`BackwardGuard` relies on this: in-place changes raise the DTensor's version and not the shard's."""
    local, tensor = shard_of((2, 3))
    before, version = tensor._version, local._version
    tensor.mul_(2)
    assert tensor._version == before + 1 and local._version == version
    torch.autograd.graph.increment_version([local])
    assert local._version == version + 1


def test_versions_of_a_dtensor_and_its_shard() -> None:
    run(2, check_versions)


def test_batched_tensors_are_recognised() -> None:
    seen: list[bool] = []

    def look(x: Any) -> Any:
        seen.append(is_batched(x))
        return 2 * x

    torch.func.vmap(look)(torch.ones(3, 2))
    look(torch.ones(3, 2))
    x = torch.ones(3, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda grad: seen.append(is_batched(grad)))
    torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(3))
    assert seen == [True, False, True, False]
