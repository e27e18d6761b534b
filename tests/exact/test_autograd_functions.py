"""Derivatives that a model defines: its own autograd functions, and hooks on gradients."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support.exact import _exact, ranks_of, relative
from support.ranks import run, run_raises
from torch import Tensor, nn
from torch.autograd import Function

import distfx
from distfx.errors import CaptureError, FallbackWarning
from distfx.passes.capture import capture


class Reversal(Function):
    """Identity; its gradient is reversed (domain adaptation)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * grad, None


class Sign(Function):
    """The sign, with the gradient of a clamp (binary networks)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class Swish(Function):
    """The derivative of autograd, but saves only its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))


class Gate(Function):
    """Two tensors, with ``setup_context``; the second has half of its gradient."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * y, grad * x / 2


class Centre(Function):
    """Not element-wise: subtracts the mean of each image, which the gradient ignores."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean((2, 3), keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class Both(Function):
    """Two results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x + 1

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> Tensor:
        return one - two


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Drawn(Function):
    """Random numbers, with the gradient of their mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.bernoulli(torch.sigmoid(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Listed(Function):
    """Returns something besides tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 2, "twice"

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        return grad


class Scaled(Reversal):
    """Inherits ``forward``."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * grad, None


class Recomputed(Function):
    """The derivative of its own operators, by a graph that ``forward`` records under ``enable_grad``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.inner = x.detach().requires_grad_()
            ctx.outer = ctx.inner.tanh() * 2
        return ctx.outer.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.autograd.grad(ctx.outer, ctx.inner, grad)[0]


def defined_in_forward(x: Tensor) -> Tensor:
    class Local(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 5

    class Derived(Local):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 7

    result: Tensor = Local.apply(x) + Derived.apply(x)
    return result


def without_gradient(x: Tensor) -> Tensor:
    """Under ``no_grad`` no derivative matters: ``forward`` is traced."""
    with torch.no_grad():
        mean = Centre.apply(x)
    result: Tensor = x * mean
    return result


bound_before = Reversal.apply
"""A reference to ``apply`` that is bound before any model is traced, as is common."""

inherited_before = Scaled.apply

FUNCTIONS = {
    "reversal": lambda x: bound_before(x, 0.5),
    "twice": lambda x: Reversal.apply(Reversal.apply(x, 0.5) * 2, 3.0),
    "sign": Sign.apply,
    "swish": Swish.apply,
    "gate": lambda x: Gate.apply(x, x.flip(1)),
    "centre": Centre.apply,
    "both": lambda x: torch.cat(Both.apply(x), 1),
    "inherited": lambda x: inherited_before(x, 0.5),
    "recomputed": Recomputed.apply,
    "local": defined_in_forward,
    "without gradient": without_gradient,
    "in place": lambda x: InPlace.apply(x * 1),
    "listed": lambda x: Listed.apply(x)[0],
    "drawn": Drawn.apply,
}


class Around(nn.Module):
    """A function between two convolutions."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.before = nn.Conv2d(3, 4, 3, padding=1)
        self.after = nn.Conv2d(8 if name == "both" else 4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.after(FUNCTIONS[self.name](self.before(x)))
        return result


def followed(name: str, grid: str, train: bool) -> tuple[dict[str, float], list[str]]:
    """The errors, and the operators that fell back to replicated execution."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        shapes = [(2, 3, 8, 9), (4, 3, 11, 8)]
        result = _exact(Around, grid, shapes, kwargs={"name": name}, sgd=3, train=train)  # captured on every rank
    return result["errors"], [str(row.op) for row in result["rows"] if row.fallback]


@pytest.mark.parametrize("grid", ["c2", "h2", "n2w2"])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("in place", "listed", "drawn", "local")])
def test_own_functions_keep_their_derivative(name: str, grid: str) -> None:
    for errors, fallbacks in run(ranks_of(grid), followed, name, grid, name != "twice"):
        assert max(errors.values()) < 1e-10, errors
        assert bool(fallbacks) == (name in ("centre", "both")), fallbacks


def test_functions_that_are_defined_in_forward() -> None:
    """On one rank, because each trace defines another operator, numbered by the earlier traces of the process."""
    ((errors, fallbacks),) = run(1, followed, "local", "h1", True)
    assert max(errors.values()) < 1e-10 and not fallbacks


def test_functions_are_left_as_they_were() -> None:
    before = [vars(cls).get("forward") for cls in (Reversal, Scaled, Function)]
    model = Around("reversal").double()
    capture(model, (torch.randn(2, 3, 8, 8, dtype=torch.float64),), training=True)
    assert [vars(cls).get("forward") for cls in (Reversal, Scaled, Function)] == before
    assert "__init_subclass__" not in vars(Function)
    x = torch.randn(2, requires_grad=True)
    bound_before(x, 0.5).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), -0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("in place", ["InPlace", "writes into its argument"]),
        ("listed", ["Listed", "besides tensors"]),
        ("drawn", ["Drawn", "draws random numbers"]),
    ],
)
def test_functions_that_cannot_be_followed(name: str, words: list[str]) -> None:
    for error in run_raises(2, followed, name, "h2", True):
        assert all(word in str(error) for word in words), error


# -- hooks


class Hooked(nn.Module):
    """Two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x).relu())
        return result


class Registers(Hooked):
    """Looks at a gradient, as for a class activation map."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 0.1)
        result: Tensor = self.b(y)
        return result


def hooked_parameters(grid: str) -> tuple[list[float], list[str]]:
    """The errors of gradients that parameter hooks change, and the calls of post-accumulate hooks."""
    torch.manual_seed(0)
    model = Hooked().double()
    plain = copy.deepcopy(model)
    seen: list[str] = []
    for each in (model, plain):
        each.a.weight.register_hook(lambda grad: grad * 0.5)
        each.a.bias.register_hook(lambda grad: grad.clamp(-1.0, 1.0))
    model.b.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    net = distfx.parallelize(model, distfx.Grid.parse(grid))
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    net(x).square().sum().backward()
    plain(x).square().sum().backward()
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    return [relative(p.grad.full_tensor(), q.grad) for p, q in pairs], seen  # type: ignore[union-attr]


@pytest.mark.parametrize("grid", ["c2", "h2"])
def test_hooks_of_parameters_are_kept(grid: str) -> None:
    for errors, seen in run(2, hooked_parameters, grid):
        assert max(errors) < 1e-10 and seen == ["accumulated"]


def refused(kind: str) -> None:
    model = Registers() if kind == "tensor" else Hooked()
    if kind == "module":
        model.a.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    if kind == "before":
        model.b.register_full_backward_pre_hook(lambda module, grad_output: None)
    net = distfx.parallelize(model, distfx.Grid.parse("h2"))
    net(torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("tensor", ["register_hook", "test_autograd_functions.py"]),
        ("module", ["a (Conv2d)", "backward hook"]),
        ("before", ["b (Conv2d)"]),
    ],
)
def test_hooks_that_would_never_run_are_refused(kind: str, words: list[str]) -> None:
    for error in run_raises(2, refused, kind):
        assert all(word in str(error) for word in words), error


# -- plain attributes of the model


class Tempered(nn.Module):
    """Divides by a temperature, and counts its calls."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.conv, self.temperature, self.counts, self.calls = nn.Conv2d(3, 4, 3, padding=1), 2.0, counts, 0
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        y = self.norm(self.conv(x)) / self.temperature * self.mean.view(-1, 1, 1)
        self.mean = self.mean * 0.5  # a new tensor, while backward needs the old one
        return y

    def train(self, mode: bool = True) -> Tempered:
        self.temperature = 2.0 if mode else 1.0
        return super().train(mode)


def changed_attribute(which: str) -> None:
    model = Tempered(False)
    net = distfx.parallelize(model, distfx.Grid.parse("h2"))
    x = torch.randn(2, 3, 8, 8)
    net(x)
    if which == "net":
        net.temperature = 0.5
    elif which == "part":
        net.norm.momentum = 0.5
    else:
        model.temperature = 0.5
        net(x)


@pytest.mark.parametrize(
    ("which", "word"), [("net", "temperature"), ("part", "norm.momentum"), ("model", "temperature = 2.0, now 0.5")]
)
def test_changed_attributes_are_an_error(which: str, word: str) -> None:
    for error in run_raises(2, changed_attribute, which):
        assert word in str(error) and "buffer" in str(error)


def tempered(counts: bool) -> tuple[list[float], list[str], int]:
    """The errors of a model that changes itself, in train and eval and train again; warnings; its counter."""
    torch.manual_seed(0)
    model = Tempered(counts).double()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = distfx.parallelize(model, distfx.Grid.parse("c2"))
        x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
        errors = []
        for training in (True, True, False, True):
            y, want = net.train(training)(x), plain.train(training)(x)
            y.square().sum().backward()
            want.square().sum().backward()
            errors += [relative(y, want), relative(net.full_state_dict()["mean"], plain.mean)]
            pairs = zip(net.parameters(), plain.parameters(), strict=True)
            errors += [relative(p.grad.full_tensor(), q.grad) for p, q in pairs]  # type: ignore[union-attr]
    return errors, [str(each.message) for each in caught if "forward modifies" in str(each.message)], model.calls


@pytest.mark.parametrize("counts", [False, True])
def test_models_that_change_themselves(counts: bool) -> None:
    for rank, (errors, messages, calls) in enumerate(run(2, tempered, counts)):
        assert max(errors) < 1e-10 and calls == 0
        assert len(messages) == (1 if counts and rank == 0 else 0) and all("calls" in text for text in messages)


def copies_in_training() -> list[float]:
    """The errors of a copy taken between backward and the step: gradients stay, and are not copied."""
    model = Hooked().double()
    net = distfx.parallelize(model, distfx.Grid.parse("h2"))
    net(torch.randn(2, 3, 8, 8, dtype=torch.float64)).square().sum().backward()
    before = [p.grad.to_local().clone() for p in net.parameters()]
    copied = copy.deepcopy(net)
    averaged = torch.optim.swa_utils.AveragedModel(net)
    assert all(p.grad is None for each in (copied, averaged) for p in each.parameters())
    errors = [relative(p.grad.to_local(), grad) for p, grad in zip(net.parameters(), before, strict=True)]
    for p, q in zip(net.parameters(), copied.parameters(), strict=True):
        errors.append(relative(p.to_local(), q.to_local()))
        assert p.to_local().data_ptr() != q.to_local().data_ptr()
    return errors


def test_copies_are_as_torch_makes_them() -> None:
    for errors in run(2, copies_in_training):
        assert max(errors) == 0


# -- models that are rejected


class Selects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.masked_select(y, y > 0).mean()


class Branches(Selects):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        if y.mean() > 0:
            return y * 2
        return y


class Assigns(Selects):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        y.data = y.data.clamp(min=0)
        return y


def test_assignments_to_data() -> None:
    with pytest.raises(CaptureError, match=r"assignment to \.data .*test_autograd_functions\.py.*copy_"):
        capture(Assigns(), (torch.randn(2, 3, 8, 8),), training=True)


class Clips(Selects):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.conv.weight.clamp_(-0.1, 0.1)
        y: Tensor = self.conv(x)
        return y


def clips() -> None:
    distfx.parallelize(Clips(), distfx.Grid.parse("h2"))(torch.randn(2, 3, 8, 8))


def test_writes_into_what_is_trained() -> None:
    for error in run_raises(2, clips):
        assert "conv.weight" in str(error) and "is trained" in str(error) and "test_autograd_functions.py" in str(error)


def selects() -> None:
    distfx.parallelize(Selects(), distfx.Grid.parse("h2"))(torch.randn(2, 3, 8, 8))


def branches() -> None:
    distfx.parallelize(Branches(), distfx.Grid.parse("h2"), example_inputs=(torch.randn(2, 3, 8, 8),))


def scripted(part: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    if part:
        model[0] = torch.jit.script(model[0])
    distfx.parallelize(model if part else torch.jit.script(model), distfx.Grid.parse("h2"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("part", [False, True])
def test_scripted_modules(part: bool) -> None:
    failures = run_raises(2, scripted, part)
    assert len(set(failures)) == 1
    assert ("0 (" if part else "the model (") in str(failures[0]) and "give the original module" in str(failures[0])


def test_branches_on_values() -> None:
    for error in run_raises(2, branches):
        assert "test_autograd_functions.py" in str(error) and "if y.mean() > 0" in str(error)


def test_sizes_that_depend_on_values() -> None:
    for error in run_raises(2, selects):
        assert (
            "masked_select" in str(error) and "test_autograd_functions.py" in str(error) and "torch.where" in str(error)
        )


# -- codebooks and moving averages, written by hand


class Codebook(nn.Module):
    """Moving averages of a codebook through ``.data``, as is common in vector quantisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer("average", torch.ones(4))
        self.register_buffer("counts", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.training:
            self.counts.data.mul_(0.9).add_(0.1 * y.detach().mean((0, 2, 3)))
            self.average.data.copy_(self.average * 0.5 + self.counts)
        return y * self.average.view(1, -1, 1, 1)


class Momentum(nn.Module):
    """A second encoder that follows the first."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.target.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
                q.mul_(0.9).add_(p, alpha=0.1)
            goal = self.target(x)
        return (self.online(x) - goal).square()


WRITERS = {"codebook": Codebook, "momentum": Momentum}


def written_by_hand(name: str, grid: str) -> dict[str, float]:
    errors: dict[str, float] = _exact(WRITERS[name], grid, [(2, 3, 8, 9)], sgd=3)["errors"]
    return errors


@pytest.mark.parametrize("grid", ["c2", "h2", "n2"])
@pytest.mark.parametrize("name", WRITERS)
def test_averages_written_by_hand(name: str, grid: str) -> None:
    for errors in run(2, written_by_hand, name, grid):
        assert max(errors.values()) < 1e-10, errors
