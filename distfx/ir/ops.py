"""The operators that distfx inserts into a graph.

A rewritten graph calls them with literal arguments, so that the printed graph explains itself. They are symbolic: for
each input shape and rank, the ``bind`` and ``link`` passes replace them by functions that run. To call one directly is
an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_aggregate

from distfx.ir.layout import Coords, Split
from distfx.ir.symbolic import Size, show

__all__ = ["LocalPart", "LocalSize", "LocalStart", "OpOutput", "inserted", "is_inserted", "on_device"]


@dataclass(frozen=True)
class LocalSize:
    """The size of this rank's part of a dim, as a symbolic argument: it prints as ``N/n``."""

    extent: Size
    split: Split

    def at(self, coords: Coords) -> Size:
        """The value at these coordinates."""
        lo, hi = self.split.bounds(self.extent, coords)
        return hi - lo

    def __repr__(self) -> str:
        text = show(self.extent)
        return f"{text if text.isalnum() else f'({text})'}{self.split}"


@dataclass(frozen=True)
class LocalStart(LocalSize):
    """The first position of this rank's part of a dim, scaled and shifted: it prints as ``2*start(H/h)-1``."""

    stride: int = 1
    shift: int = 0

    def at(self, coords: Coords) -> Size:
        return self.stride * self.split.bounds(self.extent, coords)[0] + self.shift

    def __repr__(self) -> str:
        text = f"start({super().__repr__()})"
        return (f"{self.stride}*" if self.stride != 1 else "") + text + (f"{self.shift:+d}" if self.shift else "")


@dataclass(frozen=True)
class LocalPart:
    """The index of this rank among the parts into which ``axes`` split a tensor: it prints as ``part(n,c)``."""

    axes: tuple[str, ...]

    def at(self, coords: Coords) -> Size:
        part: Size = 0
        for axis in self.axes:
            index, size = coords[axis]
            part = part * size + index
        return part

    def __repr__(self) -> str:
        return f"part({','.join(self.axes)})"


@dataclass(frozen=True)
class OpOutput:
    """One output of an operator with several, as a separate call: ``topk.0``. The pass ``share`` merges these calls."""

    op: Callable[..., Any]
    index: int

    @property
    def __name__(self) -> str:
        return f"{self.op.__name__.removesuffix('.default')}.{self.index}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)[self.index]


OWN_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Maps each operator that represents a user's autograd function to the function that it calls.

Filled by :mod:`distfx.passes.capture.autograd_functions`."""


def on_device(arguments: Any, device: torch.device | None = None) -> Any:
    """The arguments of a call, with every device in them replaced by ``device``, or else stripped of its index."""

    def replace(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device or torch.device(value.type)
        return value

    return map_aggregate(arguments, replace)


_SYMBOLIC: set[Callable[..., Any]] = set()


def is_inserted(target: Any) -> bool:
    """Whether ``target`` is one of the operators below, which cannot run before they are linked."""
    return target in _SYMBOLIC


def _symbolic(name: str, doc: str) -> Callable[..., Any]:
    def op(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"distfx.{name} is symbolic and cannot run: call the parallel module, which binds the graph")

    op.__name__ = op.__qualname__ = name
    op.__doc__ = doc
    _SYMBOLIC.add(op)
    return op


halo = _symbolic("halo", "Fetch the positions of a split dim that this rank's window needs from other ranks.")
exchange = _symbolic("exchange", "Change the partition of a split dim.")
all_gather = _symbolic("all_gather", "Gather a split dim.")
reduce_scatter = _symbolic("reduce_scatter", "Add partial sums and split a dim.")
all_reduce = _symbolic("all_reduce", "Add partial sums.")
slice = _symbolic("slice", "Take this rank's part of a dim.")
all_to_all = _symbolic("all_to_all", "Gather one dim and split another.")
to_varying = _symbolic("to_varying", "Mark a tensor as used differently by each rank: its gradient is summed.")
to_replicated = _symbolic("to_replicated", "Mark a tensor as used identically by all ranks: its gradient counts once.")
refresh = _symbolic("refresh", "Gather a replicated buffer after each rank updated its part of it.")
add_bias = _symbolic("add_bias", "Add a bias along `dim`, once, after the partial sums over channels are added.")
batch_norm = _symbolic("batch_norm", "Batch norm in train mode, with the statistics of the global batch.")
conv_transpose = _symbolic(
    "conv_transpose", "This rank's block of the output of a transposed convolution, from `start` on."
)
avg_pool = _symbolic("avg_pool", "This rank's block of the output of average pooling, divided by global window sizes.")
adaptive_pool = _symbolic("adaptive_pool", "This rank's block of the output of adaptive pooling, from `start` on.")
max_pool_index = _symbolic("max_pool_index", "The global positions of the maxima of max pooling.")
causal_attention = _symbolic("causal_attention", "Causal attention for the queries from `start` on.")
norm = _symbolic("norm", "Normalise with the statistics of the global tensor, scale and shift.")
dropout = _symbolic("dropout", "Dropout: replicas draw identical masks, shards draw independent ones.")
draw = _symbolic("draw", "Random numbers: replicas draw identical ones, shards draw independent ones.")
resample = _symbolic("resample", "This rank's block of the output of an interpolation, from `start` on.")
add_blocks = _symbolic("add_blocks", "A concatenation along a split dim, as a sum of zero-padded parts.")
reduce = _symbolic("reduce", "A reduction over a split dim that sends only the reduced values of each rank.")
pick_class = _symbolic("pick_class", "At each position, the value of the target's class.")
class_weights = _symbolic("class_weights", "At each position, the weight of the target's class; zero if it is ignored.")
straight = _symbolic(
    "straight", "The values of the second operand with the gradient of the first: an in-place write under no_grad."
)
mean = _symbolic("mean", "A sum divided by the global count. Over a split dim it is a partial sum of the mean.")
halo_convolution = _symbolic("halo_convolution", "A halo exchange that overlaps with the convolution of the interior.")
activate_in_place = _symbolic("activate_in_place", "An activation in place, with its gradient in place, too.")
add_into = _symbolic("add_into", "A sum, written into its first operand.")
to_memory_format = _symbolic("to_memory_format", "The same tensor in another memory format.")


def inserted(name: str) -> Callable[..., Any]:
    """The inserted operator called ``name``."""
    return globals()[name]
