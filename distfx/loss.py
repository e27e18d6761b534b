"""A model and its loss as one module, so that the model's output stays sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from distfx.errors import DistfxError

__all__ = ["with_loss"]


def with_loss(model: nn.Module, criterion: Callable[..., Tensor], *, outputs: bool = False) -> nn.Module:
    """Return ``model`` followed by ``criterion``: a module that takes the target last and returns the loss.

    ``parallelize`` sees both, so it never gathers a large output: each rank compares its shard with its shard of the
    target, and sums and counts are global.

        net = distfx.parallelize(distfx.with_loss(model, nn.CrossEntropyLoss()), grid, example_inputs=(x, target))
        loss = net(x, target)

    Args:
        model: the model. Its parameters are shared, not copied, and keep their names in the state dict.
        criterion: a loss module, or a function of the model's output and the target. In the state dict, the state of a
            module (weights of classes) has the prefix ``criterion.``.
        outputs: also return the model's output: ``loss, y = net(x, target)``.
    """
    if not isinstance(model, nn.Module) or not callable(criterion):
        raise DistfxError("with_loss takes a torch.nn.Module and a loss: a module or a function of output and target")
    if "criterion" in model._modules:
        raise DistfxError("with_loss: the model already has a module called 'criterion'; rename it")
    kind = type(model)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not args:
            raise DistfxError("a model with a loss takes its inputs and, as the last positional argument, the target")
        modules = self._modules
        # A model that iterates over its modules, as a Sequential does, must not call the loss.
        self._modules = {name: module for name, module in modules.items() if name != "criterion"}
        try:
            y = kind.forward(self, *args[:-1], **kwargs)
        finally:
            self._modules = modules
        compute_loss: Any = modules.get("criterion", criterion)
        loss = compute_loss(y, args[-1])
        return (loss, y) if outputs else loss

    joint = copy.copy(model)
    joint.__class__ = type(f"{kind.__name__}WithLoss", (kind,), {"forward": forward, "__doc__": kind.__doc__})
    if isinstance(criterion, nn.Module):
        joint._modules = {**model._modules, "criterion": criterion}
    return joint
