"""The state of one mode of a parallel module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from distfx.passes.capture.attributes import AttributeSnapshot
from distfx.passes.pipeline import BoundGraph, Compiled

__all__ = ["LruCache", "ModeState"]

V = TypeVar("V")


@dataclass
class ModeState:
    """Everything that belongs to one mode, that is to one combination of train and eval flags of the modules."""

    graphs: list[Compiled] = field(default_factory=list)
    """The compiled graphs; more than one if the model or an operator branches on sizes or on constant arguments."""
    agreed: int = 0
    """How many of ``graphs`` all ranks have compared."""
    valid_at_one: dict[tuple[int, frozenset[Any]], bool] = field(default_factory=dict)
    """Whether a graph, by its index, is valid if these of its symbols are one."""
    attributes: AttributeSnapshot | None = None
    """The plain attributes of the model when the first graph was captured."""
    is_planned_for_call: bool = False
    """Whether the first graph was planned for the sizes of a call, and not for guessed ones."""
    inputs_compared: bool = False
    """Whether the values of plain inputs were compared across ranks, which the first call does."""
    latest: int = 0
    """The index of the graph that the last call used."""
    last_call: BoundGraph | None = None


class LruCache(Generic[V]):
    """A mapping that drops the least recently used entry when it is full."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable) -> V | None:
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: Hashable, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self.capacity:
            self._entries.popitem(last=False)
