"""The notation of the rule table."""

import pytest
from torch.fx import Node

from distfx.rules.notation import DimPattern, Pattern, parse
from distfx.rules.registry import TABLE, Rule
from distfx.rules.rule import RuleChoice


def test_convolution() -> None:
    pattern = parse("n (g c) [s]..., (g k) c _..., (g k) -> n (g k) s...", 2)
    x, weight, bias = pattern.operands
    assert x == (
        DimPattern(("n",)),
        DimPattern(("g", "c")),
        DimPattern(("h",), window=True),
        DimPattern(("w",), window=True),
    )
    assert weight == (DimPattern(("g", "k")), DimPattern(("c",)), DimPattern(()), DimPattern(()))
    assert bias == (DimPattern(("g", "k")),)
    assert pattern.result == (DimPattern(("n",)), DimPattern(("g", "k")), DimPattern(("h",)), DimPattern(("w",)))


@pytest.mark.parametrize(("rank", "space"), [(0, ""), (1, "w"), (2, "hw"), (3, "dhw")])
def test_space_is_named_from_the_last(rank: int, space: str) -> None:
    pattern = parse("n c s... -> n c _...", rank)
    assert pattern.operands == ((DimPattern(("n",)), DimPattern(("c",)), *(DimPattern((name,)) for name in space)),)
    assert pattern.result == (DimPattern(("n",)), DimPattern(("c",)), *(DimPattern(()) for _ in space))


def test_only_s_is_repeated_by_name() -> None:
    assert parse("b... -> b...", 2).result == (DimPattern(("b",)), DimPattern(("b",)))


def test_blanks_do_not_matter() -> None:
    assert parse("  n   (g  c) ->n c ", 0) == parse("n (g c) -> n c", 0)


def test_an_operand_may_have_no_dims() -> None:
    assert parse("n, -> n", 0) == Pattern(((DimPattern(("n",)),), ()), (DimPattern(("n",)),))


def test_parsed_once() -> None:
    assert parse("n c -> n", 1) is parse("n c -> n", 1)


@pytest.mark.parametrize("text", ["n [a b] -> n", "n (c -> n", "n c+1 -> n", "n () -> n", "n [] -> n", "n .. -> n"])
def test_what_cannot_be_read_is_shown(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read") as error:
        parse(text, 2)
    assert "in rule" in str(error.value)


@pytest.mark.parametrize("text", ["n c", "n -> c -> n"])
def test_a_rule_has_one_arrow(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text, 2)


def test_every_pattern_of_the_table_parses() -> None:
    rows = [row for row in TABLE.values() if isinstance(row, Rule) and row.build is None]
    assert rows
    for row in rows:
        pattern = parse(row.pattern, 2)
        assert len(pattern.operands) == len(row.tensors), row.name
        known = {factor for words in pattern.operands for word in words for factor in word.factors}
        assert {factor for word in pattern.result for factor in word.factors} <= known, row.name
        assert row.cost, row.name


def test_rules_know_the_transposed_convolution_apart() -> None:
    from torch.fx import Graph

    from distfx.rules.registry import CONVOLUTION, TRANSPOSED, aten

    node: Node = Graph().call_function(aten.convolution.default, (None,) * 6 + (True,))
    choice = TABLE[aten.convolution.default]
    assert isinstance(choice, RuleChoice)
    assert choice.pick(node) is TRANSPOSED
    node.args = (None,) * 6 + (False,)
    assert choice.pick(node) is CONVOLUTION
