"""fuse: make a halo exchange and its convolution one operator, which computes the interior while the halo travels.

in: a bound graph.   out: the same graph with ``ops.halo_convolution`` where a halo serves one convolution alone.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from distfx.ir import ops
from distfx.ir.meta import Meta, inherit
from distfx.ir.nodes import aten, is_empty

__all__ = ["fuse_halos"]


def fuse_halos(graph: Graph) -> None:
    """Replace a halo exchange and the only convolution that reads it by ``ops.halo_convolution``."""
    for node in list(graph.nodes):
        if node.op == "call_function" and (halo := _own_halo(node)) is not None:
            _, weight, bias, stride, padding, dilation, _, _, groups = node.args
            empty = is_empty(node)  # before the extended input is replaced by the block
            node.target, node.args = ops.halo_convolution, (halo.args[0], weight, bias)
            node.kwargs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "empty": empty}
            inherit(node, halo, Meta.transfers, Meta.move, Meta.owner)
            graph.erase_node(halo)


def _own_halo(node: Node) -> Node | None:
    """The halo exchange directly before a convolution that no other call reads, or ``None``.

    The answer depends on the graph alone, so it is the same on all ranks; and nothing communicates between the two.
    """
    source = node.args[0] if node.args else None
    if node.target is not aten.convolution.default or not isinstance(source, Node) or source.target is not ops.halo:
        return None
    between = source.next
    while between is not node and between.op == "get_attr":
        between = between.next
    only_reader = list(source.users) == [node] and node.all_input_nodes.count(source) == 1
    return source if only_reader and between is node and not node.args[6] else None
