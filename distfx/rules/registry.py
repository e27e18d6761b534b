"""The rule table: for each operator, how its dims may be split and the call that a rank makes.

An operator without a rule falls back to replicated execution. :func:`register_rule` adds a rule. The built-in rules are
in the files of their families in :mod:`distfx.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as replaced
from typing import Any

from torch.fx import Node

from distfx.errors import DistfxError
from distfx.ir.exchange import PAD_MODES
from distfx.ir.layout import Window
from distfx.ir.meta import Meta
from distfx.ir.nodes import arguments, operator_of
from distfx.ir.torch_private import OpOverload, OpOverloadPacket, schema_of
from distfx.rules import contraction, indexing, normalization, pointwise, pooling, random, reduction, resampling, shape
from distfx.rules.contraction import CONVOLUTION, TRANSPOSED
from distfx.rules.notation import Pattern, parse
from distfx.rules.pointwise import POINTWISE, draws, is_pointwise, is_random
from distfx.rules.rule import Call, LocalContext, OpSpec, Rule, RuleChoice, aten, tensor_arguments, unchanged

__all__ = [
    "BUILT_IN",
    "CONVOLUTION",
    "TABLE",
    "TRANSPOSED",
    "Call",
    "LocalContext",
    "OpSpec",
    "Rule",
    "RuleChoice",
    "aten",
    "built_in_rules",
    "draws",
    "has_operand_roles",
    "overload_of",
    "register_rule",
    "rule_of",
    "spec_of",
]

BUILT_IN: Mapping[Any, Rule | RuleChoice] = {
    **contraction.RULES,
    **indexing.RULES,
    **normalization.RULES,
    **pointwise.RULES,
    **pooling.RULES,
    **random.RULES,
    **reduction.RULES,
    **resampling.RULES,
    **shape.RULES,
}
"""The rules of distfx itself."""

TABLE: dict[Any, Rule | RuleChoice] = dict(BUILT_IN)
"""Maps each operator to its rule, or to several rules of which one fits a call. Includes registered rules."""


def rule_of(target: Any) -> Rule | RuleChoice | None:
    """The rule of an operator, or ``None`` if it has none."""
    return TABLE.get(target) or (POINTWISE if is_pointwise(target) else None)


def has_operand_roles(target: Any) -> bool:
    """Whether the operands of an operator have different patterns, so that one tensor cannot stand for two of them."""
    rule = rule_of(target)
    rules = rule.rules if isinstance(rule, RuleChoice) else () if rule is None else (rule,)
    return any(len({o.terms for o in parse(each.pattern).operands}) > 1 for each in rules if each.pattern)


def spec_of(node: Node) -> OpSpec | None:
    """The iteration space of a call, or ``None`` if no rule fits it."""
    if not isinstance(Meta.shape.get(node), tuple) or Meta.multiple.get(node):
        return None
    rule = rule_of(operator_of(node))
    if isinstance(rule, RuleChoice):
        rule = rule.pick(node)
    return rule.spec(node) if rule is not None else None


# ---------------------------------------------------------------------------------------------- registration

Windows = Window | Sequence[Window] | Callable[[dict[str, Any]], Sequence[Window]]
Local = Callable[[LocalContext], Call]


def register_rule(
    op: Any,
    pattern: str,
    *,
    local: Local | None = None,
    windows: Windows | None = None,
    mode: str = "constant",
    fill: float = 0.0,
    cost: str = "",
    name: str | None = None,
    replace: bool = False,
) -> Callable[[Local], Local]:
    """Add the rule of an operator, from then on used by all models that are compiled. Call it on every rank.

    Args:
        op: The operator: an overload such as ``torch.ops.mylib.blur.default``, ``torch.ops.mylib.blur`` if it has only
            one overload, or the result of ``torch.library.custom_op``.
        pattern: How the dims of the operands relate to those of the result, in the notation of
            :mod:`distfx.rules.notation`. The operands are the operator's tensor arguments in the order of its schema.
            For an operator that returns several tensors, the result describes each of them.
        local: Returns the call that a rank makes on its local tensors, from a
            :class:`~distfx.rules.rule.LocalContext`. By default the same call.
        windows: One :class:`~distfx.ir.layout.Window` for each windowed dim of the pattern, in order; or a function
            that returns them for the call's arguments, by name.
        mode: How windows read beyond the border of the tensor, as in ``torch.nn.functional.pad``.
        fill: The value that windows read there in mode ``"constant"``.
        cost: What the operator communicates, for readers.
        name: A name for readers. The operator's name by default.
        replace: Allow the operator to have a rule already.

    Returns:
        A decorator for the ``local`` function, which may be ignored. See ``docs/adding-an-operator.md``.

    >>> register_rule(aten.trace, "_ _, c ->")
    Traceback (most recent call last):
    ...
    distfx.errors.DistfxError: the rule '_ _, c ->' of aten.trace.default has 2 operands, but the operator takes 1
    """
    overload = overload_of(op)
    if schema_of(overload).is_mutable:
        raise DistfxError(f"{overload} writes into its arguments; rules are for operators that return new tensors")
    if is_random(overload):
        raise DistfxError(
            f"{overload} draws random numbers, and a pattern cannot state which ranks draw the same numbers"
        )
    if not replace and rule_of(overload) is not None:
        raise DistfxError(f"{overload} has a rule already; pass replace=True to use another one")
    try:
        parsed = parse(pattern)
    except ValueError as error:
        raise DistfxError(f"the rule of {overload}: {error}") from None
    problem = _schema_problem(parsed, overload) or _window_problem(parsed, windows, mode)
    if problem:
        raise DistfxError(f"the rule {pattern!r} of {overload} {problem}")
    rule = Rule(
        name or str(overload).removesuffix(".default"),
        pattern,
        local or unchanged,
        windows=_window_function(windows),
        mode=mode,
        fill=fill,
        cost=cost,
    )
    TABLE[overload] = rule

    def set_local(function: Local) -> Local:
        TABLE[overload] = replaced(rule, local=function)
        return function

    return set_local


def overload_of(op: Any) -> OpOverload:
    """The operator overload that a user means."""
    overload = getattr(op, "_opoverload", op)  # torch.library.custom_op
    if isinstance(overload, OpOverloadPacket):
        names = overload.overloads()
        functional = [n for n in names if not schema_of(getattr(overload, n)).is_mutable and "out" not in n]
        if len(functional) != 1:
            raise DistfxError(
                f"{overload} has the overloads {', '.join(names)}: pass one, such as {overload}.{names[0]}"
            )
        overload = getattr(overload, functional[0])
    if not isinstance(overload, OpOverload):
        raise DistfxError(f"a rule is for an operator such as torch.ops.mylib.blur.default, not for {op!r}")
    return overload


def _schema_problem(pattern: Pattern, op: OpOverload) -> str | None:
    """How a pattern contradicts the schema of an operator, worded to follow the name of the operator."""
    tensors = tensor_arguments(op)
    variadic = bool(pattern.operands) and pattern.operands[-1].quantifier == "*"
    count = len(pattern.operands) - variadic
    if count > len(tensors) or (count < len(tensors) and not variadic):
        return f"has {count} operand{'s' * (count != 1)}, but the operator takes {len(tensors)}"
    for number, (operand, (name, kind)) in enumerate(zip(pattern.operands, tensors, strict=False)):
        if operand.quantifier == "*":
            break
        if "List" in kind:
            return f"has one operand for {name!r}, which is a list of tensors: write '*' before operand {number}"
        if "Optional" in kind and operand.quantifier != "?":
            return f"needs operand {number}, but argument {name!r} is optional: write '?' before it"
        if "Optional" not in kind and operand.quantifier == "?":
            return f"has an optional operand {number}, but argument {name!r} is required"
    types = {argument.name: str(argument.type) for argument in schema_of(op).arguments}
    for name in sorted(pattern.arguments):
        if name not in types:
            return f"names argument {name!r}, but the operator's arguments are {', '.join(types)}"
        if "int" not in types[name].lower():
            return f"names argument {name!r} of type {types[name]}, but positions and extents are integers"
    if not schema_of(op).returns or any(str(value.type) != "Tensor" for value in schema_of(op).returns):
        return f"is for tensors, but the operator returns {[str(value.type) for value in schema_of(op).returns]}"
    return None


def _window_problem(pattern: Pattern, windows: Windows | None, mode: str) -> str | None:
    if pattern.has_windows and windows is None:
        return "has windows: pass windows="
    if windows is not None and not pattern.has_windows:
        return "has no windows, but windows= was passed: write [s] for a dim that is read through a window"
    if mode not in PAD_MODES:
        return f"has mode {mode!r}; the modes are {', '.join(PAD_MODES)}"
    return None


def _window_function(windows: Windows | None) -> Callable[[Node], Sequence[Window]] | None:
    if windows is None:
        return None
    if callable(windows):
        function = windows
        return lambda node: function(arguments(node))
    fixed: Sequence[Window] = [windows] if isinstance(windows, Window) else list(windows)
    return lambda node: fixed


def built_in_rules() -> Mapping[str, list[Rule]]:
    """The rules of distfx by name. The element-wise rule comes first; most of its operators have no entry."""
    result: dict[str, list[Rule]] = {POINTWISE.name: [POINTWISE]}
    for entry in BUILT_IN.values():
        for rule in entry.rules if isinstance(entry, RuleChoice) else (entry,):
            known = result.setdefault(rule.name, [])
            known += [rule] if rule not in known else []
    return result
