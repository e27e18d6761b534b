"""Operators that make a tensor of random numbers: stochastic depth, noise.

Those with a size alone are drawn whole, alike on every rank; those that fill a tensor lie as it does, and then ranks
with the same part of it draw the same numbers, others independent ones.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from distfx.ir import ops
from distfx.ir.meta import meta
from distfx.ir.ops import LocalPart
from distfx.rules.rule import Call, LocalContext, OpSpec, Rule, aten, spec_from_dims

__all__ = ["RANDOM", "RULES"]


def _random_spec(rule: Rule, node: Node) -> OpSpec | None:
    every = list(range(len(meta(node).shape)))
    if any(meta(operand).shape != meta(node).shape for operand in node.all_input_nodes):
        return None
    return spec_from_dims(rule, node, [(operand, every) for operand in node.all_input_nodes], every)


def _local_random(context: LocalContext) -> Call:
    """The operator's name is an argument: the drawing is done by :class:`distfx.runtime.kernels.random.Draw`."""
    part = LocalPart(tuple(axis for split in context.layout.dims for axis in split.axes))
    name = str(context.node.target).removeprefix("aten.")
    return ops.draw, context.args, dict(context.node.kwargs) | {"operator": name, "part": part}


RANDOM = Rule(
    "random numbers", "... -> ...", _local_random, build=_random_spec, cost="eight bytes a pass: rank 0's seed"
)

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
