"""The private parts of torch that distfx relies on, each behind one name. Those of DTensor and sympy have adapters too:
:mod:`distfx.runtime.autograd.dtensor` and :mod:`distfx.ir.symbolic`.

``tests/unit/test_adapter.py`` checks every assumption below, so that a torch release that breaks one fails there by
name. It also checks that no other module uses a private module of torch.

distfx is tested with torch 2.13. With torch 2.15, on CPU, ``test_adapter.py``, ``test_capture.py`` and the
grid-h2 cases of ``test_autograd_functions.py`` have been tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import _trace as export_trace
from torch.fx import Node
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "NOISY_LOGGERS",
    "SET_GRAD_ENABLED",
    "FakeTensor",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "TreeSpec",
    "expression_of",
    "guards_of",
    "has_backward_hooks",
    "inline_checkpoints",
    "is_batch_norm",
    "is_mutable",
    "region_kind",
    "rename",
    "replace_attribute",
    "schema_of",
    "shares_storage",
    "silence_export",
    "size_hint",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "version_of",
]


# --------------------------------------------------------------------------------------------------- operators


def schema_of(op: Any) -> torch.FunctionSchema:
    """The schema of an operator: its name, its arguments, its results and their aliases."""
    return op._schema


def is_mutable(target: Any) -> bool:
    """Whether ``target`` is an operator that writes into an argument."""
    return isinstance(target, OpOverload) and schema_of(target).is_mutable


# ----------------------------------------------------------------------------------------------------- tensors


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share memory. They may be fake tensors."""
    return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]


def version_of(tensor: Tensor) -> int:
    """A number that grows with each write into the tensor or a view of it."""
    return tensor._version


# ----------------------------------------------------------------------------------------------- symbolic sizes


def size_hint(size: int | torch.SymInt) -> int:
    """The value of a size in the example inputs."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def expression_of(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> sympy.Basic:
    """The sympy expression of a symbolic number."""
    return value.node.expr


def guards_of(value: Any) -> list[sympy.Basic] | None:
    """The conditions on sizes that the trace of a fake tensor has assumed so far; ``None`` if it records none."""
    mode = getattr(value, "fake_mode", None)
    if mode is None or mode.shape_env is None:
        return None
    return [guard.expr for guard in mode.shape_env.guards]


# ------------------------------------------------------------------------------------------------ graphs, modules


def rename(node: Node, name: str) -> None:
    """Give a node another name, with a number appended if the graph has that name already."""
    node._rename(name)


def region_kind(node: Node) -> Literal["grad", "autocast"] | None:
    """The kind of ``with`` region that a node of an exported graph stands for: grad mode, autocast, or none.

    The arguments of such a node are those of the context manager, the ``get_attr`` node of a submodule, and the
    operands of this submodule.
    """
    name = str(node.target)
    if "wrap_with_set_grad_enabled" in name:
        return "grad"
    return "autocast" if "wrap_with_autocast" in name else None


def has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module has the arguments of a batch norm; instance norms do."""
    return isinstance(module, nn.modules.batchnorm._NormBase)


# ------------------------------------------------------------------------------------------------------- tracing

SET_GRAD_ENABLED = torch._C._set_grad_enabled
"""The function through which ``no_grad`` and ``enable_grad`` go: a ``TorchFunctionMode`` sees its calls."""

NOISY_LOGGERS = (
    "torch._subclasses.fake_tensor",
    "torch._export.non_strict_utils",
    "torch.fx.experimental.symbolic_shapes",
)
"""The loggers that report a failed export in addition to the exception."""  # fmt: skip

_MISSING = object()


@contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a class or module, without looking it up in base classes, and restore it at the end."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def silence_export() -> Iterator[None]:
    """Keep ``torch.export`` from printing the partial graph of a failed export to stderr."""
    with replace_attribute(export_trace, "print", lambda *_, **__: None):
        yield


_NON_REENTRANT = next(
    name
    for name in ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    if hasattr(checkpoint, name)
)
"""The generator around the function of a checkpoint that is not reentrant: its name since torch 2.15, and before."""


@contextmanager
def inline_checkpoints() -> Iterator[list[Callable[..., Any]]]:
    """Make ``torch.utils.checkpoint.checkpoint`` call its function directly. Yields the list of these functions.

    The reentrant kind would run its function under ``no_grad`` and hide its derivative from the trace.
    """
    functions: list[Callable[..., Any]] = []

    def apply_reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        functions.append(function)
        return function(*args)

    def around_function(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        functions.append(function)
        yield

    with (
        replace_attribute(checkpoint.CheckpointFunction, "apply", staticmethod(apply_reentrant)),
        replace_attribute(checkpoint, _NON_REENTRANT, around_function),
    ):
        yield functions
