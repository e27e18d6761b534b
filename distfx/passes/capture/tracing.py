"""A ``TorchFunctionMode`` for calls of a model that ``torch.export`` would silently lose or cannot follow."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from distfx.errors import CaptureError
from distfx.ir.torch_private import SET_GRAD_ENABLED, FakeTensor, version_of

__all__ = ["TraceMode"]

_DATA: Any = Tensor.data  # the descriptor


class TraceMode(TorchFunctionMode):
    """Follows writes through ``.data`` and ``torch.arange(...).tolist()``, and rejects hooks on gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.grad_enabled = True
        """The grad mode that the model has set. Inside an autograd function torch's own grad mode is always off."""
        self._constants: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """The value and the version of ``torch.arange(2, 4)`` and of its elements.

        The method ``tolist`` of a fake tensor calls ``unbind`` and ``item``, whose result export would not know."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is SET_GRAD_ENABLED:
            self.grad_enabled = args[0]
        handler = _HANDLERS.get(func)
        return handler(self, *args, **(kwargs or {})) if handler else func(*args, **(kwargs or {}))

    @contextmanager
    def restore_grad_mode(self) -> Iterator[None]:
        """Restore the grad mode of the model, also in the graph.

        Inside an autograd function grad mode is off, so a ``with torch.enable_grad()`` there would leave it off.
        """
        before = self.grad_enabled
        try:
            yield
        finally:
            if self.grad_enabled != before:
                torch.set_grad_enabled(before)

    # -- one handler for each function

    def _read_data(self, tensor: Tensor, *owner: Any) -> Any:
        """A write through ``.data`` is a write into the tensor, as through ``detach``."""
        return tensor.detach() if isinstance(tensor, FakeTensor) else _DATA.__get__(tensor, *owner)

    def _assign_data(self, tensor: Tensor, value: Any) -> None:
        if not isinstance(tensor, FakeTensor):
            _DATA.__set__(tensor, value)
            return
        raise CaptureError(
            f"distfx cannot follow an assignment to .data inside forward ({_caller()}). Write tensor.copy_(...) under "
            "torch.no_grad() instead."
        )

    def _register_hook(self, tensor: Tensor, hook: Any) -> Any:
        if not isinstance(tensor, FakeTensor):
            return Tensor.register_hook(tensor, hook)
        raise CaptureError(
            f"distfx cannot follow register_hook on a tensor inside forward ({_caller()}), because the graph would "
            "never call the hook. Change the gradient in an autograd function, or return the tensor."
        )

    def _arange(self, *args: Any, **kwargs: Any) -> Any:
        result = torch.arange(*args, **kwargs)
        if not kwargs and all(type(value) is int for value in args):
            self._remember(result, range(*args))
        return result

    def _unbind(self, tensor: Tensor, dim: int = 0) -> Any:
        results = Tensor.unbind(tensor, dim)
        values = self._constant(tensor)
        if isinstance(values, range):
            for result, value in zip(results, values, strict=True):
                self._remember(result, value)
        return results

    def _item(self, tensor: Tensor) -> Any:
        value = self._constant(tensor)
        return value if isinstance(value, int) else Tensor.item(tensor)

    def _remember(self, tensor: Tensor, value: range | int) -> None:
        self._constants[tensor] = value, version_of(tensor)

    def _constant(self, tensor: Tensor) -> range | int | None:
        """The constant value of a tensor, unless it was modified."""
        value, version = self._constants.get(tensor, (None, 0))
        return value if value is not None and version == version_of(tensor) else None


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _DATA.__get__: TraceMode._read_data,
    _DATA.__set__: TraceMode._assign_data,
    Tensor.register_hook: TraceMode._register_hook,
    torch.arange: TraceMode._arange,
    Tensor.unbind: TraceMode._unbind,
    Tensor.item: TraceMode._item,
}

_HERE = str(Path(__file__).parent)


def _caller() -> str:
    """The line of the model that is being traced."""
    frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename.replace("\\", "/")]
    model = next(frame for frame in reversed(frames) if not frame.filename.startswith(_HERE))
    return f"{model.filename}:{model.lineno}: {model.line}"
