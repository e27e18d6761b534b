"""``parallelize(..., check=True)``: find the first node whose output is not finite, on any rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from distfx.errors import NonFiniteError
from distfx.grid import Grid
from distfx.ir.meta import Meta, meta
from distfx.ir.moves import BoundMove
from distfx.ir.nodes import describe
from distfx.ir.torch_private import tree_leaves
from distfx.runtime.comm.agreement import compare_values, host_group
from distfx.runtime.comm.failure import CommunicationScope

__all__ = ["GraphChecker"]

SHOWN_RANKS = 16
"""Number of ranks that an error message lists."""


class GraphChecker:
    """Runs a linked graph node by node and raises if a value is not finite, with the same error on all ranks.

    Each rank records its first such node. The ranks compare these after the pass, so the check does not delay it. All
    ranks run the same nodes in the same order, so the first node over all ranks is the cause.
    """

    def __init__(self, module: GraphModule, grid: Grid, local_inputs: Collection[str] = ()) -> None:
        self.module, self.grid, self.local_inputs = module, grid, local_inputs

    def __call__(self, *args: Any) -> Sequence[Tensor]:
        self._compare_inputs(args[1:])
        interpreter = _CheckingInterpreter(self.module)
        with torch.fx.traceback.preserve_node_meta(False):
            results = interpreter.run(*args)
        self._raise_if_any(interpreter.first)
        return results

    def _compare_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Raise if a global input differs between ranks, for example because each rank shuffles its data loader."""
        names = [node.name for node in self.module.graph.find_nodes(op="placeholder")[1:]]
        pairs = zip(names, inputs, strict=True)
        compare_values(self.grid.size, {name: value for name, value in pairs if name not in self.local_inputs})

    def _raise_if_any(self, first: tuple[int, int, int] | None) -> None:
        """Compare the first non-finite nodes of all ranks, and raise an error about the first of these."""
        nodes = list(self.module.graph.nodes)
        own = torch.tensor(first or (len(nodes), 0, 0))
        firsts = own.unsqueeze(0)
        if self.grid.size > 1:
            gathered = torch.empty(self.grid.size * 3, dtype=torch.int64)
            with CommunicationScope("comparison of check=True"):
                dist.all_gather_single(gathered, own, group=host_group())
            firsts = gathered.view(-1, 3)
        cause = int(firsts[:, 0].min())
        if cause == len(nodes):
            return
        ranks = [(rank, nan, inf) for rank, (index, nan, inf) in enumerate(firsts.tolist()) if index == cause]
        lines = [f"  rank {rank}: {_counts(nan, inf)}" for rank, nan, inf in ranks[:SHOWN_RANKS]]
        lines += [f"  and {len(ranks) - SHOWN_RANKS} more ranks"] if len(ranks) > SHOWN_RANKS else []
        raise NonFiniteError(
            f"{_value_of(nodes[cause])} is not finite. Number of elements in each rank's part:\n" + "\n".join(lines)
        )


class _CheckingInterpreter(Interpreter):
    """Runs a graph and records the index of the first node with a non-finite result, and its counts of nan and inf."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.indices = {node: index for index, node in enumerate(module.graph.nodes)}
        self.first: tuple[int, int, int] | None = None

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        is_checked = n.meta and n.op != "output" and not _inserts_infinity(n)  # nodes without meta come from link
        if is_checked and self.first is None:
            tensors = [t.detach() for t in tree_leaves(result) if isinstance(t, Tensor) and t.dtype.is_floating_point]
            bad = [t for t in tensors if not bool(t.isfinite().all())]
            if bad:
                nan, inf = (sum(int(count(t).sum()) for t in bad) for count in (torch.isnan, torch.isinf))
                self.first = (self.indices[n], nan, inf)
        return result


def _inserts_infinity(node: Node) -> bool:
    """Whether a node writes infinities on purpose: a mask, or the border of a max pooling. Its operands are checked."""
    bound = Meta.transfers.get(node)
    if isinstance(bound, BoundMove):
        return not math.isfinite(getattr(bound.forward, "fill", 0.0))
    return any(isinstance(a, float) and not math.isfinite(a) for a in tree_leaves((node.args, node.kwargs)))


def _counts(nan: int, inf: int) -> str:
    return " and ".join(f"{count} {name}" for count, name in ((nan, "nan"), (inf, "inf")) if count)


def _value_of(node: Node) -> str:
    """The value of a node as the user knows it: a parameter, an input, or the result of an operator."""
    if Meta.parameter.is_set(node):
        return f"the parameter or buffer {meta(node).parameter}"
    if node.op == "placeholder":
        return f"the input {node.name}"
    purpose = f" for {meta(node).owner}" if Meta.owner.is_set(node) else ""
    return f"the result of {getattr(node.target, '__name__', node.target)}{purpose}, {describe(node)},"
