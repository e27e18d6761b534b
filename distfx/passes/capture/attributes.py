"""The plain attributes of a model: the captured graph uses the values they had at capture time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distfx.ir.torch_private import version_of

__all__ = ["AttributeSnapshot", "preserve_attributes"]

_PLAIN = (int, float, bool, str)


def _attributes(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The plain attributes of all modules: the full name, the dict that holds the attribute, and its key there."""
    for path, module in model.named_modules():
        for name in list(vars(module)):
            if name != "training" and not name.startswith("_"):
                yield f"{path}.{name}" if path else name, vars(module), name


class AttributeSnapshot:
    """The numbers, booleans and strings among a model's attributes, which a graph may have fixed."""

    def __init__(self, model: nn.Module) -> None:
        self._values = {
            name: (owner, key, owner[key]) for name, owner, key in _attributes(model) if type(owner[key]) in _PLAIN
        }

    def ignore(self, name: str) -> None:
        """Do not report changes of an attribute any more."""
        self._values.pop(name, None)

    def changes(self) -> list[str]:
        """Each attribute that has another value now, with both values."""
        return [
            f"{name} = {old!r}, now {new!r}"
            for name, (owner, key, old) in self._values.items()
            if (new := owner.get(key)) is not old and (type(new) is not type(old) or new != old)
        ]


@dataclass
class _SavedAttribute:
    """An attribute of a module at capture time: the object, and a copy of its content if it can be modified."""

    value: Any
    version: int | None
    content: Any

    @classmethod
    def of(cls, value: Any) -> _SavedAttribute:
        if isinstance(value, torch.Tensor) and not value.is_inference():  # inference tensors have no version
            return cls(value, version_of(value), value.detach().clone())
        return cls(value, None, copy.copy(value) if type(value) in (list, dict, set) else None)

    def equals(self, current: Any) -> bool:
        if current is not self.value:  # equal numbers may be different objects
            return type(current) in _PLAIN and type(current) is type(self.value) and bool(current == self.value)
        if self.version is not None:
            return version_of(current) == self.version
        return self.content is None or _identities(current) == _identities(self.content)

    def restore(self, owner: dict[str, Any], name: str) -> None:
        is_unchanged = self.equals(owner.get(name))
        owner[name] = self.value
        if is_unchanged:
            return
        if self.version is not None:
            with torch.no_grad():
                self.value.copy_(self.content)
        elif self.content is not None:
            self.value.clear()
            self.value.extend(self.content) if isinstance(self.value, list) else self.value.update(self.content)


def _identities(container: Any) -> list[int]:
    """The ids of the objects in a list, dict or set. The objects themselves may not support comparison."""
    ids = [id(item) for item in container]
    if isinstance(container, dict):
        return ids + [id(item) for item in container.values()]
    return ids if isinstance(container, list) else sorted(ids)  # a copy of a set may have another order


@contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[list[str]]:
    """Restore the attributes that ``forward`` modifies. Yields a list that receives their names."""
    saved = {key: (owner, name, _SavedAttribute.of(owner[name])) for key, owner, name in _attributes(model)}
    modified: list[str] = []

    def compare(*_: Any) -> None:
        for key, owner, name in _attributes(model):
            if key not in modified and (key not in saved or not saved[key][2].equals(owner[name])):
                modified.append(key)

    hook = model.register_forward_hook(compare)
    try:
        yield modified
    finally:
        hook.remove()
        for key, owner, name in list(_attributes(model)):
            if key not in saved:
                del owner[name]
        for owner, name, attribute in saved.values():
            attribute.restore(owner, name)
