"""The rule table: for each operator, how its iteration space maps to its operands, and what it becomes on a rank.

An operator with no row is run whole on every rank. To add one, add a row to the file of its kind in
:mod:`distfx.passes.rules`.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from distfx.ir.meta import Meta
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
from distfx.rules.rule import Call, LocalContext, OpSpec, Rule, RuleChoice, aten

__all__ = [
    "CONVOLUTION",
    "TABLE",
    "TRANSPOSED",
    "Call",
    "LocalContext",
    "OpSpec",
    "Rule",
    "RuleChoice",
    "aten",
    "draws",
    "spec_of",
]

TABLE: dict[Any, Rule | RuleChoice] = {
    **contract.RULES,
    **index.RULES,
    **norm.RULES,
    **pointwise.RULES,
    **pool.RULES,
    **random.RULES,
    **reduce.RULES,
    **resample.RULES,
    **shape.RULES,
}
"""By operator its row, or several of which one fits a call."""


def spec_of(node: Node) -> OpSpec | None:
    """The iteration space of a call, or ``None`` if the table has no row that fits it."""
    if not isinstance(Meta.shape.get(node), tuple) or Meta.multiple.get(node):
        return None
    target = operator_of(node)
    rule = TABLE.get(target) or (POINTWISE if is_pointwise(target) else None)
    if isinstance(rule, RuleChoice):
        rule = rule.pick(node)
    return rule.spec(node) if rule is not None else None
