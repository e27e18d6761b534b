"""Regions of an exported graph (``with torch.no_grad()``, ``with torch.autocast(...)``) become part of the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from distfx.errors import CaptureError
from distfx.ir.meta import Meta, meta
from distfx.ir.nodes import aten
from distfx.ir.torch_private import region_kind

__all__ = ["inline_regions"]


def inline_regions(module: GraphModule) -> None:
    """Inline the submodules that hold the regions, in place.

    The operands of a ``no_grad`` region are detached and its nodes marked with :attr:`Meta.no_grad`; nodes for which
    the model disables autocast are marked with :attr:`Meta.autocast`.
    """
    for node in list(module.graph.nodes):
        kind = region_kind(node)
        if kind == "autocast" and node.args[2]:
            raise CaptureError(
                f"the model uses torch.autocast inside forward ({_source(module, node)}): put it around the call of "
                "the parallel module instead"
            )
        if kind is not None:
            _inline(module, node, kind)


def _inline(module: GraphModule, region: Node, kind: str) -> None:
    graph = module.graph
    position = next(i for i, a in enumerate(region.args) if isinstance(a, Node) and a.op == "get_attr")
    source: Any = region.args[position]
    inner = getattr(module, str(source.target))
    inline_regions(inner)
    values = dict(zip(inner.graph.find_nodes(op="placeholder"), region.args[position + 1 :], strict=True))
    marks: dict[str, Any] = {}
    with graph.inserting_before(region):
        if kind == "grad" and not region.args[0]:
            values = {place: _detach(module, value) for place, value in values.items()}
            marks = {Meta.no_grad.key: region.name}
            for value in values.values():
                if isinstance(value, Node) and value.target is aten.detach.default:
                    value.meta |= marks
        elif kind == "autocast":
            marks = {Meta.autocast.key: False}
        for old in inner.graph.nodes:
            if old.op == "get_attr":
                value = getattr(inner, str(old.target))
                if isinstance(value, torch.Tensor):
                    module.register_buffer(f"{source.target}_{old.target}", value, persistent=False)
                values[old] = graph.get_attr(f"{source.target}_{old.target}")
                values[old].meta = dict(old.meta)
            elif old.op == "call_function":
                values[old] = graph.node_copy(old, values.__getitem__)
                values[old].meta |= marks
    results = [values[result] for result in inner.graph.output_node().args[0]]
    for output in list(region.users):
        index: Any = output.args[1]
        output.replace_all_uses_with(results[index])
        graph.erase_node(output)
    graph.erase_node(region)
    if not source.users:
        graph.erase_node(source)


def _source(module: GraphModule, region: Node) -> str:
    """The first line of the model in a region."""
    inner = next(a for a in region.args if isinstance(a, Node) and a.op == "get_attr")
    nodes = getattr(module, str(inner.target)).graph.nodes
    traces = [meta(node).stack_trace for node in nodes if Meta.stack_trace.get(node)]
    lines = traces[0].strip().splitlines()[-2:] if traces else ["no source"]
    return " ".join(line.strip() for line in lines)


def _detach(module: GraphModule, value: Any) -> Any:
    """Detach a tensor that may have a gradient. Buffers and frozen parameters stay, because they may be written."""
    if not isinstance(value, Node) or not isinstance(Meta.val.get(value), torch.Tensor):
        return value
    frozen = (name for name, parameter in module.named_parameters() if not parameter.requires_grad)
    if value.op == "get_attr" and str(value.target) in {*dict(module.named_buffers()), *frozen}:
        return value
    result = module.graph.call_function(aten.detach.default, (value,))
    result.meta = dict(value.meta)
    return result
