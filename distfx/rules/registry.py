"""The rule table: for each operator, how its iteration space maps to its operands, and what it becomes on a rank.

An operator with no row is run whole on every rank. To add one, add a row to the file of its kind in
:mod:`distfx.passes.rows`.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from distfx.ir.nodes import operator_of
from distfx.rules import contraction as contract
from distfx.rules import indexing as index
from distfx.rules import normalization as norm
from distfx.rules import pointwise, random, shape
from distfx.rules import pooling as pool
from distfx.rules import reduction as reduce
from distfx.rules import resampling as resample
from distfx.rules.contraction import CONVOLUTION, TRANSPOSED
from distfx.rules.pointwise import POINTWISE, draws, is_pointwise
from distfx.rules.row import Call, Choice, Row, Site, Spec, aten

__all__ = [
    "CONVOLUTION",
    "TABLE",
    "TRANSPOSED",
    "Call",
    "Choice",
    "Row",
    "Site",
    "Spec",
    "aten",
    "draws",
    "spec_of",
]

TABLE: dict[Any, Row | Choice] = {
    **contract.ROWS,
    **index.ROWS,
    **norm.ROWS,
    **pointwise.ROWS,
    **pool.ROWS,
    **random.ROWS,
    **reduce.ROWS,
    **resample.ROWS,
    **shape.ROWS,
}
"""By operator its row, or several of which one fits a call."""


def spec_of(node: Node) -> Spec | None:
    """The iteration space of a call, or ``None`` if the table has no row that fits it."""
    if not isinstance(node.meta.get("shape"), tuple) or node.meta.get("many"):
        return None
    target = operator_of(node)
    row = TABLE.get(target) or (POINTWISE if is_pointwise(target) else None)
    if isinstance(row, Choice):
        row = row.pick(node)
    return row.spec(node) if row is not None else None
