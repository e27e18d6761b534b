"""Writes docs/operators.md from the rule table: ``python docs/generate.py``. A test checks that the file is current."""

from __future__ import annotations

from pathlib import Path

from distfx.passes import rules
from distfx.passes.rows import norm, pointwise, reduce

HEADER = """# Operators

Generated from the table in `distfx/passes/rows` by `docs/generate.py`. The notation is explained in
`distfx/passes/notation.py`: a factor may be split if it is written; `_` stays whole; `[s]` is read through a window.
Every other element-wise operator of ATen (those tagged `pointwise`) goes by the row *pointwise*.

| operator | ATen | pattern | what it communicates |
|---|---|---|---|
"""


def table() -> str:
    """The page."""
    targets: dict[str, list[str]] = {}
    found: dict[str, rules.Row] = {}
    rows = [pointwise.POINTWISE, rules.CONVOLUTION, rules.TRANSPOSED, reduce.GLOBAL_POOL, norm.INSTANCE_NORM]
    rows += [row for row in rules.TABLE.values() if isinstance(row, rules.Row)]
    for row in rows:
        found.setdefault(row.name, row)
    for target, row in rules.TABLE.items():
        name = getattr(target, "__name__", str(target)).removesuffix(".default")
        names = [row.name] if isinstance(row, rules.Row) else ["convolution", "transposed convolution"]
        if not isinstance(row, rules.Row) and "convolution" not in name:
            names = ["global average pooling" if "adaptive" in name else "instance norm"]
        for each in names:
            targets.setdefault(each, []).append(name)
    lines = [
        f"| {row.name} | {', '.join(f'`{t}`' for t in targets.get(row.name, []))} | `{row.pattern}` | {row.cost} |"
        for row in found.values()
    ]
    return HEADER + "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("operators.md").write_text(table())
