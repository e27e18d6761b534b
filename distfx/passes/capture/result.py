"""The result of a capture: a functional graph, and everything that it assumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from distfx.ir.meta import Meta
from distfx.ir.nodes import aten
from distfx.ir.symbolic import Size, evaluate, evaluate_shape
from distfx.ir.torch_private import TreeSpec

__all__ = ["Capture", "InputSpec"]


@dataclass(frozen=True)
class InputSpec:
    """The name, shape and dtype that the graph expects of one tensor input."""

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype


@dataclass
class Capture:
    """A captured model: its graph, its inputs and outputs, and the symbols' example values."""

    module: GraphModule
    inputs: tuple[InputSpec, ...]
    out_spec: TreeSpec
    hints: dict[sympy.Symbol, int]
    guards: tuple[sympy.Expr, ...]
    """Conditions on the sizes under which the graph is valid, from branches of the model or of an operator."""
    training: bool
    mutated: frozenset[str]
    """The buffers that the graph writes."""
    constants: tuple[str, ...] = ()
    """The structure of the arguments and the arguments that are not tensors. The graph has fixed both."""
    modified_attributes: tuple[str, ...] = ()
    """The attributes of the model that its ``forward`` modifies. The graph has fixed them."""
    checkpointed: bool = False
    """Whether the model uses activation checkpoints. The graph does not recompute anything."""

    @property
    def graph(self) -> Graph:
        return self.module.graph

    def same_calls(self, other: Capture, values: Mapping[sympy.Symbol, int]) -> bool:
        """Whether ``other`` makes the same calls with the same operands if the sizes are ``values``."""
        return self._calls(values) == other._calls(values)

    def _calls(self, values: Mapping[sympy.Symbol, int]) -> list[Any]:
        """All calls, with operands as indices of calls and sizes as numbers; then the outputs."""
        calls: list[Any] = []
        keys: dict[Node, Any] = {}

        def key(value: Any) -> Any:
            if isinstance(value, Node):
                return keys[value]
            if isinstance(value, list | tuple):
                return tuple(key(item) for item in value)
            if isinstance(value, slice):
                return ("slice", key(value.start), key(value.stop), key(value.step))
            return evaluate(value, values) if isinstance(value, sympy.Basic) else value

        for node in self.graph.nodes:
            if node.op == "output":
                calls.append(key(node.args))
            elif node.op != "call_function":
                keys[node] = (node.op, str(node.target))
            elif node.target is aten.alias.default:
                keys[node] = key(node.args[0])
            else:
                keys[node] = ("call", len(calls))
                shape = None if Meta.multiple.get(node) else evaluate_shape(Meta.shape.get(node) or (), values)
                kwargs = tuple((name, key(value)) for name, value in sorted(node.kwargs.items()))
                calls.append((node.target, shape, key(node.args), kwargs))
        return calls

    def is_valid_for(self, values: Mapping[sympy.Symbol, int]) -> bool:
        """Whether the graph is right for these sizes. A batch of one counts as two, because it was captured as two."""
        numbers = {s: sympy.Integer(max(2, v) if str(s).startswith("N") else v) for s, v in values.items()}
        return all(guard.xreplace(numbers) != sympy.false for guard in self.guards)
