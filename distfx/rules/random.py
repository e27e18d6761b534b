"""Operators that make a tensor of random numbers: stochastic depth, noise.

Those with a size alone are drawn whole, alike on every rank; those that fill a tensor lie as it does, and then ranks
with the same part of it draw the same numbers, others independent ones.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from distfx.ir import ops
from distfx.ir.ops import LocalPart
from distfx.rules.row import Call, Row, Site, Spec, aten, dims_spec

__all__ = ["RANDOM", "ROWS"]


def _random_spec(row: Row, node: Node) -> Spec | None:
    every = list(range(len(node.meta["shape"])))
    if any(operand.meta["shape"] != node.meta["shape"] for operand in node.all_input_nodes):
        return None
    return dims_spec(row, node, [(operand, every) for operand in node.all_input_nodes], every)


def _local_random(site: Site) -> Call:
    """The operator's name is an argument: the drawing is done by :class:`distfx.runtime.kernels.random.Draw`."""
    part = LocalPart(tuple(axis for split in site.layout.dims for axis in split.axes))
    name = str(site.node.target).removeprefix("aten.")
    return ops.draw, site.args, dict(site.node.kwargs) | {"operator": name, "part": part}


RANDOM = Row(
    "random numbers", "... -> ...", _local_random, build=_random_spec, cost="eight bytes a pass: rank 0's seed"
)

ROWS: dict[Any, Row] = {
    aten.rand.default: RANDOM,
    aten.randn.default: RANDOM,
    aten.rand_like.default: RANDOM,
    aten.randn_like.default: RANDOM,
    aten.bernoulli.default: RANDOM,
    aten.bernoulli.p: RANDOM,
    aten.uniform.default: RANDOM,
    aten.normal_functional.default: RANDOM,
}
