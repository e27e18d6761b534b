"""Models that cannot be captured: one clear error, before anything is traced."""

from __future__ import annotations

from collections.abc import Callable

import sympy
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from distfx.errors import CaptureError
from distfx.ir.meta import Meta
from distfx.ir.nodes import describe
from distfx.ir.torch_private import has_backward_hooks, is_batch_norm
from distfx.passes.capture.modes import Mode
from distfx.passes.capture.result import Capture

__all__ = ["check_model", "check_sizes", "check_supported"]


def _is_quantized(module: nn.Module) -> bool:
    return type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized"))


def _is_sharded(module: nn.Module) -> bool:
    """Whether parameters are DTensors, told by their public method: compiler passes do not import torch.distributed."""
    return any(hasattr(parameter, "full_tensor") for parameter in module.parameters(recurse=False))


def _is_fully_sharded(module: nn.Module) -> bool:
    return any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__)


_WRAPPERS: list[tuple[Callable[[nn.Module], bool], str]] = [
    (
        lambda module: isinstance(module, torch.jit.ScriptModule),
        "is a TorchScript module (torch.jit.script or torch.jit.trace), which cannot be captured: give the original "
        "module",
    ),
    (
        lambda module: isinstance(module, DataParallel | DistributedDataParallel) or _is_fully_sharded(module),
        "distributes the model already: give the module that it wraps (its attribute .module)",
    ),
    (
        _is_sharded,
        "has DTensor parameters (fully_shard, distribute_module, parallelize): give the model before it was "
        "distributed",
    ),
    (_is_quantized, "is quantized, which distfx does not support: give the model before quantization"),
]


def check_model(model: nn.Module, *, needs_values: bool = False) -> None:
    """Raise unless the model is a plain module: not wrapped, scripted, distributed or quantized, and on one device.

    ``needs_values``: the parameters must have values, so the model must not be on the ``meta`` device.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"the model is a {type(model).__name__}: give a torch.nn.Module")
    for path, module in model.named_modules():
        for matches, reason in _WRAPPERS:
            if matches(module):
                raise CaptureError(f"{_name(path, module)} {reason}")
        if path and "_orig_mod" in dict(module.named_children()):
            raise CaptureError(
                f"{_name(path, module)} is compiled by torch.compile: give the original module (its attribute "
                "._orig_mod), or compile the whole model"
            )
    devices = sorted({str(p.device) for p in model.parameters() if not nn.parameter.is_lazy(p) and p.dim()})
    if len(devices) > 1:
        raise CaptureError(
            f"{type(model).__name__} has parameters on several devices ({', '.join(devices)}): move it to one device, "
            "model.to(device)"
        )
    if needs_values and devices == ["meta"]:
        raise CaptureError(
            f"{type(model).__name__} is on the meta device, so its parameters have no values: call "
            "model.to_empty(device=...) and initialize it. distfx.plan takes models on the meta device."
        )


def _name(path: str, module: nn.Module) -> str:
    return f"{path or 'the model'} ({type(module).__name__})"


def check_supported(model: nn.Module, mode: Mode) -> None:
    """Raise for models that no capture can follow, whatever the input."""
    check_model(model)
    for (path, module), training in zip(model.named_modules(), mode.flags, strict=True):
        if has_backward_hooks(module):
            raise CaptureError(
                f"{_name(path, module)} has a backward hook, which would never run because the graph does not call "
                "modules. Put hooks on parameters (these are kept), or on the parallel module."
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise CaptureError(
                f"{_name(path, module)} is a SyncBatchNorm: give the model as it was before convert_sync_batchnorm. "
                "distfx computes batch statistics over the whole batch."
            )
        if any(nn.parameter.is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            raise CaptureError(
                f"{_name(path, module)} has parameters whose shape is not known yet: call the model once before "
                "parallelize."
            )
        is_cumulative = is_batch_norm(module) and module.momentum is None
        if is_cumulative and training and module.track_running_stats:
            raise CaptureError(
                f"{_name(path, module)} has momentum=None (a cumulative average), so its factor depends on the number "
                "of calls. Give it a number, such as momentum=0.1."
            )


def check_sizes(captured: Capture) -> None:
    """Raise for results whose size depends on values, because no layout can describe them."""
    for node in captured.graph.nodes:
        shape = Meta.shape.get(node) or ()
        sizes = [size for item in shape for size in (item if isinstance(item, tuple) else (item,))]
        symbols = {s for size in sizes if isinstance(size, sympy.Expr) for s in size.free_symbols}
        if symbols - set(captured.hints):
            raise CaptureError(
                f"{describe(node)}: the size of the result of {node.target} depends on the values of tensors (boolean "
                "indexing, nonzero, masked_select), so no rank could know its shard. Use torch.where, or multiply by a "
                "mask."
            )
