"""Values as JSON that keep their type: tuples, counters, scalar tensors, and dicts whose keys are not strings."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distfx.errors import DistfxError

__all__ = ["decode", "dtype_of", "encode"]

_TAG = "distfx"


def encode(value: Any, where: str) -> Any:
    """A value as JSON that :func:`decode` restores: tuples, counters and keys that are not strings keep their type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item, where) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [encode(item, where) for item in value]}
    if isinstance(value, Counter | dict):
        plain = type(value) is dict and _TAG not in value and all(isinstance(key, str) for key in value)
        if plain:
            return {key: encode(item, where) for key, item in value.items()}
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {_TAG: kind, "items": [[encode(k, where), encode(v, where)] for k, v in value.items()]}
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim() == 0:
        return {_TAG: "scalar", "dtype": str(value.dtype).removeprefix("torch."), "items": value.item()}
    if isinstance(value, numpy.generic):
        return encode(value.item(), where)
    raise DistfxError(
        f"{where} has a {type(value).__name__}, which a checkpoint cannot hold: give numbers, strings, lists, tuples "
        "and dicts of these"
    )


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    items = value.get("items")
    if kind == "scalar":
        return torch.tensor(items, dtype=dtype_of(value["dtype"]))
    if kind == "tuple" and isinstance(items, list):
        return tuple(decode(item) for item in items)
    if kind in ("dict", "counter") and isinstance(items, list):
        pairs = {decode(key): decode(item) for key, item in items}
        return Counter(pairs) if kind == "counter" else pairs
    raise DistfxError(f"the checkpoint has a value of the unknown kind {kind!r}")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DistfxError(f"the checkpoint names a dtype {name!r} that torch does not have")
    return dtype
