"""Predicting what a bound graph sends: exactly what the ledger will count when it runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from distfx.grid import Grid
from distfx.ir import ops
from distfx.ir.symbolic import show
from distfx.passes.bind import Bound
from distfx.passes.pipeline import Compiled
from distfx.report import ledger
from distfx.report.plan import Plan, PlanRow
from distfx.rules.registry import aten
from distfx.runtime.autograd.parameters import Bucket, make_buckets
from distfx.runtime.kernels.reduce import KINDS

__all__ = ["gradient_buckets", "plan_of"]


def _has_gradient(bound: Bound, inputs: Mapping[str, bool], trained: Mapping[str, bool]) -> dict[Node, bool]:
    """Which nodes of a bound graph have a gradient: they depend on what is trained, and a loss can depend on them."""
    depends: dict[Node, bool] = {}
    for node in bound.module.graph.nodes:
        if node.op == "placeholder":
            depends[node] = inputs.get(node.name, False)
        elif node.op == "get_attr":
            depends[node] = trained.get(str(node.target), False)
        else:
            depends[node] = _passes_gradients(node) and any(depends[operand] for operand in node.all_input_nodes)
    used: dict[Node, bool] = {}
    for node in reversed(bound.module.graph.nodes):
        used[node] = node.op == "output" or any(used[user] for user in node.users if _passes_gradients(user))
    return {node: depends[node] and used[node] for node in depends}


def _passes_gradients(node: Node) -> bool:
    if node.target in _CONSTANT or str(node.kwargs.get("operator")) in _DRAWN:
        return False
    dtype = node.meta.get("dtype")
    return dtype is None or dtype.is_floating_point or dtype.is_complex


_CONSTANT = (
    ops.refresh,
    aten.detach.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
)
"""Operators whose result has no gradient whatever its operands have."""


_DRAWN = ("rand.default", "randn.default", "rand_like.default", "randn_like.default")
"""Random numbers that depend on nothing."""


def _counts(node: Node, has_gradient: Mapping[Node, bool], grid: Grid) -> tuple[int, int, int, int] | None:
    """Bytes forward and backward, messages forward and backward, that a node sends."""
    move = node.meta.get("bound")
    if move is not None:
        size = node.meta["dtype"].itemsize
        back = node.target is not ops.refresh and has_gradient[node.all_input_nodes[0]] and has_gradient[node]
        forward, backward = move.forward, move.backward
        if not back:
            return forward.sent_bytes(size), 0, forward.messages, 0
        return forward.sent_bytes(size), backward.sent_bytes(size), forward.messages, backward.messages
    if node.target not in (ops.batch_norm, ops.norm, ops.reduce):
        return None
    x = node.all_input_nodes[0]
    axes: Any = node.kwargs["axis"]
    ranks = len(grid.members(tuple(axes)))
    if node.target is ops.reduce:
        return _reduction(node, x, ranks, has_gradient[x] and has_gradient[node])
    known = _norm(node, x, ranks, has_gradient[x] and has_gradient[node])
    apart: Any = node.kwargs.get("apart", ())
    if not apart or not isinstance(node.args[3], Node):
        return known
    there = len(grid.members(tuple(apart)))
    values = 2 * x.meta["local"][1] * max(4, node.meta["dtype"].itemsize)
    sent, messages = ledger.allreduce_bytes(values, there), ledger.allreduce_messages(there)
    return known[0] + sent, known[1], known[2] + messages, known[3]


def _norm(node: Node, x: Node, ranks: int, gradient: bool) -> tuple[int, int, int, int]:
    """What the sums of a norm's statistics send."""
    values = _statistics(node, x.meta["local"]) * max(4, node.meta["dtype"].itemsize)
    if ranks == 1:
        return 0, 0, 0, 0
    sent, messages = ledger.allreduce_bytes(values, ranks), ledger.allreduce_messages(ranks)
    if not node.kwargs.get("centre", True):  # of an RMS norm one sum each way
        return sent, sent if gradient else 0, messages, messages if gradient else 0
    if not gradient:
        return 2 * sent, 0, 2 * messages, 0
    return 2 * sent, ledger.allreduce_bytes(2 * values, ranks), 2 * messages, messages


def _reduction(node: Node, x: Node, ranks: int, gradient: bool) -> tuple[int, int, int, int]:
    """What :class:`distfx.runtime.kernels.reduce.Reduction` sends, from the table of its kind."""
    words: dict[str, Any] = dict(node.kwargs)
    kind, dtype = KINDS[words["kind"]], words.get("dtype") or x.meta["dtype"]
    results = int(math.prod(size for dim, size in enumerate(x.meta["local"]) if dim not in words["dims"]))
    value = max(4, dtype.itemsize) if dtype.is_floating_point else dtype.itemsize
    sizes = {"value": value, "index": 8, "flag": 1, "stack": ranks * value}
    phases = (kind.forward, kind.backward if gradient else ())
    sent = [sum(ledger.allreduce_bytes(results * sizes[word], ranks) for word in phase) for phase in phases]
    messages = [len(phase) * ledger.allreduce_messages(ranks) for phase in phases]
    return sent[0], sent[1], messages[0], messages[1]


def _statistics(node: Node, local: tuple[int, ...]) -> int:
    """How many values of each kind a norm computes: one for a channel, a sample and group, or a position."""
    if node.target is ops.batch_norm:
        return local[1]
    dims: Any = node.kwargs["dims"]
    groups: Any = node.kwargs.get("groups")
    return int(math.prod(groups if groups and i == 1 else size for i, size in enumerate(local) if i not in dims))


def _in_order_of_use(bound: Bound) -> list[Node]:
    """The parameters of a graph, by the first call that uses each."""
    order: dict[Node, None] = {}
    for node in bound.module.graph.nodes:
        for operand in node.all_input_nodes:
            if operand.op == "get_attr":
                order.setdefault(operand)
    return list(order)


def _nbytes(node: Node) -> int:
    """The bytes of this rank's part of a parameter."""
    return int(math.prod(node.meta["local"]) * node.meta["dtype"].itemsize)


def gradient_buckets(
    bound: Bound,
    trained: Mapping[str, bool],
    grid: Grid,
    dtypes: Mapping[str, torch.dtype] | None = None,
    last: bool = False,
) -> list[Bucket]:
    """The buckets in which the gradients of a graph's parameters are reduced; ``dtypes`` as they are now; ``last``:
    weights lie channels last."""
    now = dtypes or {}
    wanted, owned = [], set()
    has_gradient = _has_gradient(bound, {}, trained)
    for node in _in_order_of_use(bound):
        if has_gradient[node]:
            owned |= {str(node.target)} if _has_own_gradient(node) else set()
            axes = tuple(axis for axis in grid.axes if axis in node.meta["layout"].varying)
            dtype = now.get(str(node.target), node.meta["dtype"])
            wanted.append((str(node.target), axes, _nbytes(node), dtype))
    return make_buckets(wanted, grid, owned, last)


def _has_own_gradient(node: Node) -> bool:
    """Whether a parameter's gradient is a new tensor: that of the weight of one convolution is."""
    user = next(iter(node.users))
    return len(node.users) == 1 and user.target is aten.convolution.default and user.all_input_nodes[1:2] == [node]


def plan_of(
    compiled: Compiled,
    bound: Bound,
    grid: Grid,
    inputs: Mapping[str, bool],
    trained: Mapping[str, bool],
    buckets: Sequence[Bucket],
) -> Plan:
    """The plan at one shape. ``inputs`` and ``trained`` say which inputs and parameters have gradients."""
    has_gradient = _has_gradient(bound, inputs, trained)
    counts: dict[str, tuple[int, ...]] = {}
    moves: dict[str, list[str]] = {}
    for node in bound.module.graph.nodes:
        owner = str(node.meta.get("owner", node.name))
        if (sent := _counts(node, has_gradient, grid)) is not None:
            before = counts.get(owner, (0, 0, 0, 0))
            counts[owner] = tuple(a + b for a, b in zip(before, sent, strict=True))
        if "bound" in node.meta:
            moves.setdefault(owner, []).append(str(node.meta["move"]))
    known = {node.name for node in compiled.module.graph.nodes if "move" not in node.meta}
    assert counts.keys() <= known, f"moves without an operator: {sorted(counts.keys() - known)}"
    rows = [
        _row(node, counts.get(node.name, (0, 0, 0, 0)), moves.get(node.name, ()))
        for node in compiled.module.graph.nodes
        if (node.op == "call_function" and not _is_bookkeeping(node, counts))
        or (node.op == "placeholder" and node.name in moves)
    ]
    nbytes = {str(node.target): _nbytes(node) for node in bound.module.graph.find_nodes(op="get_attr")}
    rows += [_bucket_row(bucket, nbytes) for bucket in buckets if bucket.segment.size > 1]
    sizes = tuple((str(symbol), value) for symbol, value in bound.values.items())
    return Plan(repr(grid), grid.rank, compiled.capture.training, sizes, tuple(rows))


def _is_bookkeeping(node: Node, counts: Collection[str]) -> bool:
    """Moves, which stand in their operators' rows, and counters such as a batch norm's, for which nothing is sent."""
    return "move" in node.meta or (node.target is aten.add_.Tensor and node.name not in counts)


def _row(node: Node, counts: tuple[int, ...], moves: Sequence[str]) -> PlanRow:
    source, decision = node.meta.get("source"), node.meta.get("decision")
    shape = node.meta.get("shape") or ()
    return PlanRow(
        node=node.name,
        op="input" if node.op == "placeholder" else getattr(node.target, "__name__", str(node.target)),
        algorithm=decision.algorithm if decision is not None else "",
        shape=tuple(show(size) for size in shape),
        layout=str(node.meta["layout"]),
        moves=tuple(moves),
        bytes_forward=counts[0],
        bytes_backward=counts[1],
        messages_forward=counts[2],
        messages_backward=counts[3],
        path=node.meta.get("path") or "",
        source=f"{source[0]}:{source[1]}" if source else "",
        whole=decision is not None and decision.whole,
    )


def _bucket_row(bucket: Bucket, nbytes: Mapping[str, int]) -> PlanRow:
    ranks = bucket.segment.size
    return PlanRow(
        node=bucket.label,
        op="all_reduce",
        algorithm="segmented allreduce",
        shape=(f"{len(bucket.names)} parameters",),
        layout=f"over {','.join(bucket.segment.axes)}",
        bytes_backward=ledger.allreduce_bytes(sum(nbytes[name] for name in bucket.names), ranks),
        messages_backward=ledger.allreduce_messages(ranks),
    )
