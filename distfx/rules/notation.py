"""The notation of the rule table: how the dims of an operator's operands relate to the dims of its result.

A pattern lists the operands, an arrow, and the result: ``n (g c) [s]..., (g k) c _..., ?(g k) -> n (g k) s...`` is a
convolution. Each word stands for one dim or for several:

==================  ====================================================================================================
``n``               a dim with the *factor* ``n``, an index of the iteration space. Its dims are split together
``(g c)``           a dim of merged factors, the major one first
``_``               a dim that is never split
``[s]``             a dim read through a window around the positions of factor ``s``: splitting it needs a halo
``...``             any number of dims, each with its own factor. Operands broadcast: dims are matched from the right
``a...``            the same with a name, so that a pattern can have several such groups; also ``[a]...`` and ``_...``
``s...``            spatial dims. Their factors are ``d``, ``h``, ``w``, named from the last
``b...``            batch dims. Their factors are ``n``, ``b1``, ``b2``, ...
``=...``            only dims with the same extent in every tensor get a factor; the others are not split
``r@dim``           the dims at the positions in argument ``dim`` (an int or a list; none means all dims), in that order
``r!``              the operator itself reduces over ``r``: its result is complete, not a partial sum
``m?``              a dim that may be missing; ``_@dim?`` in the result has extent one, as ``keepdim`` leaves it
==================  ====================================================================================================

An operand with a leading ``?`` may be missing. One with a leading ``*`` stands for all remaining operands. A final
``where`` takes extents from arguments: ``where g = groups``, or ``where c... = normalized_shape``.

A factor that appears in an operand but not in the result is summed over: if it is split, the result is a partial sum.
A dim of extent one is not split if its factor has a larger extent in another tensor.

:func:`parse` reads a pattern once into an immutable :class:`Pattern`. :func:`match` applies it to the shapes of a call:

>>> sizes = match(parse("n (g c) [s]..., (g k) c _... -> n (g k) s... where g = groups"),
...               [(0, (8, 6, 32)), (1, (4, 3, 5))], (8, 4, 28), {"groups": 2})
>>> [str(dim) for dim in sizes.operands[0]], sizes.extents
(['n', '(g c)', '[w]'], {'g': 2, 'n': 8, 'w': 28, 'c': 3, 'k': 2})
>>> total = match(parse("... r@dim -> ... _@dim?"), [(0, (4, 5, 6))], (4, 6), {"dim": -2})
>>> [str(dim) for dim in total.operands[0]], [str(dim) for dim in total.result]
(['.0', 'r0', '.1'], ['.0', '.1'])
>>> parse("n [a b] -> n")
Traceback (most recent call last):
...
ValueError: cannot read the pattern 'n [a b] -> n' at position 5: expected ']', found 'b'
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NoReturn

from distfx.ir.symbolic import Size, floordiv, product

__all__ = ["DimPattern", "DimPatterns", "Match", "Operand", "Pattern", "Term", "match", "parse"]

MAX_LENGTH = 500
"""The length of the longest pattern that is read."""

SPACE = {0: (), 1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}
"""The factors of the spatial dims, by their number."""


@dataclass(frozen=True)
class DimPattern:
    """One dim of a tensor in a call: its factors, the major one first. Without factors the dim is never split."""

    factors: tuple[str, ...]
    window: bool = False

    def __str__(self) -> str:
        if len(self.factors) > 1:
            return f"({' '.join(self.factors)})"
        return f"[{self.factors[0]}]" if self.window else "".join(self.factors) or "_"


DimPatterns = tuple[DimPattern, ...]


@dataclass(frozen=True)
class Term:
    """One word of a pattern."""

    factors: tuple[str, ...]
    """The factors of one dim, or the name of a group of dims; none for ``_``."""
    many: bool = False
    """Whether it stands for any number of dims: ``...``."""
    argument: str = ""
    """The argument that has the positions of the dims: ``@dim``."""
    window: bool = False
    inside: bool = False
    equal: bool = False
    optional: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether it is a reduced dim that ``keepdim`` keeps with extent one: ``_@dim?``."""
        return bool(self.argument) and self.optional and not self.factors

    @property
    def group(self) -> str | None:
        """The name that numbered factors share, if the word stands for several dims."""
        return self.factors[0] if (self.many or self.argument) and self.factors else None


@dataclass(frozen=True)
class Operand:
    """The words of one operand, with its quantifier: ``"?"`` for none or one, ``"*"`` for any number."""

    terms: tuple[Term, ...]
    quantifier: str = ""


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern."""

    text: str
    operands: tuple[Operand, ...]
    result: tuple[Term, ...]
    extents: tuple[tuple[str, bool, str], ...] = ()
    """The ``where`` clause: a factor (or, if true, a group) and the argument that has its extent (or its extents)."""

    @cached_property
    def arguments(self) -> frozenset[str]:
        """The arguments that the pattern names."""
        terms = [*self.result, *(term for operand in self.operands for term in operand.terms)]
        return frozenset({term.argument for term in terms if term.argument} | {name for _, _, name in self.extents})

    @property
    def has_windows(self) -> bool:
        return any(term.window for operand in self.operands for term in operand.terms)


# -------------------------------------------------------------------------------------------------- parsing


@dataclass(frozen=True)
class _Token:
    text: str
    start: int
    attached: bool
    """Whether it follows the previous token without a blank."""


_TOKEN = re.compile(r"->|\.\.\.|[A-Za-z][A-Za-z0-9_]*|[()\[\],@?*=!_]")
_END = "the end"


class _Parser:
    """A recursive-descent parser: one method for each part of a pattern."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_LENGTH:
            raise ValueError(f"a pattern has at most {MAX_LENGTH} characters, not {len(text)}: {text[:40]!r}...")
        self.tokens = list(self._tokenize())
        self.at = 0

    def _tokenize(self) -> Iterator[_Token]:
        start = 0
        while start < len(self.text):
            blanks = len(self.text[start:]) - len(self.text[start:].lstrip())
            token = _TOKEN.match(self.text, start + blanks)
            if token is None:
                if start + blanks == len(self.text):
                    break
                self.fail(f"unexpected {self.text[start + blanks]!r}", start + blanks)
            yield _Token(token.group(), token.start(), blanks == 0)
            start = token.end()
        yield _Token(_END, len(self.text), False)

    def fail(self, problem: str, start: int | None = None) -> NoReturn:
        place = self.tokens[self.at].start if start is None else start
        raise ValueError(f"cannot read the pattern {self.text!r} at position {place}: {problem}")

    @property
    def next(self) -> _Token:
        return self.tokens[self.at]

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1].text

    def accept(self, text: str, *, attached: bool = False) -> bool:
        if self.next.text != text or (attached and not self.next.attached):
            return False
        self.at += 1
        return True

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(f"expected {text!r}, found {self.next.text!r}")

    def name(self, kind: str) -> str:
        """A factor (letters only, because numbers are appended to the names of groups) or an argument."""
        text = self.next.text
        good = text.isalpha() if kind == "factor" else text.isidentifier()
        if text == _END or not good or text in ("where", "_"):
            self.fail(f"expected the name of {'an' if kind == 'argument' else 'a'} {kind}, found {text!r}")
        return self.take()

    def pattern(self) -> Pattern:
        operands = [self.operand()]
        while self.accept(","):
            if operands[-1].quantifier == "*":
                self.fail("an operand with '*' stands for all remaining operands and must be the last")
            operands.append(self.operand())
        self.expect("->")
        result = self.terms()
        bindings: list[tuple[str, bool, str]] = []
        if self.accept("where"):
            bindings.append(self.binding())
            while self.accept(","):
                bindings.append(self.binding())
        if self.next.text != _END:
            self.fail(f"expected {_END}, found {self.next.text!r}")
        return Pattern(self.text, tuple(operands), result, tuple(bindings))

    def binding(self) -> tuple[str, bool, str]:
        factor = self.name("factor")
        many = self.accept("...", attached=True)
        self.expect("=")
        return factor, many, self.name("argument")

    def operand(self) -> Operand:
        quantifier = self.take() if self.next.text in ("?", "*") else ""
        return Operand(self.terms(), quantifier)

    def terms(self) -> tuple[Term, ...]:
        terms: list[Term] = []
        while self.next.text not in (",", "->", "where", _END):
            terms.append(self.term())
        return tuple(terms)

    def term(self) -> Term:
        equal = self.accept("=")
        window = False
        factors: tuple[str, ...]
        if self.accept("("):
            names = [self.name("factor")]
            while not self.accept(")"):
                names.append(self.name("factor"))
            return Term(tuple(names))
        if self.accept("["):
            factors, window = (self.name("factor"),), True
            self.expect("]")
        elif self.accept("_"):
            factors = ()
        elif self.next.text == "...":
            factors = ("",)
        else:
            factors = (self.name("factor"),)
        inside = self.accept("!", attached=True)
        many = self.accept("...", attached=bool(factors != ("",)))
        argument = self.name("argument") if self.accept("@", attached=True) else ""
        optional = self.accept("?", attached=True)
        if equal and not many:
            self.fail("'=' is for groups of dims: '=...'")
        if many and argument:
            self.fail("a word has '...' or '@', not both")
        return Term(factors, many, argument, window, inside, equal, optional)


def _check(pattern: Pattern) -> None:
    """Raise if the words contradict each other."""

    def fail(problem: str) -> NoReturn:
        raise ValueError(f"cannot use the pattern {pattern.text!r}: {problem}")

    bound = {name for name, many, _ in pattern.extents if many}
    groups: set[str] = set()
    single: set[str] = set()
    for terms in [*(operand.terms for operand in pattern.operands), pattern.result]:
        names = [factor for term in terms for factor in term.factors]
        if twice := sorted({name or "..." for name in names if names.count(name) > 1}):
            fail(f"factor {twice[0]} appears twice in one tensor")
        if len([term for term in terms if term.many and not set(term.factors) & bound]) > 1:
            fail("the number of dims of two '...' in one tensor is ambiguous: add where a... = argument")
        groups |= {term.group for term in terms if term.group is not None}
        single |= {factor for term in terms if term.group is None for factor in term.factors}
    if both := sorted(groups & single):
        fail(f"{both[0]} is one dim in one place and several in another")
    if ("s" in groups and single & {"d", "h", "w"}) or ("b" in groups and "n" in single):
        fail("the factors of s... are called d, h, w, and those of b... are called n, b1, ...: use other names")
    sources = {factor for operand in pattern.operands for term in operand.terms for factor in term.factors}
    if unknown := sorted({factor for term in pattern.result for factor in term.factors[:1]} - sources):
        fail(f"factor {unknown[0] or '...'} of the result appears in no operand")
    if unused := sorted({name for name, _, _ in pattern.extents} - sources):
        fail(f"the where clause names {unused[0]}, which appears in no operand")
    if any(term.window or term.inside for term in pattern.result):
        fail("only operands have windows '[s]' and reductions 'r!'")
    kept = {factor for term in pattern.result for factor in term.factors}
    for operand in pattern.operands:
        for term in operand.terms:
            if term.window and not set(term.factors) <= kept:
                fail(f"the window [{term.factors[0]}] needs a dim {term.factors[0]} in the result")
            if term.inside and set(term.factors) & kept:
                fail(f"{term.factors[0]}! is reduced, so it cannot be in the result")


@lru_cache(maxsize=1024)
def parse(text: str) -> Pattern:
    """Parse a pattern. Raises ``ValueError`` with the position of a mistake."""
    pattern = _Parser(text).pattern()
    _check(pattern)
    return pattern


# -------------------------------------------------------------------------------------------------- matching


@dataclass(frozen=True)
class Match:
    """A pattern applied to the shapes of a call."""

    operands: tuple[DimPatterns, ...]
    result: DimPatterns
    extents: Mapping[str, Size]
    windows: tuple[tuple[int, str], ...]
    """Operand number and factor of each windowed dim, in the order of the pattern and of the argument."""
    inside: frozenset[str]


@dataclass(frozen=True)
class _Place:
    """One dim of a tensor: its word, and for a group its number in the group and the group's number of dims."""

    term: Term
    number: int = 0
    count: int = 1


@dataclass
class _Tensor:
    shape: Sequence[Size]
    places: list[_Place]
    dims: list[DimPattern] = field(default_factory=list)


Shape = tuple[Size, ...]
Positions = Mapping[str, Sequence[int]]


def match(
    pattern: Pattern,
    operands: Sequence[tuple[int, Sequence[Size]]],
    result: Sequence[Size],
    arguments: Mapping[str, Any],
) -> Match | None:
    """Apply a pattern to a call, or return ``None`` if it does not fit.

    ``operands`` has the operands that are present, each as the index of its entry in the pattern and its shape.
    """
    values = tuple((name, _hashable(arguments.get(name))) for name in pattern.arguments)
    return _match(pattern.text, tuple((index, tuple(shape)) for index, shape in operands), tuple(result), values)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


@lru_cache(maxsize=4096)
def _match(
    text: str, operands: tuple[tuple[int, Shape], ...], result: Shape, values: tuple[tuple[str, Any], ...]
) -> Match | None:
    """:func:`match` of values that can be hashed, because networks repeat their calls."""
    pattern, arguments = parse(text), dict(values)
    terms = [pattern.operands[index].terms for index, _ in operands]
    ranks = [len(shape) for (_, shape), each in zip(operands, terms, strict=True) if any(t.argument for t in each)]
    width = max(ranks, default=0)
    positions = _positions(pattern, width, arguments)
    if positions is None:
        return None
    extents: dict[str, Size] = {name: arguments[key] for name, many, key in pattern.extents if not many}
    bound = {name: len(arguments[key]) for name, many, key in pattern.extents if many}
    tensors: list[_Tensor] = []
    for (_, shape), each in zip(operands, terms, strict=True):
        places = _place(each, len(shape), width - len(shape), positions, bound)
        if places is None:
            return None
        tensors.append(_Tensor(shape, places))
    lengths = {t.group: 0 for each in terms for t in each if t.many and t.group is not None} | _lengths(tensors)
    present = {factor for tensor in tensors for place in tensor.places for factor in place.term.factors}
    kept = tuple(t for t in pattern.result if not (t.optional and t.factors) or set(t.factors) <= present)
    fixed = {name: length for name, length in lengths.items() if not any(t.equal and t.group == name for t in kept)}
    places = _place(kept, len(result), 0, positions, bound | fixed)
    if places is None or any(p.term.is_kept and size != 1 for p, size in zip(places, result, strict=True)):
        return None
    tensors.append(_Tensor(result, places))
    if not _name_factors(tensors, _lengths(tensors)) or not _find_extents(tensors, extents):
        return None
    return Match(
        tuple(tuple(_unsplit_broadcast(tensor, extents)) for tensor in tensors[:-1]),
        tuple(_unsplit_broadcast(tensors[-1], extents)),
        extents,
        tuple(_windows(tensors[:-1])),
        frozenset(
            f for t in tensors for p, d in zip(t.places, t.dims, strict=True) if p.term.inside for f in d.factors
        ),
    )


def _positions(pattern: Pattern, width: int, arguments: Mapping[str, Any]) -> Positions | None:
    """The dims that each argument names, counted in the widest operand."""
    result: dict[str, Sequence[int]] = {}
    terms = [*pattern.result, *(term for operand in pattern.operands for term in operand.terms)]
    for name in {term.argument for term in terms if term.argument}:
        value = arguments.get(name)
        dims = list(range(width)) if value is None or value == () else [value] if isinstance(value, int) else value
        result[name] = [dim % width for dim in dims] if width else []
        if len(set(result[name])) < len(result[name]):
            return None
    return result


def _place(
    terms: Sequence[Term], ndim: int, offset: int, positions: Positions, counts: Mapping[str, int]
) -> list[_Place] | None:
    """The word of each of ``ndim`` dims; first with the optional words, then without them."""
    places = _place_all(terms, ndim, offset, positions, counts)
    if places is None and any(term.optional for term in terms):
        return _place_all([t for t in terms if not t.optional], ndim, offset, positions, counts)
    return places


def _place_all(
    terms: Sequence[Term], ndim: int, offset: int, positions: Positions, counts: Mapping[str, int]
) -> list[_Place] | None:
    slots: dict[int, _Place] = {}
    for term in terms:
        for number, position in enumerate(positions[term.argument] if term.argument else ()):
            dim = position - offset
            if dim >= ndim or dim in slots:
                return None
            if dim >= 0:  # an operand with fewer dims broadcasts
                slots[dim] = _Place(term, number, len(positions[term.argument]))
    rest = [term for term in terms if not term.argument]
    sizes = [counts.get(term.group or "", None) if term.group is not None else None for term in rest]
    taken = sum(1 if not term.many else size or 0 for term, size in zip(rest, sizes, strict=True))
    spare = ndim - len(slots) - taken
    flexible = [term for term, size in zip(rest, sizes, strict=True) if term.many and size is None]
    if spare < 0 or (spare and not flexible):
        return None
    others = iter(
        _Place(term, number, count)
        for term, size in zip(rest, sizes, strict=True)
        for count in [1 if not term.many else spare if size is None else size]
        for number in range(count)
    )
    return [slots[dim] if dim in slots else next(others) for dim in range(ndim)]


def _lengths(tensors: Iterable[_Tensor]) -> dict[str, int]:
    """The number of dims of each group: the most that a tensor has."""
    lengths: dict[str, int] = {}
    for tensor in tensors:
        for group in {place.term.group for place in tensor.places}:
            counts = [place.count for place in tensor.places if place.term.group == group]
            if group is not None:
                lengths[group] = max(lengths.get(group, 0), *counts)
    return lengths


def _numbered(group: str, number: int, length: int) -> str:
    if group == "s":
        return SPACE[length][number]
    if group == "b":
        return f"b{number}" if number else "n"
    return f"{group or '.'}{number}"


def _name_factors(tensors: Sequence[_Tensor], lengths: Mapping[str, int]) -> bool:
    """Give each dim its factors. Returns whether that is possible."""
    if lengths.get("s", 0) not in SPACE:
        return False
    common = _equal_dims(tensors, lengths)
    for tensor in tensors:
        for place in tensor.places:
            term, group = place.term, place.term.group
            if group is None:
                tensor.dims.append(DimPattern(term.factors, term.window))
                continue
            number = place.number if term.argument else lengths[group] - place.count + place.number
            if term.equal and number not in common[group]:
                tensor.dims.append(DimPattern(()))
            else:
                tensor.dims.append(DimPattern((_numbered(group, number, lengths[group]),), term.window))
    return True


def _equal_dims(tensors: Sequence[_Tensor], lengths: Mapping[str, int]) -> dict[str, set[int]]:
    """For each group with ``=``, the numbers of the dims that have the same extent in all tensors with the group."""
    sizes: dict[str, list[dict[int, Size]]] = {}
    for tensor in tensors:
        extents: dict[str, dict[int, Size]] = {}
        for place, size in zip(tensor.places, tensor.shape, strict=True):
            if place.term.equal and place.term.group is not None:
                shift = lengths[place.term.group] - place.count
                extents.setdefault(place.term.group, {})[shift + place.number] = size
        for group, each in extents.items():
            sizes.setdefault(group, []).append(each)
    return {
        group: {number for number in each[0] if all(other.get(number) == each[0][number] for other in each)}
        for group, each in sizes.items()
    }


def _find_extents(tensors: Sequence[_Tensor], extents: dict[str, Size]) -> bool:
    """Complete the extents of the factors from the shapes. Returns whether all could be found."""
    *operands, result = tensors
    for tensor in [result, *operands]:
        for dim, size in zip(tensor.dims, tensor.shape, strict=True):
            if len(dim.factors) == 1 and not dim.window:
                (factor,) = dim.factors
                previous = extents.get(factor, 1)
                # numbers before symbols: a symbol of another operand has the same value or the call is invalid
                if previous == 1 or (tensor is not result and not isinstance(previous, int) and isinstance(size, int)):
                    extents[factor] = previous if size == 1 else size
    merged = [(d, s) for t in tensors for d, s in zip(t.dims, t.shape, strict=True) if len(d.factors) > 1]
    for _ in merged:
        for dim, size in merged:
            unknown = [factor for factor in dim.factors if factor not in extents]
            if len(unknown) == 1:
                known = product(extents[factor] for factor in dim.factors if factor in extents)
                extents[unknown[0]] = floordiv(size, known)
    return all(factor in extents for tensor in tensors for dim in tensor.dims for factor in dim.factors)


def _unsplit_broadcast(tensor: _Tensor, extents: Mapping[str, Size]) -> Iterator[DimPattern]:
    for dim, size in zip(tensor.dims, tensor.shape, strict=True):
        broadcast = len(dim.factors) == 1 and not dim.window and size == 1 and extents[dim.factors[0]] != 1
        yield DimPattern(()) if broadcast else dim


def _windows(tensors: Sequence[_Tensor]) -> list[tuple[int, str]]:
    windows = []
    for index, tensor in enumerate(tensors):
        terms = list(dict.fromkeys(place.term for place in tensor.places))
        for place, dim in zip(tensor.places, tensor.dims, strict=True):
            if place.term.window:
                windows.append((index, terms.index(place.term), place.number, dim.factors[0]))
    return [(index, factor) for index, _, _, factor in sorted(windows)]
