"""The rule table: for each operator, how its iteration space maps to its operands, and what it becomes on a rank.

An operator with no row is run whole on every rank. To add one, add a row to the file of its kind in
:mod:`distfx.passes.rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from distfx.passes.rows import contract, norm, pointwise, pool, random, reduce, resample, shape
from distfx.passes.rows.contract import CONVOLUTION, TRANSPOSED
from distfx.passes.rows.pointwise import POINTWISE, is_pointwise, is_random
from distfx.passes.rule import Call, Row, Site, Spec, aten

__all__ = ["CONVOLUTION", "TABLE", "TRANSPOSED", "Call", "Row", "Site", "Spec", "aten", "is_random", "spec_of"]

TABLE: dict[Any, Row | Callable[[Node], Row | None]] = {
    **contract.ROWS,
    **norm.ROWS,
    **pointwise.ROWS,
    **pool.ROWS,
    **random.ROWS,
    **reduce.ROWS,
    **resample.ROWS,
    **shape.ROWS,
}
"""By operator its row, or a function that finds the row which fits a call."""


def spec_of(node: Node) -> Spec | None:
    """The iteration space of a call, or ``None`` if the table has no row that fits it."""
    if not isinstance(node.meta.get("shape"), tuple) or node.meta.get("many"):
        return None
    row = TABLE.get(node.target) or (POINTWISE if is_pointwise(node.target) else None)
    if row is not None and not isinstance(row, Row):
        row = row(node)
    return row.spec(node) if row is not None else None
