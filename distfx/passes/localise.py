"""localise: operators become local ones.

in: a graph with moves.   out: the same graph, in which every call is one on this rank's tensors: padding only where the
dim is not split, sizes as ``N/n``, means divided by global counts.
"""

from __future__ import annotations

from torch.fx import GraphModule

__all__ = ["localise"]


def localise(module: GraphModule) -> GraphModule:
    """Rewrite each call by the ``local`` of its row."""
    for node in module.graph.nodes:
        decision = node.meta.get("decision")
        if decision is None or decision.spec is None:
            continue
        row = decision.spec.row
        node.target, args, kwargs = row.local(decision.spec, decision.axes, decision.raw, tuple(node.args))
        node.args, node.kwargs = args, kwargs
    return module
