"""The plain attributes of a model: the captured graph uses the values they had at capture time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["AttributeSnapshot", "attributes_kept"]

_PLAIN = (int, float, bool, str)


def _attributes(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The plain attributes of a model's modules: the full name, the dict that holds it, and the key there."""
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
            if (new := owner.get(key)) is not old and new != old
        ]


@dataclass
class _Kept:
    """An attribute of a module as it was: the object, and what was in it."""

    value: Any
    version: int | None
    content: Any

    @classmethod
    def of(cls, value: Any) -> _Kept:
        if isinstance(value, torch.Tensor) and not value.is_inference():  # which counts no changes
            return cls(value, value._version, value.detach().clone())
        return cls(value, None, copy.copy(value) if type(value) in (list, dict, set) else None)

    def is_same(self, now: Any) -> bool:
        if now is not self.value:  # numbers may be made anew
            return type(now) in _PLAIN and type(now) is type(self.value) and bool(now == self.value)
        if self.version is not None:
            return bool(now._version == self.version)
        return self.content is None or _things(now) == _things(self.content)

    def restore(self, owner: dict[str, Any], name: str) -> None:
        same, owner[name] = self.is_same(owner.get(name)), self.value
        if not same and self.version is not None:
            with torch.no_grad():
                self.value.copy_(self.content)
        elif not same and self.content is not None:
            self.value.clear()
            self.value.extend(self.content) if isinstance(self.value, list) else self.value.update(self.content)


def _things(container: Any) -> list[int]:
    """What a list, dict or set holds: the very objects, which may not compare."""
    held = [id(each) for each in container]
    if isinstance(container, dict):
        return held + [id(each) for each in container.values()]
    return held if isinstance(container, list) else sorted(held)  # a copy of a set may have another order


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[list[str]]:
    """Counters and the like that ``forward`` changes are as they were in the end; gives their names then."""
    kept = {key: (owner, name, _Kept.of(owner[name])) for key, owner, name in _attributes(model)}
    found: list[str] = []

    def look(*_: Any) -> None:
        now = {key: owner[name] for key, owner, name in _attributes(model)}
        changed = [key for key, value in now.items() if key not in kept or not kept[key][2].is_same(value)]
        found.extend(key for key in changed if key not in found)

    seen = model.register_forward_hook(look)
    try:
        yield found
    finally:
        seen.remove()
        for key, owner, name in list(_attributes(model)):
            if key not in kept:
                del owner[name]
        for owner, name, value in kept.values():
            value.restore(owner, name)
