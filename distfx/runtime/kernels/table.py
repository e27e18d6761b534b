"""The table of inserted operators that are plain functions of local tensors."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from distfx.runtime.kernels.attention import causal_attention
from distfx.runtime.kernels.classes import class_weights, pick_class
from distfx.runtime.kernels.convolution import conv_transpose
from distfx.runtime.kernels.formats import to_memory_format
from distfx.runtime.kernels.in_place import add_into
from distfx.runtime.kernels.pool import adaptive_pool, avg_pool, max_pool_index
from distfx.runtime.kernels.resample import resample
from distfx.runtime.kernels.straight_through import straight_through
from distfx.runtime.kernels.sums import add_bias, add_blocks, mean

__all__ = ["KERNELS"]

KERNELS: dict[str, Callable[..., Tensor]] = {
    "adaptive_pool": adaptive_pool,
    "add_bias": add_bias,
    "add_blocks": add_blocks,
    "add_into": add_into,
    "avg_pool": avg_pool,
    "causal_attention": causal_attention,
    "class_weights": class_weights,
    "conv_transpose": conv_transpose,
    "max_pool_index": max_pool_index,
    "mean": mean,
    "pick_class": pick_class,
    "resample": resample,
    "straight": straight_through,
    "to_memory_format": to_memory_format,
}
"""The kernel of each inserted operator (see :mod:`distfx.ir.ops`), by the operator's name."""
