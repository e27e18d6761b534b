"""A model and its loss as one module: what the loss is computed from stays where it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from distfx.errors import DistfxError

__all__ = ["with_loss"]


def with_loss(model: nn.Module, criterion: Callable[..., Tensor], *, outputs: bool = False) -> nn.Module:
    """``model`` followed by ``criterion``: a module whose last argument is the target and whose result is the loss.

    ``parallelize`` sees both together, so that a large output is never gathered: each rank compares its part with its
    part of the target, and sums and counts are global.

        net = distfx.parallelize(distfx.with_loss(model, nn.CrossEntropyLoss()), grid, example_inputs=(x, target))
        loss = net(x, target)

    Args:
        model: the model. Its parameters are shared, not copied, and keep their names in the state dict.
        criterion: a loss module, or a function of the model's output and the target. The state of a module (weights
            of classes) is found under ``criterion.`` in the state dict.
        outputs: also give the model's output: ``loss, y = net(x, target)``.
    """
    if not isinstance(model, nn.Module) or not callable(criterion):
        raise DistfxError("with_loss takes a torch.nn.Module and a loss: a module or a function of output and target")
    if "criterion" in model._modules:
        raise DistfxError("with_loss: the model has a module called 'criterion' already; give its loss another name")
    kind = type(model)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not args:
            raise DistfxError("a model with a loss takes its inputs and, as the last positional argument, the target")
        both = self._modules
        own = {name: module for name, module in both.items() if name != "criterion"}
        self._modules = own  # a model that runs over its modules, as a Sequential does, knows of no loss
        try:
            y = kind.forward(self, *args[:-1], **kwargs)
        finally:
            self._modules = both
        last: Any = both.get("criterion", criterion)
        loss = last(y, args[-1])
        return (loss, y) if outputs else loss

    joint = copy.copy(model)
    joint.__class__ = type(f"{kind.__name__}WithLoss", (kind,), {"forward": forward, "__doc__": kind.__doc__})
    if isinstance(criterion, nn.Module):
        joint._modules = {**model._modules, "criterion": criterion}
    return joint
