"""In-place writes of the captured graph: made functional where nothing else sees the memory, refused where it does."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from distfx.errors import CaptureError
from distfx.ir import ops
from distfx.ir.meta import Meta, meta
from distfx.ir.nodes import arguments, aten, describe

__all__ = [
    "MAYBE_COPIES",
    "UNSAID",
    "functional",
    "functional_form",
    "gives_view",
    "promotes",
    "read_elsewhere",
    "results_apart",
    "same_tensor",
    "shares_memory",
    "viewed",
    "writes",
    "written_whole",
]


_WITHOUT_NAMESAKE = {aten.bernoulli_.float: aten.bernoulli.p, aten.normal_.default: aten.normal_functional.default}
"""Operators that write in place, and whose functional form has another name."""


UNSAID = (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)
"""Operators that may give their argument itself, of which their schema says nothing."""


MAYBE_COPIES = (
    aten.reshape.default,
    aten.reshape_as.default,
    aten.flatten.using_ints,
    aten.contiguous.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
)
"""Operators that give a view where they can, else a copy."""


def gives_view(node: Node) -> bool:
    """Whether the value of a captured call shares memory with its first argument: views, and parts of a split."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and gives_view(node.args[0])
    if node.target is ops.straight:
        return True
    if node.target in UNSAID and isinstance(node.args[0], Node):
        return not arguments(node)["train"] or not arguments(node)["p"]
    if node.target is aten.einsum.default:
        return shares_memory(node)
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    if not any(value.alias_info is not None for value in returns):
        return False
    return node.target not in MAYBE_COPIES or Meta.no_grad.is_set(node) or shares_memory(node)


def shares_memory(node: Node) -> bool:
    """Whether a value and what it was made of were one in the example. Not known across the border of a region."""
    if Meta.shares_memory.is_set(node):
        return meta(node).shares_memory
    value, source = Meta.val.get(node), Meta.val.get(viewed(node))
    both = isinstance(value, torch.Tensor) and isinstance(source, torch.Tensor)
    return both and bool(torch._C._is_alias_of(value, source))  # type: ignore[attr-defined]


def viewed(node: Node) -> Any:
    """What a view is a view of."""
    if node.target is aten.einsum.default:
        operands: Any = node.args[1]
        return operands[0]
    return node.args[1] if node.target is ops.straight else node.args[0]


def writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def same_tensor(node: Any) -> list[Node]:
    """The nodes of the captured graph that stand for the very tensor of ``node``: results of writes into it."""
    same = [node]
    while node.op == "call_function" and writes(node):
        node = node.args[0]
        same.append(node)
    return same


def written_whole(node: Any) -> Node | None:
    """The buffer all of which a write into ``node`` changes, be it through ``detach``."""
    while isinstance(node, Node) and (writes(node) or node.target is aten.detach.default):
        node = node.args[0]
    return node if isinstance(node, Node) and node.op == "get_attr" else None


def read_elsewhere(write: Node) -> bool:
    """Whether memory that ``write`` changes is read later through another view of it."""
    nodes = list(write.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    root: Any = write.args[0]
    parts: dict[Node, Any] = {}  # the splits on the way, and the part that was taken
    while gives_view(root):
        if root.target is operator.getitem:
            parts[root.args[0]] = root.args[1]
        root = viewed(root)
    own = set(same_tensor(write.args[0]))
    aliases, found = {root}, [root]
    while found:
        for user in found.pop().users:
            disjoint = user.target is operator.getitem and parts.get(user.args[0], user.args[1]) != user.args[1]
            if user not in aliases and place[user] < place[write] and gives_view(user) and not disjoint:
                aliases.add(user)
                found.append(user)
    splits = {node for node in aliases if node in parts}
    return any(place[user] > place[write] for alias in aliases - own - splits for user in alias.users)


def results_apart(graph: Graph) -> None:
    """``f(x, out=y)`` becomes ``f(x)`` and a copy into ``y``."""
    for node in list(graph.nodes):
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or "out" not in node.kwargs:
            continue
        names = [argument.name for argument in target._schema.arguments if argument.name != "out"]
        plain = [getattr(target.overloadpacket, name) for name in target.overloadpacket.overloads()]
        fitting = [
            op for op in plain if [a.name for a in op._schema.arguments] == names and not op._schema.is_mutable
            and [a.type for a in op._schema.arguments] == [a.type for a in target._schema.arguments][: len(names)]
        ]  # fmt: skip
        if not fitting:
            continue
        place = node.kwargs["out"]
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
        node.target = fitting[0]
        with graph.inserting_after(node):
            copy = graph.call_function(aten.copy_.default, (place, node))
        copy.meta = dict(node.meta)


def functional_form(node: Node) -> Any:
    """The operator that gives what this one writes; ``None`` if there is none."""
    target: Any = node.target
    if target is aten.copy_.default:
        return aten.clone.default  # of what is copied
    name = target._schema.name.split("::")[1]
    packet = getattr(aten, name[:-1], None) if name.endswith("_") else None
    if target in _WITHOUT_NAMESAKE or packet is None:
        return _WITHOUT_NAMESAKE.get(target)
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    fitting = [op for op in overloads if not op._schema.is_mutable and _takes(op) == _takes(target)]
    return fitting[0] if fitting else getattr(packet, target._overloadname, None)


def _takes(op: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]


def promotes(write: Node) -> bool:
    """Whether what a write computes may have another dtype than what it is written into."""
    return len(write.all_input_nodes) > 1


def _trains(root: Node) -> bool:
    """Whether what a captured graph holds here is a parameter that has a gradient."""
    held = dict(root.graph.owning_module.named_parameters(remove_duplicate=False))  # type: ignore[union-attr]
    return str(root.target) in held and held[str(root.target)].requires_grad


def functional(node: Node, old: Node) -> Node | None:
    """The node without side effects. ``None`` for a write into a buffer, which stays."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return node
    if target in (aten.batch_norm.default, aten.instance_norm.default):
        return node
    name = target._schema.name.split("::")[1]
    root = old.args[0] if old.args else None
    while isinstance(root, Node) and gives_view(root):
        root = viewed(root)
    if isinstance(root, Node) and root.op == "get_attr":
        if written_whole(old.args[0]) is not root:
            raise CaptureError(
                f"{describe(node)}: {target} writes into a part of {root.target}, which distfx cannot follow. "
                "Write the whole buffer (self.buffer.copy_(...))."
            )
        if _trains(root):
            raise CaptureError(
                f"{describe(node)}: {target} writes into {root.target}, a parameter that is trained, whose gradient "
                "would be lost. Change it between the steps (on net's parameters), or compute with a changed copy."
            )
        return None
    overload = functional_form(node)
    if target in _WITHOUT_NAMESAKE:  # the two have the same arguments, but not the same defaults
        given = arguments(node)
        node.args = tuple(given[a.name] for a in target._schema.arguments if not a.kwarg_only)
    if overload is None or read_elsewhere(old):
        raise CaptureError(
            f"{describe(node)}: {target} writes in place into a tensor that is read elsewhere, which distfx cannot "
            "follow. Write it out of place (y = f(x) instead of f_(x))."
        )
    if target is aten.copy_.default:
        node.args, node.kwargs = (node.args[1],), {}
    elif promotes(node):
        meta(node).in_place = True
    node.target = overload
    node._rename(name[:-1])
    return node
