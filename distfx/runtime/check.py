"""``parallelize(..., check=True)``: find the first node whose output is not finite, on any rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from distfx.errors import NonFiniteError
from distfx.grid import Grid
from distfx.ir.meta import Meta, meta
from distfx.ir.moves import BoundMove
from distfx.runtime.comm.agreement import compare_values, host_group
from distfx.runtime.comm.failure import CommunicationScope

__all__ = ["CheckedGraph"]


class CheckedGraph:
    """A linked graph, run node by node. Each rank notes its first bad node; after the pass, in which nothing waits for
    that, they compare, and all raise the same error about the first of all: every rank runs the same nodes in the same
    order, so that one is the cause."""

    def __init__(self, module: GraphModule, grid: Grid, local: Collection[str] = ()) -> None:
        self.module, self.grid, self.local = module, grid, local

    def __call__(self, *args: Any) -> Sequence[Tensor]:
        self._compare_inputs(args[1:])
        run = _Run(self.module)
        with torch.fx.traceback.preserve_node_meta(False):
            results = run.run(*args)
        self._compare(run.first)
        return results

    def _compare_inputs(self, inputs: Sequence[Tensor]) -> None:
        """What was given as the global tensor is the same on every rank: a data loader may have shuffled for each."""
        names = [node.name for node in self.module.graph.find_nodes(op="placeholder")[1:]]
        whole = [(name, value) for name, value in zip(names, inputs, strict=True) if name not in self.local]
        compare_values(self.grid.size, dict(whole))

    def _compare(self, first: tuple[int, int, int] | None) -> None:
        nodes = list(self.module.graph.nodes)
        mine = torch.tensor(first or (len(nodes), 0, 0))
        every = mine.unsqueeze(0)
        if self.grid.size > 1:
            gathered = torch.empty(self.grid.size * 3, dtype=torch.int64)
            with CommunicationScope("comparison of check=True"):
                dist.all_gather_single(gathered, mine, group=host_group())
            every = gathered.view(-1, 3)
        number = int(every[:, 0].min())
        if number == len(nodes):
            return
        found = [(rank, nan, inf) for rank, (index, nan, inf) in enumerate(every.tolist()) if index == number]
        shown = [f"  rank {rank}: {_counts(nan, inf)}" for rank, nan, inf in found[:16]]
        shown += [f"  and {len(found) - 16} more ranks"] if len(found) > 16 else []
        raise NonFiniteError(f"{_describe(nodes[number])} is not finite, in this rank's part:\n" + "\n".join(shown))


class _Run(Interpreter):
    """Runs a graph, and keeps the number of its first bad node with the counts of nan and inf there."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.numbers = {node: number for number, node in enumerate(module.graph.nodes)}
        self.first: tuple[int, int, int] | None = None

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if self.first is None and n.meta and n.op != "output" and not _means_it(n):  # without meta: inserted by link
            tensors = [t.detach() for t in tree_leaves(result) if isinstance(t, Tensor) and t.dtype.is_floating_point]
            bad = [t for t in tensors if not bool(t.isfinite().all())]
            if bad:
                nan, inf = (sum(int(count(t).sum()) for t in bad) for count in (torch.isnan, torch.isinf))
                self.first = (self.numbers[n], nan, inf)
        return result


def _means_it(node: Node) -> bool:
    """Whether a node puts infinities there itself: a mask, the border of a max pooling. What it copies was checked."""
    bound = Meta.transfers.get(node)
    if isinstance(bound, BoundMove):
        return not math.isfinite(getattr(bound.forward, "fill", 0.0))
    return any(isinstance(a, float) and not math.isfinite(a) for a in tree_leaves((node.args, node.kwargs)))


def _counts(nan: int, inf: int) -> str:
    return " and ".join(f"{count} {what}" for count, what in ((nan, "nan"), (inf, "inf")) if count)


def _describe(node: Node) -> str:
    """A node as its user knows it: operator, module path, source line."""
    if Meta.parameter.is_set(node):
        return f"the parameter or buffer {meta(node).parameter}"
    if node.op == "placeholder":
        return f"the input {node.name}"
    path, source = Meta.path.get(node), Meta.source.get(node)
    what = f"the result of {getattr(node.target, '__name__', node.target)}" + (
        f" for {meta(node).owner}" if Meta.owner.is_set(node) else f", node {node.name}"
    )
    return what + (f", in {path}" if path else "") + (f" ({source[0]}:{source[1]}: {source[2]})" if source else "")
