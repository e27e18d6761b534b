"""Text from outside: it is parsed by small grammars, never executed, and bad text raises one clear error quickly."""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._sympy import functions as torch_functions

import distfx
from distfx.errors import DistfxError
from distfx.grid import MAX_RANKS, Grid
from distfx.ir.expressions import MAX_DEGREE, MAX_DEPTH, MAX_DIGITS, MAX_LENGTH, MAX_NAME
from distfx.ir.layout import Layout, Split, Window
from distfx.ir.symbolic import Size, ceildiv, evaluate, floordiv, maximum, minimum, parse_size, show, size_of
from distfx.report.plan import Plan, PlanRow
from distfx.runtime.comm import detect
from distfx.runtime.comm.launch import expand_nodelist

PACKAGE = Path(distfx.__file__).parent
SYMBOLS = sympy.symbols("N C D H W H2 S0", integer=True, positive=True)
N, C, D, H, W, *_ = SYMBOLS

READERS: dict[str, Callable[[str], object]] = {
    "size": parse_size,
    "unit": lambda text: Layout.parse(f"N/n[{text}]"),
    "window": Window.parse,
    "symbolic window": lambda text: Window.parse(f"{text};0;1;1"),
    "layout": Layout.parse,
    "grid": Grid.parse_abstract,
    "plan": Plan.from_json,
}
READERS_OF_TEXT = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


# -- what a size prints parses back


def combine(name: str, a: Size, b: Size) -> Size:
    """One operation of the algebra of sizes, or one that torch puts into captured sizes."""
    x, y = sympy.sympify(a), sympy.sympify(b)
    positive = 1 + abs(b) if isinstance(b, int) else b
    match name:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "//":
            return floordiv(a, positive)
        case "ceildiv":
            return ceildiv(a, positive)
        case "min":
            return minimum(a, b)
        case "max":
            return maximum(a, b)
        case "**":
            return x**2
        case "/":
            return x / sympy.sympify(positive)
        case "floor":
            return sympy.floor(x / 3)
        case "ceiling":
            return sympy.ceiling(y / 4)
        case "%":
            return torch_functions.PythonMod(x, sympy.Integer(7))
        case "Mod":
            return torch_functions.Mod(x**2, sympy.Integer(5))
        case "scale":
            return torch_functions.TruncToInt(1.5 * torch_functions.ToFloat(x))
    raise AssertionError(name)


NAMES = ["+", "-", "*", "//", "ceildiv", "min", "max", "**", "/", "floor", "ceiling", "%", "Mod", "scale"]


def sizes(depth: int = 4) -> st.SearchStrategy[Size]:
    leaves = st.sampled_from(SYMBOLS) | st.integers(-20, 600)

    def defined(name: str, a: Size, b: Size) -> Size:
        try:
            return combine(name, a, b)
        except ZeroDivisionError:
            return a

    return st.recursive(leaves, lambda x: st.builds(defined, st.sampled_from(NAMES), x, x), max_leaves=2**depth)


@settings(deadline=None, max_examples=400)
@given(sizes())
@example(-(C + 17) * minimum(C, H))  # a minus before a sum stays in front of the product
@example(27 * (H - C) / W)
@example(N / 2 / (C + N))
@example(N / 2 / (C + N) ** 2 / H)
@example(floordiv(sympy.Integer(1), 1 / H))
@example(floordiv(H - 1, 2) + 1)
@example(floordiv(-H, 2))
@example(-floordiv(H, 2))
@example(H**2 * W ** (-3))
@example(1 / H**2)
def test_what_a_size_prints_parses_back(size: Size) -> None:
    size = size_of(size)
    assume(isinstance(size, int) or not size.is_number)
    assume(not sympy.sympify(size).has(sympy.Abs, sympy.nan, sympy.zoo, sympy.sign))
    exponents = [power.exp for power in sympy.sympify(size).atoms(sympy.Pow)]
    assume(all(exponent.is_Integer and abs(exponent) <= 8 for exponent in exponents))
    for text in (str(size), show(size)):
        assert parse_size(text) == size, text
        assert parse_size(text.replace(" ", "")) == size, text


@settings(deadline=None, max_examples=200)
@given(sizes(3), st.lists(st.integers(1, 40), min_size=len(SYMBOLS), max_size=len(SYMBOLS)))
def test_a_parsed_size_has_the_value_that_python_computes(size: Size, values: list[int]) -> None:
    """Against Python's own precedence rules, for what sizes print with operators alone."""
    text = str(size_of(size))
    assume(re.fullmatch(r"[-+*/() A-Z0-9]+", text) is not None)
    assume("/" not in text.replace("//", ""))  # torch does not evaluate floor divisions of fractions
    names = {str(symbol): sympy.Integer(value) for symbol, value in zip(SYMBOLS, values, strict=True)}
    try:
        number = eval(re.sub(r"\b([0-9]+)\b", r"I(\1)", text), {"I": sympy.Integer}, names)  # our own text
        assume(number.is_Integer)
        parsed = parse_size(text)
    except (ZeroDivisionError, DistfxError):
        assume(False)
    assert evaluate(parsed, dict(zip(SYMBOLS, values, strict=True))) == number


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12", 12),
        ("-3", -3),
        ("--3", 3),
        ("2 + 3*4", 14),
        ("-7//2", -4),
        ("-(7//2)", -3),
        ("2*3//4*5", 5),
        ("7 % 4", 3),
        ("-7 % 4", 1),
        ("-2**2", -4),
        ("2**3", 8),
        ("6/3", 2),
        ("12/(2*3)", 2),
        ("12/2*3", 18),
        ("12/(6/3)", 6),
        ("floor(7/2)", 3),
        ("ceil(7/2)", 4),
        ("ceiling(7/2)", 4),
        ("min(3, 1, 2)", 1),
        ("max(3, 1, 2)", 3),
        ("H", H),
        ("H*W", H * W),
        ("H - H", 0),
        ("(H - 1)//2 + 1", floordiv(H - 1, 2) + 1),
        ("((H - 1)//2) + 1", floordiv(H - 1, 2) + 1),
        ("CeilDiv(H, 2)", ceildiv(H, 2)),
        ("FloorDiv(H, 2)", floordiv(H, 2)),
        ("CleanDiv(H, 2)", floordiv(H, 2)),
        ("min(H, W)", minimum(H, W)),
        ("Max(H, 7)", maximum(H, 7)),
        ("H % 8", torch_functions.PythonMod(H, sympy.Integer(8))),
        ("TruncToInt(1.5*ToFloat(5))", 7),
        ("\tH +\t1 ", H + 1),
    ],
)
def test_sizes_as_a_person_writes_them(text: str, size: Size) -> None:
    parsed = parse_size(text)
    assert parsed == size and isinstance(parsed, int) == isinstance(size, int)


def test_symbols_are_those_of_a_captured_graph() -> None:
    """Also the letters that sympy's own parser takes for constants."""
    for name in ("N", "S", "E", "I", "Q", "O", "C", "_x", "H2", "pi", "lambda"):
        assert parse_size(name) == sympy.Symbol(name, integer=True, positive=True)


@settings(deadline=None, max_examples=100)
@given(*[sizes(2)] * 5)
def test_layouts_with_symbolic_units_and_windows_parse_back(
    unit: Size, lo: Size, hi: Size, mul: Size, div: Size
) -> None:
    window = Window(*(map(size_of, (lo, hi, mul, div))))
    for size in (unit, window.lo, window.hi, window.mul, window.div):
        assume(not sympy.sympify(size).has(sympy.Abs, sympy.nan, sympy.zoo, sympy.sign))
        assume(isinstance(size, int) or not size.is_number)
    assume(not isinstance(window.div, int) or window.div > 0)
    assume(not isinstance(unit, int) or unit > 0)
    assert Window.parse(str(window)) == window
    layout = Layout((Split(("n",)), Split(("c0", "c1"), size_of(unit), window)), frozenset({"h"}), names=("N", "C"))
    assert Layout.parse(str(layout)) == layout
    assert str(Layout.parse(str(layout))) == str(layout)


class Sizes(nn.Module):
    """A model whose sizes use every function that captures produce."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.conv(x)
        height, width = x.shape[2:]
        padded = F.pad(x, (0, -width % 8, 0, height % 3))
        scaled = F.interpolate(x, scale_factor=1.5)
        square = F.interpolate(x, size=(min(height, width), max(height, 7)))
        return padded, scaled, square, x.flatten(1), F.max_pool2d(x, 3, 2, ceil_mode=True)


def test_what_a_plan_prints_parses_back() -> None:
    rows = [row for row in distfx.plan(Sizes(), "n2h2", (4, 3, 65, 63)).rows if not row.node.startswith("gradients")]
    texts = {text for row in rows for text in row.shape}
    for name in ("//", "*", "Min", "Max", "Mod", "PythonMod", "TruncToInt"):
        assert any(name in text for text in texts), f"no size uses {name}: {texts}"
    for text in texts:
        assert show(parse_size(text)) == text
    for row in rows:
        assert str(Layout.parse(row.layout)) == row.layout


# -- hostile text

CODE = [
    "__import__('os').system('touch {path}')",
    "__import__('os').mkdir('{path}')",
    "open('{path}', 'w')",
    "eval('open(chr(47))')",
    "exec('import os')",
    "().__class__.__base__.__subclasses__()",
    "H.__class__",
    "[x for x in (1,)]",
    "lambda: 0",
    "(lambda: 0)()",
    "H if W else (N)",
    "f'{H}'",
    "H[0]",
    "H:=1",
    "H; import os",
    "`id`",
    "$(id)",
    "os.system('id')",
    "sqrt(H)",
    "Symbol('H')",
    "S('H')",
    "H!",
    "0x10",
    "1e9",
    "1_000",
    "H\x00",
    "٣",
    "Ｈ",
    "H\n+\nW",
]


@READERS_OF_TEXT
@pytest.mark.parametrize("text", CODE)
def test_code_is_an_error_and_does_not_run(
    read: Callable[[str], object], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "executed"

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"called with {args}")

    with monkeypatch.context() as patch:
        for module, name in ((builtins, "eval"), (builtins, "exec"), (builtins, "compile"), (os, "system")):
            patch.setattr(module, name, refuse)
        with pytest.raises(DistfxError):
            read(text.replace("{path}", str(path)))
    assert not path.exists()


def test_the_command_of_a_layout_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "executed"
    for text in (f"N/n[__import__('os').mkdir('{path}')]", f"N/n{{__import__('os').mkdir('{path}');0;1;1}}"):
        with pytest.raises(DistfxError, match="cannot read"):
            Layout.parse(text)
    assert not path.exists()


OVERSIZED = {
    "long name": "H" * 100_000,
    "long number": "9" * 100_000,
    "many numbers": "9" * MAX_DIGITS + ("*" + "9" * MAX_DIGITS) * 60,
    "parentheses": "(" * 50_000 + "H" + ")" * 50_000,
    "open parentheses": "(" * 4000,
    "deep parentheses": "(" * 1000 + "H" + ")" * 1000,
    "deep calls": "floor(" * 500 + "H" + ")" * 500,
    "deep divisions": "H" + "//2" * 1000,
    "deep remainders": "H" + "%W" * 1000,
    "tower": "9**9**9**9",
    "nested powers": "((((9**9)**9)**9)**9)**9",
    "nested powers of a sum": "((((H+1)**9+1)**9+1)**9+1)**9",
    "large exponent": "H**99999999999999999999",
    "large power": "999999999**60",
    "many factors": "*".join(["H"] * 1000),
    "large coefficient": "2*(" * 70 + "H+1" + ")" * 70,
    "brackets": "N/n" + "[" * 10_000,
    "braces": "N/n" + "{" * 10_000,
    "many axes": "N/(" + ",".join(["n"] * 3000) + ")",
    "many sums": "sum(n) " * 100_000,
    "large grid": "n" + "9" * 10_000,
    "grid of many axes": "n2" * 10_000,
    "json arrays": "[" * 100_000,
    "json objects": '{"a":' * 100_000,
    "json number": "1" * 10_000,
    "null bytes": "\x00" * 10_000,
    "surrogate": "\ud800",
}


@READERS_OF_TEXT
@pytest.mark.parametrize("text", OVERSIZED.values(), ids=OVERSIZED)
def test_oversized_text_is_refused_quickly(read: Callable[[str], object], text: str) -> None:
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(DistfxError) as error:
            read(text)
        seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seconds < 2 and peak < 20e6
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "text",
    [
        "+".join(f"(A{i}+B)//(C{i}+D*E)" for i in range(180)),
        "Max(" + ",".join(f"H{i}" for i in range(700)) + ")",
        "Max(A," * 60 + "B" + ")" * 60,
        "+".join(f"H{i}" for i in range(700)),
        "*".join(f"(A{i}+B)" for i in range(32)),
        "(" * 15 + "H+1" + ")//(W+2)+1" * 15,
        "+".join(["(((H+1)**2+1)**2+W)**2"] * 150),
        "Mod(" * 50 + "H" + ",7)" * 50,
        "(A+B+C+D+E)**8//(A**2-B**2)",
        "0*(" + "+".join(f"(A{i}+B)//(C{i}+D*E)" for i in range(150)) + ")",
        "-" * 4000 + "H",
    ],
)
def test_valid_text_at_the_limits_is_read_quickly(text: str) -> None:
    """What torch's and sympy's simplifications would take very long for."""
    assert len(text) <= MAX_LENGTH
    start = time.process_time()
    parse_size(text)
    assert time.process_time() - start < 5


ALPHABET = st.sampled_from(
    ["H", "W", "n", "c0", "0", "7", "1.5", "+", "-", "*", "/", "//", "%", "**", "(", ")", "[", "]", "{", "}", ",", ":"]
    + [";", " ", "a", "b", "sum(", "each(", "floor(", "Min(", "Mod(", "N/n", "a-1:b+1", "__", "'", '"', ".", "x"]
)


@READERS_OF_TEXT
@settings(deadline=None, max_examples=150)
@given(text=st.text() | st.lists(ALPHABET, max_size=40).map("".join))
def test_random_text_is_read_or_refused(read: Callable[[str], object], text: str) -> None:
    start = time.process_time()
    try:
        value = read(text)
    except DistfxError as error:
        assert str(error)
    else:
        assert str(value)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("read", [parse_size, Window.parse, Layout.parse, Grid.parse_abstract, Plan.from_json])
@pytest.mark.parametrize("value", [5, None, b"n2", ["n2"], 2.5, object()])
def test_other_types_are_refused(read: Callable[[Any], object], value: Any) -> None:
    with pytest.raises(DistfxError):
        read(value)


def test_the_algebra_takes_no_text() -> None:
    with pytest.raises(ValueError, match="SympifyError"):
        floordiv("H", 2)  # type: ignore[arg-type]  (the mistake)


# -- errors teach


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["character 1", "a number, a name or '(' is missing"]),
        ("H +", ["character 4", "is missing before the end"]),
        ("H W", ["'H W'", "character 3", "write an operator"]),
        ("2H", ["character 2", "'H' cannot follow", "write an operator"]),
        ("(H + 1", ["character 7", "')' is missing"]),
        ("H + $", ["character 5", "'$' has no meaning", "write integers, names"]),
        ("sqrt(H)", ["character 1", "no function 'sqrt'", "floor"]),
        ("floor + 1", ["character 7", "'floor' needs arguments in parentheses"]),
        ("floor(H, 2)", ["floor has 1 argument, not 2"]),
        ("Mod(H)", ["Mod has 2 arguments, not 1"]),
        ("H**W", ["character 4", f"an integer of at most {MAX_DEGREE}"]),
        ("H**65", [f"an integer of at most {MAX_DEGREE}"]),
        ("(H**9)**9", [f"more than {MAX_DEGREE} factors"]),
        ("1" * (MAX_DIGITS + 1), [f"at most {MAX_DIGITS} digits"]),
        ("H" * (MAX_NAME + 1), [f"at most {MAX_NAME} characters"]),
        ("(" * (MAX_DEPTH + 1) + "H", [f"nested more than {MAX_DEPTH} deep"]),
        ("H//0", ["'//' divides by zero"]),
        ("H % (W - W)", ["'%' divides by zero"]),
        ("1/(H - H)", ["'/' divides by zero"]),
        ("0**(-1)", ["'**' divides by zero"]),
        ("7/2", ["7/2, which is not an integer", "use //"]),
        ("2.5", ["not an integer"]),
        ("9" * MAX_DIGITS + "*99", ["does not fit into 64 bits"]),
        ("x" * (MAX_LENGTH + 1), [f"the limit is {MAX_LENGTH}"]),
    ],
)
def test_errors_of_sizes(text: str, words: list[str]) -> None:
    with pytest.raises(DistfxError) as error:
        parse_size(text)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("N/n C/c[0]", ["'C/c[0]'", "the unit 0 is not positive"]),
        ("N/n C/c[-2]", ["the unit -2 is not positive"]),
        ("N/n C/c[H$]", ["'H$'", "character 2"]),
        ("N/n C/(c0,)", ["'C/(c0,)'", "character 5", "write it like"]),
        ("N/n C/()", ["'C/()'", "write it like"]),
        ("N/n sum()", ["'sum()'", "character 5"]),
        ("N/n sum(c,,h)", ["'sum(c,,h)'"]),
        ("H/h{}", ["window ''", "write it like"]),
        ("H/h{(a:b)/0}", ["divides by 0"]),
        ("H/h{(a:b}", ["'(a:b'", "write it like"]),
        ("H/h{a:b)/2}", ["'a:b)/2'", "write it like"]),
        ("H/h{1;2}", ["'1;2'", "write four sizes, 'lo;hi;mul;div'"]),
        ("H/h{1;2;3;4;5}", ["cannot read"]),
        ("H/h{H;1;1;0}", ["divides by 0"]),
        ("H/h{a-" + "9" * 30 + ":b}", ["cannot read window"]),
    ],
)
def test_errors_of_layouts(text: str, words: list[str]) -> None:
    with pytest.raises(DistfxError) as error:
        Layout.parse(text)
    for word in words:
        assert word in str(error.value)


def test_a_flip_may_be_written_without_a_number() -> None:
    assert Window.parse("-a+9:-b+9") == Window.parse("-1a+9:-1b+9") == Window(lo=-9, hi=9, mul=-1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (5, ["a grid is written as text such as 'n2c2h2', not as int"]),
        (None, ["not as NoneType"]),
        (b"n2", ["not as bytes"]),
        ("n" + "9" * 5000, ["axis n has more than", "ranks"]),
        (f"n{MAX_RANKS + 1}", ["axis n (samples) has more than"]),
        (f"n{MAX_RANKS // 2}c4", ["has more than"]),
        ("n٢", ["write it like 'n2c2h2'"]),
        ("n2\u00a0h2", ["character 3"]),
        ("  n2 h2", ["character 5"]),
        ("n2h", ["character 3"]),
        ("n--2", ["character 1"]),
        ("n2" * 9000, ["'n'", "each once", "..."]),
    ],
)
def test_errors_of_grids(text: Any, words: list[str]) -> None:
    with pytest.raises(DistfxError) as error:
        Grid.parse_abstract(text)
    assert len(str(error.value)) < 300
    for word in words:
        assert word in str(error.value)


def test_sizes_of_a_grid_are_bounded() -> None:
    for size in (10**30, -(10**30), 10**10_000):
        with pytest.raises(DistfxError, match=r"axis n \(samples\) has more than"):
            Grid.abstract(n=size)


axes = st.fixed_dictionaries(
    {},
    optional={**dict.fromkeys("ndhw", st.integers(1, 9)), "c": st.integers(1, 9) | st.tuples(*[st.integers(1, 9)] * 2)},
)


@given(axes)
def test_grids_parse_back(sizes: dict[str, Any]) -> None:
    text = "".join(
        f"{axis}{'x'.join(map(str, size)) if isinstance(size, tuple) else size}" for axis, size in sizes.items()
    )
    assert Grid.parse_abstract(text or "n1") == Grid.abstract(**sizes) == Grid.of_abstract(sizes)


# -- plans

counts = st.integers(0, 2**63 - 1)
rows = st.builds(
    PlanRow,
    *[st.text()] * 3,
    st.lists(st.text()).map(tuple),
    st.text(),
    st.lists(st.text()).map(tuple),
    *[counts] * 4,
    *[st.text()] * 2,
    st.booleans(),
)
plans = st.builds(
    Plan,
    st.text(),
    counts,
    st.booleans(),
    st.lists(st.tuples(st.text(), counts)).map(tuple),
    st.lists(rows, max_size=3).map(tuple),
)


@settings(deadline=None, max_examples=50)
@given(plans)
def test_plans_parse_back(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def changed(**changes: Any) -> str:
    """The JSON of a small plan with some values replaced; those of its row after ``row_``. ``...`` removes one."""
    row = PlanRow("conv", "convolution", "stationary-x", ("N", "8"), "N/n C")
    data = json.loads(Plan("Grid(n=2)", 0, True, (("N", 4),), (row,)).to_json())
    for name, value in changes.items():
        target = data["rows"][0] if name.startswith("row_") else data
        name = name.removeprefix("row_")
        if value is ...:
            del target[name]
        else:
            target[name] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["not JSON"]),
        ("Grid(n=2)", ["not JSON"]),
        ("{", ["not JSON", "line 1"]),
        ("[" * 100_000, ["nested too deeply"]),
        ("1" * 10_000, ["not JSON"]),
        ("null", ["plan must be an object, not null"]),
        ("[]", ["plan must be an object, not a list"]),
        ("NaN", ["not a float"]),
        (changed(grid=...), ["no key 'grid'", "the keys are grid, rank"]),
        (changed(row_layout=...), ["plan.rows[0] has no key 'layout'"]),
        (changed(extra=1), ["unknown key 'extra'"]),
        (changed(row_extra=1), ["plan.rows[0] has an unknown key 'extra'"]),
        (changed(row___class__=1), ["unknown key '__class__'"]),
        (changed(grid=5), ["plan.grid must be a string, not an integer"]),
        (changed(rank="0"), ["plan.rank must be an integer, not a string"]),
        (changed(rank=True), ["plan.rank must be an integer, not a boolean"]),
        (changed(rank=-1), ["plan.rank must be between 0"]),
        (changed(rank=10**1000), ["plan.rank must be between 0"]),
        (changed(training=1), ["plan.training must be true or false"]),
        (changed(sizes={"N": 4}), ["plan.sizes must be a list, not an object"]),
        (changed(sizes=[["N"]]), ["plan.sizes[0] must be a pair"]),
        (changed(sizes=[["N", "4"]]), ["plan.sizes[0][1] must be an integer"]),
        (changed(rows=None), ["plan.rows must be a list, not null"]),
        (changed(rows=["x"]), ["plan.rows[0] must be an object"]),
        (changed(row_shape="N"), ["plan.rows[0].shape must be a list, not a string"]),
        (changed(row_shape=[1]), ["plan.rows[0].shape[0] must be a string"]),
        (changed(row_bytes_forward=1.5), ["plan.rows[0].bytes_forward must be an integer, not a float"]),
        (changed(row_fallback="no"), ["plan.rows[0].fallback must be true or false"]),
    ],
)
def test_errors_of_plans(text: str, words: list[str]) -> None:
    with pytest.raises(DistfxError) as error:
        Plan.from_json(text)
    assert str(error.value).startswith("cannot read the plan: ") and len(str(error.value)) < 500
    for word in words:
        assert word in str(error.value)


def test_fields_with_a_default_may_be_missing() -> None:
    (row,) = Plan.from_json(changed(row_moves=..., row_fallback=..., row_bytes_forward=...)).rows
    assert row.moves == () and not row.fallback and row.bytes_forward == 0


# -- the environment


@pytest.mark.parametrize(
    "nodes",
    [
        "n[1-999999999999]",
        "n[1-999999999999999999999999]",
        "n[1-1000][1-1000][1-1000]",
        "n[" + "1-1000," * 1000 + "1]",
        "n[1-100000],m[1-100000]",
        "n" * 10**6,
        "n[٣]",
    ],
)
def test_large_node_lists_are_refused_quickly(nodes: str) -> None:
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(ValueError, match="set MASTER_ADDR") as error:
            expand_nodelist(nodes)
        seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seconds < 2 and peak < 50e6 and len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"DISTFX_QUIET": "maybe"}, "DISTFX_QUIET='maybe': set it to 0 or 1"),
        ({"DISTFX_MPI_CUDA": "true"}, "DISTFX_MPI_CUDA='true': set it to 0 or 1"),
        ({"DISTFX_DEBUG": "x" * 10_000}, "DISTFX_DEBUG='xxx"),
        ({"DISTFX_LAUNCHER": "mpirun"}, "DISTFX_LAUNCHER=mpirun: unknown launcher"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1' is not a number"),
        ({"RANK": "9" * 10_000, "WORLD_SIZE": "2"}, "RANK='999"),
        ({"RANK": "0", "WORLD_SIZE": "1e3"}, "WORLD_SIZE='1e3' is not a number"),
    ],
)
def test_errors_of_environment_variables(env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        detect.detect(env, None)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_flags(value: str) -> None:
    assert detect.detect(dict.fromkeys(detect.FLAGS, value), None).launcher == "single"


# -- the package itself


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_executes_text(path: Path) -> None:
    """No `eval`, `exec` or `compile`, nothing of sympy that parses text, no unpickling."""
    forbidden = {"eval", "exec", "compile", "parse_expr", "literal_eval", "lambdify", "loads_pickle", "unsafe_load"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                assert function.id not in forbidden, f"line {node.lineno}"
            if isinstance(function, ast.Attribute) and function.attr == "sympify":
                assert not isinstance(node.args[0], ast.Constant | ast.JoinedStr), f"line {node.lineno}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & {"pickle", "marshal", "sympy.parsing", "sympy.parsing.sympy_parser", "parse_expr"}
