"""Operators that return random numbers: stochastic depth, noise.

An operator that only takes a size is replicated: all ranks draw the same numbers. One that takes a tensor follows its
layout: ranks with the same part draw the same numbers, others draw independent ones.
"""

from __future__ import annotations

from typing import Any

from distfx.ir import ops
from distfx.ir.ops import LocalPart
from distfx.rules.rule import Call, LocalContext, Rule, aten

__all__ = ["RANDOM", "RULES"]


def _local_random(context: LocalContext) -> Call:
    """:class:`distfx.runtime.kernels.random.Draw` draws; the name of the operator is an argument."""
    part = LocalPart(tuple(axis for split in context.layout.dims for axis in split.axes))
    name = str(context.node.target).removeprefix("aten.")
    return ops.draw, context.args, dict(context.node.kwargs) | {"operator": name, "part": part}


RANDOM = Rule("random numbers", "*... -> ...", _local_random, cost="rank 0's seed: eight bytes per pass")

RULES: dict[Any, Rule] = {
    aten.rand.default: RANDOM,
    aten.randn.default: RANDOM,
    aten.rand_like.default: RANDOM,
    aten.randn_like.default: RANDOM,
    aten.bernoulli.default: RANDOM,
    aten.bernoulli.p: RANDOM,
    aten.uniform.default: RANDOM,
    aten.normal_functional.default: RANDOM,
}
