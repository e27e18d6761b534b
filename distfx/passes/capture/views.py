"""Writes into views of tensors that are read elsewhere: the new value of a part is put back into the whole.

in: an exported graph.   out: the same without such writes: ``y[:, 0] = 0`` becomes a concatenation of what is written
and what stays, from which everything that reads ``y``, or another view of it, is made anew. Other writes are left to
:mod:`distfx.passes.capture.mutation`.

A tensor that is written under ``no_grad``, or by way of ``detach``, has new values and its old gradient.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from distfx.errors import CaptureError
from distfx.ir import ops
from distfx.ir.meta import Meta, inherit, meta
from distfx.ir.nodes import arguments, aten
from distfx.passes.capture.mutation import (
    MAYBE_COPIES,
    UNSAID,
    functional_form,
    gives_view,
    promotes,
    read_elsewhere,
    shares_memory,
    viewed,
    writes,
)

__all__ = ["put_back_writes"]

_END = 2**63 - 1
_RESHAPED = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.view_as.default,
    aten.reshape_as.default,
)
_TURNED = (aten.transpose.int, aten.t.default, aten.swapaxes.default, aten.swapdims.default, aten.mT.default)
_SAME = (aten.alias.default, *UNSAID, *(target for target in MAYBE_COPIES if target not in _RESHAPED))


def put_back_writes(graph: Graph) -> None:
    """Rewrite, in place, the writes that others see."""
    for node in graph.nodes:  # before operands are replaced, whose memory is another
        if node.target in (*MAYBE_COPIES, aten.einsum.default):
            meta(node).shares_memory = shares_memory(node)
    for node in list(graph.nodes):
        written = node.op == "call_function" and writes(node) and isinstance(node.args[0], Node)
        if node.target is aten.copy_.default:
            _fit(graph, node)
        if written and (_origin(node) is not None or read_elsewhere(node)):
            _put_back(graph, node)


def _fit(graph: Graph, copy: Node) -> None:
    """What is copied gets the shape and dtype of what it is copied into."""
    place, source = meta(copy).val, copy.args[1]
    assert isinstance(source, Node)
    with graph.inserting_before(copy):
        if meta(source).val.dtype != place.dtype:
            source = _call(graph, copy, aten.to.dtype, (source, place.dtype))
        if meta(source).val.shape != place.shape:
            shape = [
                size if isinstance(size, int) else _call(graph, copy, aten.sym_size.int, (copy.args[0], dim))
                for dim, size in enumerate(place.shape)
            ]
            source = _call(graph, copy, aten.expand.default, (source, shape))
    copy.args = (copy.args[0], source, *copy.args[2:])


def _origin(write: Node) -> Node | None:
    """The tensor with a gradient that a write under ``no_grad`` goes into, which has it again outside of the region."""
    target: Any = write.args[0]
    if _region(write) is None:
        return None
    if target.target is aten.detach.default and _region(target) is not None:
        origin: Node = target.args[0]
        return origin
    return Meta.written_tensor.get(target)  # it was written before


def _region(node: Node) -> Any:
    return Meta.no_grad.get(node)


def _root(view: Any) -> Any:
    """What a view is a view of in the end."""
    while isinstance(view, Node) and gives_view(view):
        view = viewed(view)
    return view


def _put_back(graph: Graph, write: Node) -> None:
    written: Any = write.args[0]
    path = [written]
    while gives_view(path[-1]):
        path.append(viewed(path[-1]))
    target = functional_form(write)
    if path[-1].op == "get_attr" or target is None:
        return  # a buffer, or no way to write it otherwise: for others to refuse
    nodes = {node: i for i, node in enumerate(graph.nodes)}
    late = {node for node, i in nodes.items() if i > nodes[write]}
    with graph.inserting_before(write):
        given = write.args[1:2] if write.target is aten.copy_.default else write.args
        inner = _call(graph, write, target, given, {} if target is aten.clone.default else dict(write.kwargs))
        if target is not aten.clone.default and promotes(write):
            meta(inner).in_place = True
            meta(inner).val = meta(inner).val.to(meta(written).val.dtype)
        new = {written: inner}
        for view, parent in itertools.pairwise(path):
            value = _whole(graph, write, view, parent, new[view])
            if value is None:
                raise CaptureError(
                    f"{_source(write)}: {write.target} writes in place into {view.target} of a tensor that is "
                    "read elsewhere, which distfx cannot follow. Write it out of place (y = f(x) instead of f_(x))."
                )
            new[parent] = value
        if any(writes(node) and _root(node.args[0]) is path[-1] for node in late):  # for these they are views again
            for view, parent in reversed(list(itertools.pairwise(path))):
                new[view] = _again(graph, write, view, parent, new[parent])
        found = [path[-1]]
        while found:  # other views of it
            whole = found.pop()
            for user in list(whole.users):
                early = user in nodes and user not in late and user is not write
                if early and gives_view(user) and viewed(user) is whole:
                    if user not in new:
                        new[user] = _again(graph, write, user, whole, new[whole])
                    found.append(user)
        outside, origin = new[written], _origin(write)
        if origin is not None:
            meta(inner).written_tensor = origin
            outside = new[origin] if origin in new else _call(graph, write, ops.straight, (origin, inner))
    for user in list(write.users):
        user.replace_input_with(write, new[written] if _region(user) == _region(write) else outside)
    for old, value in new.items():
        for user in [user for user in old.users if user in late]:
            user.replace_input_with(old, value)
    graph.erase_node(write)
    for value in dict.fromkeys((*new.values(), outside)):
        _erase(graph, value)


def _source(node: Node) -> str:
    lines = (Meta.stack_trace.get(node) or "the model").strip().splitlines()
    return " ".join(line.strip() for line in lines[-2:])


def _erase(graph: Graph, node: Node) -> None:
    """Remove a node that nothing uses, and what only led to it."""
    if node.users or node.op != "call_function" or not Meta.rebuilt.is_set(node):
        return
    operands = list(node.all_input_nodes)
    graph.erase_node(node)
    for operand in operands:
        _erase(graph, operand)


def _whole(graph: Graph, write: Node, view: Node, parent: Node, new: Node) -> Node | None:
    """The value of ``parent`` after its ``view`` has become ``new``; ``None`` where nobody knows."""
    target = view.target
    rank = meta(parent).val.dim() if isinstance(Meta.val.get(parent), torch.Tensor) else 0

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        return _call(graph, write, target, args, kwargs)

    def size(tensor: Node, dim: int) -> Any:
        known = meta(tensor).val.shape[dim]
        return known if isinstance(known, int) else call(aten.sym_size.int, tensor, dim)

    if target is aten.detach.default:
        return call(ops.straight, parent, new)
    if target in MAYBE_COPIES and not shares_memory(view):
        return None
    if writes(view) or target in _SAME or target is ops.straight:
        return new
    if target in _RESHAPED:
        return call(aten.reshape.default, new, [size(parent, dim) for dim in range(rank)])
    if target in _TURNED:
        return call(target, new, *view.args[1:])
    if target is aten.permute.default:
        dims: Any = view.args[1]
        order = [dim % rank for dim in dims]
        return call(aten.permute.default, new, [order.index(dim) for dim in range(len(order))])
    if target is aten.select.int:
        given = arguments(view)
        dim, index = given["dim"] % rank, given["index"]
        piece = call(aten.unsqueeze.default, new, dim)
        if not isinstance(index, int):
            return None
        return _cut_in(call, parent, piece, dim, index, _END if index == -1 else index + 1)
    if target is aten.slice.Tensor:
        given = arguments(view)
        dim, step = given["dim"] % rank, given["step"]
        start, end = given["start"] or 0, _END if given["end"] is None else given["end"]
        if step == 1:
            return _cut_in(call, parent, new, dim, start, end)
        return _strided(call, size(parent, dim), parent, new, dim, start, end, step)
    return None


def _cut_in(call: Any, whole: Node, piece: Node, dim: int, start: Any, end: Any) -> Node:
    """``whole`` with ``[start, end)`` of ``dim`` replaced by ``piece``."""
    before = call(aten.slice.Tensor, whole, dim, 0, start)
    after = call(aten.slice.Tensor, whole, dim, end, _END)
    parts = [part for part in (before, piece, after) if not statically_known_true(meta(part).val.shape[dim] == 0)]
    result: Node = call(aten.cat.default, parts, dim) if len(parts) > 1 else (*parts, piece)[0]
    return result


def _strided(call: Any, size: Any, whole: Node, piece: Node, dim: int, start: Any, end: Any, step: int) -> Node | None:
    """The same for every ``step``-th position."""
    if not isinstance(start, int) or start < 0 or end != _END:
        return None
    value = meta(whole).val
    place = call(aten.arange.default, size, device=value.device)
    steps = call(aten.sub.Tensor, place, start)
    number = call(aten.div.Scalar_mode, steps, step, rounding_mode="floor")
    written = call(aten.eq.Scalar, call(aten.remainder.Scalar, steps, step), 0)
    if start:
        written = call(aten.logical_and.default, written, call(aten.ge.Scalar, steps, 0))
    spread = call(aten.index_select.default, piece, dim, call(aten.clamp.default, number, 0))
    mask = call(aten.reshape.default, written, [-1 if i == dim else 1 for i in range(value.dim())])
    result: Node = call(aten.where.self, mask, spread, whole)
    return result


def _again(graph: Graph, write: Node, view: Node, whole: Node, new: Node) -> Node:
    """A view, of another value."""
    if writes(view) or view.target is ops.straight:  # the very tensor
        return new
    args, kwargs = map_arg((view.args, view.kwargs), lambda n: new if n is whole else n)
    made = _call(graph, write, view.target, args, kwargs)
    inherit(made, view, Meta.shares_memory)
    return made


def _call(graph: Graph, write: Node, target: Any, args: Any, kwargs: Any = None) -> Node:
    """A call in place of ``write``, with the value that it has in the example."""
    node = graph.call_function(target, tuple(args), dict(kwargs or {}))
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: meta(n).val)
    inherit(node, write, Meta.stack_trace, Meta.nn_module_stack, Meta.autocast, Meta.no_grad)
    meta(node).rebuilt = True
    with meta(write).val.fake_mode:
        meta(node).val = args[1] if target is ops.straight else target(*args, **kwargs)
    return node
