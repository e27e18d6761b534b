"""Modes around a model: train or eval for each module, grad mode, inference mode and autocast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Mode", "without_modes"]


@dataclass(frozen=True)
class Mode:
    """Which modules of a model are in train mode, in the order of ``model.modules()``."""

    flags: tuple[bool, ...]

    @classmethod
    def of(cls, model: nn.Module, training: bool | None = None) -> Mode:
        """The present mode if ``training`` is ``None`` or agrees with it, so that frozen parts stay frozen.

        Otherwise all modules are in train mode, or all in eval mode.
        """
        if training is None or training == model.training:
            return cls(tuple(module.training for module in model.modules()))
        return cls(tuple(training for _ in model.modules()))

    @property
    def training(self) -> bool:
        return self.flags[0]

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Put the model into this mode inside the block."""
        before = Mode.of(model)
        self.set(model.modules())
        try:
            yield
        finally:
            before.set(model.modules())

    def set(self, modules: Iterable[nn.Module]) -> None:
        for module, flag in zip(modules, self.flags, strict=True):
            module.training = flag

    def describe(self, model: nn.Module) -> str:
        """``train`` or ``eval``, and the modules that are in the other mode."""
        paths = (path for path, _ in model.named_modules())
        exceptions = [path for path, flag in zip(paths, self.flags, strict=True) if flag != self.training]
        name = "train" if self.training else "eval"
        return f"{name} except {', '.join(exceptions)}" if exceptions else name


@contextmanager
def without_modes() -> Iterator[None]:
    """Leave the caller's inference mode, ``no_grad`` and autocast: tensors created here outlive the call."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
