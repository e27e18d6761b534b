"""capture: an unmodified ``nn.Module`` becomes an FX graph of ATen calls with symbolic sizes.

in:  a module, example inputs.   out: a :class:`Capture`, whose graph is functional, calls one convolution operator for
every kind of convolution, holds no size computations (sizes stand as expressions where they are used), and on whose
nodes ``meta`` has ``shape`` (global, in the input's symbols), ``dtype``, ``path`` (module) and ``source`` (line).
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import sympy
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.export import Dim, register_dataclass
from torch.export import _trace as torch_export
from torch.fx import Graph, GraphModule, Node
from torch.utils import checkpoint

from distfx.errors import CaptureError, DistfxError
from distfx.ir.layout import DIM_NAMES
from distfx.ir.meta import Meta, meta
from distfx.ir.nodes import aten, describe
from distfx.ir.ops import on_device
from distfx.ir.symbolic import Size, evaluate, evaluate_shape, size_of
from distfx.passes.canonicalize import canonical, name_after_module
from distfx.passes.capture.attributes import attributes_kept
from distfx.passes.capture.autograd_functions import own_functions
from distfx.passes.capture.mutation import (
    functional,
    results_apart,
    same_tensor,
    writes,
    written_whole,
)
from distfx.passes.capture.views import put_back_writes

__all__ = ["Capture", "InputSpec", "Mode", "capture", "infer_inputs"]


@dataclass(frozen=True)
class InputSpec:
    """What the graph expects of one tensor input."""

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype


@dataclass
class Capture:
    """A captured model: its graph, its inputs and outputs, and the symbols' example values."""

    module: GraphModule
    inputs: tuple[InputSpec, ...]
    out_spec: pytree.TreeSpec
    hints: dict[sympy.Symbol, int]
    guards: tuple[sympy.Expr, ...]
    """What the graph takes for granted of the sizes: where the model branched on them, or an operator did."""
    training: bool
    mutated: frozenset[str]
    constants: tuple[str, ...] = ()
    """The structure of the arguments and those that are not tensors, which the graph has fixed."""
    modified_attributes: tuple[str, ...] = ()
    """The attributes of the model that its ``forward`` changes, which the graph has fixed."""
    checkpointed: bool = False
    """Whether parts of the model ask to be computed again in backward, which the graph does not do."""

    @property
    def graph(self) -> Graph:
        return self.module.graph

    def same_calls(self, other: Capture, values: Mapping[sympy.Symbol, int]) -> bool:
        """Whether ``other`` makes the same calls of the same things where the sizes are ``values``."""
        return self._calls(values) == other._calls(values)

    def _calls(self, values: Mapping[sympy.Symbol, int]) -> list[Any]:
        """Every call, its operands by the numbers of the calls that made them, sizes as numbers; what is returned."""
        made: list[Any] = []
        known: dict[Node, Any] = {}

        def shown(value: Any) -> Any:
            if isinstance(value, Node):
                return known[value]
            if isinstance(value, list | tuple):
                return tuple(shown(each) for each in value)
            if isinstance(value, slice):
                return ("slice", shown(value.start), shown(value.stop), shown(value.step))
            return evaluate(value, values) if isinstance(value, sympy.Basic) else value

        for node in self.graph.nodes:
            if node.op == "output":
                made.append(shown(node.args))
            elif node.op != "call_function":
                known[node] = (node.op, str(node.target))
            elif node.target is aten.alias.default:
                known[node] = shown(node.args[0])
            else:
                known[node] = ("call", len(made))
                shape = None if Meta.multiple.get(node) else evaluate_shape(Meta.shape.get(node) or (), values)
                named = tuple((name, shown(value)) for name, value in sorted(node.kwargs.items()))
                made.append((node.target, shape, shown(node.args), named))
        return made

    def is_valid_for(self, values: Mapping[sympy.Symbol, int]) -> bool:
        """Whether the graph is right for these sizes. (A batch of one counts as two: so it was captured.)"""
        numbers = {s: sympy.Integer(max(2, v) if str(s).startswith("N") else v) for s, v in values.items()}
        return all(guard.xreplace(numbers) != sympy.false for guard in self.guards)


# ------------------------------------------------------------------------------------------- example inputs

_FIRST = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EXTENTS = {1: (4096, 1024, 256, 128), 2: (224, 32, 28, 64, 128, 256, 96, 512), 3: (64, 32, 128, 16, 96)}


def infer_inputs(model: nn.Module, batch: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Inputs to try for a model whose example was not given: rank and channels of its first layer, common extents."""
    for layer in model.modules():
        if isinstance(layer, _FIRST):
            rank = len(layer.kernel_size)
            shapes = [(batch, layer.in_channels, *(extent,) * rank) for extent in _EXTENTS[rank]]
        elif isinstance(layer, nn.Linear):
            shapes = [(batch, layer.in_features)]
        else:
            continue
        like = next(layer.parameters())  # not its weight: reading one that is made may change what it is made from
        yield from ((torch.empty(shape, dtype=like.dtype, device=like.device),) for shape in shapes)
        return


def _enlarged(value: Any, batch: int) -> Any:
    """An example with a batch of one is captured with more (if ``batch``): export would fix a size of one for ever."""
    if batch and isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == 1:
        return torch.empty((batch, *value.shape[1:]), dtype=value.dtype, device=value.device)
    return value


# ------------------------------------------------------------------------------------------------- capture


@dataclass(frozen=True)
class Mode:
    """Which modules of a model are in train mode, in the order of ``model.modules()``."""

    flags: tuple[bool, ...]

    @classmethod
    def of(cls, model: nn.Module, training: bool | None = None) -> Mode:
        """As the model is; or all in one mode, if it is not in that one already (a frozen part stays frozen)."""
        if training is None or training == model.training:
            return cls(tuple(module.training for module in model.modules()))
        return cls(tuple(training for _ in model.modules()))

    @property
    def training(self) -> bool:
        return self.flags[0]

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """The model in this mode."""
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
        """``train`` or ``eval``, and what is not."""
        others = [
            path for (path, _), flag in zip(model.named_modules(), self.flags, strict=True) if flag != self.training
        ]
        name = "train" if self.training else "eval"
        return f"{name} but for {', '.join(others)}" if others else name


@contextmanager
def without_modes() -> Iterator[None]:
    """Without the caller's inference mode, ``no_grad`` and autocast: what is made here outlives the call."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def _through_checkpoints() -> Iterator[list[str]]:
    """Calls of ``torch.utils.checkpoint`` become what they compute: one kind of them hides it under ``no_grad``."""
    found: list[str] = []

    def reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        found.append(str(function))
        return function(*args)

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        found.append(str(function))
        yield

    with (
        patch.object(checkpoint.CheckpointFunction, "apply", reentrant),
        patch.object(checkpoint, "_checkpoint_without_reentrant_generator", generator),
    ):
        yield found


def _know_outputs(model: nn.Module, args: Any, output: Any) -> None:
    """Dataclasses that a model returns become known to torch.export, whose fields it then sees."""
    for leaf in pytree.tree_leaves(output):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            register_dataclass(type(leaf))
            _know_outputs(model, args, leaf)


def _check_sizes(captured: Capture) -> None:
    """Raise for results whose size depends on values: no layout can say what a rank has of them."""
    for node in captured.graph.nodes:
        shape = Meta.shape.get(node) or ()
        sizes = [size for each in shape for size in (each if isinstance(each, tuple) else (each,))]
        unknown = {s for size in sizes if isinstance(size, sympy.Expr) for s in size.free_symbols} - set(captured.hints)
        if unknown:
            raise CaptureError(
                f"{describe(node)}: how large the result of {node.target} is depends on the values of tensors (boolean "
                "indexing, nonzero, masked_select), so that no rank could know its part. Write it with torch.where or "
                "by multiplying with a mask."
            )


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool | Mode,
    batch: int = 2,
    guess: bool = False,
) -> Capture:
    """Capture ``model`` in train or eval mode. The model is left as it was. ``batch=0``: sizes of one stay one.

    ``guess``: the inputs were guessed, so that a model which needs their very sizes is not meant.
    """
    mode = training if isinstance(training, Mode) else Mode.of(model, training)
    check_supported(model, mode)
    leading = [v.shape[0] for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor) and v.dim()]
    batch = batch if all(size == 1 for size in leading) else 0  # otherwise a leading one is there to broadcast
    examples = tuple(pytree.tree_map(lambda v: _enlarged(v, batch), tuple(args)))
    keywords = dict(pytree.tree_map(lambda v: _enlarged(v, batch), dict(kwargs or {})))

    with (
        mode.on(model), _silence(), without_modes(), own_functions(), _through_checkpoints() as checkpoints,
        attributes_kept(model) as modified_attributes, model.register_forward_hook(_know_outputs),
    ):  # fmt: skip
        program = _export(model, examples, keywords, guess)
    module = program.module(check_guards=False)
    _inline(module)
    results_apart(module.graph)
    put_back_writes(module.graph)
    result = _normalise(module, program, mode.training)
    for node in result.module.graph.nodes:  # the number of a GPU is each rank's own
        node.args, node.kwargs = on_device((node.args, node.kwargs))
    result.constants = constants_of(examples, keywords)
    result.checkpointed, result.modified_attributes = bool(checkpoints), tuple(modified_attributes)
    _check_sizes(result)
    result.module.graph.lint()
    return result


def _export(model: nn.Module, examples: tuple[Any, ...], keywords: dict[str, Any], guess: bool) -> Any:
    """The model exported with every size a symbol; if that fails, with the batch's alone, or for these sizes alone:
    others get a capture of their own."""
    first: Exception | None = None
    for free in (None,) if guess else (None, 1, 0):
        # each time with new tensors: export leaves marks on them
        args, kwargs = pytree.tree_map(
            lambda v: torch.empty_like(v) if isinstance(v, torch.Tensor) else v, (examples, keywords)
        )
        try:
            shapes = _dynamic_shapes(model, args, kwargs, free)
            return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            first = first or error
    assert first is not None
    shown = first if os.environ.get("DISTFX_DEBUG", "0") not in ("", "0") else None  # hundreds of lines of torch's own
    raise CaptureError(_explain(model, (examples, keywords), first, guess)) from shown


def _dynamic_shapes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], free: int | None
) -> dict[str, Any]:
    """For each argument which of its dims are symbols: the first ``free`` of each tensor, or all."""

    def dims(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        return tuple(Dim.AUTO if free is None or i < free else Dim.STATIC for i in range(value.dim()))

    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    shapes = {name: pytree.tree_map(dims, value) for name, value in bound.arguments.items()}
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            shapes |= shapes.pop(parameter.name, {})
    return shapes


def _inline(module: GraphModule) -> None:
    """Regions ``with torch.no_grad()`` become part of the graph, with operands that have no gradient."""
    graph = module.graph
    for node in list(graph.nodes):
        name = str(node.target)
        if "wrap_with_autocast" in name and node.args[2]:
            raise CaptureError(
                f"the model uses torch.autocast inside of forward ({_source_of(module, node)}): put it around the call "
                "of the parallel module instead"
            )
        if not any(word in name for word in ("wrap_with_set_grad_enabled", "wrap_with_autocast")):
            continue
        number = next(i for i, a in enumerate(node.args) if isinstance(a, Node) and a.op == "get_attr")
        source: Any = node.args[number]
        inner = getattr(module, str(source.target))
        _inline(inner)
        values = dict(zip(inner.graph.find_nodes(op="placeholder"), node.args[number + 1 :], strict=True))
        with graph.inserting_before(node):
            marks: dict[str, Any] = {}
            if "set_grad" in name and not node.args[0]:
                values = {place: _detached(module, value) for place, value in values.items()}
                marks = {Meta.no_grad.key: node.name}
                for value in values.values():
                    if isinstance(value, Node) and value.target is aten.detach.default:
                        value.meta |= marks
            elif "autocast" in name:
                marks = {Meta.autocast.key: False}
            for old in inner.graph.nodes:
                if old.op == "get_attr":
                    value = getattr(inner, str(old.target))
                    if isinstance(value, torch.Tensor):
                        module.register_buffer(f"{source.target}_{old.target}", value, persistent=False)
                    values[old] = graph.get_attr(f"{source.target}_{old.target}")
                    values[old].meta = dict(old.meta)
                elif old.op == "call_function":
                    values[old] = graph.node_copy(old, values.__getitem__)
                    values[old].meta |= marks
            results = [values[result] for result in inner.graph.output_node().args[0]]
        for part in list(node.users):
            part.replace_all_uses_with(results[part.args[1]])
            graph.erase_node(part)
        graph.erase_node(node)
        if not source.users:
            graph.erase_node(source)


def _source_of(module: GraphModule, region: Node) -> str:
    """The first line of the model in a region."""
    inner = next(a for a in region.args if isinstance(a, Node) and a.op == "get_attr")
    nodes = getattr(module, str(inner.target)).graph.nodes
    traces = [meta(node).stack_trace for node in nodes if Meta.stack_trace.get(node)]
    lines = traces[0].strip().splitlines()[-2:] if traces else ["no source"]
    return " ".join(line.strip() for line in lines)


def _detached(module: GraphModule, value: Any) -> Any:
    """A value without its gradient. Buffers and frozen parameters, which have none, stay: they may be written."""
    if not isinstance(value, Node) or not isinstance(Meta.val.get(value), torch.Tensor):
        return value
    frozen = (name for name, parameter in module.named_parameters() if not parameter.requires_grad)
    if value.op == "get_attr" and str(value.target) in {*dict(module.named_buffers()), *frozen}:
        return value
    result = module.graph.call_function(aten.detach.default, (value,))
    result.meta = dict(value.meta)
    return result


def check_supported(model: nn.Module, mode: Mode) -> None:
    """Raise for what no capture can follow, whatever the input."""
    for (path, module), training in zip(model.named_modules(), mode.flags, strict=True):
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"{path or 'the model'} ({type(module).__name__}) has a backward hook, which would never run: the "
                "graph runs as a whole. Put hooks on parameters (these are kept), or on the parallel module."
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise CaptureError(
                f"{path or 'the model'} is a SyncBatchNorm: give the model as it was before convert_sync_batchnorm. "
                "Here batch norms have the statistics of the whole batch anyway."
            )
        if any(nn.parameter.is_lazy(parameter) for parameter in module._parameters.values()):
            raise CaptureError(
                f"{path or 'the model'} ({type(module).__name__}) has parameters whose shape is not known yet: call "
                "the model once before parallelize."
            )
        cumulative = isinstance(module, nn.modules.batchnorm._NormBase) and module.momentum is None
        if cumulative and training and module.track_running_stats:
            raise CaptureError(
                f"{path or 'the model'} is a {type(module).__name__} with momentum=None (a cumulative average), whose "
                "factor depends on values at run time. Give it a number, such as momentum=0.1."
            )


_NOISY = ("_subclasses.fake_tensor", "_export.non_strict_utils", "fx.experimental.symbolic_shapes")


@contextmanager
def _silence() -> Iterator[None]:
    """A capture that fails is reported by the error alone; that sizes of one are fixed is meant where it happens."""
    loggers = [logging.getLogger(f"torch.{name}") for name in _NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), patch.object(torch_export, "print", lambda *_, **__: None, create=True):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def constants_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """What a graph has fixed of the arguments of a call, as text: their structure, and those that are not tensors."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    for leaf in leaves:
        if hasattr(leaf, "__array__") and not isinstance(leaf, torch.Tensor | numpy.generic):
            kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
            raise DistfxError(f"an argument is a {kind}: give torch.as_tensor(x)")
    return (f"arguments {spec}", *(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)))


def _explain(model: nn.Module, arguments: Any, error: Exception, guess: bool) -> str:
    args, kwargs = pytree.tree_map(lambda v: tuple(v.shape) if isinstance(v, torch.Tensor) else v, arguments)
    given = ", ".join((*(repr(value)[:80] for value in args), *(f"{k}={repr(v)[:80]}" for k, v in kwargs.items())))
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/torch/" not in f.filename.replace("\\", "/") and not f.filename.startswith(_PACKAGE)]
    where = next((f" ({f.filename}:{f.lineno}: {f.line})" for f in reversed(own) if f.line), "")
    other = "If the model needs another input, give example_inputs=(x,) to parallelize; if" if guess else "If"
    return (
        f"{type(model).__name__} could not be captured with inputs {given}: {first}{where}\n"
        f"{other} it branches on the values of tensors, torch.export cannot follow it. DISTFX_DEBUG=1 shows torch's "
        "own account of this error."
    )


_PACKAGE = str(Path(__file__).parents[2])
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def _normalise(module: GraphModule, program: Any, training: bool) -> Capture:
    old = module.graph
    rename = _rename_symbols(old)
    hints = _hints(old, rename)
    graph = Graph()
    values: dict[Node, Any] = {}
    inputs: list[InputSpec] = []
    mutated: set[str] = set()
    known = {*program.state_dict, *program.graph_signature.buffers}  # those that are not persistent, too

    def sized(size: Any) -> Any:
        size = size_of(size)
        return size_of(size.xreplace(rename)) if isinstance(size, sympy.Expr) else size

    def literal(node: Node) -> Any:
        value = Meta.val.get(node)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return sized(value.node.expr if not isinstance(value, torch.SymInt) else value)
        if isinstance(value, int | float | bool) and node.op == "call_function":
            return value
        return values[node]

    for node in old.nodes:
        if node.op == "output":
            outputs = pytree.tree_leaves(node.args[0])
            graph.output(tuple(literal(o) if isinstance(o, Node) else o for o in outputs))
            break
        if node.op == "call_module":
            continue  # the guards: checked when a shape is bound, with better words
        value = Meta.val.get(node)
        if node.op == "call_function" and (value is None or isinstance(value, _NUMBERS)):
            continue
        if node.op == "get_attr" and str(node.target) not in known:
            node.target = _constant(module, str(node.target))
        if node.op == "placeholder" and not isinstance(value, torch.Tensor):
            continue  # its value is in the graph
        new = graph.node_copy(node, literal)
        new.meta = _meta(node, sized)
        values[node] = new
        if node.op == "placeholder":
            inputs.append(InputSpec(new.name, meta(new).shape, meta(new).dtype))
        if node.op == "call_function":
            done = functional(new, node)
            if done is None:
                buffer = written_whole(node.args[0])
                assert buffer is not None
                if str(buffer.target) not in known:
                    raise CaptureError(
                        f"{describe(new)}: forward writes into a tensor of the model that is no buffer, of which the "
                        "graph has a copy. Register it: self.register_buffer(name, tensor, persistent=False)."
                    )
                mutated.add(str(buffer.target))
                continue
            values[node] = done
            if writes(node) and done.target is not node.target:
                values |= dict.fromkeys(same_tensor(node.args[0]), done)
            name_after_module(canonical(graph, done), node)
    made = GraphModule(module, graph)
    made.graph.eliminate_dead_code(is_impure)
    made.recompile()
    spec = program.call_spec
    return Capture(made, tuple(inputs), spec.out_spec, hints, _guards(old, rename), training, frozenset(mutated))


def _constant(module: GraphModule, name: str) -> str:
    """A tensor made in forward is named after its contents: graphs number them each for itself."""
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return name
    data = value.detach().cpu().contiguous()
    content = repr((data.dtype, tuple(data.shape))).encode() + data.reshape(-1).view(torch.uint8).numpy().tobytes()
    unique = f"constant_{hashlib.sha256(content).hexdigest()[:12]}"
    module.register_buffer(unique, value, persistent=False)
    return unique


def is_impure(node: Node) -> bool:
    """What dead-code elimination must leave: inputs, outputs, writes into buffers, norms that keep statistics."""
    if node.op in ("placeholder", "output"):
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target is aten.instance_norm.default:
        return bool(node.args[5]) and node.args[3] is not None
    return target._schema.is_mutable or (target is aten.batch_norm.default and bool(node.args[5]))


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _rename_symbols(graph: Graph) -> dict[sympy.Symbol, sympy.Symbol]:
    """The input's symbols by the names a reader expects: N, C, D, H, W; numbered where inputs have their own."""
    rename: dict[sympy.Symbol, sympy.Symbol] = {}
    taken: set[str] = set()
    for node in graph.nodes:
        value = Meta.val.get(node)
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        names = DIM_NAMES.get(value.dim(), [f"S{i}" for i in range(value.dim())])
        for size, name in zip(value.shape, names, strict=False):
            symbol = size_of(size)
            if isinstance(symbol, sympy.Symbol) and symbol not in rename:
                unique = next(n for n in (name, *(f"{name}{i}" for i in range(2, 99))) if n not in taken)
                taken.add(unique)
                rename[symbol] = sympy.Symbol(unique, integer=True, positive=True)
    return rename


def _hints(graph: Graph, rename: Mapping[sympy.Symbol, sympy.Symbol]) -> dict[sympy.Symbol, int]:
    """For each symbol its value in the example."""
    hints: dict[sympy.Symbol, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = Meta.val.get(node)
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            symbol = size_of(size)
            if isinstance(symbol, sympy.Symbol):
                hints[rename[symbol]] = int(size.node.hint)  # type: ignore[attr-defined]
    return hints


def _guards(graph: Graph, rename: Mapping[sympy.Symbol, sympy.Symbol]) -> tuple[sympy.Expr, ...]:
    """The guards of the capture that speak of the input's sizes, from the shape environment of its fake tensors."""
    for node in graph.find_nodes(op="placeholder"):
        mode = getattr(Meta.val.get(node), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            guards = (guard.expr.xreplace(dict(rename)) for guard in mode.shape_env.guards)
            return tuple(guard for guard in guards if guard.free_symbols and guard.free_symbols <= set(rename.values()))
    return ()


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')
_HERE = str(Path(__file__).parents[2])


def _meta(node: Node, sized: Any) -> dict[str, Any]:
    value = Meta.val.get(node)
    stack = [path for path, _ in (Meta.nn_module_stack.get(node) or {}).values()]
    path = stack[-1] if stack and not stack[-1].startswith("_empty_nn_module_stack") else ""
    trace = [f for f in _FRAME.findall(Meta.stack_trace.get(node) or "") if "/torch/" not in f[0].replace("\\", "/")]
    frames = [frame for frame in trace if not frame[0].startswith(_HERE)]
    found: dict[str, Any] = {
        "path": path or ("the loss" if trace and not frames else ""),  # of with_loss, if it is a function
        "source": (frames[-1][0], int(frames[-1][1]), frames[-1][3]) if frames else None,
    }
    found |= {field.key: field.get(node) for field in (Meta.autocast, Meta.in_place) if field.is_set(node)}
    if isinstance(value, torch.Tensor):
        found |= {"shape": tuple(sized(s) for s in value.shape), "dtype": value.dtype}
    elif _has_tensor(value):
        leaves = pytree.tree_leaves(value)
        found |= {
            "shape": tuple(tuple(sized(s) for s in v.shape) for v in leaves),
            "dtype": leaves[0].dtype,
            "multiple": True,
        }
    return found
