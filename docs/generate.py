"""Writes docs/operators.md from the rule table: ``python docs/generate.py``. A test checks that the file is current."""

from __future__ import annotations

from pathlib import Path

from distfx.rules import pointwise
from distfx.rules import registry as rules

HEADER = """# Operators

Generated from the table in `distfx/passes/rows` by `docs/generate.py`. The notation is explained in
`distfx/passes/notation.py`: a factor may be split if it is written; `_` stays whole; `[s]` is read through a window.
Every other element-wise operator of ATen (those tagged `pointwise`) goes by the row *pointwise*. Names that ATen does
not have (`pick_class`) are parts into which losses and writes are taken.

| operator | names | pattern | what it communicates |
|---|---|---|---|
"""


def table() -> str:
    """The page."""
    targets: dict[str, list[str]] = {}
    found: dict[str, rules.Rule] = {}
    found[pointwise.POINTWISE.name] = pointwise.POINTWISE
    for target, entry in rules.TABLE.items():
        name = getattr(target, "__name__", str(target)).removesuffix(".default")
        for row in entry.rules if isinstance(entry, rules.RuleChoice) else (entry,):
            found.setdefault(row.name, row)
            names = targets.setdefault(row.name, [])
            names += [name] if name not in names else []
    lines = [
        f"| {row.name} | {', '.join(f'`{t}`' for t in targets.get(row.name, []))} | `{row.pattern}` | {row.cost} |"
        for row in found.values()
    ]
    return HEADER + "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("operators.md").write_text(table())
