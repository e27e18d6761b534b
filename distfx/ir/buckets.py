"""Gradient buckets: which parameters' gradients are reduced in one allreduce."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

__all__ = ["BUCKET_BYTES", "Bucket", "make_buckets"]

BUCKET_BYTES = 8 << 20
"""Size at which a bucket is closed: small enough that reduction starts early, large enough to hide latency."""


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are summed over ``axes`` in one allreduce."""

    label: str
    names: tuple[str, ...]
    axes: tuple[str, ...]
    nbytes: int
    """Bytes of this rank's shards."""
    may_overwrite: bool = False
    """Whether the gradients are new tensors that nothing else refers to, so that they may be reduced in place."""
    channels_last: bool = False
    """Whether the weights, and so their gradients, are stored channels last."""


def make_buckets(
    gradients: Sequence[tuple[str, tuple[str, ...], int, torch.dtype]],
    new_gradients: Collection[str] = (),
    channels_last: bool = False,
    limit: int = BUCKET_BYTES,
) -> list[Bucket]:
    """Group parameters ``(name, axes of the sum, local bytes, dtype)``, in order of use, into buckets.

    Backward meets parameters in reverse order, so grouping starts from the end. Only gradients with the same axes and
    dtype share a bucket. ``new_gradients`` names the parameters whose gradients may be reduced in place.
    """
    groups: list[tuple[tuple[str, ...], list[str], int]] = []
    open_groups: dict[tuple[tuple[str, ...], torch.dtype], int] = {}
    for name, axes, nbytes, dtype in reversed(gradients):
        at = open_groups.get((axes, dtype))
        if at is None or groups[at][2] + nbytes > limit:
            open_groups[axes, dtype] = at = len(groups)
            groups.append((axes, [], 0))
        _, names, total = groups[at]
        groups[at] = (axes, [*names, name], total + nbytes)
    return [
        Bucket(
            label=f"gradients[{number}]",
            names=tuple(reversed(names)),
            axes=axes,
            nbytes=total,
            may_overwrite=all(name in new_gradients for name in names),
            channels_last=channels_last,
        )
        for number, (axes, names, total) in enumerate(groups)
    ]
