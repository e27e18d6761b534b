"""Example inputs: inferred from the first layer, enlarged to a batch of several, and their constant parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import nn

from distfx.errors import DistfxError
from distfx.ir.torch_private import tree_flatten, tree_leaves, tree_map

__all__ = ["constants_of", "enlarge_batch", "infer_inputs"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EXTENTS = {1: (4096, 1024, 256, 128), 2: (224, 32, 28, 64, 128, 256, 96, 512), 3: (64, 32, 128, 16, 96)}
"""For each number of spatial dims the extents to try, the most common ones first."""


def infer_inputs(model: nn.Module, batch: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Inputs to try if the user gave no example: rank and channels of the first layer, common extents."""
    for layer in model.modules():
        if isinstance(layer, _CONVOLUTIONS):
            ndim = len(layer.kernel_size)
            shapes = [(batch, layer.in_channels, *(extent,) * ndim) for extent in _EXTENTS[ndim]]
        elif isinstance(layer, nn.Linear):
            shapes = [(batch, layer.in_features)]
        else:
            continue
        like = next(layer.parameters())  # layer.weight may be computed (weight_norm), which can change buffers
        yield from ((torch.empty(shape, dtype=like.dtype, device=like.device),) for shape in shapes)
        return


def enlarge_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None, batch: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example arguments with ``batch`` samples if they have one, because export treats sizes of one as constants.

    If only some tensors have a leading one, it is there to broadcast and stays.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    is_enlarged = batch and all(tensor.shape[0] == 1 for tensor in tensors if tensor.dim())

    def enlarge(value: Any) -> Any:
        if is_enlarged and isinstance(value, torch.Tensor) and value.dim():
            return torch.empty((batch, *value.shape[1:]), dtype=value.dtype, device=value.device)
        return value

    return tuple(tree_map(enlarge, tuple(args))), dict(tree_map(enlarge, dict(kwargs or {})))


def constants_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The parts of a call that a graph has fixed, as text: the structure, and the arguments that are not tensors."""
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    for leaf in leaves:
        if hasattr(leaf, "__array__") and not isinstance(leaf, torch.Tensor | numpy.generic):
            kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
            raise DistfxError(f"an argument is a {kind}: give torch.as_tensor(x)")
    return (f"arguments {spec}", *(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)))
