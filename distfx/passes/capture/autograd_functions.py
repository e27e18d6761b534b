"""A model's own ``torch.autograd.Function``: ``torch.export`` traces its ``forward`` and ignores its ``backward``.

Each call is tried on small random tensors while the model is traced. If autograd's derivative of ``forward`` agrees
with ``backward`` (a swish that saves memory), the trace is right. Otherwise (gradient reversal, straight-through and
surrogate gradients) the call becomes an operator of the graph that calls the function itself. The operator is tagged
as element-wise if slices of the operands gave the same slices of results and gradients. Otherwise it falls back to
replicated execution.

``Function.apply`` looks up ``forward`` on the class at every call, so replacing ``forward`` is enough: it also reaches
calls through a reference to ``apply`` that was taken earlier.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from distfx.errors import CaptureError
from distfx.ir import ops
from distfx.ir.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    TreeSpec,
    replace_attribute,
    size_hint,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from distfx.passes.capture.derivatives import OperandModifiedError, differentiate, is_elementwise, try_differentiate
from distfx.passes.capture.tracing import TraceMode

__all__ = ["intercept_functions"]

SAMPLE_EXTENT = 6
"""The largest extent of the tensors on which a function is tried."""

_NAMESPACE = "distfx_model"
_library = torch.library.Library(_NAMESPACE, "DEF")
_operators: dict[Any, tuple[Any, list[Any]]] = {}
"""For each kind of call its operator, or ``None`` if the trace is right.

The constants of the call are kept alive, because the key may contain their ids."""
_name_counts: dict[str, int] = {}
_ORIGINAL = "_distfx_original"


@contextmanager
def intercept_functions(mode: TraceMode) -> Iterator[None]:
    """Replace ``forward`` of all autograd functions outside torch, also of those defined inside the block."""

    def intercept(cls: Any) -> None:
        if cls.__module__.partition(".")[0] not in ("torch", "distfx"):
            stack.enter_context(replace_attribute(cls, "forward", staticmethod(_traced_forward(cls, mode))))

    def init_subclass(cls: Any, **kwargs: Any) -> None:
        super(Function, cls).__init_subclass__(**kwargs)
        intercept(cls)

    with ExitStack() as stack:
        stack.enter_context(replace_attribute(Function, "__init_subclass__", classmethod(init_subclass)))
        # Derived classes first: a class without its own forward must still inherit the original one.
        for cls in reversed(list(_subclasses(Function))):
            intercept(cls)
        yield


def _subclasses(cls: Any) -> Iterator[Any]:
    """All subclasses, base classes before derived classes, each once."""
    subclasses: dict[Any, None] = {}
    pending = [cls]
    while pending:
        for subclass in pending.pop(0).__subclasses__():
            subclasses.pop(subclass, None)
            subclasses[subclass] = None
            pending.append(subclass)
    yield from subclasses


def _takes_context(cls: type[Function]) -> bool:
    """Whether the first argument of ``forward`` is a context: not if the class defines ``setup_context``."""
    return cls.setup_context is Function.setup_context


def _traced_forward(cls: type[Function], mode: TraceMode) -> Callable[..., Any]:
    """``cls.forward`` for the time of a trace."""
    original = getattr(cls.forward, _ORIGINAL, cls.forward)  # a new class may have inherited a replaced one

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args[1:] if _takes_context(cls) else args, kwargs))
        if not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return original(*args, **kwargs)
        operator = _operator_of(_Call(cls, original, leaves, spec)) if mode.grad_enabled else None
        if operator is not None:
            return operator(*_operands(leaves))
        with mode.restore_grad_mode():
            return original(*args, **kwargs)

    setattr(forward, _ORIGINAL, original)
    return forward


def _operator_of(call: _Call) -> Any:
    """The operator that a call becomes; ``None`` if ``forward`` may be traced."""
    if call.key not in _operators:
        constants = [leaf for leaf in call.leaves if not _is_operand(leaf)]
        _operators[call.key] = _run_outside_trace(call.choose_operator), constants
    return _operators[call.key][0]


def _run_outside_trace(action: Callable[[], Any]) -> Any:
    """Run in another thread, because the modes of a trace are local to its thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result()


_RANDOM = torch.Tag.nondeterministic_seeded


class _RandomnessDetector(TorchDispatchMode):
    """Records whether any operator draws random numbers."""

    is_random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_random = self.is_random or _RANDOM in func.tags
        return func(*args, **(kwargs or {}))


class _Context(FunctionCtx):
    """The context of a ``forward`` that is called outside of autograd."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count


def _is_operand(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | torch.SymInt)


def _operands(leaves: Sequence[Any]) -> list[Any]:
    return [leaf for leaf in leaves if _is_operand(leaf)]


class _Call:
    """A call of one function with arguments of one kind. Calling it applies the function to other operands."""

    def __init__(self, cls: type[Function], forward: Callable[..., Any], leaves: Sequence[Any], spec: TreeSpec) -> None:
        self.cls, self.forward, self.leaves, self.spec = cls, forward, leaves, spec
        self.__name__ = cls.__qualname__
        kinds = [(leaf.dim(), leaf.dtype) if isinstance(leaf, Tensor) else _constant_key(leaf) for leaf in leaves]
        self.key = (cls, str(spec), tuple(kinds))

    def _arguments(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these operands; the constants are those of the call."""
        rest = iter(operands)
        args, kwargs = tree_unflatten([next(rest) if _is_operand(leaf) else leaf for leaf in self.leaves], self.spec)
        return args, kwargs

    def __call__(self, *operands: Any) -> Any:
        args, kwargs = self._arguments(operands)
        return self.cls.apply(*args, **kwargs)

    def inline(self, *operands: Any) -> Any:
        """Call ``forward`` as an ordinary function, whose derivative is that of its operators."""
        args, kwargs = self._arguments(operands)
        context = (_Context(len(args)),) if _takes_context(self.cls) else ()
        return self.forward(*context, *args, **kwargs)

    def choose_operator(self) -> Any:
        """``None`` if ``forward`` may be traced; otherwise a new operator that stands for the function."""
        sample = self._sample()
        try:
            derivative = differentiate(self, sample)
        except OperandModifiedError:
            applied, inlined = (try_differentiate(each, sample, may_write=True) for each in (self, self.inline))
            if applied is not None and applied.equals(inlined):
                return None
            raise CaptureError(
                f"{self.cls.__qualname__}, an autograd function of the model, writes into its argument and defines its "
                "own derivative. Let it return a new tensor."
            ) from None
        except Exception:  # it may need other sizes or values, or a GPU
            return self._define_operator(elementwise=False)
        if derivative.equals(try_differentiate(self.inline, sample)):
            return None
        return self._define_operator(elementwise=is_elementwise(self, sample, derivative))

    def _sample(self) -> list[Any]:
        """Small random operands of the same ranks; floating-point tensors are float64."""
        generator = torch.Generator().manual_seed(0)

        def draw(leaf: Any) -> Any:
            if isinstance(leaf, torch.SymInt):
                return min(size_hint(leaf), SAMPLE_EXTENT)
            shape = [min(size_hint(size), SAMPLE_EXTENT) for size in leaf.shape]
            if leaf.dtype.is_floating_point:
                return 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
            return torch.randint(2, shape, generator=generator).to(leaf.dtype)

        return [draw(leaf) for leaf in _operands(self.leaves)]

    def _define_operator(self, *, elementwise: bool) -> Any:
        operands, function = _operands(self.leaves), self._without_tensors()
        fake = next(leaf for leaf in operands if isinstance(leaf, FakeTensor))
        with fake.fake_mode, _RandomnessDetector() as detector:
            result = self.inline(*operands)
        is_single = isinstance(result, Tensor)
        if not is_single and not (isinstance(result, tuple) and all(isinstance(each, Tensor) for each in result)):
            raise CaptureError(
                f"{self.cls.__qualname__}, an autograd function of the model that defines its own derivative, returns "
                "something besides tensors. Let it return a tensor, or a tuple of tensors."
            )
        name = _unique_name(self.cls)
        types = ("Tensor" if isinstance(leaf, Tensor) else "SymInt" for leaf in operands)
        parameters = ", ".join(f"{kind} x{i}" for i, kind in enumerate(types))
        returns = "Tensor" if is_single else f"({', '.join(['Tensor'] * len(result))})"
        tags = [tag for tag, has in ((torch.Tag.pointwise, elementwise), (_RANDOM, detector.is_random)) if has]
        _library.define(f"{name}({parameters}) -> {returns}", tags=tags)

        def fake_kernel(*operands: Any) -> Any:
            return tree_map(torch.empty_like, function.inline(*operands))

        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake_kernel, lib=_library)
        operator = getattr(getattr(torch.ops, _NAMESPACE), name).default
        ops.OWN_FUNCTIONS[operator] = function
        return operator

    def _without_tensors(self) -> _Call:
        """The same call for later use: it must not keep tensors of the trace alive."""
        leaves = [torch.empty(0) if _is_operand(leaf) else leaf for leaf in self.leaves]
        return _Call(self.cls, self.forward, leaves, self.spec)


def _unique_name(cls: type[Function]) -> str:
    base = re.sub(r"\W+", "_", cls.__qualname__.replace("<locals>.", ""))
    count = _name_counts[base] = _name_counts.get(base, 0) + 1
    return base if count == 1 else f"{base}_{count}"


def _constant_key(leaf: Any) -> Any:
    """A key that differs between different constant arguments."""
    if isinstance(leaf, torch.SymInt):
        return torch.SymInt
    return (type(leaf), repr(leaf) if isinstance(leaf, int | float | str | bool | complex | None) else id(leaf))
