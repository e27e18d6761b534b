"""The engine behind a parallel module: compiles a mode when it is first needed, binds a shape when it first comes.

All that may differ between ranks is compared before anything is communicated: the signature of every call, the outcome
and the graph of every compilation.
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
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.fx import Graph, Node

from distfx.errors import CaptureError, DistfxError, FallbackWarning, SizeError, say, warn
from distfx.grid import Grid
from distfx.ir import ops
from distfx.ir.layout import Layout
from distfx.ir.nodes import describe
from distfx.passes.bind import Values, bind, check_batch, match_inputs
from distfx.passes.capture.attributes import Numbers, changed_numbers, numbers_of
from distfx.passes.capture.export import (
    Capture,
    InputSpec,
    Mode,
    capture,
    check_supported,
    constants_of,
    infer_inputs,
)
from distfx.passes.link import link
from distfx.passes.pipeline import Compiled, compile_capture
from distfx.passes.plan import Pins
from distfx.report.plan import Plan
from distfx.report.predict import gradient_buckets, plan_of
from distfx.runtime.autograd.parameters import Bucket
from distfx.runtime.check import Checked
from distfx.runtime.comm.agreement import agree, compare_values, host_group, next_number, together
from distfx.runtime.comm.failure import During
from distfx.runtime.kernels.formats import any_channels_last, local_parts

__all__ = ["Engine", "Runnable"]

MANY_GRAPHS = 16
"""More graphs of a mode than a model has that branches on sizes."""
KEPT = 256
"""So many bound graphs are kept; the one that was not used for longest goes first."""

FLAGS = 61
"""So many inputs of a call are looked at for being parts already."""
CHANNELS_FIRST = 1 << FLAGS
"""Set where nothing lies channels last."""

SLOW = 30.0
"""Seconds after which a user is told what is being done."""

NOT_YET = (
    "the model's input could not be told from its first layer, so its graph and parameters are made at the first call: "
    "give parallelize example_inputs=(x,) (with a loss: (x, target)), or call it once before."
)

State = tuple[tuple[bool, torch.dtype], ...]
Ready = Callable[[Compiled | None], Mapping[str, DTensor]]


@dataclass(frozen=True)
class Runnable:
    """A graph bound to a shape and linked, with the plan at that shape."""

    run: Callable[..., Sequence[Tensor]]
    buckets: Sequence[Bucket]
    plan: Plan


class Engine:
    """Everything about a parallel module but its parameters."""

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        example: tuple[Any, ...] | None,
        pins: Pins,
        outputs: str,
        strict: bool,
        check: bool = False,
        statistics: frozenset[str] | None = None,
    ) -> None:
        self.model, self.grid, self.example = model, grid, example
        self.number = next_number(grid.size)
        self.pins, self.outputs, self.strict, self.check = pins, outputs, strict, check
        self.parameters = inspect.signature(model.forward)
        self.statistics = statistics
        """The axes over which batch norms are computed; ``None``: all."""
        self.compiled: dict[Mode, list[Compiled]] = defaultdict(list)
        """For each mode its graph; more than one where the model or an operator branches on sizes."""
        self.agreed: dict[Mode, int] = defaultdict(int)
        self.ones: dict[tuple[Mode, int, frozenset[Any]], bool] = {}
        """Whether a graph is right where these of its sizes are one."""
        self.adopted: dict[str, Layout] = {}
        """How the parallel module holds its parameters and buffers, once it does."""
        self.inferred = False
        """Whether the example was guessed from a linear layer, whose input may have any rank."""
        self.warned: set[str] = set()
        """What was said of operators without a rule: once, not for each graph of the model."""
        self.guessed = False
        """Whether the example was not given."""
        self.settled: set[Mode] = set()
        """The modes whose graph was planned for sizes that are meant."""
        self.latest: dict[Mode, int] = defaultdict(int)
        self.prepared: dict[Any, tuple[int, Runnable]] = {}
        """For each kind of call the number of its graph, and what to run."""
        self.state_texts: dict[State, str] = {}
        self.numbers: dict[Mode, Numbers] = {}
        """The attributes of the model that the graphs of a mode have fixed."""
        self.compared: set[Mode] = set()
        """The modes in which the values of a call were compared: those of the first. (``check`` compares all.)"""
        self.last: dict[Mode, Plan] = {}
        """For each mode the plan at the shape of its last call."""

    def __deepcopy__(self, memo: object) -> Engine:
        """Copies of a parallel module, as of its moving average, have parameters of their own and all else together."""
        return self

    # ---------------------------------------------------------------------------------------------- compilation

    @property
    def stored(self) -> dict[str, Layout]:
        """How parameters and buffers are stored: as the first graph that uses them decided."""
        graphs = [compiled for made in self.compiled.values() for compiled in made]
        found = {name: layout for compiled in reversed(graphs) for name, layout in compiled.stored.items()}
        return found | self.adopted

    def compile(
        self,
        mode: Mode,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        another: bool = False,
        literal: bool = False,
    ) -> Compiled | None:
        """The rewritten graph of a mode, made on this rank alone; ``None`` if that must wait for the first call.

        ``another``: one more, for inputs such as ``args``, which the graphs there are do not fit; ``literal``: for
        their sizes of one alone.
        """
        graphs = self.compiled[mode]
        if another or not graphs:
            with self._patience(f"torch.export is tracing {type(self.model).__name__}, once for each mode"):
                captured = self._capture(mode, args, kwargs, follow=another, literal=literal)
            if captured is None:
                return None
            compiled = self._planned(captured)
            self.numbers.setdefault(mode, numbers_of(self.model))
            graphs.append(compiled)
        return graphs[-1] if another else graphs[0]

    @contextmanager
    def _patience(self, what: str) -> Iterator[None]:
        """Rank 0 says what takes so long, if it does."""
        timer = threading.Timer(SLOW, lambda: say(f"{what}; this takes long"))
        timer.daemon = True
        if self.grid.rank == 0 and os.environ.get("DISTFX_QUIET", "0") in ("", "0"):
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _planned(self, captured: Capture) -> Compiled:
        """The passes on a captured graph."""
        compiled = compile_capture(captured, self.grid.axes, self.pins, self.outputs, self.stored, self.statistics)
        if compiled.decisions.whole and self.strict:
            raise DistfxError(_fallback_text(compiled))
        return compiled

    def _plan_again(self, mode: Mode, tensors: Sequence[Tensor]) -> None:
        """At the first call of a model whose example was a guess: what is cheapest depends on sizes."""
        if not self.guessed or mode in self.settled:
            return
        self.settled.add(mode)
        captured = self.compiled[mode][0].capture
        try:
            values = match_inputs(captured.inputs, [tuple(t.shape) for t in tensors], [t.dtype for t in tensors])
        except DistfxError:  # another graph fits, or none
            return
        captured = replace(captured, hints=values)
        compiled = together(self.grid.size, lambda: self._planned(captured))
        agree(self.grid.size, "models", self._fingerprint(compiled))
        self.compiled[mode][0] = compiled

    def compile_together(
        self,
        mode: Mode,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        another: bool = False,
        literal: bool = False,
    ) -> Compiled | None:
        """As :meth:`compile`, on all ranks; raises on all of them if any fails or has another graph."""
        if self.agreed[mode] and not another:
            return self.compiled[mode][0]
        compiled = together(self.grid.size, lambda: self.compile(mode, args, kwargs, another=another, literal=literal))
        if compiled is not None:
            agree(self.grid.size, "models", self._fingerprint(compiled))
            self.agreed[mode] += 1
            if compiled.decisions.whole:
                self._warn(_fallback_text(compiled), FallbackWarning)
            if compiled.capture.checkpointed:
                self._warn(
                    "torch.utils.checkpoint inside of the model is not followed: backward computes nothing again"
                )
            if compiled.capture.counted:
                self._warn(
                    f"forward changes {', '.join(compiled.capture.counted)} of the model, which are no buffers: the "
                    "graph has them as they were at its making, in every call. Make them buffers (register_buffer)."
                )
                for name in compiled.capture.counted:
                    self.numbers[mode].pop(name, None)
            if len(self.compiled[mode]) > MANY_GRAPHS:
                self._warn(
                    f"{type(self.model).__name__} has more than {MANY_GRAPHS} graphs: each value of an argument that "
                    "is no tensor has one of its own, and takes time to make. Give numbers that change as tensors."
                )
        return compiled

    def _warn(self, text: str, kind: type[Warning] = UserWarning) -> None:
        """Once, on rank 0."""
        if text not in self.warned and self.grid.rank == 0:
            warn(text, kind)
        self.warned.add(text)

    def _capture(
        self, mode: Mode, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, follow: bool, literal: bool
    ) -> Capture | None:
        """Capture a mode with the user's example, the arguments of this call, or what the first layer tells.

        ``follow``: with the arguments; ``literal``: with their sizes of one as well, which export fixes.
        """
        batch = max(2, 2 * self.grid.axes.get("n", 1))
        example = args if follow or self.example is None else self.example
        batch = 0 if follow and literal else batch
        if example is not None:
            like = self._like()
            return capture(
                self.model,
                pytree.tree_map(like, tuple(example)),
                pytree.tree_map(like, dict(kwargs or {})),
                training=mode,
                batch=batch,
            )
        check_supported(self.model, mode)
        for attempt in infer_inputs(self.model, batch):
            try:
                captured = capture(self.model, attempt, training=mode, batch=batch, guess=True)
            except CaptureError:
                continue
            self.example, self.inferred, self.guessed = attempt, len(attempt[0].shape) == 2, True
            return captured
        return None

    def _like(self) -> Callable[[Any], Any]:
        """From an input to an example for the original model: on its device, in its dtype, whatever became of ours."""
        parameter = next(self.model.parameters(), None)
        graphs = [compiled for made in self.compiled.values() for compiled in made]
        typed = {s.dtype for s in graphs[0].capture.inputs if s.dtype.is_floating_point} if graphs else set()

        def example(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            device = value.device if parameter is None else parameter.device
            dtype = next(iter(typed)) if value.dtype.is_floating_point and len(typed) == 1 else value.dtype
            return torch.empty(value.shape, dtype=dtype, device=device)

        return example

    def _fingerprint(self, compiled: Compiled) -> str:
        """What must be the same on all ranks, one fact a line: versions, grid, options, parameters, graph."""
        from distfx import __version__

        lines = [f"distfx {__version__}", f"torch {torch.__version__}", f"Python {platform.python_version()}"]
        lines += [f"{self.grid} of {self.grid.size} ranks", f"outputs={self.outputs!r}"]
        lines += [f"example_inputs {'guessed from the first layer' if self.guessed else 'known'}"]
        statistics = None if self.statistics is None else sorted(self.statistics)
        lines += [f"check={self.check}", f"strategy={dict(self.pins)}", f"batch_norm={statistics}"]
        lines += [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in self.model.state_dict().items()]
        lines += [f"{name} requires_grad={p.requires_grad}" for name, p in self.model.named_parameters()]
        lines += [f"{node.format_node()} {node.meta.get('layout')}" for node in compiled.module.graph.nodes]
        return "\n".join(lines)

    def present(self, mode: Mode) -> Compiled:
        """The rewritten graph of a mode, that of the last call, for looking at."""
        compiled = self.compile(mode)
        if compiled is None:
            raise DistfxError(NOT_YET)
        return self.compiled[mode][self.latest[mode]]

    # --------------------------------------------------------------------------------------------------- calls

    def prepare(
        self,
        mode: Mode,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        ready: Ready,
        who: str = "",
    ) -> tuple[Compiled, Runnable, Mapping[str, DTensor], list[Tensor]]:
        """The graph for a call with these inputs, the parameters and buffers, and the inputs as the graph takes them.

        ``who`` calls: other than what ``parallelize`` made.
        ``ready`` gives the parameters and buffers, as a graph needs them or (``None``) as far as they are there.
        """
        key = (*self._signature(mode, tensors), *constants_of(args, kwargs))
        held = ready(None)
        state = _state(held)
        said = [f"{name} = {values}" for name, values in changed_numbers(self.numbers.get(mode, {})).items()]
        fits = self._fits(mode, tensors)
        caller = f"parallel module {self.number} of this program, {type(self.model).__name__}{who}"
        text = "\n".join((caller, *key, *said, self._state_text(held, state)))
        first = not any_channels_last(local_parts(tensors)) and not any_channels_last(local_parts(held.values()))
        common = agree(self.grid.size, "inputs or parameters", text, (fits or 0) | CHANNELS_FIRST * first)
        last = not common & CHANNELS_FIRST
        if said:
            raise DistfxError(
                f"attributes of the model have changed, which its graph has fixed: {'; '.join(said)}. Parallelize "
                "again; or make what changes during training a buffer, or an argument of forward that is a tensor."
            )
        self._check_devices(tensors)
        self.compile_together(mode, args, kwargs)
        self._plan_again(mode, tensors)
        if fits is None:  # there was no graph yet to look it up in
            common = agree(self.grid.size, "inputs", "", self._fits(mode, tensors) or 0)
        local = [bool(common >> i & 1) for i in range(len(tensors))]
        if mode not in self.compared:
            self.compared.add(mode)
            whole = {f"{i}": t for i, t in enumerate(tensors) if not isinstance(t, DTensor)}
            compare_values(
                self.grid.size, whole, lambda text: self._warn(f"{text}\nEach rank uses its part of its own.")
            )
        self._warn_of_gathers(self.compiled[mode][0], tensors, local)
        entry = (mode, key, tuple(local), last, state)
        if entry not in self.prepared:
            number, specs, values = self._fit(mode, args, kwargs, tensors, ready)
            compiled = self.compiled[mode][number]
            held = ready(compiled)
            inputs = {s.name: t.requires_grad for s, t in zip(specs, tensors, strict=True)}
            given = {s.name for s, is_local in zip(specs, local, strict=True) if is_local}
            runnable = self._bind(compiled, values, given, inputs, held, last)
            if len(self.prepared) >= KEPT:
                del self.prepared[next(iter(self.prepared))]  # the one that was not used for longest
            entry = (*entry[:-1], _state(held))  # as the next such call will find it
            self.prepared[entry] = (number, runnable)
        number, runnable = self.prepared[entry] = self.prepared.pop(entry)
        self.latest[mode], self.last[mode] = number, runnable.plan
        plain = [_plain(t, own) for t, own in zip(tensors, local, strict=True)]
        return self.compiled[mode][number], runnable, held, plain

    def _fit(
        self,
        mode: Mode,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        ready: Ready,
    ) -> tuple[int, list[InputSpec], Values]:
        """The number of the graph that is right for these inputs, made now if there is none yet."""
        shapes, dtypes = [tuple(t.shape) for t in tensors], [t.dtype for t in tensors]
        problem: SizeError | None = None
        values: Values = {}
        literal = False
        for attempt in range(3):
            but_for_ones = False
            for number, compiled in enumerate(self.compiled[mode]):
                if compiled.capture.constants != constants_of(args, kwargs):
                    continue
                specs = _retyped(compiled, ready(compiled))
                try:
                    values = match_inputs(specs, shapes, dtypes, any_rank=self.inferred)
                except SizeError as error:  # another graph may fit
                    problem = problem or error
                    continue
                check_batch(compiled.capture.inputs, shapes, self.grid.axes.get("n", 1))
                if compiled.capture.holds(values):
                    if self._holds_for_ones(mode, number, values, args, kwargs):
                        return number, specs, values
                    but_for_ones = True
            if attempt == 0 or (not literal and any(1 in shape for shape in shapes)):  # such sizes are a case apart
                literal = but_for_ones or attempt == 1
                try:
                    self.compile_together(mode, args, kwargs, another=True, literal=literal)
                except CaptureError:
                    if problem is not None:
                        raise problem from None
                    if values:  # names the layer
                        bind(self.compiled[mode][0].module, values, self.grid.at(self.grid.rank))
                    raise
        raise DistfxError(f"no graph of {type(self.model).__name__} could be captured that holds for {shapes}")

    def _holds_for_ones(
        self, mode: Mode, number: int, values: Values, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether a graph is right where sizes are one: export takes for granted that a symbolic size is not.

        Found out once for each set of such sizes, by a capture at just these: it must make the same calls.
        """
        ones = frozenset(symbol for symbol, value in values.items() if value == 1)
        known = self.ones.get((mode, number, ones))
        if not ones or known is not None:
            return known is not False
        like = self._like()
        example = pytree.tree_map(like, tuple(args)), pytree.tree_map(like, dict(kwargs))
        same = self.compiled[mode][number].capture.same_calls(
            capture(self.model, *example, training=mode, batch=0), values
        )
        self.ones[mode, number, ones] = same
        return same

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call as the model's signature has it, however it was written: by position where that can be."""
        try:
            bound = self.parameters.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{type(self.model).__name__}.forward(): {error}") from None
        return bound.args, bound.kwargs

    def draw_seed(self, compiled: Compiled) -> int:
        """The seed of a pass with random operators: rank 0's. Nothing is drawn or sent for others."""
        if not compiled.random:
            return 0
        seed = torch.randint(2**62, (1,))
        if self.grid.size > 1:
            with During("broadcast of the seed of random operators"):
                dist.broadcast(seed, src=0, group=host_group())
        return int(seed)

    def _signature(self, mode: Mode, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        """What must be the same on all ranks in each call, one fact a line."""
        gradients = f"gradients {'on' if torch.is_grad_enabled() else 'off'}"
        return (
            f"{mode.describe(self.model)}, {gradients}{_autocast(self.grid)}",
            *(
                f"input {i}: {tuple(t.shape)} {t.dtype} on {t.device.type}, requires_grad={t.requires_grad}"
                f"{f', DTensor {t.placements}' if isinstance(t, DTensor) else ''}"
                for i, t in enumerate(tensors)
            ),
        )

    def _state_text(self, parameters: Mapping[str, Tensor], state: State) -> str:
        """A state to read."""
        if state not in self.state_texts:  # made once for each state: a large model has many lines
            lines = [f"{n}: {p.dtype}, requires_grad={p.requires_grad}" for n, p in parameters.items()]
            self.state_texts[state] = "\n".join(lines)
        return self.state_texts[state]

    def _check_devices(self, tensors: Sequence[Tensor]) -> None:
        for number, tensor in enumerate(tensors):
            if tensor.dim() and tensor.device.type != self.grid.device.type:
                raise DistfxError(
                    f"input {number} of {type(self.model).__name__} is on {tensor.device}, but this rank computes on "
                    f"{self.grid.device}: give x.to(net.grid.device)"
                )

    def agree_on_call(self, what: str) -> None:
        """Raise on all ranks if one makes another call, as ``if rank == 0:`` around what all must do together."""
        agree(self.grid.size, "calls", what)

    def _bind(
        self,
        compiled: Compiled,
        values: Values,
        local: set[str],
        inputs: Mapping[str, bool],
        parameters: Mapping[str, Tensor],
        last: bool,
    ) -> Runnable:
        bound = bind(compiled.module, values, self.grid, local)
        changed = _converted(compiled, parameters)
        for node in bound.module.graph.nodes if changed and not _names_dtypes(bound.module.graph) else ():
            if node.meta.get("dtype") in changed:
                node.meta["dtype"] = changed[node.meta["dtype"]]
        trained = {name: tensor.requires_grad for name, tensor in parameters.items()}
        dtypes = {name: tensor.dtype for name, tensor in parameters.items()}
        buckets = gradient_buckets(bound, trained, self.grid, dtypes, last)
        plan = plan_of(compiled, bound, self.grid, inputs, trained, buckets)
        linked = link(bound.module, self.grid, buckets, last)
        return Runnable(Checked(linked, self.grid, local) if self.check else linked, buckets, plan)

    # --------------------------------------------------------------------------------------------------- inputs

    def input_layout(self, compiled: Compiled, name: str) -> Layout:
        """The layout in which an input is first used: after the slices that take this rank's part."""
        node: Node = next(n for n in compiled.module.graph.find_nodes(op="placeholder") if n.name == name)
        while len(node.users) == 1 and next(iter(node.users)).target is ops.slice:
            node = next(iter(node.users))
        layout = node.meta["layout"]
        assert isinstance(layout, Layout)
        return layout

    def _fits(self, mode: Mode, tensors: Sequence[Tensor]) -> int | None:
        """A bit for each input that comes as the part that the plan has; ``None`` where there is no plan yet.

        An input of which that holds on some ranks only is taken on none.
        """
        if not any(isinstance(tensor, DTensor) for tensor in tensors):
            return 0
        if not self.agreed[mode] or (self.guessed and mode not in self.settled):
            return None
        compiled = self.compiled[mode][0]
        names = [spec.name for spec in compiled.capture.inputs]
        if len(names) != len(tensors):
            return 0
        pairs = list(zip(names, tensors, strict=True))[:FLAGS]
        return sum(1 << i for i, (name, tensor) in enumerate(pairs) if self._is_local(compiled, name, tensor))

    def _warn_of_gathers(self, compiled: Compiled, tensors: Sequence[Tensor], local: Sequence[bool]) -> None:
        """An input that does not fit a rank must not become whole there without a word."""
        for spec, tensor, own in zip(compiled.capture.inputs, tensors, local, strict=False):
            if own or not isinstance(tensor, DTensor) or not any(placed.is_shard() for placed in tensor.placements):
                continue
            once = f"gathered: {spec.name}"
            if once in self.warned:
                continue
            self.warned.add(once)
            self._warn(
                f"the input {spec.name}, a DTensor {tuple(tensor.shape)} split by {tensor.placements} on "
                f"{tensor.device_mesh}, is gathered on every rank: the plan has it as "
                f"{self.input_layout(compiled, spec.name)}, whose parts are net.input_slices(...) "
                "(DTensor.from_local with these, on net.grid.mesh, is taken as it is)"
            )

    def _is_local(self, compiled: Compiled, name: str, tensor: Tensor) -> bool:
        """Whether a DTensor input is split just as the plan has it."""
        if not isinstance(tensor, DTensor) or tensor.device_mesh != self.grid.mesh:
            return False
        layout = self.input_layout(compiled, name)
        local = layout.local_shape(tuple(tensor.shape), self.grid.placement())
        if tuple(tensor.to_local().shape) != tuple(local):
            return False
        names = tensor.device_mesh.mesh_dim_names or ()
        if any(placement.is_partial() for placement in tensor.placements):
            return False
        placed = {a: p.dim if isinstance(p, Shard) else None for a, p in zip(names, tensor.placements, strict=True)}
        return all(dim == layout.dim_of(axis) for axis, dim in placed.items() if axis in self.grid.axes)


def _autocast(grid: Grid) -> str:
    device = grid.device.type
    return f", autocast to {torch.get_autocast_dtype(device)}" if torch.is_autocast_enabled(device) else ""


def _state(parameters: Mapping[str, Tensor]) -> State:
    """What may be changed between calls and decides what is sent: which parameters train, and their dtypes."""
    return tuple((p.requires_grad, p.dtype) for p in parameters.values())


def _plain(tensor: Tensor, is_local: bool) -> Tensor:
    """An input as the graph takes it: this rank's part if it is split as planned, else the whole."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if is_local else tensor.full_tensor()


def _converted(compiled: Compiled, parameters: Mapping[str, Tensor]) -> dict[torch.dtype, torch.dtype]:
    """What has become of the dtypes of a capture, where the parameters were converted since (``net.half()``)."""
    changed = {}
    for node in compiled.module.graph.find_nodes(op="get_attr"):
        now = parameters[str(node.target)].dtype
        if now != node.meta["dtype"] and now.is_floating_point:
            changed[node.meta["dtype"]] = now
    return changed


def _names_dtypes(graph: Graph) -> bool:
    """Whether a call says in which dtype it is: what follows from it is not converted with the parameters."""
    leaves = (pytree.tree_leaves((node.args, node.kwargs)) for node in graph.nodes)
    return any(isinstance(leaf, torch.dtype) for each in leaves for leaf in each)


def _retyped(compiled: Compiled, parameters: Mapping[str, Tensor]) -> list[InputSpec]:
    """The inputs as captured; where the parameters were converted since, the inputs follow."""
    changed = _converted(compiled, parameters)
    return [InputSpec(s.name, s.shape, changed.get(s.dtype, s.dtype)) for s in compiled.capture.inputs]


def _fallback_text(compiled: Compiled) -> str:
    nodes = compiled.decisions.whole
    targets = [node.target.op if isinstance(node.target, ops.Nth) else node.target for node in nodes]
    lines = [f"  {describe(node)}: {target}" for node, target in zip(nodes, targets, strict=True)]
    return (
        f"{len(nodes)} operator{'s have' if len(nodes) > 1 else ' has'} no rule that applies; inputs are gathered and "
        "every rank runs them whole (right, but neither faster nor smaller):\n" + "\n".join(lines)
    )
