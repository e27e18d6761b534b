"""The private parts of torch behind :mod:`distfx.ir.torch_private` exist and behave as assumed.

A new torch release that changes one fails here, in the test that has its name.
"""

from __future__ import annotations

import ast
import contextlib
import io
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from distfx.ir import torch_private

aten = torch.ops.aten


class Net(nn.Module):
    """A convolution, and a function of its result."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.conv(x))


def export(function: Any) -> ExportedProgram:
    shapes = ((Dim.AUTO, Dim.STATIC, Dim.AUTO, Dim.AUTO),)
    return torch.export.export(Net(function), (torch.randn(2, 3, 8, 10),), dynamic_shapes=shapes, strict=False)


def input_of(program: ExportedProgram) -> Any:
    module: Any = program.module(check_guards=False)
    return next(node for node in module.graph.find_nodes(op="placeholder") if "val" in node.meta).meta["val"]


# -- operators


def test_schema_of() -> None:
    schema = torch_private.schema_of(aten.add_.Tensor)
    assert schema.name == "aten::add_" and schema.overload_name == "Tensor"
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert schema.arguments[2].kwarg_only and schema.arguments[2].default_value == 1
    assert schema.returns[0].alias_info is not None
    assert torch_private.schema_of(aten.add.Tensor).returns[0].alias_info is None


def test_is_mutable() -> None:
    assert torch_private.is_mutable(aten.add_.Tensor)
    assert not torch_private.is_mutable(aten.add.Tensor)
    assert not torch_private.is_mutable(torch.add)
    assert isinstance(aten.add.Tensor, torch_private.OpOverload)
    assert aten.add.Tensor in [getattr(aten.add, name) for name in aten.add.overloads()]
    assert aten.add.Tensor.overloadpacket is aten.add


# -- trees


def test_trees() -> None:
    tree = ((1, {"a": 2}), [3])
    leaves, spec = torch_private.tree_flatten(tree)
    assert leaves == torch_private.tree_leaves(tree) == [1, 2, 3]
    assert isinstance(spec, torch_private.TreeSpec) and spec.num_leaves == 3
    assert torch_private.tree_unflatten([4, 5, 6], spec) == ((4, {"a": 5}), [6])
    assert torch_private.tree_map(lambda leaf: -leaf, tree) == ((-1, {"a": -2}), [-3])
    assert str(spec) == str(torch_private.tree_flatten(tree)[1]) != str(torch_private.tree_flatten([1])[1])


# -- tensors


def test_shares_storage() -> None:
    x = torch.zeros(4)
    assert torch_private.shares_storage(x, x[1:]) and not torch_private.shares_storage(x, x.clone())


def test_shares_storage_of_fake_tensors() -> None:
    x = input_of(export(torch.relu))
    with x.fake_mode:
        assert torch_private.shares_storage(x, x.view(-1)) and not torch_private.shares_storage(x, x.clone())


def test_version_of() -> None:
    x = torch.zeros(4)
    before, view = torch_private.version_of(x), x[1:]
    view.add_(1)
    assert torch_private.version_of(x) == torch_private.version_of(view) > before


# -- symbolic sizes


def test_fake_tensors_and_sizes() -> None:
    x = input_of(export(torch.relu))
    assert isinstance(x, torch_private.FakeTensor) and x.fake_mode is not None
    assert [torch_private.size_hint(size) for size in x.shape] == [2, 3, 8, 10]
    assert isinstance(x.shape[0], torch.SymInt) and isinstance(torch_private.expression_of(x.shape[0]), sympy.Symbol)


def test_guards_of() -> None:
    x = input_of(export(lambda y: y * 2 if y.shape[2] < y.shape[3] else y))
    guards = torch_private.guards_of(x)
    assert guards is not None
    height, width = (torch_private.expression_of(size) for size in x.shape[2:])
    assert any(guard.free_symbols == {height, width} for guard in guards)
    assert torch_private.guards_of(torch.zeros(2)) is None


# -- graphs and modules


def test_rename() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    torch_private.rename(y, "z")
    assert y.name == "z"
    torch_private.rename(y, "x")
    assert x.name == "x" and y.name == "x_1"


@pytest.mark.parametrize(
    ("region", "kind"),
    [(torch.no_grad(), "grad"), (torch.autocast("cpu", enabled=False), "autocast")],
    ids=["grad", "autocast"],
)
def test_region_kind(region: Any, kind: str) -> None:
    def function(y: Tensor) -> Tensor:
        with region:
            z = y * 2
        return y + z

    module: Any = export(function).module(check_guards=False)
    (node,) = [node for node in module.graph.nodes if torch_private.region_kind(node) is not None]
    assert torch_private.region_kind(node) == kind
    position = next(i for i, a in enumerate(node.args) if getattr(a, "op", "") == "get_attr")
    inner = getattr(module, node.args[position].target)
    assert len(inner.graph.find_nodes(op="placeholder")) == len(node.args) - position - 1
    assert aten.mul.Tensor in [each.target for each in inner.graph.nodes]
    assert node.args[0 if kind == "grad" else 2] is False


def test_has_backward_hooks() -> None:
    for register in (nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook):
        module: Any = nn.Linear(2, 2)
        assert not torch_private.has_backward_hooks(module)
        register(module, lambda *_: None)
        assert torch_private.has_backward_hooks(module)


def test_is_batch_norm() -> None:
    assert torch_private.is_batch_norm(nn.BatchNorm2d(3)) and torch_private.is_batch_norm(nn.InstanceNorm1d(3))
    assert not torch_private.is_batch_norm(nn.GroupNorm(1, 3))


# -- tracing


def test_grad_mode_is_seen_by_a_function_mode() -> None:
    seen: list[bool] = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch_private.SET_GRAD_ENABLED:
                seen.append(args[0])
            return func(*args, **(kwargs or {}))

    with Seen(), torch.no_grad(), torch.enable_grad():
        pass
    assert seen == [False, True, False, True]


def test_function_modes_see_attributes_and_hooks() -> None:
    """Public API, but the capture relies on it: descriptors compare equal, and ``tolist`` unbinds a fake tensor."""
    seen: list[Any] = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    data: Any = Tensor.data
    x = torch.zeros(2, requires_grad=True)
    with Seen():
        x.data = x.data
        x.register_hook(lambda grad: grad)
        torch.arange(2)
    assert {data.__get__, data.__set__, Tensor.register_hook, torch.arange} <= set(seen)
    seen.clear()
    with Seen(), contextlib.suppress(Exception):
        export(lambda y: y.sum(torch.arange(2).tolist()))
    assert {Tensor.unbind, Tensor.item} <= set(seen)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def test_apply_looks_up_forward_at_each_call() -> None:
    apply = Halved.apply
    x = torch.ones(2, requires_grad=True)
    with torch_private.replace_attribute(Halved, "forward", staticmethod(lambda ctx, x: x * 10)):
        y = apply(x)
    y.sum().backward()
    assert y.tolist() == [10, 10] and apply(x).tolist() == [0.5, 0.5]
    assert torch.equal(x.grad, torch.full((2,), 3.0))  # type: ignore[arg-type]


def test_replace_attribute_restores_inherited_ones() -> None:
    class Base:
        name = 1

    class Derived(Base):
        pass

    with torch_private.replace_attribute(Derived, "name", 2):
        assert Derived.name == 2
    assert Derived.name == 1 and "name" not in vars(Derived)


def test_silence_export() -> None:
    """The graph of a failed export is printed to stderr, unless silenced."""

    def output(*contexts: Any) -> str:
        stderr = io.StringIO()
        with contextlib.ExitStack() as stack, contextlib.redirect_stderr(stderr):
            for context in contexts:
                stack.enter_context(context)
            with pytest.raises(Exception, match="data-dependent"):
                export(lambda y: y if y.sum() > 0 else -y)
        return stderr.getvalue()

    assert "conv2d" in output()
    assert "conv2d" not in output(torch_private.silence_export())


def test_noisy_loggers() -> None:
    """Each is a logger that a failed export writes to, or one that exists."""
    known = logging.root.manager.loggerDict
    export(torch.relu)
    assert [name for name in torch_private.NOISY_LOGGERS if name not in known] == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_inline_checkpoints(reentrant: bool) -> None:
    def function(y: Tensor) -> Any:
        return checkpoint(torch.tanh, y, use_reentrant=reentrant)

    with torch_private.inline_checkpoints() as functions:
        module: Any = export(function).module(check_guards=False)
    assert functions and set(functions) == {torch.tanh}
    assert aten.tanh.default in [node.target for node in module.graph.nodes]
    assert not [node for node in module.graph.nodes if torch_private.region_kind(node)]
    x = torch.ones(2, requires_grad=True)
    checkpoint(torch.tanh, x, use_reentrant=reentrant).sum().backward()  # type: ignore[union-attr]
    assert x.grad is not None


def test_dispatch_modes_see_operators() -> None:
    seen: list[Any] = []

    class Seen(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seen():
        torch.rand(2)
    assert any(torch.Tag.nondeterministic_seeded in func.tags for func in seen)


# -- no other module of the capture uses private parts

PACKAGE = Path(torch_private.__file__).parents[1]
FILES = [
    *sorted((PACKAGE / "passes" / "canonicalize").glob("*.py")),
    *sorted((PACKAGE / "passes" / "capture").glob("*.py")),
    PACKAGE / "passes" / "losses.py",
    PACKAGE / "loss.py",
]
OWN = ("self", "other", "cls", "TraceMode", "aten")
"""Objects of distfx whose private attributes a module may use, and the namespace of ATen's operators."""
SLOTS = {"_modules"}
"""``with_loss`` replaces the submodules of a copied model, for which ``nn.Module`` has no public way."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_capture_uses_no_other_private_parts(path: Path) -> None:
    """Neither private modules of torch nor private attributes of its objects."""
    private: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names if alias.name.startswith("torch") for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in OWN:
            names = [node.attr]
        is_private = [name.startswith("_") and not name.endswith("__") and name not in SLOTS for name in names]
        private += [name for name, hidden in zip(names, is_private, strict=True) if hidden]
    assert private == []


ADAPTERS = ("ir/torch_private.py", "ir/symbolic.py", "runtime/autograd/dtensor.py")
MODULES = [p for p in sorted(PACKAGE.rglob("*.py")) if not str(p).endswith(ADAPTERS)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_imports_private_modules_of_torch(path: Path) -> None:
    private = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            private += [part for part in (node.module or "").split(".") if part.startswith("_")]
        elif isinstance(node, ast.Import):
            private += [alias.name for alias in node.names if alias.name.startswith("torch") and "._" in alias.name]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch" and re.match(r"_[^_]", node.attr):
            private.append(node.attr)
    assert private == []
