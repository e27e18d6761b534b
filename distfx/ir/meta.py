"""Typed access to ``node.meta``: every key that distfx stores on a node, with its type and the pass that sets it.

>>> from torch.fx import Graph
>>> node = Graph().placeholder("x")
>>> meta(node).shape = (8, 3)
>>> meta(node).shape, node.meta["shape"], Meta.layout.get(node)
((8, 3), (8, 3), None)
>>> meta(node).layout
Traceback (most recent call last):
...
KeyError: "node x has no 'layout'"

``meta(node).layout`` reads or writes a key that must be there. ``Meta.layout.get(node)`` is ``None`` if it is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar, overload

import torch
from torch.fx import Node

from distfx.ir.layout import Layout
from distfx.ir.moves import BoundMove, Move
from distfx.ir.symbolic import Size

__all__ = ["Field", "Meta", "inherit", "meta"]

T = TypeVar("T")


class Field(Generic[T]):
    """One key of ``node.meta``. The key is the name of the attribute."""

    key: str

    def __set_name__(self, owner: type, name: str) -> None:
        self.key = name

    @overload
    def __get__(self, view: None, owner: type) -> Field[T]: ...

    @overload
    def __get__(self, view: Meta, owner: type) -> T: ...

    def __get__(self, view: Meta | None, owner: type) -> Field[T] | T:
        if view is None:
            return self
        try:
            value: T = view.node.meta[self.key]
        except KeyError:
            raise KeyError(f"node {view.node.name} has no {self.key!r}") from None
        return value

    def __set__(self, view: Meta, value: T) -> None:
        view.node.meta[self.key] = value

    def get(self, node: Node) -> T | None:
        """The value, or ``None`` if the node has none."""
        return node.meta.get(self.key)

    def is_set(self, node: Node) -> bool:
        return self.key in node.meta


class Meta:
    """A typed view of one node's ``meta``."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node

    # Set by torch.export
    val = Field[Any]()
    """The fake tensor, or tuple of them, that the call returned during export."""
    stack_trace = Field[str]()
    nn_module_stack = Field[Mapping[str, tuple[str, Any]]]()

    # Set while the exported graph is made functional
    no_grad = Field[str]()
    """The ``torch.no_grad`` region that the node comes from."""
    shares_memory = Field[bool]()
    """Whether the result aliases its operand. Recorded before operands are replaced."""
    written_tensor = Field[Node]()
    """The tensor with a gradient that a write under ``no_grad`` modifies."""
    rebuilt = Field[bool]()
    """Set on nodes that replace a write through a view."""
    in_place = Field[bool]()
    """The model writes the result over the first operand, so the result has that operand's dtype."""
    autocast = Field[bool]()
    """False if the model disables autocast around this call."""

    # Set by capture
    path = Field[str]()
    """The path of the module that makes the call."""
    source = Field[tuple[str, int, str] | None]()
    """File, line number and text of the line in the user's model."""
    shape = Field[tuple[Size, ...]]()
    """The global shape in the input's symbols; a tuple of shapes if ``multiple``."""
    dtype = Field[torch.dtype]()
    multiple = Field[bool]()
    """Set if the call returns several tensors."""

    # Set by the planning passes
    statistics_axes = Field[frozenset[str] | None]()
    """The axes over which a batch norm computes its statistics; ``None`` for all."""
    decision = Field[Any]()
    """The :class:`distfx.planner.decisions.Decision` of an operator."""

    # Set by insert
    layout = Field[Layout]()
    move = Field[Move]()
    """The communication that an inserted node performs."""
    owner = Field[str]()
    """The name of the operator that a move serves."""
    needs = Field[tuple[tuple[str, Layout], ...]]()
    """The operands of an operator by name, with the layouts it was planned for."""
    written_layout = Field[Layout]()
    """Of ``refresh``: the layout of the slice that each rank wrote."""

    # Set by localize
    is_product = Field[bool]()
    """Whether autocast lowers the call, as it does sums of products."""
    refuses_empty = Field[bool]()
    """Whether ATen may refuse the call on empty tensors."""

    # Set by bind
    local_shape = Field[tuple[int, ...]]()
    """The shape of this rank's part, including halos."""
    part_shape = Field[tuple[int, ...]]()
    """The shape of this rank's part by its layout, to verify a move's result."""
    transfers = Field[BoundMove]()
    """The forward and backward communication of a move at this shape."""

    # Set by the passes that prepare a bound graph for execution
    channels_last = Field[bool]()
    parameter = Field[str]()
    """The parameter or buffer that the node reads."""


def meta(node: Node) -> Meta:
    """The typed view of ``node.meta``."""
    return Meta(node)


def inherit(node: Node, source: Node, *fields: Field[Any]) -> None:
    """Copy ``fields``, as far as ``source`` has them, to ``node``."""
    node.meta |= {field.key: source.meta[field.key] for field in fields if field.is_set(source)}
