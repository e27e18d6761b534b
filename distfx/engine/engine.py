"""The engine behind a parallel module: compiles a mode when it is first used, binds a shape when it first occurs.

Each call takes four steps (:meth:`Engine.prepare`): agree on the call, compile if there is no graph yet, select the
graph that is valid for the input's sizes, bind it to these sizes. Bound graphs are cached.

Everything that could differ between ranks is compared before anything depends on it: the signature of every call, and
the outcome and graph of every compilation.
"""

from __future__ import annotations

import inspect
import os
import platform
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distfx.engine.calls import Call, ParameterState, input_layout, is_planned_shard, parameter_state
from distfx.engine.modes import LruCache, ModeState
from distfx.engine.parameters import ParameterLayouts, ParameterStore
from distfx.errors import CaptureError, DistfxError, FallbackWarning, SizeError, log_to_stderr, warn
from distfx.grid import Grid
from distfx.ir.nodes import describe, operator_of
from distfx.ir.torch_private import tree_map
from distfx.passes.bind import bind, converted_dtypes
from distfx.passes.capture.attributes import AttributeSnapshot
from distfx.passes.capture.export import Capture, InputSpec, Mode, capture, check_supported, infer_inputs
from distfx.passes.inputs import Values, check_batch, match_inputs
from distfx.passes.pipeline import BoundGraph, Compiled, Options, bind_graph, compile_graph
from distfx.runtime.autograd.dtensor import local_parts
from distfx.runtime.autograd.gradients import SegmentBucket
from distfx.runtime.check import GraphChecker
from distfx.runtime.comm.agreement import agree, compare_values, host_group, next_number, raise_on_all_ranks
from distfx.runtime.comm.failure import CommunicationScope
from distfx.runtime.kernels.formats import any_channels_last

__all__ = ["Engine", "PreparedCall"]

MANY_GRAPHS = 16
"""Number of graphs of one mode above which the user is warned."""
CALL = "inputs or parameters"
"""What ranks compare before each call, as errors name it."""
CACHE_SIZE = 256
"""Capacity of the LRU cache of bound graphs."""
FLAGS = 61
"""How many inputs of a call are checked for being sharded as planned."""
CHANNELS_FIRST = 1 << FLAGS
"""Flag of a rank on which no tensor is stored channels last."""
SLOW = 30.0
"""Seconds after which rank 0 logs what takes so long."""

NOT_YET = (
    "the model's input could not be inferred from its first layer, so its graph and parameters are made at the first "
    "call: pass example_inputs=(x,) to parallelize (with a loss: (x, target)), or call the module once first."
)


@dataclass(frozen=True)
class Runnable:
    """A bound graph with its gradient buckets, ready to be called."""

    graph_index: int
    bound: BoundGraph
    run: Callable[..., Sequence[Tensor]]
    buckets: Sequence[SegmentBucket]


@dataclass(frozen=True)
class PreparedCall:
    """What a call runs, and with what."""

    compiled: Compiled
    runnable: Runnable
    parameters: Mapping[str, DTensor]
    inputs: Sequence[Tensor]


@dataclass(frozen=True)
class _Agreement:
    """What all ranks know about a call once they have agreed on it."""

    signature: tuple[str, ...]
    state: ParameterState
    is_local: tuple[bool, ...]
    """Which inputs are sharded as planned on every rank."""
    channels_last: bool
    """Whether a tensor is stored channels last on any rank."""


class Engine:
    """The graphs of a parallel module, without its parameters. Copies of the module share it."""

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        example: tuple[Any, ...] | None,
        options: Options,
        strict: bool = False,
        check: bool = False,
    ) -> None:
        self.model, self.grid, self.options = model, grid, options
        self.strict, self.check = strict, check
        self.serial_number = next_number(grid.size)
        """Counts the parallel modules of the program, the same on all ranks."""
        self.signature = inspect.signature(model.forward)
        self.example = example
        self.example_is_guessed = False
        """Whether the example was inferred from the first layer."""
        self.any_ndim = False
        """Whether inputs may have another number of dims than the example: it was inferred from a linear layer."""
        self.layouts = ParameterLayouts(model)
        self.modes: defaultdict[Mode, ModeState] = defaultdict(ModeState)
        self._bound: LruCache[Runnable] = LruCache(CACHE_SIZE)
        self._state_texts: dict[ParameterState, str] = {}
        self._warned: set[str] = set()

    def __deepcopy__(self, memo: object) -> Engine:
        return self

    # ---------------------------------------------------------------------------------------------- compilation

    def compile(self, mode: Mode, call: Call | None = None, *, another: bool = False, ones: bool = False) -> Any:
        """Compile the graph of a mode on this rank alone; ``None`` if that must wait for the first call.

        ``another``: compile one more graph, for the arguments of ``call``. ``ones``: keep their sizes of one as fixed
        sizes.
        """
        state = self.modes[mode]
        if state.graphs and not another:
            return state.graphs[0]
        with self._log_if_slow(f"torch.export is tracing {type(self.model).__name__}, once for each mode"):
            captured = self._capture(mode, call, follow=another, ones=ones)
        if captured is None:
            return None
        compiled = self._compile(captured)
        self.layouts.add(compiled)
        if state.attributes is None:
            state.attributes = AttributeSnapshot(self.model)
        state.graphs.append(compiled)
        return compiled

    def compile_on_all_ranks(
        self, mode: Mode, call: Call | None = None, *, another: bool = False, ones: bool = False
    ) -> Compiled | None:
        """As :meth:`compile`, on all ranks. Raises on all of them if one fails or has a different graph."""
        state = self.modes[mode]
        if state.agreed and not another:
            return state.graphs[0]
        compiled: Compiled | None = raise_on_all_ranks(
            self.grid.size, lambda: self.compile(mode, call, another=another, ones=ones)
        )
        if compiled is not None:
            agree(self.grid.size, "models", self._fingerprint(compiled))
            state.agreed += 1
            self._warn_about(compiled, state)
        return compiled

    def inspect(self, mode: Mode) -> Compiled:
        """The graph of a mode that the last call used, or the first graph; compiled on this rank alone if needed."""
        if self.compile(mode) is None:
            raise DistfxError(NOT_YET)
        state = self.modes[mode]
        return state.graphs[state.latest]

    def _compile(self, captured: Capture) -> Compiled:
        compiled = compile_graph(captured, self.options, self.layouts.known)
        if compiled.decisions.fallbacks and self.strict:
            raise DistfxError(_fallback_text(compiled))
        return compiled

    def _plan_for_call(self, call: Call) -> None:
        """Plan the first graph again if its example was guessed: the best strategies depend on the sizes."""
        state = self.modes[call.mode]
        if not self.example_is_guessed or state.is_planned_for_call:
            return
        state.is_planned_for_call = True
        captured = state.graphs[0].capture
        try:
            values = match_inputs(captured.inputs, call.shapes, call.dtypes)
        except DistfxError:  # another graph is valid for these inputs, or none
            return
        compiled = raise_on_all_ranks(self.grid.size, lambda: self._compile(replace(captured, hints=values)))
        agree(self.grid.size, "models", self._fingerprint(compiled))
        state.graphs[0] = compiled

    def _capture(self, mode: Mode, call: Call | None, *, follow: bool, ones: bool) -> Capture | None:
        """Capture a mode with the user's example, the arguments of the call, or what the first layer suggests.

        ``follow``: use the arguments of the call. ``ones``: fix their sizes of one, as export does.
        """
        batch = max(2, 2 * self.grid.axes.get("n", 1))
        example = (call.args if call else None) if follow or self.example is None else self.example
        if example is not None:
            like = self._example_like()
            return capture(
                self.model,
                tree_map(like, tuple(example)),
                tree_map(like, dict(call.kwargs if call else {})),
                training=mode,
                batch=0 if follow and ones else batch,
            )
        check_supported(self.model, mode)
        for attempt in infer_inputs(self.model, batch):
            try:
                captured = capture(self.model, attempt, training=mode, batch=batch, guess=True)
            except CaptureError:
                continue
            self.example, self.example_is_guessed = attempt, True
            self.any_ndim = len(attempt[0].shape) == 2
            return captured
        return None

    def _example_like(self) -> Callable[[Any], Any]:
        """Turns an input into an example for the original model, on the model's device and in the captured dtype."""
        parameter = next(self.model.parameters(), None)
        graphs = [compiled for state in self.modes.values() for compiled in state.graphs]
        typed = {s.dtype for s in graphs[0].capture.inputs if s.dtype.is_floating_point} if graphs else set()

        def example(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            device = value.device if parameter is None else parameter.device
            dtype = next(iter(typed)) if value.dtype.is_floating_point and len(typed) == 1 else value.dtype
            return torch.empty(value.shape, dtype=dtype, device=device)

        return example

    def _fingerprint(self, compiled: Compiled) -> str:
        """What must be the same on all ranks, one fact per line: versions, grid, options, parameters, graph."""
        from distfx import __version__

        options = self.options
        axes = None if options.statistics_axes is None else sorted(options.statistics_axes)
        lines = [f"distfx {__version__}", f"torch {torch.__version__}", f"Python {platform.python_version()}"]
        lines += [f"{self.grid} of {self.grid.size} ranks", f"outputs={options.outputs!r}"]
        lines += [f"example_inputs {'guessed from the first layer' if self.example_is_guessed else 'known'}"]
        lines += [f"check={self.check}", f"strategy={dict(options.pins)}", f"batch_norm={axes}"]
        lines += [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in self.model.state_dict().items()]
        lines += [f"{name} requires_grad={p.requires_grad}" for name, p in self.model.named_parameters()]
        lines += [f"{node.format_node()} {node.meta.get('layout')}" for node in compiled.module.graph.nodes]
        return "\n".join(lines)

    # ----------------------------------------------------------------------------------------- logs and warnings

    @contextmanager
    def _log_if_slow(self, what: str) -> Iterator[None]:
        """Log on rank 0 if the block takes longer than ``SLOW`` seconds."""
        timer = threading.Timer(SLOW, lambda: log_to_stderr(f"{what}; this may take a while"))
        timer.daemon = True
        if self.grid.rank == 0 and os.environ.get("DISTFX_QUIET", "0") in ("", "0"):
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _warn(self, text: str, kind: type[Warning] = UserWarning) -> None:
        """Warn once, on rank 0. All ranks must call it: a warning that is an error there is raised on all of them."""
        if text not in self._warned:
            self._warned.add(text)
            raise_on_all_ranks(self.grid.size, lambda: warn(text, kind) if self.grid.rank == 0 else None)

    def _warn_about(self, compiled: Compiled, state: ModeState) -> None:
        if compiled.decisions.fallbacks:
            self._warn(_fallback_text(compiled), FallbackWarning)
        if compiled.capture.checkpointed:
            self._warn(
                "torch.utils.checkpoint in the model has no effect: backward uses saved activations and does not "
                "recompute them"
            )
        if compiled.capture.modified_attributes:
            self._warn(
                f"forward modifies {', '.join(compiled.capture.modified_attributes)} of the model. These are not "
                "buffers, so every call uses the values they had when the model was captured. Make them buffers "
                "(register_buffer)."
            )
            for name in compiled.capture.modified_attributes:
                if state.attributes is not None:
                    state.attributes.ignore(name)
        if len(state.graphs) > MANY_GRAPHS:
            self._warn(
                f"{type(self.model).__name__} has more than {MANY_GRAPHS} graphs. Each value of an argument that is "
                "not a tensor needs its own graph, which takes time to compile. Give numbers that change as tensors."
            )

    def _warn_about_gathers(self, compiled: Compiled, call: Call, is_local: Sequence[bool]) -> None:
        """Warn if a sharded input is gathered: it may not fit on one rank."""
        for spec, tensor, local in zip(compiled.capture.inputs, call.tensors, is_local, strict=False):
            if local or not isinstance(tensor, DTensor) or not any(placed.is_shard() for placed in tensor.placements):
                continue
            once = f"gathered: {spec.name}"
            if once in self._warned:
                continue
            self._warned.add(once)
            self._warn(
                f"the input {spec.name}, a DTensor {tuple(tensor.shape)} split by {tensor.placements} on "
                f"{tensor.device_mesh}, is gathered on every rank because the plan needs it as "
                f"{input_layout(compiled, spec.name)}. Pass parts that match net.input_slices(...), as "
                "DTensor.from_local(part, net.grid.mesh, ...), to avoid the gather."
            )

    # --------------------------------------------------------------------------------------------------- calls

    def prepare(self, call: Call, store: ParameterStore, root: nn.Module) -> PreparedCall:
        """Find or make the bound graph for a call. ``root`` is the module that shows the parameters of ``store``."""
        parameters = store.tensors()
        agreement = self._agree_on_call(call, parameters)
        state = self.modes[call.mode]
        self._warn_about_gathers(state.graphs[0], call, agreement.is_local)
        key = (call.mode, agreement.signature, agreement.is_local, agreement.channels_last)
        runnable = self._bound.get((*key, agreement.state))
        if runnable is None:
            runnable = self._bind(call, agreement, store, root)
            parameters = store.tensors()  # binding may have added some
            self._bound.put((*key, parameter_state(parameters)), runnable)
        state.latest, state.last_call = runnable.graph_index, runnable.bound
        compiled = state.graphs[runnable.graph_index]
        return PreparedCall(compiled, runnable, parameters, call.graph_inputs(agreement.is_local))

    def _agree_on_call(self, call: Call, parameters: Mapping[str, DTensor]) -> _Agreement:
        """Compare the call across ranks, and compile its mode if that has no graph yet."""
        state = self.modes[call.mode]
        try:
            signature, parameters_now = call.signature(self.model, self.grid), parameter_state(parameters)
            changes = state.attributes.changes() if state.attributes else []
            planned = self._planned_shards(call)
            first = not any_channels_last(local_parts((*call.tensors, *parameters.values())))
        except Exception as error:
            self.reject_call(error, call.is_copy)
        lines = (self._caller(call.is_copy), *signature, *changes, self._state_text(parameters, parameters_now))
        flags = agree(self.grid.size, CALL, "\n".join(lines), (planned or 0) | CHANNELS_FIRST * first)
        channels_last = not flags & CHANNELS_FIRST
        if changes:
            raise DistfxError(
                f"attributes of the model have changed since it was captured: {'; '.join(changes)}. The graph uses the "
                "old values. Call parallelize again, or make a value that changes during training a buffer or a "
                "tensor argument of forward."
            )
        call.check_inputs(self.model, self.grid)
        self.compile_on_all_ranks(call.mode, call)
        self._plan_for_call(call)
        if planned is None:  # there was no plan to compare with
            flags = agree(self.grid.size, "inputs", "", self._planned_shards(call) or 0)
        if not state.inputs_compared:
            state.inputs_compared = True
            whole = {f"{i}": t for i, t in enumerate(call.tensors) if not isinstance(t, DTensor)}
            compare_values(
                self.grid.size,
                whole,
                lambda text: self._warn(f"{text}\nEach rank uses its part of the tensor that it was given."),
            )
        is_local = tuple(bool(flags >> i & 1) for i in range(len(call.tensors)))
        return _Agreement(signature, parameters_now, is_local, channels_last)

    def _caller(self, is_copy: bool) -> str:
        copy = ", a copy of it" if is_copy else ""
        return f"parallel module {self.serial_number} of this program, {type(self.model).__name__}{copy}"

    def reject_call(self, error: Exception, is_copy: bool) -> NoReturn:
        """Raise an error about this rank's arguments, while the other ranks agree on the call.

        If they have no error, or another one, all ranks raise a ``RankMismatchError`` that shows the difference.
        """
        agree(self.grid.size, CALL, f"{self._caller(is_copy)}\n{type(error).__name__}: {error}")
        raise error

    def _planned_shards(self, call: Call) -> int | None:
        """A bit for each input that is a DTensor sharded as planned; ``None`` if there is no plan yet."""
        if not any(isinstance(tensor, DTensor) for tensor in call.tensors):
            return 0
        state = self.modes[call.mode]
        if not state.agreed or (self.example_is_guessed and not state.is_planned_for_call):
            return None
        compiled = state.graphs[0]
        names = [spec.name for spec in compiled.capture.inputs]
        if len(names) != len(call.tensors):
            return 0
        pairs = list(zip(names, call.tensors, strict=True))[:FLAGS]
        planned = (is_planned_shard(t, input_layout(compiled, n), self.grid) for n, t in pairs)
        return sum(1 << i for i, is_planned in enumerate(planned) if is_planned)

    def _select(self, call: Call, store: ParameterStore, root: nn.Module) -> tuple[int, list[InputSpec], Values]:
        """The index of the graph that is valid for the call's inputs, compiled now if there is none yet."""
        state = self.modes[call.mode]
        problem: SizeError | None = None
        values: Values = {}
        ones = False
        for attempt in range(3):
            invalid_at_one = False
            for index, compiled in enumerate(state.graphs):
                if compiled.capture.constants != call.constants:
                    continue
                store.fill(self.model, root)
                store.add_constants(compiled)
                specs = _present_inputs(compiled, store.tensors())
                try:
                    values = match_inputs(specs, call.shapes, call.dtypes, any_ndim=self.any_ndim)
                except SizeError as error:  # another graph may be valid
                    problem = problem or error
                    continue
                check_batch(compiled.capture.inputs, call.shapes, self.grid.axes.get("n", 1))
                if compiled.capture.is_valid_for(values):
                    if self._is_valid_at_one(call, index, values):
                        return index, specs, values
                    invalid_at_one = True
            if attempt == 0 or (not ones and any(1 in shape for shape in call.shapes)):
                ones = invalid_at_one or attempt == 1
                try:
                    self.compile_on_all_ranks(call.mode, call, another=True, ones=ones)
                except CaptureError:
                    if problem is not None:
                        raise problem from None
                    if values:  # binding names the layer that cannot take these sizes
                        bind(state.graphs[0].module, values, self.grid.at(self.grid.rank))
                    raise
        raise DistfxError(f"no graph of {type(self.model).__name__} could be captured that is valid for {call.shapes}")

    def _is_valid_at_one(self, call: Call, index: int, values: Values) -> bool:
        """Whether a graph is valid where sizes are one: export assumes that no symbolic size is.

        Decided once for each set of such symbols, by another capture at these sizes: it must make the same calls.
        """
        state = self.modes[call.mode]
        symbols = frozenset(symbol for symbol, value in values.items() if value == 1)
        if not symbols:
            return True
        if (index, symbols) not in state.valid_at_one:
            like = self._example_like()
            args, kwargs = tree_map(like, call.args), tree_map(like, dict(call.kwargs))
            fixed = capture(self.model, args, kwargs, training=call.mode, batch=0)
            state.valid_at_one[index, symbols] = state.graphs[index].capture.same_calls(fixed, values)
        return state.valid_at_one[index, symbols]

    def _bind(self, call: Call, agreement: _Agreement, store: ParameterStore, root: nn.Module) -> Runnable:
        index, specs, values = self._select(call, store, root)
        compiled = self.modes[call.mode].graphs[index]
        store.fill(self.model, root)
        store.add_constants(compiled)
        parameters = store.tensors()
        local = {spec.name for spec, is_local in zip(specs, agreement.is_local, strict=True) if is_local}
        bound = bind_graph(
            compiled,
            self.grid,
            values,
            trained={name: tensor.requires_grad for name, tensor in parameters.items()},
            inputs={spec.name: t.requires_grad for spec, t in zip(specs, call.tensors, strict=True)},
            local_inputs=local,
            dtypes={name: tensor.dtype for name, tensor in parameters.items()},
            channels_last=agreement.channels_last,
        )
        assert bound.module is not None
        run = GraphChecker(bound.module, self.grid, local) if self.check else bound.module
        return Runnable(index, bound, run, [SegmentBucket.of(bucket, self.grid) for bucket in bound.buckets])

    def bind_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in the order of ``forward``'s signature: positional where possible."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{type(self.model).__name__}.forward(): {error}") from None
        return bound.args, bound.kwargs

    def draw_seed(self, compiled: Compiled) -> int:
        """The seed of a forward pass, drawn by rank 0. Nothing is sent for a graph without random operators."""
        if not compiled.is_random:
            return 0
        seed = torch.randint(2**62, (1,))
        if self.grid.size > 1:
            with CommunicationScope("broadcast of the seed of random operators"):
                dist.broadcast(seed, src=0, group=host_group())
        return int(seed)

    def agree_on(self, what: str) -> None:
        """Raise on all ranks if one of them makes another call, as in ``if rank == 0: net.full_state_dict()``."""
        agree(self.grid.size, "calls", what)

    def _state_text(self, parameters: Mapping[str, Tensor], state: ParameterState) -> str:
        """A parameter state as text, made once for each state: a large model has many lines."""
        if state not in self._state_texts:
            lines = [f"{n}: {p.dtype}, requires_grad={p.requires_grad}" for n, p in parameters.items()]
            self._state_texts[state] = "\n".join(lines)
        return self._state_texts[state]


def _present_inputs(compiled: Compiled, parameters: Mapping[str, Tensor]) -> list[InputSpec]:
    """The inputs as captured, in the dtypes that follow from conversions of the parameters since."""
    changed = converted_dtypes(compiled.module.graph, {name: tensor.dtype for name, tensor in parameters.items()})
    return [InputSpec(s.name, s.shape, changed.get(s.dtype, s.dtype)) for s in compiled.capture.inputs]


def _fallback_text(compiled: Compiled) -> str:
    nodes = compiled.decisions.fallbacks
    lines = [f"  {describe(node)}: {operator_of(node)}" for node in nodes]
    return (
        f"{len(nodes)} operator{'s have' if len(nodes) > 1 else ' has'} no rule that applies, so their inputs are "
        "gathered and every rank runs them on the whole tensors. The results are right, but this saves neither time "
        "nor memory:\n" + "\n".join(lines)
    )
