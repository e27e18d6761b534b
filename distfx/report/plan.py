"""The plan as a value: what was decided for each operator, and what it will send."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["Plan", "PlanRow"]


@dataclass(frozen=True)
class PlanRow:
    """One operator of the rewritten graph. Bytes and messages are what the plan's rank sends."""

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
    """Whether the operator has no rule that applies and runs whole on every rank."""


def _amount(nbytes: int) -> str:
    """Bytes for a reader: three digits and a unit."""
    value, unit = float(nbytes), 0
    while value >= 1000 and unit < 4:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"


@dataclass(frozen=True)
class Plan:
    """A plan for one grid, seen from one rank, at one input shape. Frozen, printable, JSON-able."""

    grid: str
    rank: int
    training: bool
    sizes: tuple[tuple[str, int], ...]
    rows: tuple[PlanRow, ...]

    def bytes(self, phase: str | None = None) -> int:
        """Bytes this rank sends in a pass, ``"forward"``, ``"backward"`` or both."""
        forward = sum(row.bytes_forward for row in self.rows) if phase in (None, "forward") else 0
        backward = sum(row.bytes_backward for row in self.rows) if phase in (None, "backward") else 0
        return forward + backward

    def messages(self, phase: str | None = None) -> int:
        """Messages this rank sends in a pass; as :meth:`bytes`."""
        forward = sum(row.messages_forward for row in self.rows) if phase in (None, "forward") else 0
        backward = sum(row.messages_backward for row in self.rows) if phase in (None, "backward") else 0
        return forward + backward

    def row(self, node: str) -> PlanRow:
        """The row of one node, by its name or its module path."""
        for row in self.rows:
            if node in (row.node, row.path):
                return row
        raise KeyError(f"the plan has no node {node!r}")

    def to_json(self) -> str:
        """The plan as JSON; :meth:`from_json` is its inverse."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        data = json.loads(text)
        rows = tuple(
            PlanRow(**(row | {"shape": tuple(row["shape"]), "moves": tuple(row["moves"])})) for row in data["rows"]
        )
        sizes = tuple((str(name), int(value)) for name, value in data["sizes"])
        return cls(data["grid"], data["rank"], data["training"], sizes, rows)

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
