"""Shells: modules that stand for the modules of the model and show their parameters.

Programs walk over a model's modules: they freeze, initialize or group parameters by ``isinstance(m, nn.BatchNorm2d)``.
So a parallel module has a part for each module of the model, with its name, mode, type and parameters, while the graph
computes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distfx.engine.engine import NOT_YET, Engine
from distfx.engine.parameters import ParameterStore
from distfx.errors import DistfxError

__all__ = ["Part", "Shell"]

_FIXED = (
    "{} is an attribute of the model, and the captured graph uses the value it had at capture time: a new value would "
    "have no effect. Set it before parallelize, or make a value that changes during training a buffer or a tensor "
    "argument of forward."
)


def _fixed_names(module: nn.Module) -> frozenset[str]:
    """What the graph has fixed of a module: its plain attributes, its submodules, and ``forward``."""
    plain = (name for name in vars(module) if name != "training" and not name.startswith("_"))
    return frozenset((*plain, *module._modules, "forward"))


class Shell(nn.Module):
    """Stands for a module of the model: it holds the parameters and the mode, while the graph computes.

    It behaves as a plain ``nn.Module``, even where the type of the model's module overrides these methods.
    """

    _engine: Engine
    _store: ParameterStore
    _path: str
    """The path of the module in the model."""
    _has_state: bool
    """Whether the module has parameters or buffers, here or in a submodule."""
    _fixed: frozenset[str]

    def _stand_for(self, path: str, module: nn.Module, engine: Engine, store: ParameterStore) -> None:
        has_state = any(True for _ in (*module.parameters(), *module.buffers()))
        self.__dict__ |= {"_engine": engine, "_store": store, "_path": path, "_has_state": has_state}
        self.__dict__["_fixed"] = _fixed_names(module)  # last: from here on __setattr__ refuses these names

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_fixed", ()):
            raise DistfxError(_FIXED.format(self._full_name(name)))
        is_state = name in self.__dict__.get("_parameters", ()) or name in self.__dict__.get("_buffers", ())
        if is_state and not isinstance(value, DTensor):
            raise DistfxError(
                f"{self._full_name(name)} is a DTensor, of which each rank has its part: write into it (copy_), or "
                "load a whole tensor with net.load_state_dict(..., strict=False)"
            )
        nn.Module.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Read plain attributes from the model: ``net.fc.out_features``."""
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if name in self.__dict__.get("_fixed", ()):
                return getattr(self._engine.model.get_submodule(self._path), name)
            raise

    def __delattr__(self, name: str) -> None:
        if name in self._fixed or name in self._parameters or name in self._buffers:
            raise DistfxError(_FIXED.format(self._full_name(name)))
        nn.Module.__delattr__(self, name)

    def _full_name(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _check_filled(self) -> None:
        """Raise if parameters do not exist yet, instead of returning an empty list."""
        if self._has_state and not self._store.is_filled:
            raise DistfxError(NOT_YET)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._store.is_filled:  # before the first call there is nothing to clear
            nn.Module.zero_grad(self, set_to_none)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._check_filled()
        return nn.Module.named_parameters(self, *args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        self._check_filled()
        return nn.Module.named_buffers(self, *args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._check_filled()
        return nn.Module.state_dict(self, *args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._check_filled()
        return nn.Module._apply(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DistfxError("a parallel module cannot be pickled: save net.full_state_dict(), or net.state_dict()")


class Part(Shell):
    """Stands for a submodule of the model. It cannot be called."""

    @classmethod
    def of(cls, path: str, module: nn.Module, engine: Engine, store: ParameterStore) -> Part:
        """A part that is also an instance of the module's type, because programs look for ``nn.BatchNorm2d``."""
        kind: Any = type(module)
        part_type = _part_type(kind)
        part: Part = part_type.__new__(part_type)
        nn.Module.__init__(part)
        part.__dict__ |= {"_type_name": kind.__name__, "_extra_repr": module.extra_repr()}
        part._stand_for(path, module, engine, store)
        return part

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)

    def _get_name(self) -> str:
        return str(self.__dict__["_type_name"])

    def extra_repr(self) -> str:
        return str(self.__dict__["_extra_repr"])

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise DistfxError(
            f"{self._path} ({self._get_name()}) is part of a parallel module, whose graph runs as a whole: it cannot "
            "be called, and hooks on it would never run. Put hooks on the parallel module or on parameters, and let "
            "the model return the activations you want to see."
        )

    train = nn.Module.train
    requires_grad_ = nn.Module.requires_grad_
    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state
    _save_to_state_dict, _load_from_state_dict = nn.Module._save_to_state_dict, nn.Module._load_from_state_dict
    forward = _refuse
    register_forward_hook = register_forward_pre_hook = _refuse
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse


@cache
def _part_type(kind: Any) -> Any:
    try:
        return type(kind.__name__, (Part, kind), {"__module__": kind.__module__})
    except TypeError:  # a type that cannot be inherited from
        return Part
