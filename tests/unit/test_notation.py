"""The notation of the rule table."""

from __future__ import annotations

import random
import string
from typing import Any

import pytest
from torch.fx import Graph, Node

from distfx.rules.notation import MAX_LENGTH, Match, match, parse
from distfx.rules.registry import CONVOLUTION, TABLE, TRANSPOSED, aten, built_in_rules
from distfx.rules.rule import RuleChoice

Shape = tuple[int, ...]


def dims(pattern: str, operands: list[Shape], result: Shape, **arguments: Any) -> list[str] | None:
    """Each tensor's dims as text, the result last."""
    matched = matching(pattern, operands, result, **arguments)
    if matched is None:
        return None
    return [" ".join(map(str, tensor)) for tensor in (*matched.operands, matched.result)]


def matching(pattern: str, operands: list[Shape], result: Shape, **arguments: Any) -> Match | None:
    return match(parse(pattern), list(enumerate(operands)), result, arguments)


CONV = "n (g c) [s]..., (g k) c _..., ?(g k) -> n (g k) s... where g = groups"


def test_convolution() -> None:
    matched = matching(CONV, [(8, 6, 9, 7), (4, 3, 3, 3), (4,)], (8, 4, 9, 7), groups=2)
    assert matched is not None
    assert [" ".join(map(str, tensor)) for tensor in matched.operands] == ["n (g c) [h] [w]", "(g k) c _ _", "(g k)"]
    assert " ".join(map(str, matched.result)) == "n (g k) h w"
    assert matched.extents == {"g": 2, "n": 8, "c": 3, "k": 2, "h": 9, "w": 7}
    assert matched.windows == ((0, "h"), (0, "w"))


@pytest.mark.parametrize(("rank", "space"), [(0, ""), (1, " w"), (2, " h w"), (3, " d h w")])
def test_space_is_named_from_the_last(rank: int, space: str) -> None:
    shape = (2, 3, *range(4, 4 + rank))
    assert dims("n c s... -> n c _...", [shape], (2, 3, *(1,) * rank)) == [f"n c{space}", "n c" + " _" * rank]


def test_four_spatial_dims_do_not_fit() -> None:
    assert dims("n c s... -> n c s...", [(2,) * 6], (2,) * 6) is None


@pytest.mark.parametrize(
    ("pattern", "operands", "result", "arguments", "expected"),
    [
        ("*... -> ...", [(4, 1, 5), (3, 1)], (4, 3, 5), {}, [".0 _ .2", ".1 _", ".0 .1 .2"]),
        ("*... -> ...", [], (4, 3), {}, [".0 .1"]),
        ("b... c, k c -> b... k", [(2, 3, 5), (7, 5)], (2, 3, 7), {}, ["n b1 c", "k c", "n b1 k"]),
        ("b... m? c, b... c k? -> b... m? k?", [(2, 3), (4, 3, 5)], (4, 2, 5), {}, ["m c", "n c k", "n m k"]),
        ("b... m? c, b... c k? -> b... m? k?", [(3,), (4, 3, 5)], (4, 5), {}, ["c", "n c k", "n k"]),
        ("b... m? c, b... c k? -> b... m? k?", [(3,), (3,)], (), {}, ["c", "c", ""]),
        ("... r@dim -> ... _@dim?", [(2, 3, 4)], (2, 4), {"dim": 1}, [".0 r0 .1", ".0 .1"]),
        ("... r@dim -> ... _@dim?", [(2, 3, 4)], (1, 3, 1), {"dim": [-1, 0]}, ["r1 .0 r0", "_ .0 _"]),
        ("... r@dim -> ... _@dim?", [(2, 3)], (), {"dim": None}, ["r0 r1", ""]),
        ("... r@dim -> ... _@dim?", [(2, 3)], (1, 1), {"dim": []}, ["r0 r1", "_ _"]),
        ("... r@dim -> ... _@dim?", [()], (), {"dim": 0}, ["", ""]),
        ("... _@dim, ... _@dim -> ...", [(2, 3, 4), (4,)], (2, 3), {"dim": -1}, [".0 .1 _", "_", ".0 .1"]),
        ("... [r]@d -> ... r@d _", [(7, 4)], (3, 4, 2), {"d": 0}, ["[r0] .0", "r0 .0 _"]),
        ("r@dims -> r...", [(2, 3, 4)], (4, 2, 3), {"dims": [2, 0, 1]}, ["r1 r2 r0", "r0 r1 r2"]),
        ("=... -> =...", [(3, 4)], (2, 3, 8), {}, [".1 _", "_ .1 _"]),
        ("... k@dim, k... -> ... k@dim", [(2, 3, 4), (3,)], (2, 3, 4), {"dim": 1}, [".0 k0 .1", "k0", ".0 k0 .1"]),
        ("... c..., ?c... -> ... c... where c... = s", [(2, 3, 4), (3, 4)], (2, 3, 4), {"s": [3, 4]},
         [".0 c0 c1", "c0 c1", ".0 c0 c1"]),
        ("n c _ _ -> n (c t) _", [(2, 3, 5, 5)], (2, 12, 16), {}, ["n c _ _", "n (c t) _"]),
        ("n, -> n", [(3,), ()], (3,), {}, ["n", "", "n"]),
    ],
)  # fmt: skip
def test_dims(
    pattern: str, operands: list[Shape], result: Shape, arguments: dict[str, Any], expected: list[str]
) -> None:
    parsed = parse(pattern)
    star = parsed.operands[-1].quantifier == "*"
    entries = [(0 if star else index, shape) for index, shape in enumerate(operands)]
    matched = match(parsed, entries, result, arguments)
    assert matched is not None
    assert [" ".join(map(str, tensor)) for tensor in (*matched.operands, matched.result)] == expected


@pytest.mark.parametrize(
    ("pattern", "operands", "result", "arguments"),
    [
        ("n c -> n", [(2, 3, 4)], (2,), {}),
        ("n c ... -> n c ...", [(2,)], (2,), {}),
        ("... -> ...", [(2, 3)], (3,), {}),
        ("... r@dim -> ...", [(2, 3)], (2, 3), {"dim": 1}),
        ("... r@dim -> ... _@dim?", [(2, 3)], (2, 3), {"dim": []}),  # any.dims reduces over no dims
        ("... r@dim -> ... _@dim?", [(2, 3)], (7,), {"dim": None}),
        ("r@dims -> r...", [(2, 2)], (2, 2), {"dims": [0, 0]}),
        ("n (g c) -> n", [(2, 6)], (2,), {}),  # the extents of g and c are unknown
    ],
)
def test_a_pattern_may_not_fit(pattern: str, operands: list[Shape], result: Shape, arguments: dict[str, Any]) -> None:
    assert dims(pattern, operands, result, **arguments) is None


def test_reductions_inside_the_operator() -> None:
    matched = matching("... r!@dim -> ... _@dim?", [(2, 3, 4)], (3,), dim=[0, 2])
    assert matched is not None and matched.inside == {"r0", "r1"}


def test_windows_come_in_the_order_of_the_argument() -> None:
    matched = matching("... [r]@dims -> ... r@dims", [(2, 3, 4)], (2, 3, 4), dims=[2, 0])
    assert matched is not None and matched.windows == ((0, "r0"), (0, "r1"))
    assert [str(dim) for dim in matched.operands[0]] == ["[r1]", ".0", "[r0]"]


def test_blanks_do_not_matter() -> None:
    assert parse("  n   (g  c) ->n c ").operands == parse("n (g c) -> n c").operands
    assert parse("c ... -> c ...") != parse("c... -> c...")


def test_parsed_once() -> None:
    assert parse("n c -> n") is parse("n c -> n")


@pytest.mark.parametrize(
    ("text", "position", "problem"),
    [
        ("n [a b] -> n", 5, "expected ']', found 'b'"),
        ("n (c -> n", 5, "expected the name of a factor, found '->'"),
        ("n c+1 -> n", 3, "unexpected '+'"),
        ("n () -> n", 3, "expected the name of a factor, found ')'"),
        ("n .. -> n", 2, "unexpected '.'"),
        ("n c", 3, "expected '->', found 'the end'"),
        ("n -> c -> n", 7, "expected the end, found '->'"),
        ("*n, c -> n", 4, "must be the last"),
        ("n0 -> n0", 0, "expected the name of a factor, found 'n0'"),
        ("r@ -> r", 3, "expected the name of an argument"),
        ("r...@dim -> r", 9, "'...' or '@', not both"),
        ("=n -> n", 3, "'=' is for groups"),
        ("n -> n where n groups", 15, "expected '=', found 'groups'"),
    ],
)
def test_mistakes_are_shown_with_their_position(text: str, position: int, problem: str) -> None:
    with pytest.raises(ValueError, match="cannot read the pattern") as error:
        parse(text)
    assert repr(text) in str(error.value) and problem in str(error.value)
    assert f"position {position}:" in str(error.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("n n -> n", "n appears twice"),
        ("n -> n c", "c of the result appears in no operand"),
        ("a... b... -> a... b...", "ambiguous"),
        ("r@dim r... -> r", "r appears twice"),
        ("r... , r -> r...", "one dim in one place"),
        ("h s... -> h s...", "use other names"),
        ("[s] -> _", "needs a dim s in the result"),
        ("n -> [n]", "only operands"),
        ("r! -> r", "cannot be in the result"),
        ("n -> n where g = groups", "g, which appears in no operand"),
    ],
)
def test_contradictions_are_explained(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(text)
    assert problem in str(error.value)


def test_long_patterns_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        parse("n " * MAX_LENGTH + "-> n")


def test_random_text_parses_or_raises_value_error() -> None:
    numbers = random.Random(0)
    words = ["n", "c", "_", "...", "s...", "(g c)", "[s]", "->", ",", "?", "*", "=", "@dim", "!", "where", "g = groups"]
    accepted = 0
    for _ in range(3000):
        parts = [numbers.choice(words) for _ in range(numbers.randrange(1, 9))]
        text = numbers.choice([" ", ""]).join(parts) + numbers.choice(["", numbers.choice(string.printable)])
        try:
            parse(text)
            accepted += 1
        except ValueError:
            pass
    assert accepted


def test_every_pattern_of_the_table_is_what_runs() -> None:
    """A rule has a pattern that parses, or a builder: never both."""
    rules = [rule for group in built_in_rules().values() for rule in group]
    for rule in rules:
        assert bool(rule.pattern) != bool(rule.build), rule.name
        assert rule.cost, rule.name
        if rule.pattern:
            assert rule.text == f"`{rule.pattern}`"
            assert parse(rule.pattern).has_windows == (rule.windows is not None), rule.name
    assert {rule.build.__name__ for rule in rules if rule.build} == {"cat", "einsum", "index", "reshape"}


def test_rules_distinguish_the_transposed_convolution() -> None:
    node: Node = Graph().call_function(aten.convolution.default, (None,) * 6 + (True,))
    choice = TABLE[aten.convolution.default]
    assert isinstance(choice, RuleChoice)
    assert choice.pick(node) is TRANSPOSED
    node.args = (None,) * 6 + (False,)
    assert choice.pick(node) is CONVOLUTION
