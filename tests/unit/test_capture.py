"""Capture: an unmodified model becomes a functional graph with symbolic sizes that computes the same."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import itertools
import re
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from support.ranks import run
from torch import Tensor, nn
from torch.fx import Node

import distfx
from distfx.engine import engine
from distfx.errors import CaptureError, DistfxError
from distfx.ir import ops
from distfx.ir.nodes import describe
from distfx.passes.capture import Capture, capture, check_model, infer_inputs
from distfx.runtime.kernels.straight_through import straight_through

aten = torch.ops.aten


def calls(captured: Capture) -> list[Node]:
    return [node for node in captured.graph.nodes if node.op == "call_function"]


def targets(captured: Capture) -> list[Any]:
    return [node.target for node in calls(captured)]


class Evaluate(torch.fx.Interpreter):
    """Runs a captured graph on real tensors, with its symbols replaced by numbers."""

    def __init__(self, captured: Capture, *inputs: Tensor) -> None:
        super().__init__(captured.module)
        self.symbols: dict[sympy.Symbol, int] = {}
        for spec, x in zip(captured.inputs, inputs, strict=True):
            for size, have in zip(spec.shape, x.shape, strict=True):
                if isinstance(size, sympy.Symbol):
                    self.symbols[size] = have
                else:
                    assert size == have

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and "shape" in n.meta:
            assert tuple(result.shape) == tuple(self.number(size) for size in n.meta["shape"]), n.name
            assert result.dtype == n.meta["dtype"], n.name
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is ops.straight:
            target = straight_through
        return super().call_function(target, args, kwargs)

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return torch.utils._pytree.tree_map(self.number, (args, kwargs))

    def number(self, value: Any) -> Any:
        if isinstance(value, sympy.Expr):
            return int(value.xreplace({s: sympy.Integer(v) for s, v in self.symbols.items()}))
        return value


def same(model: nn.Module, *shapes: tuple[int, ...], training: bool = False, example: Any = None) -> Capture:
    """Capture with one example, then compare with the model at every shape."""
    model = model.double()
    captured = capture(model, (torch.randn(*(example or shapes[0]), dtype=torch.float64),), training=training, batch=4)
    model.train(training)
    for shape in shapes:
        x = torch.randn(*shape, dtype=torch.float64)
        want = model(x.clone())
        have = Evaluate(captured, x).run(x.clone())
        wanted = [want] if isinstance(want, Tensor) else list(want)
        assert len(have) == len(wanted)
        for a, b in zip(have, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    return captured


def of(forward: Any, *modules: nn.Module) -> nn.Module:
    """A model with this forward and layers ``l0``, ``l1``, ..."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number, module in enumerate(modules):
                self.add_module(f"l{number}", module)

        def forward(self, x: Tensor) -> Any:
            return forward(self, x)

    return Model()


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))


# -- symbols


def test_symbols_are_named_after_their_dims() -> None:
    captured = capture(small(), (torch.randn(4, 3, 16, 12),), training=False)
    (spec,) = captured.inputs
    assert [str(size) for size in spec.shape] == ["N", "3", "H", "W"]
    assert {str(symbol): value for symbol, value in captured.hints.items()} == {"N": 4, "H": 16, "W": 12}
    assert str(calls(captured)[-1].meta["shape"]) == "(N, 4, (H//2), (W//2))"


@pytest.mark.parametrize(
    ("layer", "shape", "names"),
    [
        (nn.Conv1d(3, 4, 3), (4, 3, 16), ["N", "3", "W"]),
        (nn.Conv3d(3, 4, 3), (4, 3, 8, 10, 12), ["N", "3", "D", "H", "W"]),
        (nn.Linear(3, 4), (4, 3), ["N", "3"]),
        (nn.Linear(3, 4), (4, 7, 3), ["N", "C", "3"]),
    ],
)
def test_symbols_of_other_ranks(layer: nn.Module, shape: tuple[int, ...], names: list[str]) -> None:
    captured = capture(layer, (torch.randn(shape),), training=False)
    assert [str(size) for size in captured.inputs[0].shape] == names


def test_two_inputs_have_their_own_symbols() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.sum() + y.sum()

    captured = capture(Two(), (torch.randn(2, 3, 4, 5), torch.randn(6, 7)), training=False)
    names = [[str(size) for size in spec.shape] for spec in captured.inputs]
    flat = [name for group in names for name in group]
    assert len(set(flat)) == 6 and flat[:2] == ["N", "C"]


def test_one_capture_serves_all_sizes_though_the_example_was_a_single_sample() -> None:
    captured = same(small(), (1, 3, 16, 12), (5, 3, 9, 24), (2, 3, 8, 8))
    assert {str(s) for s in captured.hints} == {"N", "H", "W"}
    for n, h, w in itertools.product((1, 2, 7), (8, 9, 224), (8, 13, 100)):
        assert captured.is_valid_for(sizes(captured, N=n, H=h, W=w))


def sizes(captured: Capture, **values: int) -> dict[sympy.Symbol, int]:
    return {symbol: values[str(symbol)] for symbol in captured.hints}


def slow_capture() -> str:
    before, engine.SLOW = engine.SLOW, 0.0
    try:
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            distfx.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3)), distfx.Grid(h=-1))
    finally:
        engine.SLOW = before
    return stderr.getvalue()


def test_a_slow_capture_says_so_on_rank_0() -> None:
    line = "distfx: torch.export is tracing Sequential, once for each mode; this may take a while\n"
    assert run(2, slow_capture) == [line, ""]


def test_sizes_that_cannot_be_symbols_are_fixed() -> None:
    """torch's solver fails on the sizes of an AlexNet at 64 x 64, but its batch stays symbolic."""
    pools = [nn.MaxPool2d(3, 2), nn.Conv2d(4, 4, 5, padding=2), nn.MaxPool2d(3, 2), nn.MaxPool2d(3, 2)]
    model = nn.Sequential(nn.Conv2d(3, 4, 11, 4, 2), *pools, nn.AdaptiveAvgPool2d((6, 6)))
    captured = capture(model, (torch.randn(4, 3, 64, 64),), training=True)
    assert [str(size) for size in captured.inputs[0].shape] == ["N", "3", "64", "64"]


def test_a_branch_on_a_size_is_remembered() -> None:
    model = of(lambda self, x: self.l0(x) if x.shape[2] > 10 else self.l0(x) * 2, nn.Conv2d(3, 4, 1))
    large = same(model, (4, 3, 16, 12), (2, 3, 11, 7))
    small_one = same(model, (4, 3, 8, 12), (2, 3, 10, 9))
    for height, is_large in ((11, True), (10, False), (100, True), (3, False)):
        assert large.is_valid_for(sizes(large, N=4, H=height, W=12)) == is_large
        assert small_one.is_valid_for(sizes(small_one, N=4, H=height, W=12)) == (not is_large)


def test_no_sizes_are_computed_in_the_graph() -> None:
    captured = same(
        of(lambda self, x: self.l0(x).view(x.shape[0], -1, x.shape[2] * x.shape[3]).flatten(1), nn.Conv2d(3, 4, 1)),
        (4, 3, 8, 6),
        (2, 3, 5, 7),
    )
    assert all(isinstance(target, torch._ops.OpOverload) for target in targets(captured))
    assert not [t for t in targets(captured) if "sym" in str(t)]
    assert targets(captured).count(aten.reshape.default) == 2


class TreatsOneDifferently(nn.Module):
    """Behaves differently for a size of one, which torch.export rules out for symbolic dims."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.how = nn.Conv2d(3, 4, 1), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.how == "squeeze":
            return y.squeeze()
        if self.how == "slice":
            return y[:, 1:3]
        if self.how == "small batch" and x.shape[2] < 5:
            y = y * 3
        size = {"batch": x.shape[0], "small batch": x.shape[0], "height": x.shape[2]}.get(self.how, 2)
        return y * 2 if size == 1 else y


def call_both_ways(how: str, shapes: list[tuple[int, ...]]) -> tuple[list[bool], int]:
    model = TreatsOneDifferently(how)
    net = distfx.parallelize(model, distfx.Grid())
    outcomes = []
    for shape in shapes:
        x = torch.randn(shape)
        have, want = net(x), model(x)
        outcomes.append(have.shape == want.shape and torch.allclose(have, want))
    return outcomes, len(net.graphs)


@pytest.mark.parametrize(
    ("how", "graphs"), {"nothing": 1, "slice": 1, "squeeze": 3, "batch": 2, "height": 2, "small batch": 4}.items()
)
def test_sizes_of_one(how: str, graphs: int) -> None:
    shapes = [(1, 3, 4, 8), (4, 3, 8, 8), (1, 3, 8, 8), (2, 3, 1, 8), (3, 3, 8, 9)]
    ((outcomes, count),) = run(1, call_both_ways, how, shapes)
    assert outcomes == [True] * len(shapes), dict(zip(shapes, outcomes, strict=True))
    assert count == graphs


# -- in place


class Inplace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y.relu_()
        y += x
        y *= 2
        y.add_(1.5)
        z = y.clamp_(max=2)
        return y + z


@pytest.mark.parametrize(
    "model",
    [
        Inplace(),
        small(),
        of(lambda self, x: F.relu_(self.l0(x)) + 1, nn.Conv2d(3, 4, 3)),
        of(lambda self, x: (self.l0(x).mul_(2).add_(1), x), nn.Conv2d(3, 4, 3)),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.Hardtanh(inplace=True), nn.SiLU(inplace=True), nn.ELU(inplace=True)),
    ],
    ids=["all", "module", "function", "chain", "activations"],
)
def test_in_place_operators_become_functional(model: nn.Module) -> None:
    captured = same(model, (4, 3, 8, 8), (2, 3, 9, 11))
    for target in targets(captured):
        assert not target._schema.is_mutable or target is aten.batch_norm.default, target


def write_through_view_read_later(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    z = y.view(y.shape[0], -1)
    z.relu_()
    return y * 2


def write_into_part(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    y[:, 0].mul_(3)
    return y


def write_into_base_read_through_view(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    z = y.flatten(1)
    y.relu_()
    return z * 2


def write_through_view_of_a_view(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    y.flatten(2).transpose(1, 2).mul_(3)
    return y + 1


def write_into_a_chunk(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    first, _ = y.chunk(2, dim=1)
    first.mul_(3)
    return y + 1


def write_into_base_read_through_chunk(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    first, second = y.chunk(2, dim=1)
    y.mul_(3)
    return first + second


def write_twice_under_two_names(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    z = y.relu_()
    z.mul_(2)
    y.add_(1)
    return y + z


def write_through_a_view_read_through_another(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    one, two = y.flatten(1), y.flatten(2)
    one.mul_(3)
    return two * 2


def write_through_a_view_read_through_its_view(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x).flatten(2)
    z = y.transpose(1, 2)
    y.mul_(3)
    return z * 2


def write_through_a_view_then_view_again(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    y.flatten(1).mul_(3)
    return y.flatten(2) * 2


def write_through_detach(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    y.detach().mul_(3)
    return y + 1


def assign_to_a_part(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    y[:, 0] = 0
    return y + 1


def write_into_a_reshaped_copy(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    y.transpose(1, 2).reshape(x.shape[0], -1).mul_(3)  # reshape copies here
    return y + 1


def copy_into(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    y.copy_(y.abs())
    y.zero_()
    return y + 1


def write_into_the_result_of_a_contiguous(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    y.contiguous().mul_(3)  # no copy: y is contiguous
    return y + 1


def write_through_a_cast_that_is_none(self: Any, x: Tensor) -> Tensor:
    y = x.to(x.dtype)  # no copy: y is x
    y.mul_(2)
    return self.l0(x) + self.l0(y)


@pytest.mark.parametrize(
    "forward",
    [
        write_through_view_read_later,
        write_into_part,
        write_into_base_read_through_view,
        write_through_view_of_a_view,
        write_into_a_chunk,
        write_into_base_read_through_chunk,
        write_twice_under_two_names,
        write_through_a_view_read_through_another,
        write_through_a_view_read_through_its_view,
        write_through_a_view_then_view_again,
        write_through_detach,
        assign_to_a_part,
        write_into_a_reshaped_copy,
        copy_into,
        write_into_the_result_of_a_contiguous,
        write_through_a_cast_that_is_none,
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_a_write_that_is_seen_elsewhere_is_an_error_or_right(forward: Any, trained: bool) -> None:
    """The graph either computes the same, or the error names the write that distfx cannot follow."""
    model = of(forward, nn.Conv2d(3, 4, 3)).requires_grad_(trained)
    try:
        same(model, (4, 3, 8, 8))
    except CaptureError as error:
        assert "in place" in str(error) or "inplace" in str(error) or "in-place" in str(error)


def write_into_a_diagonal(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    y.diagonal(0, 2, 3).mul_(3)
    return y + 1


def write_into_an_einsum(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    z = torch.einsum("nchw->nhwc", y)
    z += 1.0
    return y + z.permute(0, 3, 1, 2)


@pytest.mark.parametrize("forward", [write_into_a_diagonal, write_into_an_einsum])
def test_a_write_that_cannot_be_followed_is_an_error(forward: Any) -> None:
    with pytest.raises(CaptureError, match=r"test_capture.py.*(diagonal|einsum).*which distfx cannot follow"):
        capture(of(forward, nn.Conv2d(3, 4, 3)), (torch.randn(2, 3, 8, 8),), training=False)


def test_a_write_through_a_view_without_other_readers() -> None:
    same(of(lambda self, x: self.l0(x).flatten(1).relu_() + 1, nn.Conv2d(3, 4, 3)), (4, 3, 8, 8), (2, 3, 5, 6))


def test_a_buffer_that_is_written_is_noted() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            return self.conv(x)

    model = Counter()
    captured = capture(model, (torch.randn(2, 3, 4, 4),), training=True)
    assert captured.mutated == {"seen"}
    assert float(model.seen) == 0


# -- canonical form


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dilation", [1, 2])
def test_padding_same(kernel: int, dilation: int) -> None:
    layer = nn.Conv2d(3, 4, (kernel, 3), padding="same", dilation=dilation)
    captured = same(layer, (4, 3, 12, 11), (2, 3, 16, 9))
    uneven = dilation * (kernel - 1) % 2 == 1
    assert targets(captured) == [aten.pad.default] * uneven + [aten.convolution.default]


def test_padding_valid() -> None:
    captured = same(nn.Conv2d(3, 4, 3, padding="valid"), (4, 3, 12, 11))
    assert calls(captured)[-1].args[4] == [0, 0]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_one_operator_for_every_convolution(rank: int) -> None:
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank]
    space = (9, 8, 7)[:rank]
    captured = same(kind(4, 6, 3, stride=2, padding=1, dilation=1, groups=2), (4, 4, *space), (2, 4, *space[::-1]))
    (node,) = calls(captured)
    assert node.target is aten.convolution.default
    assert list(node.args[3:]) == [[2] * rank, [1] * rank, [1] * rank, False, [0] * rank, 2]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_one_operator_for_every_transposed_convolution(rank: int) -> None:
    kind = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[rank]
    space = (5, 4, 3)[:rank]
    layer = kind(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, bias=False)
    captured = same(layer, (4, 4, *space), (2, 4, *space[::-1]))
    (node,) = calls(captured)
    assert node.target is aten.convolution.default and node.args[2] is None
    assert list(node.args[3:]) == [[2] * rank, [1] * rank, [1] * rank, True, [1] * rank, 2]


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_modes_are_a_pad_in_front(mode: str) -> None:
    captured = same(nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode), (4, 3, 12, 11), (2, 3, 8, 9))
    assert targets(captured) == [aten.pad.default, aten.convolution.default]


def test_dropout_is_removed_in_eval() -> None:
    captured = same(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)), (4, 3), (7, 3))
    assert aten.dropout.default not in targets(captured)
    train = capture(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), (torch.randn(4, 3),), training=True)
    assert aten.dropout.default in targets(train)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.l0(x).flatten(1),
        lambda self, x: self.l0(x).reshape(x.shape[0], 2, 2, *x.shape[2:]),
        lambda self, x: self.l0(x).unsqueeze(1).squeeze(1).unflatten(1, (2, 2)),
        lambda self, x: self.l0(x).view(x.shape[0], -1).view(x.size(0), 4, -1),
    ],
    ids=["flatten", "reshape", "squeeze", "view"],
)
def test_all_reshapes_are_one_operator(forward: Any) -> None:
    captured = same(of(forward, nn.Conv2d(3, 4, 1)), (4, 3, 6, 4), (2, 3, 5, 7))
    assert set(targets(captured)) == {aten.convolution.default, aten.reshape.default}


# -- where a node comes from


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        return torch.sigmoid(y) * 2


def test_nodes_know_their_module_and_line() -> None:
    captured = capture(Named(), (torch.randn(2, 3, 8, 8),), training=False)
    nodes = {node.target: node for node in calls(captured)}
    conv, sigmoid = nodes[aten.convolution.default], nodes[aten.sigmoid.default]
    assert conv.meta["path"] == "block.0" and conv.name == "block_0"
    assert nodes[aten.relu.default].meta["path"] == "block.1"
    assert sigmoid.meta["path"] == ""
    lines, first = inspect.getsourcelines(Named.forward)
    for node, text in ((conv, "y = self.block(x)"), (sigmoid, "return torch.sigmoid(y) * 2")):
        path, line, code = node.meta["source"]
        assert path.endswith("test_capture.py") and code == text == lines[line - first].strip()
        assert f"test_capture.py:{line}: {text}" in describe(node)
    assert "block.0" in describe(conv)


# -- the model is left as it was


def test_the_model_is_untouched() -> None:
    model = nn.Sequential(small(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2))
    model[2].eval()
    before = copy.deepcopy(model.state_dict())
    flags = {name: module.training for name, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    for training in (True, False):
        capture(model, (torch.randn(2, 3, 8, 8),), training=training)
        assert {name: module.training for name, module in model.named_modules()} == flags
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_model_is_left_as_it_was_after_an_error() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.bn(x)
            return y if y.sum() > 0 else -y

    model = Fails().train()
    model.bn.eval()
    with pytest.raises(CaptureError):
        capture(model, (torch.randn(2, 3, 4, 4),), training=False)
    assert model.training and not model.bn.training


def batch_norms(captured: Capture) -> list[bool]:
    return [bool(node.args[5]) for node in calls(captured) if node.target is aten.batch_norm.default]


def test_train_and_eval_are_two_graphs() -> None:
    model = small().train()
    assert batch_norms(capture(model, (torch.randn(2, 3, 8, 8),), training=True)) == [True]
    assert batch_norms(capture(model, (torch.randn(2, 3, 8, 8),), training=False)) == [False]
    assert capture(model, (torch.randn(2, 3, 8, 8),), training=True).training is True


def test_a_frozen_batch_norm_stays_frozen() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)).train()
    model[1].eval()
    assert batch_norms(capture(model, (torch.randn(2, 3, 8, 8),), training=True)) == [False, True]
    assert batch_norms(capture(model, (torch.randn(2, 3, 8, 8),), training=False)) == [False, False]


# -- inputs


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Conv1d(5, 4, 3), (6, 5, 4096)),
        (nn.Sequential(nn.Identity(), nn.Conv2d(5, 4, 3), nn.Conv2d(4, 2, 1)), (6, 5, 224, 224)),
        (nn.Conv3d(5, 4, 3), (6, 5, 64, 64, 64)),
        (nn.ConvTranspose2d(5, 4, 3), (6, 5, 224, 224)),
        (nn.Linear(5, 4), (6, 5)),
        (nn.Sequential(nn.Flatten(), nn.Linear(5, 4)).double(), (6, 5)),
    ],
)
def test_inputs_are_inferred_from_the_first_layer(model: nn.Module, shape: tuple[int, ...]) -> None:
    (x,) = next(infer_inputs(model, 6))
    like = next(model.parameters())
    assert tuple(x.shape) == shape and x.dtype == like.dtype and x.device == like.device


def test_nothing_is_inferred_without_a_layer() -> None:
    assert list(infer_inputs(nn.ReLU(), 2)) == []


def test_other_extents_are_tried() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 5), nn.Flatten(), nn.Linear(4 * 24 * 24, 10))
    fitting = []
    for attempt in infer_inputs(model, 2):
        try:
            capture(model, attempt, training=False)
            fitting.append(tuple(attempt[0].shape))
        except CaptureError:
            continue
    assert fitting == [(2, 1, 28, 28)]


# -- errors


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if y.mean() > 0:
            return y
        return -y


@pytest.mark.parametrize("debug", [False, True])
def test_a_failed_capture_is_explained(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTFX_DEBUG", str(int(debug)))
    with pytest.raises(CaptureError) as error:
        capture(Branches(), (torch.randn(2, 3, 8, 8),), training=False)
    text = str(error.value)
    assert "Branches could not be captured with inputs (2, 3, 8, 8)" in text
    assert "branches on the values of tensors" in text and "DISTFX_DEBUG=1 shows torch's full error" in text
    assert (error.value.__cause__ is not None) == debug  # hundreds of lines
    assert isinstance(error.value, DistfxError) and isinstance(error.value, ValueError)


def sharded() -> nn.Module:
    model = small()
    model[0].weight.full_tensor = None  # type: ignore[attr-defined]  # as a DTensor has
    return model


def quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 4)), {nn.Linear})


def compiled_part() -> nn.Module:
    return nn.Sequential(torch.compile(nn.Conv2d(3, 4, 3)), nn.ReLU())  # type: ignore[arg-type]


def on_two_devices() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, device="meta"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.jit.script(small()), "the model (RecursiveScriptModule) is a TorchScript module"),
        (lambda: torch.jit.trace(small(), torch.randn(2, 3, 8, 8), check_trace=False), "is a TorchScript module"),
        (lambda: nn.Sequential(nn.DataParallel(small())), "0 (DataParallel) distributes the model already"),
        (sharded, "0 (Conv2d) has DTensor parameters"),
        (quantized, "0 (Linear) is quantized"),
        (compiled_part, "0 (OptimizedModule) is compiled by torch.compile"),
        (on_two_devices, "has parameters on several devices (cpu, meta)"),
        (lambda: functools.partial(small()), "the model is a partial: give a torch.nn.Module"),
    ],
    ids=["scripted", "traced", "data parallel", "sharded", "quantized", "compiled part", "two devices", "partial"],
)
def test_models_that_are_not_plain_modules(make: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(words)):
        check_model(make())


def test_models_without_values() -> None:
    model = nn.Conv2d(3, 4, 3, device="meta")
    check_model(model)
    with pytest.raises(CaptureError, match=r"Conv2d is on the meta device.*to_empty"):
        check_model(model, needs_values=True)


def test_a_compiled_model_is_captured() -> None:
    same(torch.compile(small()), (4, 3, 8, 8))  # type: ignore[arg-type]


def lists_a_range(self: Any, x: Tensor) -> Tensor:
    y = self.l0(x)
    return y.sum(dim=torch.arange(2, y.dim()).tolist(), keepdim=True) * len(torch.arange(3).tolist())


def test_lists_of_constant_ranges() -> None:
    captured = same(of(lists_a_range, nn.Conv2d(3, 4, 3)), (4, 3, 8, 8), (2, 3, 9, 11))
    assert aten.arange.start not in targets(captured)


def lists_a_modified_range(self: Any, x: Tensor) -> Tensor:
    dims = torch.arange(1, 3)
    dims += 1
    result: Tensor = self.l0(x).sum(dim=dims.tolist())
    return result


def test_a_modified_range_is_not_taken_for_the_original() -> None:
    with pytest.raises(CaptureError):
        capture(of(lists_a_modified_range, nn.Conv2d(3, 4, 3)), (torch.randn(2, 3, 8, 8),), training=False)


def iterates_over_a_range(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l0(x)
    for i in torch.arange(3):
        y = y + i * x.mean()
    return y


def test_iteration_over_a_constant_range() -> None:
    same(of(iterates_over_a_range, nn.Conv2d(3, 4, 3)), (4, 3, 8, 8))


def test_a_wrong_example_is_explained() -> None:
    with pytest.raises(CaptureError, match=r"Conv2d could not be captured with inputs \(2, 4, 8, 8\)"):
        capture(nn.Conv2d(3, 4, 3), (torch.randn(2, 4, 8, 8),), training=False)


def test_keywords_and_structures() -> None:
    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
            y = self.conv(x)
            return {"y": y * scale, "both": (y, 3)}

    x, scale = torch.randn(2, 3, 4, 4), torch.randn(2, 4, 1, 1)
    captured = capture(Structured(), (x,), {"scale": scale}, training=False)
    assert [spec.name for spec in captured.inputs] == ["x", "scale"]
    assert captured.out_spec.num_leaves == 3
