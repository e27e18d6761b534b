"""The grammar of sizes: from text to a tree, without evaluating anything.

::

    sum      = product (("+" | "-") product)*
    product  = factor (("*" | "/" | "//" | "%") factor)*
    factor   = ("+" | "-")* power
    power    = atom ["**" exponent]
    exponent = ["-"] integer | "(" ["-"] integer ")"
    atom     = integer | decimal | symbol | function "(" sum ("," sum)* ")" | "(" sum ")"

Precedence and associativity are those of Python. The text may come from anywhere, so that everything is bounded:
the length of the text, the digits of a number, the length of a name, the depth of the tree, and the degree of the
expression as a polynomial, which bounds exponents even if powers are nested.

:func:`distfx.ir.symbolic.parse_size` turns the tree into a size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from distfx.errors import DistfxError

__all__ = ["Expression", "Number", "Operation", "Symbol", "excerpt", "parse_expression"]

MAX_LENGTH = 4096
"""Characters in a text."""
MAX_DIGITS = 18
"""Digits of a number: such an integer fits into 64 bits."""
MAX_NAME = 64
"""Characters in the name of a symbol."""
MAX_DEPTH = 64
"""Nested operations, and nested parentheses."""
MAX_DEGREE = 64
"""Degree of an expression as a polynomial in its symbols and numbers; hence also the largest exponent."""


@dataclass(frozen=True, slots=True)
class Number:
    """An integer or a decimal."""

    value: int | float
    depth = 0
    degree = 1


@dataclass(frozen=True, slots=True)
class Symbol:
    """An unknown size."""

    name: str
    depth = 0
    degree = 1


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator or a function, and its operands.

    ``name`` is ``+`` or ``*`` (any number of operands), ``-`` or ``/`` (one: negative, reciprocal), ``//``, ``%`` or
    ``**`` (two), or the name of a function. The exponent of ``**`` is a :class:`Number`.
    """

    name: str
    operands: tuple[Expression, ...]
    depth: int
    degree: int


Expression: TypeAlias = Number | Symbol | Operation


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    position: int


_TOKEN = re.compile(
    r"(?P<space>[ \t]+)"
    r"|(?P<decimal>[0-9]+\.[0-9]*(?:e[+-]?[0-9]{1,2})?)"
    r"|(?P<integer>[0-9]+)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<sign>\*\*|//|[-+*/%(),])"
)


def excerpt(text: str, position: int = 0) -> str:
    """The text as a message quotes it: all of it if it is short, else the part around ``position``.

    >>> excerpt("H + 1"), len(excerpt("H" * 9999, 5000))
    ("'H + 1'", 68)
    """
    if len(text) <= 60:
        return repr(text)
    start = max(0, min(position - 30, len(text) - 60))
    end = start + 60
    return f"{'...' if start else ''}{text[start:end]!r}{'...' if end < len(text) else ''}"


def parse_expression(text: str, functions: Mapping[str, int | None]) -> Expression:
    """The tree of an expression.

    Args:
        text: What to parse.
        functions: The number of arguments of each function that may be called, or ``None`` for one or more.

    Raises:
        DistfxError: if the text is not an expression, or exceeds a bound. It names the position and the remedy.
    """
    if not isinstance(text, str):
        raise DistfxError(f"a size is written as text such as 'H//2 + 1', not as {type(text).__name__}")
    if len(text) > MAX_LENGTH:
        raise DistfxError(f"size {excerpt(text)} has {len(text)} characters: the limit is {MAX_LENGTH}")
    return _Parser(text, functions).parse()


class _Parser:
    """Recursive descent: one method for each rule of the grammar."""

    def __init__(self, text: str, functions: Mapping[str, int | None]) -> None:
        self.text = text
        self.functions = functions
        self.tokens = self._tokenize()
        self.index = 0
        self.parentheses = 0

    def parse(self) -> Expression:
        tree = self._sum()
        if self._next.kind != "end":
            self._fail(f"{self._next.text!r} cannot follow here: write an operator (+ - * / // %) between two sizes")
        return tree

    # -- tokens

    def _tokenize(self) -> list[_Token]:
        tokens, position = [], 0
        while position < len(self.text):
            match = _TOKEN.match(self.text, position)
            if match is None:
                self._fail(
                    f"{self.text[position]!r} has no meaning in a size: write integers, names, + - * / // % **, "
                    "parentheses, floor, ceil, min and max",
                    position,
                )
            if match.lastgroup != "space":
                tokens.append(_Token(str(match.lastgroup), match[0], position))
            position = match.end()
        return [*tokens, _Token("end", "", position)]

    @property
    def _next(self) -> _Token:
        return self.tokens[self.index]

    def _take(self) -> _Token:
        token = self._next
        self.index += 1
        return token

    def _accept(self, *signs: str) -> _Token | None:
        """The next token if it is one of ``signs``."""
        return self._take() if self._next.kind == "sign" and self._next.text in signs else None

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            self._fail(f"{sign!r} is missing before {self._next.text!r}" if self._next.text else f"{sign!r} is missing")

    def _fail(self, reason: str, position: int | None = None) -> NoReturn:
        position = self._next.position if position is None else position
        raise DistfxError(f"cannot read size {excerpt(self.text, position)} at character {position + 1}: {reason}")

    # -- rules

    def _sum(self) -> Expression:
        terms = [self._product()]
        while sign := self._accept("+", "-"):
            term = self._product()
            terms.append(self._operation("-", (term,), sign) if sign.text == "-" else term)
        return terms[0] if len(terms) == 1 else self._operation("+", tuple(terms))

    def _product(self) -> Expression:
        factors = self._factor()
        while sign := self._accept("*", "/", "//", "%"):
            if sign.text == "*":
                factors += self._factor()
            elif sign.text == "/":
                factors += self._reciprocals(self._multiply(self._factor()), sign)
            else:
                operands = self._multiply(factors), self._multiply(self._factor())
                factors = [self._operation(sign.text, operands, sign)]
        return self._multiply(factors)

    def _reciprocals(self, divisor: Expression, sign: _Token) -> list[Expression]:
        """The reciprocal of each factor of ``divisor``: ``a/(2*b)`` is one product of three factors."""
        factors = divisor.operands if isinstance(divisor, Operation) and divisor.name == "*" else (divisor,)
        return [self._operation("/", (factor,), sign) for factor in factors]

    def _multiply(self, factors: list[Expression]) -> Expression:
        return factors[0] if len(factors) == 1 else self._operation("*", tuple(factors))

    def _factor(self) -> list[Expression]:
        """A power, after the factor -1 if there is a minus. ``-(a + b)*c`` is one product of three factors."""
        negative = False
        while sign := self._accept("+", "-"):
            negative ^= sign.text == "-"
        power = self._power()
        return [Number(-1), power] if negative else [power]

    def _power(self) -> Expression:
        base = self._atom()
        sign = self._accept("**")
        return self._operation("**", (base, self._exponent()), sign) if sign else base

    def _exponent(self) -> Number:
        parenthesis = self._accept("(")
        negative = self._accept("-")
        token = self._next
        if token.kind != "integer" or len(token.text) > MAX_DIGITS or int(token.text) > MAX_DEGREE:
            self._fail(f"an exponent is an integer of at most {MAX_DEGREE}")
        self.index += 1
        if parenthesis:
            self._expect(")")
        return Number(-int(token.text) if negative else int(token.text))

    def _atom(self) -> Expression:
        token = self._next
        if token.kind in ("integer", "decimal"):
            if len(token.text) > (MAX_DIGITS if token.kind == "integer" else MAX_DIGITS + len(".e-00")):
                self._fail(f"a number has at most {MAX_DIGITS} digits")
            self.index += 1
            return Number(int(token.text) if token.kind == "integer" else float(token.text))
        if token.kind == "name":
            return self._name()
        if self._accept("("):
            inside = self._nested()
            self._expect(")")
            return inside
        instead = repr(token.text) if token.text else "the end"
        self._fail(f"a number, a name or '(' is missing before {instead}")

    def _name(self) -> Expression:
        token = self._take()
        if len(token.text) > MAX_NAME:
            self._fail(f"a name has at most {MAX_NAME} characters", token.position)
        if token.text not in self.functions:
            if self._next.text == "(":
                known = ", ".join(sorted(self.functions))
                self._fail(f"there is no function {token.text!r}: the functions are {known}", token.position)
            return Symbol(token.text)
        if not self._accept("("):
            self._fail(f"the function {token.text!r} needs arguments in parentheses")
        arguments = [self._nested()]
        while self._accept(","):
            arguments.append(self._nested())
        self._expect(")")
        count = self.functions[token.text]
        if count is not None and len(arguments) != count:
            self._fail(f"{token.text} has {count} argument{'s' * (count != 1)}, not {len(arguments)}", token.position)
        return self._operation(token.text, tuple(arguments), token)

    def _nested(self) -> Expression:
        """A sum inside parentheses."""
        self.parentheses += 1
        if self.parentheses > MAX_DEPTH:
            self._fail(f"parentheses are nested more than {MAX_DEPTH} deep")
        tree = self._sum()
        self.parentheses -= 1
        return tree

    def _operation(self, name: str, operands: tuple[Expression, ...], token: _Token | None = None) -> Operation:
        position = (token or self._next).position
        depth = 1 + max(operand.depth for operand in operands)
        if depth > MAX_DEPTH:
            self._fail(f"operations are nested more than {MAX_DEPTH} deep", position)
        degrees = [operand.degree for operand in operands]
        if name == "**":
            exponent = operands[1]
            assert isinstance(exponent, Number)
            degree = degrees[0] * max(1, abs(int(exponent.value)))
        else:
            degree = sum(degrees) if name in ("*", "/") else max(degrees)
        if degree > MAX_DEGREE:
            self._fail(f"the size is a product of more than {MAX_DEGREE} factors, with powers counted", position)
        return Operation(name, operands, depth, degree)
