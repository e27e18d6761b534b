"""The operators that distfx inserts into a graph.

A rewritten graph names them with literal arguments, so that it prints as a person would explain it. It is symbolic:
before it runs, ``bind`` replaces each by what it means for one shape on one rank. Hence they only say so when called.
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
    """The size of this rank's part of a dim, as an argument in a graph: ``N/n``."""

    extent: Size
    split: Split

    def at(self, coords: Coords) -> Size:
        lo, hi = self.split.bounds(self.extent, coords)
        return hi - lo

    def __repr__(self) -> str:
        text = show(self.extent)
        return f"{text if text.isalnum() else f'({text})'}{self.split}"


@dataclass(frozen=True)
class LocalStart(LocalSize):
    """Where this rank's part of a dim starts in the whole: ``start(H/h)``; or a multiple of that, shifted."""

    stride: int = 1
    shift: int = 0

    def at(self, coords: Coords) -> Size:
        return self.stride * self.split.bounds(self.extent, coords)[0] + self.shift

    def __repr__(self) -> str:
        text = f"start({super().__repr__()})"
        return (f"{self.stride}*" if self.stride != 1 else "") + text + (f"{self.shift:+d}" if self.shift else "")


@dataclass(frozen=True)
class LocalPart:
    """The number of this rank's part among those that ``axes`` make, as an argument in a graph: ``part(n,c)``."""

    axes: tuple[str, ...]

    def at(self, coords: Coords) -> Size:
        number: Size = 0
        for axis in self.axes:
            index, size = coords[axis]
            number = number * size + index
        return number

    def __repr__(self) -> str:
        return f"part({','.join(self.axes)})"


@dataclass(frozen=True)
class OpOutput:
    """One result of an operator that has several, as a call of its own: ``topk.0``. Linking shares the work."""

    op: Callable[..., Any]
    index: int

    @property
    def __name__(self) -> str:
        return f"{self.op.__name__.removesuffix('.default')}.{self.index}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)[self.index]


OWN_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Maps each operator that stands for a model's own autograd function to the function it calls.

Filled by :mod:`distfx.passes.capture.autograd_functions`."""


def on_device(arguments: Any, device: torch.device | None = None) -> Any:
    """The arguments of a call, made on ``device`` wherever they name one; without it, on any of its kind."""

    def replace(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device or torch.device(value.type)
        return value

    return map_aggregate(arguments, replace)


_SYMBOLIC: set[Callable[..., Any]] = set()


def is_inserted(target: Any) -> bool:
    """Whether ``target`` is one of the operators below, which have no kernel until they are linked."""
    return target in _SYMBOLIC


def _symbolic(name: str, doc: str) -> Callable[..., Any]:
    def op(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"distfx.{name} is symbolic: call the parallel module, which binds the graph to a shape")

    op.__name__ = op.__qualname__ = name
    op.__doc__ = doc
    _SYMBOLIC.add(op)
    return op


halo = _symbolic("halo", "Fetch what the blocks of a split dim need of their neighbours.")
exchange = _symbolic("exchange", "Partition a split dim in another way.")
all_gather = _symbolic("all_gather", "Make a split dim whole.")
reduce_scatter = _symbolic("reduce_scatter", "Add up partial sums and split a dim.")
all_reduce = _symbolic("all_reduce", "Add up partial sums.")
slice = _symbolic("slice", "Take this rank's part.")
all_to_all = _symbolic("all_to_all", "Split another dim.")
to_varying = _symbolic("to_varying", "Use a replicated tensor in different ways: its gradient is summed.")
to_replicated = _symbolic("to_replicated", "Use a tensor in the same way everywhere: its gradient counts once.")
refresh = _symbolic("refresh", "Make a buffer whole again of which each rank wrote its part.")
add_bias = _symbolic("add_bias", "Add a bias along dim 1, once, after the sum over channels.")
batch_norm = _symbolic("batch_norm", "Batch norm in training, with the statistics of the whole batch.")
conv_transpose = _symbolic("conv_transpose", "The block of a transposed convolution's output that starts at `start`.")
avg_pool = _symbolic("avg_pool", "The block of an average pooling's output, dividing by global window counts.")
adaptive_pool = _symbolic("adaptive_pool", "The block of an adaptive pooling's output that starts at `start`.")
max_pool_index = _symbolic(
    "max_pool_index", "Where in the whole the windows of this block have their greatest element."
)
causal_attention = _symbolic("causal_attention", "Attention of the queries from `start` on to all before them.")
norm = _symbolic("norm", "Standardise with statistics of the whole tensor, scale and shift.")
dropout = _symbolic("dropout", "Dropout: equal parts of the mask are drawn alike, others independently.")
draw = _symbolic("draw", "Random numbers: equal parts are drawn alike, others independently.")
resample = _symbolic("resample", "The block of an interpolation's output that starts at `start`.")
add_blocks = _symbolic("add_blocks", "A concatenation along a split dim: parts that are zero elsewhere, added.")
reduce = _symbolic("reduce", "A reduction of a split dim that only small values are sent for.")
pick_class = _symbolic("pick_class", "At each position the value of the class that the target names.")
class_weights = _symbolic("class_weights", "At each position the weight of its target's class; zero where ignored.")
straight = _symbolic("straight", "The second operand's values with the first one's gradient: a write under no_grad.")
mean = _symbolic("mean", "A sum divided by the global count: over a split dim a partial sum of the mean.")
halo_convolution = _symbolic("halo_convolution", "A halo exchange and its convolution: the interior is computed first.")
activate_in_place = _symbolic("activate_in_place", "An activation written over its operand, and its gradient likewise.")
add_into = _symbolic("add_into", "A sum written over its first operand.")
to_memory_format = _symbolic("to_memory_format", "The same tensor, stored channels last or channels first.")


def inserted(name: str) -> Callable[..., Any]:
    """The operator called ``name``."""
    return globals()[name]
