"""What a rule is, and the iteration space of one call that follows from it.

The pattern of a rule (see :mod:`distfx.rules.notation`) is all that the planner needs: the factors, the dims that they
split, the factors that are summed over, and the dims that are read through windows. ``local`` turns a call into one on
local tensors. Halos have been fetched by then, so padding remains only on dims that are not split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from torch.fx import Node

from distfx.ir.layout import Layout, Window
from distfx.ir.meta import meta
from distfx.ir.nodes import arguments, aten, operator_of
from distfx.ir.ops import LocalSize
from distfx.ir.symbolic import Size
from distfx.ir.torch_private import OpOverload, schema_of
from distfx.rules.notation import DimPattern, DimPatterns, Pattern, match, parse

__all__ = [
    "BoundCall",
    "Call",
    "DimPatterns",
    "LocalContext",
    "OpSpec",
    "Rule",
    "RuleChoice",
    "aten",
    "spec_from_pattern",
    "tensor_arguments",
    "unchanged",
]

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""Target, positional and keyword arguments of a call."""

T = TypeVar("T")


@dataclass(frozen=True)
class OpSpec:
    """The iteration space of one call: the factors of its operands' dims, their extents, and the windows."""

    rule: Rule
    node: Node
    operands: tuple[tuple[Node, DimPatterns], ...]
    result: DimPatterns
    extents: Mapping[str, Size]
    windows: Mapping[tuple[int, str], Window] = field(default_factory=dict)
    """The window through which an operand, by its index, is read along a factor."""
    mode: str = "constant"
    """How windows read beyond the border: a mode of ``torch.nn.functional.pad``."""
    fill: float = 0.0
    """The value that windows read beyond the border in mode ``"constant"``."""
    inside: frozenset[str] = frozenset()
    """The factors over which the operator reduces itself. Over their axes the result is replicated, not partial."""
    units: Mapping[str, Size] = field(default_factory=dict)
    """The unit in which a factor is split if an operand is split that way: tokens ``H*W`` by rows of ``W``."""


@dataclass(frozen=True)
class LocalContext:
    """A call that is about to become local: the axes of each factor, the result's layout, the present arguments."""

    spec: OpSpec
    axes: Mapping[str, tuple[str, ...]]
    layout: Layout
    """The layout of the result, before partial sums are completed."""
    args: tuple[Any, ...]
    ranks: Mapping[str, int]
    """The sizes of the grid's axes."""
    operands: tuple[Layout, ...] = ()
    """The layouts of the operands, in the order of ``spec.operands``."""

    @property
    def node(self) -> Node:
        return self.spec.node

    def arguments(self) -> dict[str, Any]:
        """The present arguments by name, defaults included."""
        schema = schema_of(operator_of(self.node)).arguments
        return arguments(self.node) | {a.name: value for a, value in zip(schema, self.args, strict=False)}

    def is_split(self, dim: int) -> bool:
        """Whether a dim of the result is split."""
        return bool(self.layout.dims[dim].axes)

    def split_space(self) -> list[bool]:
        """For each spatial dim of the result (dim 2 and later), whether it is split."""
        return [bool(split.axes) for split in self.layout.dims[2:]]

    def axes_of(self, dims: Sequence[int]) -> tuple[str, ...]:
        """The axes that split any of these dims of the result."""
        return tuple(axis for dim in dims for axis in self.layout.dims[dim].axes)

    def blocks(self, kind: type[LocalSize], first: int = 2) -> list[LocalSize]:
        """Start or size of this rank's block of each of the result's dims, from dim ``first`` on."""
        shape = meta(self.node).shape
        return [kind(size, split) for size, split in zip(shape[first:], self.layout.dims[first:], strict=True)]

    def sizes(self) -> list[Any]:
        """The local shape of the result."""
        shape = meta(self.node).shape
        return [
            LocalSize(size, split) if split.axes else size for size, split in zip(shape, self.layout.dims, strict=True)
        ]


@dataclass(frozen=True)
class BoundCall:
    """A localized call with numbers in place of symbolic sizes."""

    spec: OpSpec
    node: Node
    shape: tuple[int, ...]
    """The global shape of the result."""
    number: Callable[[Size], int]
    least: Callable[[Any], int]
    """The smallest value of a size, or of a :class:`LocalSize`, on any rank."""

    def operand(self, index: int) -> tuple[int, ...]:
        """The global shape of an operand."""
        return tuple(self.number(size) for size in meta(self.spec.operands[index][0]).shape)


def unchanged(context: LocalContext) -> Call:
    """The same call, on local tensors."""
    return context.node.target, context.args, dict(context.node.kwargs)


@dataclass(frozen=True)
class Rule:
    """How one operator is distributed.

    The operands of the pattern are the tensor arguments of the operator, in the order of its schema.
    """

    name: str
    pattern: str = ""
    """The pattern in the notation of :mod:`distfx.rules.notation`; empty if ``build`` computes the spec."""
    local: Callable[[LocalContext], Call] = unchanged
    """Returns the call that a rank makes on its local tensors."""
    windows: Callable[[Node], Sequence[Window | None]] | None = None
    """Returns the windows of the pattern's windowed dims, in order; ``None`` for a dim that needs no window."""
    mode: str | Callable[[Node], str] = "constant"
    """How windows read beyond the border of the tensor: a mode of ``torch.nn.functional.pad``."""
    fill: float | Callable[[Node], float] = 0.0
    """The value that windows read beyond the border in mode ``"constant"``."""
    anchor: bool = False
    """Whether the planner compares strategies for the operator. All other operators follow the layout of an operand."""
    product: bool = False
    """Whether the operator is a sum of products: autocast lowers its dtype, and the sum over an empty part is zero."""
    scatter: str | None = None
    """The factor of the result that channel axes split when a partial result is reduced (reduce-scatter instead of
    allreduce)."""
    build: Callable[[Rule, Node], OpSpec | None] | None = None
    """Computes the spec of operators whose dims a pattern cannot express."""
    check: Callable[[BoundCall], str | None] | None = None
    """Returns what is wrong with a call at concrete sizes, worded to follow the name of the node, or ``None``."""
    cost: str = ""
    """What the operator communicates, for the documentation."""

    @property
    def text(self) -> str:
        """The pattern, or the function that takes its place."""
        return f"computed by `{self.build.__name__}`" if self.build else f"`{self.pattern}`"

    def spec(self, node: Node) -> OpSpec | None:
        """The iteration space of a call, or ``None`` if the rule does not fit it."""
        return self.build(self, node) if self.build else spec_from_pattern(self, node)


@dataclass(frozen=True)
class RuleChoice:
    """Several rules of one operator. ``pick`` returns the rule that fits a call, or ``None``."""

    pick: Callable[[Node], Rule | None]
    rules: tuple[Rule, ...]


# ----------------------------------------------------------------------------------------------- from patterns


@lru_cache(maxsize=1024)
def tensor_arguments(op: OpOverload) -> tuple[tuple[str, str], ...]:
    """Name and type of each tensor argument of an operator: ``Tensor``, ``Optional[Tensor]`` or a list of tensors.

    >>> tensor_arguments(aten.linear.default)
    (('input', 'Tensor'), ('weight', 'Tensor'), ('bias', 'Optional[Tensor]'))
    """
    typed = ((argument.name, str(argument.type)) for argument in schema_of(op).arguments)
    return tuple((name, kind) for name, kind in typed if "Tensor" in kind)


def _operands(pattern: Pattern, node: Node, values: Mapping[str, Any]) -> list[tuple[int, Node]] | None:
    """The tensors that the operands of a pattern stand for, each with the index of its entry in the pattern."""
    target = operator_of(node)
    if isinstance(target, OpOverload):
        tensors = [values[name] for name, _ in tensor_arguments(target)]
    else:
        tensors = [value for value in node.args if isinstance(value, Node)]
    result: list[tuple[int, Node]] = []
    for index, operand in enumerate(pattern.operands):
        if operand.quantifier == "*":
            known = {other for _, other in result}
            return result + [(index, other) for other in node.all_input_nodes if other not in known]
        value = tensors[index] if index < len(tensors) else None
        if isinstance(value, Node):
            result.append((index, value))
        elif operand.quantifier != "?":
            return None
    return result


def spec_from_pattern(rule: Rule, node: Node) -> OpSpec | None:
    """The spec of a call from the rule's pattern, or ``None`` if the pattern does not fit the call."""
    pattern = parse(rule.pattern)
    is_aten = isinstance(operator_of(node), OpOverload)
    values = arguments(node) if is_aten else dict(node.kwargs)
    tensors = _operands(pattern, node, values)
    if tensors is None:
        return None
    shapes = [(index, meta(operand).shape) for index, operand in tensors]
    matched = match(pattern, shapes, meta(node).shape, values)
    if matched is None:
        return None
    windows = _windows(rule, node, matched.windows)
    if windows is None:
        return None
    operands: dict[Node, DimPatterns] = {}
    for index, ((_, operand), dims) in enumerate(zip(tensors, matched.operands, strict=True)):
        dims = tuple(
            DimPattern(dim.factors) if dim.window and (index, dim.factors[0]) not in windows else dim for dim in dims
        )
        if operands.setdefault(operand, dims) != dims:
            return None  # one tensor in two roles: it cannot have two layouts
    order = list(operands)
    return OpSpec(
        rule,
        node,
        tuple(operands.items()),
        matched.result,
        matched.extents,
        {(order.index(tensors[index][1]), factor): window for (index, factor), window in windows.items()},
        _value(rule.mode, node),
        _value(rule.fill, node),
        matched.inside,
    )


def _windows(rule: Rule, node: Node, dims: Sequence[tuple[int, str]]) -> dict[tuple[int, str], Window] | None:
    """The windows of the windowed dims, or ``None`` if the rule computes another number of them."""
    windows = list(rule.windows(node)) if rule.windows and dims else []
    if len(windows) != len(dims):
        return None
    return {key: window for key, window in zip(dims, windows, strict=True) if window is not None}


def _value(setting: T | Callable[[Node], T], node: Node) -> T:
    return setting(node) if callable(setting) else setting
