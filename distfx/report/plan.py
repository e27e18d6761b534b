"""The plan as a value: the algorithm and the layout of each operator, and the bytes that it will send."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, TypeVar

from distfx.errors import DistfxError

__all__ = ["Plan", "PlanRow"]

MAX_LENGTH = 2**26
"""Characters of JSON that :meth:`Plan.from_json` reads."""

T = TypeVar("T")


@dataclass(frozen=True)
class PlanRow:
    """One operator of the rewritten graph, with the bytes and messages that the plan's rank sends for it."""

    node: str
    op: str
    algorithm: str
    shape: tuple[str, ...]
    layout: str
    moves: tuple[str, ...] = ()
    bytes_forward: int = 0
    bytes_backward: int = 0
    messages_forward: int = 0
    messages_backward: int = 0
    path: str = ""
    source: str = ""
    fallback: bool = False
    """Whether every rank executes the whole operator because no rule applies."""


def _amount(nbytes: int) -> str:
    """Bytes with three significant digits and a unit."""
    value, unit = float(nbytes), 0
    while value >= 1000 and unit < 4:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"


@dataclass(frozen=True)
class Plan:
    """The plan of one model for one grid, one rank and one input shape: frozen, printable, convertible to JSON."""

    grid: str
    rank: int
    training: bool
    sizes: tuple[tuple[str, int], ...]
    rows: tuple[PlanRow, ...]

    def bytes(self, phase: str | None = None) -> int:
        """Bytes this rank sends in one phase, ``"forward"`` or ``"backward"``, or in both."""
        forward = sum(row.bytes_forward for row in self.rows) if phase in (None, "forward") else 0
        backward = sum(row.bytes_backward for row in self.rows) if phase in (None, "backward") else 0
        return forward + backward

    def messages(self, phase: str | None = None) -> int:
        """Messages this rank sends; phases as in :meth:`bytes`."""
        forward = sum(row.messages_forward for row in self.rows) if phase in (None, "forward") else 0
        backward = sum(row.messages_backward for row in self.rows) if phase in (None, "backward") else 0
        return forward + backward

    def row(self, node: str) -> PlanRow:
        """The row of a node, by the node's name or module path."""
        for row in self.rows:
            if node in (row.node, row.path):
                return row
        raise KeyError(f"the plan has no node {node!r}")

    def to_json(self) -> str:
        """The plan as JSON; :meth:`from_json` is its inverse."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote. Raises :class:`DistfxError` if the text is anything else."""
        if not isinstance(text, str):
            raise DistfxError(f"a plan is read from the text that Plan.to_json returns, not from {_kind(text)}")
        if len(text) > MAX_LENGTH:
            raise DistfxError(f"cannot read the plan: it has {len(text)} characters, and the limit is {MAX_LENGTH}")
        try:
            data = json.loads(text)
        except RecursionError:
            raise DistfxError("cannot read the plan: its JSON is nested too deeply") from None
        except ValueError as error:
            raise DistfxError(f"cannot read the plan: it is not JSON ({error})") from None
        return _read(cls, data, "plan")

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} = {value}" for name, value in self.sizes)
        lines = [f"plan on {self.grid} ({'train' if self.training else 'eval'}), rank {self.rank}, {sizes}"]
        table = [("node", "algorithm", "layout", "forward", "backward", "moves")]
        for row in self.rows:
            sent = (_amount(row.bytes_forward), _amount(row.bytes_backward))
            name = row.node + (" (fallback)" if row.fallback else "")
            table.append((name, row.algorithm, row.layout, *sent, "; ".join(row.moves)))
        widths = [max(len(line[i]) for line in table) for i in range(5)]
        for line in table:
            cells = [cell.ljust(width) for cell, width in zip(line[:3], widths[:3], strict=True)]
            cells += [cell.rjust(width) for cell, width in zip(line[3:5], widths[3:], strict=True)]
            lines.append("  ".join([*cells, line[5]]).rstrip())
        forward, backward = _amount(self.bytes("forward")), _amount(self.bytes("backward"))
        lines.append(f"sends {forward} forward in {self.messages('forward')} messages,")
        lines[-1] += f" {backward} backward in {self.messages('backward')}"
        return "\n".join(lines)


# -- reading JSON


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer"}
    return names.get(type(value), "null" if value is None else f"a {type(value).__name__}")


def _fail(where: str, expected: str, value: Any) -> DistfxError:
    return DistfxError(f"cannot read the plan: {where} must be {expected}, not {_kind(value)}")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _fail(where, "a string", value)
    return value


def _truth(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _fail(where, "true or false", value)
    return value


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _fail(where, "an integer", value)
    if not 0 <= value < 2**63:
        raise DistfxError(f"cannot read the plan: {where} must be between 0 and 2**63")
    return value


def _list(read: Callable[[Any, str], T]) -> Callable[[Any, str], tuple[T, ...]]:
    def read_list(value: Any, where: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise _fail(where, "a list", value)
        return tuple(read(item, f"{where}[{index}]") for index, item in enumerate(value))

    return read_list


def _size(value: Any, where: str) -> tuple[str, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise DistfxError(f"cannot read the plan: {where} must be a pair of a name and a size")
    return _text(value[0], f"{where}[0]"), _count(value[1], f"{where}[1]")


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "str": _text,
    "bool": _truth,
    "int": _count,
    "tuple[str, ...]": _list(_text),
    "tuple[tuple[str, int], ...]": _list(_size),
    "tuple[PlanRow, ...]": _list(lambda value, where: _read(PlanRow, value, where)),
}
"""How to read a field, by its annotation."""


def _read(cls: Callable[..., T], data: Any, where: str) -> T:
    """A dataclass from a JSON object with its fields as keys. Fields with a default may be missing."""
    if not isinstance(data, dict):
        raise _fail(where, "an object", data)
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(known))
    missing = sorted(name for name, field in known.items() if field.default is MISSING and name not in data)
    if unknown or missing:
        key, problem = (unknown[0], "an unknown key") if unknown else (missing[0], "no key")
        raise DistfxError(
            f"cannot read the plan: {where} has {problem} {key[:60]!r}; the keys are {', '.join(known)}, as "
            "Plan.to_json writes them"
        )
    return cls(**{name: _READERS[str(known[name].type)](value, f"{where}.{name}") for name, value in data.items()})
