"""A model's own ``torch.autograd.Function``: torch.export follows what its ``forward`` computes, not its ``backward``.

Each call is tried out on a few numbers while the model is traced. Where autograd's derivative of ``forward`` is what
``backward`` gives (a swish that saves memory), the trace is right. Any other (gradient reversal, straight-through and
surrogate gradients) becomes an operator of the graph, which calls the function itself: element-wise where it was seen
to work on parts of its tensors as on the whole, otherwise whole on every rank.
"""

from __future__ import annotations

import re
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode

from distfx.errors import CaptureError
from distfx.ir import ops

__all__ = ["own_functions"]

SAMPLE = 6
"""The extent of the tensors on which a function is tried out, where it is called with larger ones."""

_SPACE = "distfx_model"
_library = torch.library.Library(_SPACE, "DEF")
_known: dict[Any, tuple[Any, list[Any]]] = {}
"""For each kind of call the operator that it becomes, or ``None``."""
_names: dict[str, int] = {}


_apply: Any = Function.apply.__func__  # type: ignore[attr-defined]
_plain = types.FunctionType(_apply.__code__, _apply.__globals__, "apply", _apply.__defaults__, _apply.__closure__)


class _Trampoline:
    """Its code takes the place of ``Function.apply``'s, so that calls through references made before arrive, too."""

    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        from distfx.passes.capture.autograd_functions import (
            _traced,  # it runs among the names of torch.autograd.function
        )

        __class__  # type: ignore[name-defined]  # noqa: B018  (both codes must have this one free variable)
        return _traced(cls, args, kwargs)


def _traced(cls: Any, args: Any, kwargs: Any) -> Any:
    """A call of ``cls.apply`` while a model is traced, be it the model's or not."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    of_torch = cls.__module__.partition(".")[0] == "torch"
    if of_torch or not torch.is_grad_enabled() or not any(isinstance(leaf, FakeTensor) for leaf in leaves):
        return _plain(cls, *args, **kwargs)
    call = _Call(cls, leaves, spec)
    if call.key not in _known:
        constants = [leaf for leaf in leaves if not _is_operand(leaf)]  # kept: the key may have their numbers
        _known[call.key] = _elsewhere(call.decide), constants
    operator, _ = _known[call.key]
    return _plain(cls, *args, **kwargs) if operator is None else operator(*call.operands(leaves))


@contextmanager
def own_functions() -> Iterator[None]:
    """While a model is traced, calls of its functions become operators where they must, what it does to ``.data`` is
    seen, and hooks on gradients are refused."""
    before = _apply.__code__
    _apply.__code__ = _Trampoline.apply.__code__
    try:
        with patch.object(Tensor, "register_hook", _refuse_hook), patch.object(FakeTensor, "data", _DATA, create=True):
            yield
    finally:
        _apply.__code__ = before


def _refuse_data(tensor: Tensor, value: Any) -> None:
    raise CaptureError(
        f"an assignment to .data inside of forward ({_caller()}) is not followed. Write tensor.copy_(...) with "
        "torch.no_grad() instead."
    )


_DATA = property(lambda tensor: tensor.detach(), _refuse_data)
"""What is written through ``tensor.data`` is a write into the tensor; export would lose it."""


def _caller() -> str:
    """The line of the model that is being traced."""
    frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename.replace("\\", "/")]
    at = next(frame for frame in reversed(frames) if frame.filename != __file__)
    return f"{at.filename}:{at.lineno}: {at.line}"


_register_hook = Tensor.register_hook


def _refuse_hook(tensor: Tensor, hook: Any) -> Any:
    if not isinstance(tensor, FakeTensor):
        return _register_hook(tensor, hook)
    raise CaptureError(
        f"register_hook on a tensor inside of forward ({_caller()}) is not followed: the hook would never "
        "run. Put what it does to the gradient into an autograd function, or return the tensor."
    )


def _elsewhere(action: Callable[[], Any]) -> Any:
    """In a thread of its own, where none of the modes of the trace is on."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result()


_RANDOM = torch.Tag.nondeterministic_seeded


class _Draws(TorchDispatchMode):
    """Whether anything that runs draws random numbers: ranks would not draw the same."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or _RANDOM in func.tags
        return func(*args, **(kwargs or {}))


class _Context(FunctionCtx):
    """What ``forward`` is given, outside of autograd."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count


def _forward(cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a function computes, as ordinary operators."""
    if cls.setup_context is not Function.setup_context:
        return cls.forward(*args, **kwargs)
    return cls.forward(_Context(len(args)), *args, **kwargs)


def _is_operand(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | torch.SymInt)


class _Call:
    """A call of one function with arguments of one kind."""

    def __init__(self, cls: type[Function], leaves: Sequence[Any], spec: pytree.TreeSpec) -> None:
        self.cls, self.leaves, self.spec = cls, leaves, spec
        self.__name__ = cls.__qualname__
        kinds = [(leaf.dim(), leaf.dtype) if isinstance(leaf, Tensor) else _constant(leaf) for leaf in leaves]
        self.key = (cls, str(spec), tuple(kinds))

    def operands(self, leaves: Sequence[Any]) -> list[Any]:
        return [leaf for leaf in leaves if _is_operand(leaf)]

    def arguments(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these operands in their places; the constants are those of the call."""
        rest = iter(operands)
        args, kwargs = pytree.tree_unflatten(
            [next(rest) if _is_operand(leaf) else leaf for leaf in self.leaves], self.spec
        )
        return args, kwargs

    def __call__(self, *operands: Any) -> Any:
        args, kwargs = self.arguments(operands)
        return self.cls.apply(*args, **kwargs)

    def inlined(self, *operands: Any) -> Any:
        args, kwargs = self.arguments(operands)
        return _forward(self.cls, args, kwargs)

    # -- trying it out

    def decide(self) -> Any:
        """``None`` where the trace is right; otherwise the operator that stands for the function."""
        sample = self._sample()
        try:
            whole = _derived(self, sample)
        except _WritesError:
            if _same(*(_derived_or_none(each, sample, may_write=True) for each in (self, self.inlined))):
                return None
            raise CaptureError(
                f"{self.cls.__qualname__}, an autograd function of the model, writes into its argument and has a "
                "derivative of its own. Let it return a new tensor."
            ) from None
        except Exception:  # it may need other sizes or values, or a GPU
            return self._define(local=False)
        if _same(whole, _derived_or_none(self.inlined, sample)):
            return None
        return self._define(local=self._is_local(sample, whole))

    def _sample(self) -> list[Any]:
        generator = torch.Generator().manual_seed(0)

        def like(leaf: Any) -> Any:
            if isinstance(leaf, torch.SymInt):
                return min(int(leaf.node.hint), SAMPLE)
            shape = [min(int(s.node.hint) if isinstance(s, torch.SymInt) else s, SAMPLE) for s in leaf.shape]
            if leaf.dtype.is_floating_point:
                return 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
            return torch.randint(2, shape, generator=generator).to(leaf.dtype)

        return [like(leaf) for leaf in self.operands(self.leaves)]

    def _is_local(self, sample: Sequence[Any], whole: tuple[list[Tensor], list[Any]]) -> bool:
        """Whether any half of the tensors gives that half of the results and gradients."""
        results, gradients = whole
        shapes = {tuple(value.shape) if isinstance(value, Tensor) else None for value in (*sample, *results)}
        if len(shapes) != 1 or None in shapes or len(results) != 1:
            return False
        (shape,) = shapes
        for dim, extent in enumerate(shape or ()):
            for lo, hi in ((0, extent // 2), (extent // 2, extent)):
                part = [value.narrow(dim, lo, hi - lo) for value in sample]
                want = [[None if t is None else t.narrow(dim, lo, hi - lo) for t in group] for group in whole]
                found = _derived_or_none(self, part, [g.narrow(dim, lo, hi - lo) for g in _weights(results)])
                if not _same((want[0], want[1]), found):
                    return False
        return bool(gradients)

    # -- the operator

    def _define(self, *, local: bool) -> Any:
        operands, free = self.operands(self.leaves), self._without_tensors()
        fake = next(leaf for leaf in operands if isinstance(leaf, FakeTensor))
        with fake.fake_mode, _Draws() as draws:
            result = self.inlined(*operands)
        single = isinstance(result, Tensor)
        if not single and not (isinstance(result, tuple) and all(isinstance(each, Tensor) for each in result)):
            raise CaptureError(
                f"{self.cls.__qualname__}, an autograd function of the model with a derivative of its own, returns "
                "something besides tensors. Let it return a tensor, or a tuple of them."
            )
        base = re.sub(r"\W+", "_", self.cls.__qualname__.replace("<locals>.", ""))
        number = _names[base] = _names.get(base, 0) + 1
        name = base if number == 1 else f"{base}_{number}"
        kinds = ("Tensor" if isinstance(leaf, Tensor) else "SymInt" for leaf in operands)
        given = ", ".join(f"{kind} x{i}" for i, kind in enumerate(kinds))
        gives = "Tensor" if single else f"({', '.join(['Tensor'] * len(result))})"
        tags = [tag for tag, has in ((torch.Tag.pointwise, local), (_RANDOM, draws.found)) if has]
        _library.define(f"{name}({given}) -> {gives}", tags=tags)

        def shapes(*given: Any) -> Any:
            return pytree.tree_map(torch.empty_like, free.inlined(*given))

        torch.library.register_fake(f"{_SPACE}::{name}", shapes, lib=_library)
        operator = getattr(getattr(torch.ops, _SPACE), name).default
        ops.OWN_FUNCTIONS[operator] = free
        return operator

    def _without_tensors(self) -> _Call:
        """The same call, for later: what was traced must not be kept."""
        leaves = [torch.empty(0) if _is_operand(leaf) else leaf for leaf in self.leaves]
        return _Call(self.cls, leaves, self.spec)


def _constant(leaf: Any) -> Any:
    """What tells one constant argument from another."""
    if isinstance(leaf, torch.SymInt):
        return torch.SymInt
    return (type(leaf), repr(leaf) if isinstance(leaf, int | float | str | bool | complex | None) else id(leaf))


def _weights(results: Sequence[Tensor]) -> list[Tensor]:
    """Numbers to weight the results with: derivatives are of one sum."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(result.shape, generator=generator, dtype=torch.float64) for result in results]


class _WritesError(Exception):
    """A function changed what it was given."""


def _derived(
    function: Callable[..., Any],
    operands: Sequence[Any],
    weights: Sequence[Tensor] | None = None,
    *,
    may_write: bool = False,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The results of a function, and the gradients of its floating point arguments."""
    tensors = [value.detach() if isinstance(value, Tensor) else value for value in operands]
    leaves = [t.requires_grad_() for t in tensors if isinstance(t, Tensor) and t.is_floating_point()]
    given = [t.clone() if isinstance(t, Tensor) else t for t in tensors]
    with torch.random.fork_rng(devices=[]):  # the same numbers each time, and none of the user's
        torch.manual_seed(0)
        results = [leaf for leaf in pytree.tree_leaves(function(*given)) if isinstance(leaf, Tensor)]
    if not may_write and any(isinstance(t, Tensor) and not t.equal(g) for t, g in zip(tensors, given, strict=True)):
        raise _WritesError
    roots = [(r, w.to(r.dtype)) for r, w in zip(results, weights or _weights(results), strict=True) if r.requires_grad]
    gradients: Sequence[Tensor | None] = [None] * len(leaves)
    if roots:
        gradients = torch.autograd.grad([r for r, _ in roots], leaves, [w for _, w in roots], allow_unused=True)
    return [result.detach() for result in results], list(gradients)


def _derived_or_none(*args: Any, **kwargs: Any) -> tuple[list[Tensor], list[Tensor | None]] | None:
    """As :func:`_derived`, for a function that may not be able to."""
    try:
        return _derived(*args, **kwargs)
    except Exception:
        return None


def _same(one: Any, other: Any) -> bool:
    """Whether results and gradients are the same, no gradient counting as zero."""
    if one is None or other is None or [len(group) for group in one] != [len(group) for group in other]:
        return False
    for a, b in zip((*one[0], *one[1]), (*other[0], *other[1]), strict=True):
        if a is None or b is None:
            if any(bool(t.any()) for t in (a, b) if t is not None):
                return False
        elif a.shape != b.shape or not torch.allclose(a.double(), b.double(), 1e-9, 1e-12, equal_nan=True):
            return False
    return True
