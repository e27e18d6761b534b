"""normalize: an exported graph becomes the graph that the other passes read.

in:  an exported module without regions and without writes through views.   out: a :class:`Capture`.

Sizes are expressions in the input's symbols and stand where they are used, writes are functional unless they change a
buffer, every call is in canonical form, and each node's ``meta`` has shape, dtype, module path and source line.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from distfx.errors import CaptureError
from distfx.ir.meta import Meta, meta
from distfx.ir.nodes import aten, describe
from distfx.ir.symbolic import size_of
from distfx.ir.torch_private import OpOverload, expression_of, is_mutable, tree_leaves
from distfx.passes.canonicalize import canonicalize, name_after_module
from distfx.passes.capture.mutation import is_write, nodes_of_tensor, to_functional, written_buffer
from distfx.passes.capture.result import Capture, InputSpec
from distfx.passes.capture.symbols import Renaming, example_values, name_symbols, size_guards

__all__ = ["is_impure", "normalize"]

_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def normalize(module: GraphModule, program: torch.export.ExportedProgram, training: bool) -> Capture:
    """Build the graph of a capture from the module of an exported program."""
    return _Normalizer(module, program).run(training)


class _Normalizer:
    """Copies an exported graph node by node."""

    def __init__(self, module: GraphModule, program: torch.export.ExportedProgram) -> None:
        self.module, self.program = module, program
        self.names: Renaming = name_symbols(module.graph)
        self.graph = Graph()
        self.values: dict[Node, Any] = {}
        """For each node of the exported graph its node here."""
        self.inputs: list[InputSpec] = []
        self.mutated: set[str] = set()
        self.state = {*program.state_dict, *program.graph_signature.buffers}
        """The parameters and buffers of the model, including buffers that are not persistent."""

    def run(self, training: bool) -> Capture:
        exported = self.module.graph
        for node in exported.nodes:
            if node.op == "output":
                outputs = tree_leaves(node.args[0])
                self.graph.output(tuple(self._operand(o) if isinstance(o, Node) else o for o in outputs))
            elif not self._is_left_out(node):
                self._copy(node)
        result = GraphModule(self.module, self.graph)
        result.graph.eliminate_dead_code(is_impure)
        result.recompile()
        return Capture(
            module=result,
            inputs=tuple(self.inputs),
            out_spec=self.program.call_spec.out_spec,
            hints=example_values(exported, self.names),
            guards=size_guards(exported, self.names),
            training=training,
            mutated=frozenset(self.mutated),
        )

    def _is_left_out(self, node: Node) -> bool:
        """Whether a node has no counterpart: guards, size computations, inputs that are not tensors."""
        value = Meta.val.get(node)
        if node.op == "call_function":
            return value is None or isinstance(value, _NUMBERS)
        return node.op == "call_module" or (node.op == "placeholder" and not isinstance(value, torch.Tensor))

    def _copy(self, node: Node) -> None:
        if node.op == "get_attr" and str(node.target) not in self.state:
            node.target = _name_constant(self.module, str(node.target))
        copied = self.graph.node_copy(node, self._operand)
        copied.meta = self._meta(node)
        self.values[node] = copied
        if node.op == "placeholder":
            self.inputs.append(InputSpec(copied.name, meta(copied).shape, meta(copied).dtype))
        elif node.op == "call_function":
            self._copy_call(node, copied)

    def _copy_call(self, node: Node, copied: Node) -> None:
        functional = to_functional(copied, node)
        if functional is None:
            buffer = written_buffer(node.args[0])
            assert buffer is not None
            if str(buffer.target) not in self.state:
                raise CaptureError(
                    f"{describe(copied)}: forward writes into a tensor of the model that is not a buffer, so the graph "
                    "would write into a copy. Register it: self.register_buffer(name, tensor, persistent=False)."
                )
            self.mutated.add(str(buffer.target))
            return
        self.values[node] = functional
        if is_write(node) and functional.target is not node.target:
            self.values |= dict.fromkeys(nodes_of_tensor(node.args[0]), functional)
        name_after_module(canonicalize(self.graph, functional), node)

    def _operand(self, node: Node) -> Any:
        """The operand that stands for a node of the exported graph: a node, a number or an expression."""
        value = Meta.val.get(node)
        if isinstance(value, torch.SymInt):
            return self._size(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            return self._size(expression_of(value))
        if isinstance(value, int | float | bool) and node.op == "call_function":
            return value
        return self.values[node]

    def _size(self, size: Any) -> Any:
        """A size in the named symbols."""
        size = size_of(size)
        return size_of(size.xreplace(dict(self.names))) if isinstance(size, sympy.Expr) else size

    def _meta(self, node: Node) -> dict[str, Any]:
        """Provenance, shape and dtype of a node of the exported graph."""
        value = Meta.val.get(node)
        fields = _provenance(node)
        fields |= {field.key: field.get(node) for field in (Meta.autocast, Meta.in_place) if field.is_set(node)}
        if isinstance(value, torch.Tensor):
            fields |= {Meta.shape.key: tuple(self._size(s) for s in value.shape), Meta.dtype.key: value.dtype}
        elif any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
            leaves = tree_leaves(value)
            fields |= {
                Meta.shape.key: tuple(tuple(self._size(s) for s in leaf.shape) for leaf in leaves),
                Meta.dtype.key: leaves[0].dtype,
                Meta.multiple.key: True,
            }
        return fields


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')
_PACKAGE = str(Path(__file__).parents[2])


def _provenance(node: Node) -> dict[str, Any]:
    """The module path and the source line of the model that a call comes from."""
    stack = [path for path, _ in (Meta.nn_module_stack.get(node) or {}).values()]
    path = stack[-1] if stack and not stack[-1].startswith("_empty_nn_module_stack") else ""
    trace = [f for f in _FRAME.findall(Meta.stack_trace.get(node) or "") if "/torch/" not in f[0].replace("\\", "/")]
    frames = [frame for frame in trace if not frame[0].startswith(_PACKAGE)]
    is_loss = bool(trace) and not frames  # a loss function of torch that with_loss calls
    return {
        Meta.path.key: path or ("the loss" if is_loss else ""),
        Meta.source.key: (frames[-1][0], int(frames[-1][1]), frames[-1][3]) if frames else None,
    }


def _name_constant(module: GraphModule, name: str) -> str:
    """Name a tensor created in ``forward`` after its content, because each exported graph numbers them anew."""
    value: Any = module
    for attribute in name.split("."):
        value = getattr(value, attribute)
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return name
    data = value.detach().cpu().contiguous()
    content = repr((data.dtype, tuple(data.shape))).encode() + data.reshape(-1).view(torch.uint8).numpy().tobytes()
    unique = f"constant_{hashlib.sha256(content).hexdigest()[:12]}"
    module.register_buffer(unique, value, persistent=False)
    return unique


def is_impure(node: Node) -> bool:
    """Whether dead-code elimination must keep a node: inputs, outputs, writes into buffers, running statistics."""
    if node.op in ("placeholder", "output"):
        return True
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if target is aten.instance_norm.default:
        return bool(node.args[5]) and node.args[3] is not None
    return is_mutable(target) or (target is aten.batch_norm.default and bool(node.args[5]))
