"""In-place writes of the captured graph: made functional where nothing else sees the memory, refused where it does."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from distfx.errors import CaptureError
from distfx.passes.nodes import arguments, aten, describe

__all__ = ["functional", "results_apart", "same_tensor", "writes"]


_WITHOUT_NAMESAKE = {aten.bernoulli_.float: aten.bernoulli.p, aten.normal_.default: aten.normal_functional.default}
"""Operators that write in place, and whose functional form has another name."""


def _gives_view(node: Node) -> bool:
    """Whether the value of a captured call shares memory with its first argument: views, and parts of a split."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and _gives_view(node.args[0])
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    return any(value.alias_info is not None for value in returns)


def writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def same_tensor(node: Any) -> list[Node]:
    """The nodes of the captured graph that stand for the very tensor of ``node``: results of writes into it."""
    same = [node]
    while node.op == "call_function" and writes(node):
        node = node.args[0]
        same.append(node)
    return same


def _seen_elsewhere(write: Node) -> bool:
    """Whether memory that ``write`` changes is read later through another view of it."""
    nodes = list(write.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    root: Any = write.args[0]
    parts: dict[Node, Any] = {}  # the splits on the way, and the part that was taken
    while _gives_view(root):
        if root.target is operator.getitem:
            parts[root.args[0]] = root.args[1]
        root = root.args[0]
    own = set(same_tensor(write.args[0]))
    aliases, found = {root}, [root]
    while found:
        for user in found.pop().users:
            disjoint = user.target is operator.getitem and parts.get(user.args[0], user.args[1]) != user.args[1]
            if user not in aliases and place[user] < place[write] and _gives_view(user) and not disjoint:
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


def functional(node: Node, old: Node) -> Node | None:
    """The node without side effects. ``None`` for a write into a buffer, which stays."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return node
    if target in (aten.batch_norm.default, aten.instance_norm.default):
        return node
    name = target._schema.name.split("::")[1]
    root = old.args[0] if old.args else None
    while isinstance(root, Node) and _gives_view(root):
        root = root.args[0]
    if isinstance(root, Node) and root.op == "get_attr":
        if root not in same_tensor(old.args[0]):
            raise CaptureError(
                f"{describe(node)}: {target} writes into a part of {root.target}, which distfx cannot follow. "
                "Write the whole buffer (self.buffer.copy_(...))."
            )
        return None
    packet = getattr(aten, name[:-1], None) if name.endswith("_") else None
    overload = getattr(packet, target._overloadname, None) if packet is not None else None
    if target in _WITHOUT_NAMESAKE:  # the two have the same arguments, but not the same defaults
        overload, given = _WITHOUT_NAMESAKE[target], arguments(node)
        node.args = tuple(given[a.name] for a in target._schema.arguments if not a.kwarg_only)
    if overload is None or _seen_elsewhere(old):
        raise CaptureError(
            f"{describe(node)}: {target} writes in place into a tensor that is read elsewhere, which distfx cannot "
            "follow. Write it out of place (y = f(x) instead of f_(x))."
        )
    node.target = overload
    node._rename(name[:-1])
    return node
