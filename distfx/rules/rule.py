"""What a row of the rule table is, and what a call is in its terms.

A row's pattern (see :mod:`distfx.rules.notation`) is all the planner needs: which factors there are, which dims they
split, which are summed over, which dims are read through windows. ``local`` turns the call into one on local tensors:
windows have brought what lies beyond the block, so padding remains only on dims that are not split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from distfx.ir.layout import Layout, Window
from distfx.ir.meta import meta
from distfx.ir.nodes import aten
from distfx.ir.ops import LocalSize
from distfx.ir.symbolic import Size
from distfx.rules.notation import DimPattern, parse

__all__ = [
    "BoundCall",
    "Call",
    "DimPatterns",
    "LocalContext",
    "OpSpec",
    "Rule",
    "RuleChoice",
    "aten",
    "spec_from_dims",
    "spec_from_pattern",
    "unchanged",
]

DimPatterns = tuple[DimPattern, ...]
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class OpSpec:
    """One call of an operator: its operands with their dims' factors, the factors' extents, the windows."""

    rule: Rule
    node: Node
    operands: tuple[tuple[Node, DimPatterns], ...]
    result: DimPatterns
    extents: Mapping[str, Size]
    windows: Mapping[tuple[int, str], Window] = field(default_factory=dict)
    """The window through which an operand, by its number, is read along a factor."""
    mode: str = "constant"
    fill: float = 0.0
    inside: frozenset[str] = frozenset()
    """The factors whose reduction the operator completes itself: over their axes the result is the same everywhere."""
    units: Mapping[str, Size] = field(default_factory=dict)
    """The granules in which factors are split, where an operand comes so: tokens ``H*W`` by rows of ``W``."""

    def spatial(self) -> tuple[str, ...]:
        """The factors of the result's spatial dims, in order."""
        return tuple(word.factors[0] if word.factors else "" for word in self.result[2:])


@dataclass(frozen=True)
class LocalContext:
    """Where a call becomes local: the axes of each factor, the result's layout, the arguments in place."""

    spec: OpSpec
    axes: Mapping[str, tuple[str, ...]]
    layout: Layout
    args: tuple[Any, ...]
    ranks: Mapping[str, int]
    """The sizes of the grid's axes."""
    operands: tuple[Layout, ...] = ()
    """The layouts in which the operands come."""

    @property
    def node(self) -> Node:
        return self.spec.node

    def split_space(self) -> list[bool]:
        """Which of the result's spatial dims are split."""
        return [bool(self.axes.get(factor)) for factor in self.spec.spatial()]

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
    """A localised call when its sizes have become numbers."""

    spec: OpSpec
    node: Node
    shape: tuple[int, ...]
    """Of the result, global."""
    number: Callable[[Size], int]
    least: Callable[[Any], int]
    """The smallest that a size, or a :class:`LocalSize`, is on any rank."""

    def operand(self, index: int) -> tuple[int, ...]:
        """The global shape of an operand."""
        return tuple(self.number(size) for size in meta(self.spec.operands[index][0]).shape)


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    name: str
    pattern: str
    local: Callable[[LocalContext], Call]
    tensors: tuple[int, ...] = (0,)
    windows: Callable[[Node], Sequence[Window]] | None = None
    """The windows of the first operand's windowed dims, in order."""
    fill: float = 0.0
    anchor: bool = False
    """Whether the planner weighs strategies for it; others follow the layout of an operand."""
    product: bool = False
    """Whether it is a sum of products, which autocast computes in its dtype."""
    scatter: str | None = None
    """The factor over which a partial result is scattered."""
    build: Callable[[Rule, Node], OpSpec | None] | None = None
    """Makes the spec of operators whose dims vary; by default it comes from the pattern."""
    check: Callable[[BoundCall], str | None] | None = None
    """What is wrong with a call at some sizes, in words that follow its description: what capture left open."""
    cost: str = ""
    """What it communicates, in words, for the documentation."""

    def spec(self, node: Node) -> OpSpec | None:
        """The iteration space of a call, or ``None`` if the row does not fit it."""
        return self.build(self, node) if self.build else spec_from_pattern(self, node)


@dataclass(frozen=True)
class RuleChoice:
    """Several rows of one operator, of which ``pick`` finds the one that fits a call."""

    pick: Callable[[Node], Rule | None]
    rules: tuple[Rule, ...]


def unchanged(context: LocalContext) -> Call:
    """The same call, on local tensors."""
    return context.node.target, context.args, dict(context.node.kwargs)


def spec_from_pattern(rule: Rule, node: Node) -> OpSpec | None:
    """A spec from the row's pattern, with as many spatial dims as the result has."""
    rank = len(meta(node).shape) - 2
    if rank not in (0, 1, 2, 3):
        return None
    pattern = parse(rule.pattern, rank)
    operands: list[tuple[Node, DimPatterns]] = []
    extents: dict[str, Size] = {}
    for position, words in zip(rule.tensors, pattern.operands, strict=True):
        operand = node.args[position] if position < len(node.args) else None
        if not isinstance(operand, Node):
            continue
        if len(meta(operand).shape) != len(words):
            return None
        operands.append((operand, words))
    for operand, words in [*operands, (node, pattern.result)]:
        for word, extent in zip(words, meta(operand).shape, strict=True):
            if len(word.factors) == 1 and not word.window:
                extents[word.factors[0]] = extent
    through = [word.factors[0] for word in pattern.operands[0] if word.window]
    found = list(rule.windows(node)) if rule.windows else []
    if len(found) != len(through):
        return None  # an input without a batch
    windows = dict(zip(((0, factor) for factor in through), found, strict=True))
    return OpSpec(rule, node, tuple(operands), pattern.result, extents, windows, fill=rule.fill)


def spec_from_dims(
    rule: Rule,
    node: Node,
    operands: Sequence[tuple[Node, Sequence[int | None]]],
    result: Sequence[int | None],
    windows: Mapping[tuple[int, int], Window] | None = None,
    mode: str = "constant",
    fill: float = 0.0,
    extents: Mapping[int, Size] | None = None,
) -> OpSpec:
    """A spec whose factors are numbers: for each dim of an operand its factor, or ``None`` where it stays whole."""

    def words(numbers: Sequence[int | None], at: int | None) -> DimPatterns:
        through = {factor for operand, factor in windows or {} if operand == at}
        return tuple(DimPattern(() if n is None else (f"d{n}",), n in through) for n in numbers)

    sizes: dict[str, Size] = {f"d{n}": size for n, size in (extents or {}).items()}
    for other, numbers in [*operands, (node, result)]:
        sizes |= {f"d{n}": s for n, s in zip(numbers, meta(other).shape, strict=True) if n is not None}
    sizes |= {f"d{n}": s for n, s in zip(result, meta(node).shape, strict=True) if n is not None}
    return OpSpec(
        rule,
        node,
        tuple((operand, words(numbers, i)) for i, (operand, numbers) in enumerate(operands)),
        words(result, None),
        sizes,
        {(operand, f"d{factor}"): window for (operand, factor), window in (windows or {}).items()},
        mode,
        fill,
    )
