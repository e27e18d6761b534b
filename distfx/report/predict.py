"""Predict what a bound graph sends: exactly what the ledger counts when it runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from distfx.grid import Grid
from distfx.ir import ops, volumes
from distfx.ir.buckets import Bucket
from distfx.ir.gradients import gradient_nodes
from distfx.ir.meta import Meta, meta
from distfx.ir.nodes import aten
from distfx.ir.reductions import TRAFFIC
from distfx.ir.symbolic import show
from distfx.report.plan import Plan, PlanRow

__all__ = ["make_plan"]


@dataclass(frozen=True)
class _Sent:
    """Bytes and messages that this rank sends, forward and backward."""

    bytes_forward: int = 0
    bytes_backward: int = 0
    messages_forward: int = 0
    messages_backward: int = 0

    def __add__(self, other: _Sent) -> _Sent:
        return _Sent(
            self.bytes_forward + other.bytes_forward,
            self.bytes_backward + other.bytes_backward,
            self.messages_forward + other.messages_forward,
            self.messages_backward + other.messages_backward,
        )


def make_plan(
    symbolic: Graph,
    bound: Graph,
    grid: Grid,
    *,
    training: bool,
    sizes: Mapping[Any, int],
    inputs: Mapping[str, bool],
    trained: Mapping[str, bool],
    buckets: Sequence[Bucket],
) -> Plan:
    """The plan at one shape.

    ``bound`` is ``symbolic`` with the numbers of that shape, ``sizes``. ``inputs`` and ``trained`` say which inputs and
    parameters require a gradient.
    """
    with_gradient = gradient_nodes(bound, inputs, trained)
    sent: dict[str, _Sent] = {}
    moves: dict[str, list[str]] = {}
    for node in bound.nodes:
        owner = Meta.owner.get(node) or node.name
        if (more := _sent(node, with_gradient, grid)) is not None:
            sent[owner] = sent.get(owner, _Sent()) + more
        if Meta.transfers.is_set(node):
            moves.setdefault(owner, []).append(str(meta(node).move))
    operators = {node.name for node in symbolic.nodes if not Meta.move.is_set(node)}
    assert sent.keys() <= operators, f"moves without an operator: {sorted(sent.keys() - operators)}"
    rows = [
        _row(node, sent.get(node.name, _Sent()), moves.get(node.name, ()))
        for node in symbolic.nodes
        if (node.op == "call_function" and not _is_bookkeeping(node, sent))
        or (node.op == "placeholder" and node.name in moves)
    ]
    rows += [_bucket_row(bucket, ranks) for bucket in buckets if (ranks := len(grid.members(bucket.axes))) > 1]
    numbers = tuple((str(symbol), value) for symbol, value in sizes.items())
    return Plan(repr(grid), grid.rank, training, numbers, tuple(rows))


def _sent(node: Node, with_gradient: Collection[Node], grid: Grid) -> _Sent | None:
    """What a node sends; ``None`` if it never communicates."""
    transfers = Meta.transfers.get(node)
    if transfers is not None:
        itemsize = meta(node).dtype.itemsize
        forward, backward = transfers.forward, transfers.backward
        if node.target is ops.refresh or not {node, node.all_input_nodes[0]} <= set(with_gradient):
            return _Sent(forward.sent_bytes(itemsize), 0, forward.messages, 0)
        return _Sent(forward.sent_bytes(itemsize), backward.sent_bytes(itemsize), forward.messages, backward.messages)
    if node.target not in (ops.batch_norm, ops.norm, ops.reduce):
        return None
    x = node.all_input_nodes[0]
    ranks = _ranks(node, "axis", grid)
    gradient = x in with_gradient and node in with_gradient
    if node.target is ops.reduce:
        return _sent_by_reduction(node, x, ranks, gradient)
    known = _sent_by_norm(node, x, ranks, gradient)
    if not node.kwargs.get("average_over") or not isinstance(node.args[3], Node):
        return known
    ranks = _ranks(node, "average_over", grid)  # the running statistics are averaged over these
    nbytes = 2 * meta(x).local_shape[1] * max(4, meta(node).dtype.itemsize)
    return known + _Sent(volumes.allreduce_bytes(nbytes, ranks), 0, volumes.allreduce_messages(ranks), 0)


def _ranks(node: Node, axes: str, grid: Grid) -> int:
    """The number of ranks along the axes that an argument names."""
    names: Any = node.kwargs[axes]
    return len(grid.members(tuple(names)))


def _sent_by_norm(node: Node, x: Node, ranks: int, gradient: bool) -> _Sent:
    """The allreduces of a norm's statistics: of an RMS norm one each way, of others two forward and one backward."""
    if ranks == 1:
        return _Sent()
    nbytes = _statistics(node, meta(x).local_shape) * max(4, meta(node).dtype.itemsize)
    sent, messages = volumes.allreduce_bytes(nbytes, ranks), volumes.allreduce_messages(ranks)
    if not node.kwargs.get("centre", True):
        return _Sent(sent, sent, messages, messages) if gradient else _Sent(sent, 0, messages, 0)
    if not gradient:
        return _Sent(2 * sent, 0, 2 * messages, 0)
    return _Sent(2 * sent, volumes.allreduce_bytes(2 * nbytes, ranks), 2 * messages, messages)


def _statistics(node: Node, local: tuple[int, ...]) -> int:
    """How many values of each statistic a norm computes: one per channel, per sample and group, or per position."""
    if node.target is ops.batch_norm:
        return local[1]
    dims: Any = node.kwargs["dims"]
    groups: Any = node.kwargs.get("groups")
    return int(math.prod(groups if groups and i == 1 else size for i, size in enumerate(local) if i not in dims))


def _sent_by_reduction(node: Node, x: Node, ranks: int, gradient: bool) -> _Sent:
    """The allreduces of :class:`distfx.runtime.kernels.reduce.Reduction`."""
    arguments: dict[str, Any] = dict(node.kwargs)
    traffic, dtype = TRAFFIC[arguments["kind"]], arguments.get("dtype") or meta(x).dtype
    results = int(math.prod(size for dim, size in enumerate(meta(x).local_shape) if dim not in arguments["dims"]))
    value = max(4, dtype.itemsize) if dtype.is_floating_point else dtype.itemsize
    itemsize = {"value": value, "index": 8, "flag": 1, "stack": ranks * value}
    forward, backward = traffic.forward, traffic.backward if gradient else ()
    nbytes = [sum(volumes.allreduce_bytes(results * itemsize[s], ranks) for s in each) for each in (forward, backward)]
    messages = volumes.allreduce_messages(ranks)
    return _Sent(nbytes[0], nbytes[1], len(forward) * messages, len(backward) * messages)


def _is_bookkeeping(node: Node, sent: Collection[str]) -> bool:
    """Whether a node has no row: moves, which are in their operators' rows, and counters such as a batch norm's."""
    return Meta.move.is_set(node) or (node.target is aten.add_.Tensor and node.name not in sent)


def _row(node: Node, sent: _Sent, moves: Sequence[str]) -> PlanRow:
    source, decision = Meta.source.get(node), Meta.decision.get(node)
    return PlanRow(
        node=node.name,
        op="input" if node.op == "placeholder" else getattr(node.target, "__name__", str(node.target)),
        algorithm=decision.algorithm if decision is not None else "",
        shape=tuple(show(size) for size in Meta.shape.get(node) or ()),
        layout=str(meta(node).layout),
        moves=tuple(moves),
        bytes_forward=sent.bytes_forward,
        bytes_backward=sent.bytes_backward,
        messages_forward=sent.messages_forward,
        messages_backward=sent.messages_backward,
        path=Meta.path.get(node) or "",
        source=f"{source[0]}:{source[1]}" if source else "",
        fallback=decision is not None and decision.fallback,
    )


def _bucket_row(bucket: Bucket, ranks: int) -> PlanRow:
    return PlanRow(
        node=bucket.label,
        op="all_reduce",
        algorithm="segmented allreduce",
        shape=(f"{len(bucket.names)} parameters",),
        layout=f"over {','.join(bucket.axes)}",
        bytes_backward=volumes.allreduce_bytes(bucket.nbytes, ranks),
        messages_backward=volumes.allreduce_messages(ranks),
    )
