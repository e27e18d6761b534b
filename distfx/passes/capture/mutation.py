"""In-place operators become functional ones if no other node reads the memory; otherwise they are rejected.

Writes into buffers of the model stay.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from distfx.errors import CaptureError
from distfx.ir import ops
from distfx.ir.meta import Meta, meta
from distfx.ir.nodes import arguments, aten, describe
from distfx.ir.torch_private import OpOverload, is_mutable, rename, schema_of, shares_storage

__all__ = [
    "UNDECLARED_ALIASES",
    "VIEW_OR_COPY",
    "functional_form",
    "is_read_through_alias",
    "is_write",
    "may_promote",
    "nodes_of_tensor",
    "replace_out_arguments",
    "returns_view",
    "shares_memory",
    "to_functional",
    "view_base",
    "view_root",
    "written_buffer",
]


_FUNCTIONAL_NAMES = {aten.bernoulli_.float: aten.bernoulli.p, aten.normal_.default: aten.normal_functional.default}
"""In-place operators whose functional form has another name."""


UNDECLARED_ALIASES = (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)
"""Operators that may return their argument itself, although their schema does not say so."""


VIEW_OR_COPY = (
    aten.reshape.default,
    aten.reshape_as.default,
    aten.flatten.using_ints,
    aten.contiguous.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
)
"""Operators that return a view if they can, and a copy otherwise."""


# ------------------------------------------------------------------------------------------------------ aliases


def returns_view(node: Node) -> bool:
    """Whether the result of a captured call shares memory with its first argument. Outputs of a split do."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and returns_view(node.args[0])
    if node.target is ops.straight:
        return True
    if node.target in UNDECLARED_ALIASES and isinstance(node.args[0], Node):
        return not arguments(node)["train"] or not arguments(node)["p"]
    if node.target is aten.einsum.default:
        return shares_memory(node)
    if not isinstance(node.target, OpOverload):
        return False
    if not any(result.alias_info is not None for result in schema_of(node.target).returns):
        return False
    return node.target not in VIEW_OR_COPY or Meta.no_grad.is_set(node) or shares_memory(node)


def shares_memory(node: Node) -> bool:
    """Whether a value and its base shared memory in the example. Not known across the border of a region."""
    if Meta.shares_memory.is_set(node):
        return meta(node).shares_memory
    value, base = Meta.val.get(node), Meta.val.get(view_base(node))
    return isinstance(value, torch.Tensor) and isinstance(base, torch.Tensor) and shares_storage(value, base)


def view_base(node: Node) -> Any:
    """The tensor that a view was taken of."""
    if node.target is aten.einsum.default:
        operands: Any = node.args[1]
        return operands[0]
    return node.args[1] if node.target is ops.straight else node.args[0]


def view_root(node: Any) -> Any:
    """The tensor at the end of a chain of views."""
    while isinstance(node, Node) and returns_view(node):
        node = view_base(node)
    return node


# ------------------------------------------------------------------------------------------------------- writes


def is_write(node: Node) -> bool:
    return is_mutable(node.target)


def nodes_of_tensor(node: Any) -> list[Node]:
    """The nodes that stand for the same tensor as ``node``: an in-place operator returns its argument."""
    nodes = [node]
    while node.op == "call_function" and is_write(node):
        node = node.args[0]
        nodes.append(node)
    return nodes


def written_buffer(node: Any) -> Node | None:
    """The buffer that a write into ``node`` changes as a whole, also through ``detach``; else ``None``."""
    while isinstance(node, Node) and (is_write(node) or node.target is aten.detach.default):
        node = node.args[0]
    return node if isinstance(node, Node) and node.op == "get_attr" else None


def is_read_through_alias(write: Node) -> bool:
    """Whether memory that ``write`` changes is read later through another view of it."""
    position = {node: i for i, node in enumerate(write.graph.nodes)}
    root: Any = write.args[0]
    outputs: dict[Node, Any] = {}  # for each split on the way to the root, the index of the output that was taken
    while returns_view(root):
        if root.target is operator.getitem:
            outputs[root.args[0]] = root.args[1]
        root = view_base(root)
    own = set(nodes_of_tensor(write.args[0]))
    aliases, pending = {root}, [root]
    while pending:
        for user in pending.pop().users:
            is_disjoint = user.target is operator.getitem and outputs.get(user.args[0], user.args[1]) != user.args[1]
            is_earlier = position[user] < position[write]
            if user not in aliases and is_earlier and returns_view(user) and not is_disjoint:
                aliases.add(user)
                pending.append(user)
    splits = {node for node in aliases if node in outputs}
    return any(position[user] > position[write] for alias in aliases - own - splits for user in alias.users)


def replace_out_arguments(graph: Graph) -> None:
    """Replace ``f(x, out=y)`` by ``f(x)`` and a copy into ``y``."""
    for node in list(graph.nodes):
        target = node.target
        if not isinstance(target, OpOverload) or "out" not in node.kwargs:
            continue
        signature = [(a.name, a.type) for a in schema_of(target).arguments if a.name != "out"]
        overloads = (getattr(target.overloadpacket, name) for name in target.overloadpacket.overloads())
        functional = next(
            (
                op
                for op in overloads
                if not is_mutable(op) and [(a.name, a.type) for a in schema_of(op).arguments] == signature
            ),
            None,
        )
        if functional is None:
            continue
        destination = node.kwargs["out"]
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
        node.target = functional
        with graph.inserting_after(node):
            copy = graph.call_function(aten.copy_.default, (destination, node))
        copy.meta = dict(node.meta)


def functional_form(node: Node) -> Any:
    """The operator that returns the value that this one writes; ``None`` if there is none."""
    target: Any = node.target
    if target is aten.copy_.default:
        return aten.clone.default  # of the source
    name = _operator_name(target)
    packet = getattr(aten, name[:-1], None) if name.endswith("_") else None
    if target in _FUNCTIONAL_NAMES or packet is None:
        return _FUNCTIONAL_NAMES.get(target)
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    matching = [op for op in overloads if not is_mutable(op) and _signature(op) == _signature(target)]
    return matching[0] if matching else getattr(packet, schema_of(target).overload_name or "default", None)


def _operator_name(target: OpOverload) -> str:
    """``add_`` for ``aten::add_``."""
    return schema_of(target).name.split("::")[1]


def _signature(op: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema_of(op).arguments]


def may_promote(write: Node) -> bool:
    """Whether the value that is written may have another dtype than its destination."""
    return len(write.all_input_nodes) > 1


def _is_trained(root: Node) -> bool:
    """Whether a ``get_attr`` node reads a parameter that has a gradient."""
    parameters = dict(root.graph.owning_module.named_parameters(remove_duplicate=False))  # type: ignore[union-attr]
    return str(root.target) in parameters and parameters[str(root.target)].requires_grad


def to_functional(node: Node, exported: Node) -> Node | None:
    """Make ``node``, the copy of an ``exported`` one, functional in place. ``None`` for a write into a buffer."""
    target = node.target
    if not is_mutable(target) or target in (aten.batch_norm.default, aten.instance_norm.default):
        return node
    assert isinstance(target, OpOverload)
    root = view_root(exported.args[0] if exported.args else None)
    if isinstance(root, Node) and root.op == "get_attr":
        _check_buffer_write(node, exported, root)
        return None
    overload = functional_form(node)
    if target in _FUNCTIONAL_NAMES:  # the two have the same arguments, but not the same defaults
        values = arguments(node)
        node.args = tuple(values[a.name] for a in schema_of(target).arguments if not a.kwarg_only)
    if overload is None or is_read_through_alias(exported):
        raise CaptureError(
            f"{describe(node)}: {target} writes in place into a tensor that is read elsewhere, which distfx cannot "
            "follow. Write it out of place (y = f(x) instead of f_(x))."
        )
    if target is aten.copy_.default:
        node.args, node.kwargs = (node.args[1],), {}
    elif may_promote(node):
        meta(node).in_place = True
    node.target = overload
    rename(node, _operator_name(target)[:-1])
    return node


def _check_buffer_write(node: Node, exported: Node, root: Node) -> None:
    """Raise unless ``node`` writes a whole tensor of the model that is not trained."""
    if written_buffer(exported.args[0]) is not root:
        raise CaptureError(
            f"{describe(node)}: {node.target} writes into a part of {root.target}, which distfx cannot follow. "
            "Write the whole buffer (self.buffer.copy_(...))."
        )
    if _is_trained(root):
        raise CaptureError(
            f"{describe(node)}: {node.target} writes into {root.target}, a parameter that is trained, so its gradient "
            "would be lost. Change it between the steps (on net's parameters), or compute with a changed copy."
        )
