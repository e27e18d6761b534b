"""localize: rewrite each call to work on this rank's tensors.

in: a graph with moves.   out: the same graph. Moves have fetched what is beyond a rank's block, so padding remains
only on dims that are not split. Sizes are local (``N/n``), and means divide by global counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph

from distfx.ir.meta import Meta, meta
from distfx.rules.rule import LocalContext

__all__ = ["localize"]


def localize(graph: Graph, axes: Mapping[str, int]) -> None:
    """Rewrite each call by the ``local`` function of its rule."""
    for node in graph.nodes:
        decision = Meta.decision.get(node)
        if decision is None or decision.spec is None:
            continue
        rule, needs = decision.spec.rule, tuple(need for _, need in decision.needs)
        context = LocalContext(decision.spec, decision.axes, decision.produced, tuple(node.args), axes, needs)
        node.target, node.args, node.kwargs = rule.local(context)
        meta(node).is_product = rule.product
        meta(node).refuses_empty = rule.name != "pointwise"
