"""Adapter to the private parts of torch that this package relies on. No other module of the runtime touches them.

Tried on torch 2.13. ``tests/unit/test_dtensor_adapter.py`` checks that each part exists and behaves as assumed.

The public ``DTensor.to_local`` and ``DTensor.from_local`` are differentiable and validate their arguments, which takes
10 and 70 microseconds per call. A training step wraps and unwraps every parameter, so it uses the functions below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

__all__ = ["is_batched", "local_parts", "local_tensor", "make_dtensor", "spec_of", "wrap"]


def local_tensor(tensor: DTensor) -> Tensor:
    """This rank's shard: the stored tensor itself, not a view of it, and without autograd."""
    shard: Tensor = tensor._local_tensor
    return shard


def local_parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """This rank's shard of each DTensor; plain tensors unchanged."""
    return (local_tensor(tensor) if isinstance(tensor, DTensor) else tensor for tensor in tensors)


def spec_of(tensor: DTensor) -> Any:
    """The mesh, placements, global shape and strides of a DTensor, for :func:`wrap`."""
    return tensor._spec


def wrap(local: Tensor, spec: Any) -> DTensor:
    """The DTensor that stores ``local`` itself as this rank's shard. Nothing is checked or communicated."""
    return DTensor(local, spec, requires_grad=False)


def make_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """The contiguous DTensor of global ``shape`` that stores ``local`` itself as this rank's shard.

    ``from_local`` stores a view, whose strides differ from those of ``local`` in dims of size one.
    """
    strides = torch.empty(shape, device="meta").stride()
    viewing = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=strides)
    return wrap(local, spec_of(viewing))


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for a batch of tensors inside ``vmap``, or inside a vectorized ``jacobian``."""
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))
