"""localise: operators become local ones.

in: a graph with moves.   out: the same graph, in which every call is one on this rank's tensors: padding only where the
dim is not split, sizes as ``N/n``, means divided by global counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule

from distfx.rules.row import Site

__all__ = ["localise"]


def localise(module: GraphModule, sizes: Mapping[str, int]) -> GraphModule:
    """Rewrite each call by the ``local`` of its row."""
    for node in module.graph.nodes:
        decision = node.meta.get("decision")
        if decision is None or decision.spec is None:
            continue
        needs = tuple(need for _, need in decision.needs)
        site = Site(decision.spec, decision.axes, decision.raw, tuple(node.args), sizes, needs)
        node.target, node.args, node.kwargs = decision.spec.row.local(site)
    return module
