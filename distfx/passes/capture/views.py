"""Writes through views of tensors that are read elsewhere: the new value of a view is inserted into its base.

in: an exported graph without regions.   out: the same graph without such writes. ``y[:, 0] = 0`` becomes a
concatenation of the written slice and the rest. Later readers of ``y``, or of another view of ``y``, read the new
value. Other writes are left to :mod:`distfx.passes.capture.mutation`.

A tensor that is written under ``no_grad``, or through ``detach``, has the new values and its old gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from distfx.errors import CaptureError
from distfx.ir import ops
from distfx.ir.meta import Meta, inherit, meta
from distfx.ir.nodes import arguments, aten
from distfx.passes.capture.mutation import (
    UNDECLARED_ALIASES,
    VIEW_OR_COPY,
    functional_form,
    is_read_through_alias,
    is_write,
    may_promote,
    returns_view,
    shares_memory,
    view_base,
    view_root,
)

__all__ = ["functionalize_view_writes"]

_END = 2**63 - 1
_RESHAPES = (
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
_TRANSPOSES = (aten.transpose.int, aten.t.default, aten.swapaxes.default, aten.swapdims.default, aten.mT.default)
_IDENTITIES = (
    aten.alias.default,
    *UNDECLARED_ALIASES,
    *(target for target in VIEW_OR_COPY if target not in _RESHAPES),
)


def functionalize_view_writes(graph: Graph) -> None:
    """Rewrite, in place, the writes that other nodes see."""
    for node in graph.nodes:  # before operands are replaced by others that do not share their memory
        if node.target in (*VIEW_OR_COPY, aten.einsum.default):
            meta(node).shares_memory = shares_memory(node)
    for node in list(graph.nodes):
        is_tensor_write = node.op == "call_function" and is_write(node) and isinstance(node.args[0], Node)
        if node.target is aten.copy_.default:
            _match_destination(graph, node)
        if is_tensor_write and (_origin(node) is not None or is_read_through_alias(node)):
            _functionalize(graph, node)


def _match_destination(graph: Graph, copy: Node) -> None:
    """Cast and expand the source of a copy to the dtype and shape of its destination."""
    destination, source = meta(copy).val, copy.args[1]
    assert isinstance(source, Node)
    with graph.inserting_before(copy):
        if meta(source).val.dtype != destination.dtype:
            source = _call(graph, copy, aten.to.dtype, (source, destination.dtype))
        if meta(source).val.shape != destination.shape:
            shape = [
                size if isinstance(size, int) else _call(graph, copy, aten.sym_size.int, (copy.args[0], dim))
                for dim, size in enumerate(destination.shape)
            ]
            source = _call(graph, copy, aten.expand.default, (source, shape))
    copy.args = (copy.args[0], source, *copy.args[2:])


def _origin(write: Node) -> Node | None:
    """The tensor with a gradient that a write under ``no_grad`` changes. Outside the region it keeps its gradient."""
    target: Any = write.args[0]
    if _region(write) is None:
        return None
    if target.target is aten.detach.default and _region(target) is not None:
        origin: Node = target.args[0]
        return origin
    return Meta.written_tensor.get(target)  # set by an earlier write


def _region(node: Node) -> str | None:
    return Meta.no_grad.get(node)


def _functionalize(graph: Graph, write: Node) -> None:
    """Replace a write by a new value of the tensor, of the bases of its views, and of the other views of these."""
    destination: Any = write.args[0]
    chain = [destination]  # from the written view to the tensor that it is a view of
    while returns_view(chain[-1]):
        chain.append(view_base(chain[-1]))
    target = functional_form(write)
    if chain[-1].op == "get_attr" or target is None:
        return  # a buffer, or a write without a functional form: to_functional raises
    position = {node: i for i, node in enumerate(graph.nodes)}
    late = {node for node, i in position.items() if i > position[write]}
    early = {node for node, i in position.items() if i < position[write]}
    with graph.inserting_before(write):
        value = _written_value(graph, write, target)
        new = {destination: value}
        for view, base in itertools.pairwise(chain):
            new[base] = _updated_base(graph, write, view, base, new[view])
        if any(is_write(node) and view_root(node.args[0]) is chain[-1] for node in late):
            # Later writes must find views of the new base again.
            for view, base in reversed(list(itertools.pairwise(chain))):
                new[view] = _repeat_view(graph, write, view, base, new[base])
        _repeat_other_views(graph, write, chain[-1], early, new)
        outside, origin = new[destination], _origin(write)
        if origin is not None:
            meta(value).written_tensor = origin
            outside = new[origin] if origin in new else _call(graph, write, ops.straight, (origin, value))
    for user in list(write.users):
        user.replace_input_with(write, new[destination] if _region(user) == _region(write) else outside)
    for old, replacement in new.items():
        for user in [user for user in old.users if user in late]:
            user.replace_input_with(old, replacement)
    graph.erase_node(write)
    for node in dict.fromkeys((*new.values(), outside)):
        _erase_unused(graph, node)


def _written_value(graph: Graph, write: Node, target: Any) -> Node:
    """The value that a write stores, computed by its functional form."""
    if target is aten.clone.default:
        return _call(graph, write, target, write.args[1:2] if write.target is aten.copy_.default else write.args)
    value = _call(graph, write, target, write.args, write.kwargs)
    if may_promote(write):
        destination: Any = write.args[0]
        meta(value).in_place = True
        meta(value).val = meta(value).val.to(meta(destination).val.dtype)
    return value


def _repeat_other_views(graph: Graph, write: Node, root: Node, early: set[Node], new: dict[Node, Node]) -> None:
    """Take the views of ``root`` that existed before the write of the new values."""
    pending = [root]
    while pending:
        base = pending.pop()
        for user in list(base.users):
            if user in early and returns_view(user) and view_base(user) is base:
                if user not in new:
                    new[user] = _repeat_view(graph, write, user, base, new[base])
                pending.append(user)


def _erase_unused(graph: Graph, node: Node) -> None:
    """Remove an inserted node that has no users, and then its operands."""
    if node.users or node.op != "call_function" or not Meta.rebuilt.is_set(node):
        return
    operands = list(node.all_input_nodes)
    graph.erase_node(node)
    for operand in operands:
        _erase_unused(graph, operand)


def _source(node: Node) -> str:
    lines = (Meta.stack_trace.get(node) or "the model").strip().splitlines()
    return " ".join(line.strip() for line in lines[-2:])


# ------------------------------------------------------------------------------------- the inverse of each view


def _updated_base(graph: Graph, write: Node, view: Node, base: Node, new: Node) -> Node:
    """The value of ``base`` after its ``view`` has become ``new``."""
    is_copy = view.target in VIEW_OR_COPY and not shares_memory(view)
    invert = _identity if is_write(view) or view.target is ops.straight else _INVERSES.get(view.target)
    value = invert(_Builder(graph, write), view, base, new) if invert and not is_copy else None
    if value is None:
        raise CaptureError(
            f"{_source(write)}: {write.target} writes in place into {view.target} of a tensor that is read elsewhere, "
            "which distfx cannot follow. Write it out of place (y = f(x) instead of f_(x))."
        )
    return value


class _Builder:
    """Inserts calls in place of a write."""

    def __init__(self, graph: Graph, write: Node) -> None:
        self.graph, self.write = graph, write

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return _call(self.graph, self.write, target, args, kwargs)

    def size(self, tensor: Node, dim: int) -> Any:
        """The size of a dim: a number, or a node that computes it."""
        known = meta(tensor).val.shape[dim]
        return known if isinstance(known, int) else self(aten.sym_size.int, tensor, dim)


def _identity(call: _Builder, view: Node, base: Node, new: Node) -> Node:
    return new


def _keep_gradient(call: _Builder, view: Node, base: Node, new: Node) -> Node:
    return call(ops.straight, base, new)


def _reshape_back(call: _Builder, view: Node, base: Node, new: Node) -> Node:
    return call(aten.reshape.default, new, [call.size(base, dim) for dim in range(meta(base).val.dim())])


def _transpose_back(call: _Builder, view: Node, base: Node, new: Node) -> Node:
    return call(view.target, new, *view.args[1:])


def _permute_back(call: _Builder, view: Node, base: Node, new: Node) -> Node:
    dims: Any = view.args[1]
    order = [dim % len(dims) for dim in dims]
    return call(aten.permute.default, new, [order.index(dim) for dim in range(len(order))])


def _insert_selection(call: _Builder, view: Node, base: Node, new: Node) -> Node | None:
    values = arguments(view)
    dim, index = values["dim"] % meta(base).val.dim(), values["index"]
    if not isinstance(index, int):
        return None
    piece = call(aten.unsqueeze.default, new, dim)
    return _insert_piece(call, base, piece, dim, index, _END if index == -1 else index + 1)


def _insert_slice(call: _Builder, view: Node, base: Node, new: Node) -> Node | None:
    values = arguments(view)
    dim, step = values["dim"] % meta(base).val.dim(), values["step"]
    start, end = values["start"] or 0, _END if values["end"] is None else values["end"]
    if step == 1:
        return _insert_piece(call, base, new, dim, start, end)
    return _insert_strided(call, base, new, dim, start, end, step)


def _insert_piece(call: _Builder, base: Node, piece: Node, dim: int, start: Any, end: Any) -> Node:
    """``base`` with ``[start, end)`` of ``dim`` replaced by ``piece``."""
    before = call(aten.slice.Tensor, base, dim, 0, start)
    after = call(aten.slice.Tensor, base, dim, end, _END)
    pieces = [part for part in (before, piece, after) if not statically_known_true(meta(part).val.shape[dim] == 0)]
    return call(aten.cat.default, pieces, dim) if len(pieces) > 1 else (*pieces, piece)[0]


def _insert_strided(call: _Builder, base: Node, piece: Node, dim: int, start: Any, end: Any, step: int) -> Node | None:
    """``base`` with every ``step``-th position of ``dim`` from ``start`` on replaced by ``piece``."""
    if not isinstance(start, int) or start < 0 or end != _END:
        return None
    value = meta(base).val
    indices = call(aten.arange.default, call.size(base, dim), device=value.device)
    offsets = call(aten.sub.Tensor, indices, start)
    source_indices = call(aten.div.Scalar_mode, offsets, step, rounding_mode="floor")
    is_written = call(aten.eq.Scalar, call(aten.remainder.Scalar, offsets, step), 0)
    if start:
        is_written = call(aten.logical_and.default, is_written, call(aten.ge.Scalar, offsets, 0))
    spread = call(aten.index_select.default, piece, dim, call(aten.clamp.default, source_indices, 0))
    mask = call(aten.reshape.default, is_written, [-1 if i == dim else 1 for i in range(value.dim())])
    return call(aten.where.self, mask, spread, base)


_Inverse = Callable[[_Builder, Node, Node, Node], Node | None]
_INVERSES: Mapping[Any, _Inverse] = {
    aten.detach.default: _keep_gradient,
    aten.permute.default: _permute_back,
    aten.select.int: _insert_selection,
    aten.slice.Tensor: _insert_slice,
    **dict.fromkeys(_IDENTITIES, _identity),
    **dict.fromkeys(_RESHAPES, _reshape_back),
    **dict.fromkeys(_TRANSPOSES, _transpose_back),
}
"""For each view operator how the base follows from a new value of the view."""


def _repeat_view(graph: Graph, write: Node, view: Node, base: Node, new: Node) -> Node:
    """The same view of a new base."""
    if is_write(view) or view.target is ops.straight:  # the tensor itself
        return new
    args, kwargs = map_arg((view.args, view.kwargs), lambda n: new if n is base else n)
    repeated = _call(graph, write, view.target, args, kwargs)
    inherit(repeated, view, Meta.shares_memory)
    return repeated


def _call(graph: Graph, write: Node, target: Any, args: Any, kwargs: Any = None) -> Node:
    """A call in place of ``write``, with the value that it has in the example."""
    node = graph.call_function(target, tuple(args), dict(kwargs or {}))
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: meta(n).val)
    inherit(node, write, Meta.stack_trace, Meta.nn_module_stack, Meta.autocast, Meta.no_grad)
    meta(node).rebuilt = True
    with meta(write).val.fake_mode:
        meta(node).val = args[1] if target is ops.straight else target(*args, **kwargs)
    return node
