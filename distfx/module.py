"""The parallel module: what ``parallelize`` returns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from distfx import ops
from distfx.errors import CaptureError, DistfxError, FallbackWarning
from distfx.grid import Grid
from distfx.layout import Layout
from distfx.ledger import allreduce_bytes, allreduce_messages
from distfx.passes.bind import Bound, bind, grads, match_inputs, predict
from distfx.passes.capture import capture, describe, infer_inputs
from distfx.passes.compile import Compiled, PassRecord, compile_capture
from distfx.passes.planner import Pins
from distfx.passes.readable import readable
from distfx.plan import Plan, PlanRow
from distfx.runtime.agree import agree, agree_on_outcome
from distfx.runtime.link import link
from distfx.runtime.parameters import Bucket, Gradients, distribute, make_buckets

__all__ = ["ParallelModule"]


@dataclass
class _Runnable:
    """A graph bound to a shape and linked, with the plan at that shape."""

    run: Callable[..., Any]
    buckets: list[Bucket]
    plan: Plan


class ParallelModule(nn.Module):
    """A model distributed over a grid: the same call, the same numbers. Made by :func:`distfx.parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        example_inputs: Sequence[Any] | None,
        pins: Pins,
        outputs: str,
        strict: bool,
    ) -> None:
        super().__init__()
        state = self.__dict__
        state["_source"] = model
        state["_grid"] = grid
        state["_pins"] = dict(pins)
        state["_outputs"] = outputs
        state["_strict"] = strict
        state["_example"] = tuple(example_inputs) if example_inputs is not None else None
        state["_compiled"] = {}
        state["_runnable"] = {}
        state["_last"] = None
        state["_tensors"] = None
        self.training = model.training
        if example_inputs is not None or next(infer_inputs(model, 2), None) is not None:
            self._compile(self.training)

    # ------------------------------------------------------------------------------------------- compilation

    @property
    def grid(self) -> Grid:
        """The grid, with its channel axis factored where the plan needs that."""
        return self._grid  # type: ignore[no-any-return]

    def _compile(self, training: bool, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None) -> Compiled | None:
        """The rewritten graph of a mode, made when first needed; ``None`` if that must wait for the first call."""
        if training in self._compiled:
            return self._compiled[training]  # type: ignore[no-any-return]
        compiled: Compiled | None = None
        error: Exception | None = None
        try:
            compiled = self._rewrite(training, args, kwargs)
        except Exception as problem:
            error = problem
        agree_on_outcome(self.grid, error)
        if compiled is None:
            return None
        agree(self.grid, "models", self._fingerprint(compiled))
        if self._tensors is None:
            self._adopt_parameters(compiled)
        self._compiled[training] = compiled
        if compiled.decisions.whole and self.grid.rank == 0:
            warnings.warn(_fallback_text(compiled), FallbackWarning, stacklevel=4)
        return compiled

    def _rewrite(self, training: bool, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> Compiled | None:
        model, sizes = self._source, self.grid.axes
        batch = max(2, 2 * sizes.get("n", 1))
        example = args if args is not None else self._example
        if example is not None:
            captured = capture(model, example, kwargs, training=training, batch=batch)
        else:
            captured = None
            for attempt in infer_inputs(model, batch):
                try:
                    captured = capture(model, attempt, training=training, batch=batch)
                    break
                except CaptureError:
                    continue
            if captured is None:
                return None
            self.__dict__["_example"] = attempt
        stored = {}
        for other in self._compiled.values():
            stored |= other.stored
        compiled = compile_capture(captured, sizes, self._pins, self._outputs, stored)
        if compiled.decisions.whole and self._strict:
            raise DistfxError(_fallback_text(compiled))
        return compiled

    def _fingerprint(self, compiled: Compiled) -> str:
        """What must be the same on all ranks: versions, grid, parameters, graph; one fact a line."""
        lines = [f"torch {torch.__version__}", f"grid {self.grid} of {self.grid.size} ranks", f"outputs {self._outputs}"]
        lines += [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in self._source.state_dict().items()]
        lines += [f"{name} requires_grad={p.requires_grad}" for name, p in self._source.named_parameters()]
        lines += [f"{node.format_node()} {node.meta.get('layout')}" for node in compiled.module.graph.nodes]
        return "\n".join(lines)

    def _adopt_parameters(self, compiled: Compiled) -> None:
        """Make every parameter and buffer of the model a DTensor shard of rank 0's, under its own name."""
        stored = compiled.stored
        tensors: dict[str, DTensor] = {}
        twins: dict[int, nn.Parameter | DTensor] = {}
        persistent = set(self._source.state_dict(keep_vars=True))
        entries = [*self._source.named_parameters(remove_duplicate=False), *self._source.named_buffers(remove_duplicate=False)]
        for name, value in entries:
            layout = stored.get(name) or Layout.replicated(value.dim())
            if id(value) in twins:
                made = twins[id(value)]
            else:
                shard = distribute(value, layout, self.grid, broadcast=True)
                is_parameter = isinstance(value, nn.Parameter)
                made = nn.Parameter(shard, requires_grad=value.requires_grad) if is_parameter else shard
                twins[id(value)] = made
            self._register(name, made, persistent=name in persistent)
            tensors[name] = made  # type: ignore[assignment]
        for node in compiled.module.graph.find_nodes(op="get_attr"):
            name = str(node.target)
            if name not in tensors:  # a constant made in forward
                tensors[name] = self._constant(compiled, name)
        self.__dict__["_tensors"] = tensors

    def _constant(self, compiled: Compiled, name: str) -> DTensor:
        value: Any = compiled.capture.module
        for part in name.split("."):
            value = getattr(value, part)
        return distribute(value, Layout.replicated(value.dim()), self.grid, broadcast=False)

    def _register(self, name: str, value: Any, *, persistent: bool) -> None:
        """Put a tensor where the original model has it, so that names and state dict keys are the same."""
        *path, leaf = name.split(".")
        owner: nn.Module = self
        for part in path:
            if part not in owner._modules:
                owner._modules[part] = nn.Module()
            child = owner._modules[part]
            assert child is not None
            owner = child
        if isinstance(value, nn.Parameter):
            owner._parameters[leaf] = value
        else:
            owner._buffers[leaf] = value
            if not persistent:
                owner._non_persistent_buffers_set.add(leaf)

    # --------------------------------------------------------------------------------------------------- calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own: plain tensors are global, the same on all ranks; DTensors are sharded already."""
        compiled = self._compile(self.training, args, kwargs)
        assert compiled is not None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        problem: Exception | None = None
        runnable: _Runnable | None = None
        local: list[Tensor] = []
        try:
            key, values = self._key(compiled, tensors)
        except DistfxError as error:
            problem, key = error, ("error", str(error))
        agree(self.grid, "inputs", str(key))
        if problem is not None:
            raise problem
        given = {spec.name: "local" for spec, t in zip(compiled.capture.inputs, tensors, strict=True) if self._is_local(compiled, spec.name, t)}
        runnable = self._runnable.get(key)
        if runnable is None:
            runnable = self._bind(compiled, values, given, tensors)
            self._runnable[key] = runnable
        self.__dict__["_last"] = runnable.plan
        for name, tensor in zip([s.name for s in compiled.capture.inputs], tensors, strict=True):
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local() if name in given else tensor.full_tensor()
            local.append(tensor)
        gradients = Gradients(self._current_tensors(), runnable.buckets)
        results = runnable.run(gradients, *local)
        return pytree.tree_unflatten(list(results), compiled.capture.out_spec)

    def _current_tensors(self) -> dict[str, DTensor]:
        """The DTensors as they are now: ``.to()`` and optimizers may have replaced them."""
        tensors: dict[str, DTensor] = self._tensors
        named = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers(remove_duplicate=False))
        return tensors | named  # type: ignore[operator,no-any-return]

    def _key(self, compiled: Compiled, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        inputs = compiled.capture.inputs
        values = match_inputs(inputs, [tuple(t.shape) for t in tensors], [t.dtype for t in tensors], compiled.capture.lower)
        samples = self.grid.axes.get("n", 1)
        for spec, tensor in zip(inputs, tensors, strict=True):
            if tensor.dim() and tensor.shape[0] < samples and compiled.decisions.usable:
                raise DistfxError(
                    f"input {spec.name} has a batch of {tensor.shape[0]}, smaller than the grid's axis n={samples}: "
                    "give a larger batch, or split space or channels instead of samples."
                )
        trainable = "".join("01"[p.requires_grad] for p in self.parameters())
        flags = tuple((t.requires_grad, isinstance(t, DTensor)) for t in tensors)
        shapes = tuple(tuple(t.shape) for t in tensors)
        return (self.training, torch.is_grad_enabled(), shapes, flags, trainable), values

    def _input_node(self, compiled: Compiled, name: str) -> Node:
        return next(n for n in compiled.module.graph.nodes if n.op == "placeholder" and n.name == name)

    def _input_layout(self, compiled: Compiled, name: str) -> Layout:
        """The layout in which an input is first used: the placeholder after its slices."""
        node = self._input_node(compiled, name)
        while len(node.users) == 1 and next(iter(node.users)).target is ops.slice:
            node = next(iter(node.users))
        return node.meta["layout"]  # type: ignore[no-any-return]

    def _is_local(self, compiled: Compiled, name: str, tensor: Tensor) -> bool:
        """Whether a DTensor input is split just as the plan has it."""
        if not isinstance(tensor, DTensor) or tensor.device_mesh != self.grid.mesh:
            return False
        layout = self._input_layout(compiled, name)
        local = layout.local_shape(tuple(tensor.shape), self.grid.placement())
        return tuple(tensor.to_local().shape) == tuple(local) and all(
            (placement.is_shard() and placement.dim == layout.dim_of(axis))  # type: ignore[attr-defined]
            or (placement.is_replicate() and layout.dim_of(axis) is None)
            for axis, placement in zip(self.grid.axes or {"n": 1}, tensor.placements, strict=True)
        )

    def _bind(self, compiled: Compiled, values: Any, given: Mapping[str, str], tensors: Sequence[Tensor]) -> _Runnable:
        bound = bind(compiled.module, values, self.grid, given)
        inputs = {spec.name: t.requires_grad for spec, t in zip(compiled.capture.inputs, tensors, strict=True)}
        current = self._current_tensors()
        trained = {name: t.requires_grad for name, t in current.items()}
        differentiable = grads(bound, inputs, trained)
        wanted = []
        for node in _in_order_of_use(bound.module):
            name = str(node.target)
            if trained.get(name) and name not in [w[0] for w in wanted]:
                axes = tuple(axis for axis in self.grid.axes if axis in node.meta["layout"].varying)
                local = current[name].to_local()
                wanted.append((name, axes, local.numel() * local.element_size(), local.dtype))
        buckets = make_buckets(wanted, self.grid)
        plan = _plan(compiled, bound, differentiable, buckets, {w[0]: w[2] for w in wanted}, self.grid)
        return _Runnable(link(bound.module, self.grid, buckets), buckets, plan)

    # ---------------------------------------------------------------------------------------------- inspection

    def _present(self) -> Compiled:
        compiled = self._compile(self.training)
        if compiled is None:
            raise DistfxError(
                "the model's input could not be inferred from its first layer, so its graph is made at the first call: "
                "call it once, or give example_inputs=(x,) to parallelize."
            )
        return compiled

    @property
    def graph_module(self) -> GraphModule:
        """The rewritten graph of the present mode, for every shape: ``node.meta["layout"]``, ``node.meta["shape"]``."""
        return self._present().module

    @property
    def passes(self) -> list[PassRecord]:
        """What each pass of the compiler did."""
        return self._present().passes

    def print_readable(self, print_output: bool = True) -> str:
        """Print the rewritten graph with layouts, algorithms and the source lines of the model; returns the text."""
        name = type(self._source).__name__
        text = readable(self.graph_module, f"{name} on {self.grid}, {'train' if self.training else 'eval'}:")
        if print_output:
            print(text)
        return text

    @property
    def plan(self) -> Plan:
        """The plan of the present mode: at the shape of the last call, or of the example before the first."""
        compiled = self._present()
        last = self._last
        if last is not None and last.training == self.training:
            return last  # type: ignore[no-any-return]
        bound = bind(compiled.module, dict(compiled.capture.hints), self.grid)
        return plan_of(compiled, bound, self.grid, {n: p.requires_grad for n, p in self.named_parameters()})

    def input_slices(self, index: int, shape: Sequence[int]) -> tuple[slice, ...]:
        """This rank's part of the ``index``-th input of global ``shape``: for h5py, zarr, numpy."""
        compiled = self._present()
        layout = self._input_layout(compiled, compiled.capture.inputs[index].name)
        return tuple(slice(int(lo), int(hi)) for lo, hi in layout.bounds(tuple(shape), self.grid.placement()))

    def output_slices(self, index: int, shape: Sequence[int]) -> tuple[slice, ...]:
        """This rank's part of the ``index``-th output of global ``shape``, as ``outputs="local"`` gives it."""
        output = self._present().module.graph.output_node().args[0][index]  # type: ignore[index,call-overload]
        bounds = output.meta["layout"].bounds(tuple(shape), self.grid.placement())
        return tuple(slice(int(lo), int(hi)) for lo, hi in bounds)

    # --------------------------------------------------------------------------------------------- state dicts

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict with whole plain tensors: what the original model loads. All ranks must call it."""
        self._present()
        return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in self.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load DTensors or whole plain tensors, under the original model's keys."""
        self._present()
        own = self.state_dict()
        ready: dict[str, Any] = {}
        for name, value in state_dict.items():
            mine = own.get(name)
            if isinstance(mine, DTensor) and isinstance(value, Tensor) and mine.shape == value.shape:
                if not isinstance(value, DTensor):
                    layout = self._stored_layout(name)
                    value = distribute(value.to(mine.dtype), layout, self.grid, broadcast=False)
                elif value.placements != mine.placements or value.device_mesh != mine.device_mesh:
                    whole = value.full_tensor().to(mine.dtype)
                    value = distribute(whole, self._stored_layout(name), self.grid, broadcast=False)
            ready[name] = value
        return super().load_state_dict(ready, strict=strict, assign=assign)

    def _stored_layout(self, name: str) -> Layout:
        stored: dict[str, Layout] = {}
        for compiled in reversed(list(self._compiled.values())):
            stored |= compiled.stored
        value = self._tensors[name]
        return stored.get(name) or Layout.replicated(value.dim())

    def extra_repr(self) -> str:
        return f"{type(self._source).__name__} on {self.grid}, outputs={self._outputs!r}"


def _in_order_of_use(module: GraphModule) -> list[Node]:
    """The parameter nodes of a graph, by the first call that uses each."""
    order: dict[Node, None] = {}
    for node in module.graph.nodes:
        for operand in node.all_input_nodes:
            if operand.op == "get_attr":
                order.setdefault(operand)
    return list(order)


def _fallback_text(compiled: Compiled) -> str:
    nodes = compiled.decisions.whole
    lines = [f"  {describe(node)}: {node.target}" for node in nodes]
    return (
        f"{len(nodes)} operator{'s have' if len(nodes) > 1 else ' has'} no rule that applies; inputs are gathered and "
        "every rank runs them whole (right, but neither faster nor smaller):\n" + "\n".join(lines)
    )


def plan_of(compiled: Compiled, bound: Bound, grid: Grid, trained: Mapping[str, bool]) -> Plan:
    """The plan of a bound graph, without running anything: inputs need no gradient."""
    differentiable = grads(bound, {}, trained)
    sizes: dict[str, int] = {}
    wanted = []
    for node in _in_order_of_use(bound.module):
        name = str(node.target)
        if trained.get(name) and name not in sizes:
            axes = tuple(axis for axis in grid.axes if axis in node.meta["layout"].varying)
            local = 1
            for extent in node.meta["local"]:
                local *= extent
            sizes[name] = local * node.meta["dtype"].itemsize
            wanted.append((name, axes, sizes[name], node.meta["dtype"]))
    buckets = make_buckets(wanted, grid.at(grid.rank))
    return _plan(compiled, bound, differentiable, buckets, sizes, grid)


def _plan(
    compiled: Compiled,
    bound: Bound,
    differentiable: Mapping[Node, bool],
    buckets: Sequence[Bucket],
    nbytes: Mapping[str, int],
    grid: Grid,
) -> Plan:
    counts = predict(bound, lambda n: differentiable[n], lambda n: n.meta["dtype"].itemsize, grid)
    moves: dict[str, list[str]] = {}
    rows = []
    for node in bound.module.graph.nodes:
        if "bound" in node.meta:
            moves.setdefault(str(node.meta["owner"]), []).append(str(node.meta["move"]))
    for node in compiled.module.graph.nodes:
        owns = node.name in counts or node.name in moves
        if node.op not in ("call_function", "placeholder") or "move" in node.meta or (node.op == "placeholder" and not owns):
            continue
        source = node.meta.get("source")
        forward, backward, sends, returns = counts.get(node.name, (0, 0, 0, 0))
        rows.append(
            PlanRow(
                node=node.name,
                op=getattr(node.target, "__name__", str(node.target)) if node.op == "call_function" else "input",
                algorithm=str(node.meta.get("algorithm") or ""),
                shape=tuple(str(s) for s in node.meta.get("shape") or ()),
                layout=str(node.meta["layout"]),
                moves=tuple(moves.get(node.name, ())),
                bytes_forward=forward,
                bytes_backward=backward,
                messages_forward=sends,
                messages_backward=returns,
                path=node.meta.get("path") or "",
                source=f"{source[0]}:{source[1]}" if source else "",
                whole=bool("decision" in node.meta and node.meta["decision"].whole),
            )
        )
    for bucket in buckets:
        ranks = bucket.segment.size
        total = sum(nbytes[name] for name in bucket.names)
        if ranks > 1:
            rows.append(
                PlanRow(
                    node=bucket.label,
                    op="all_reduce",
                    algorithm="segmented allreduce",
                    shape=(f"{len(bucket.names)} parameters",),
                    layout=f"over {','.join(bucket.segment.axes)}",
                    bytes_backward=allreduce_bytes(total, ranks),
                    messages_backward=allreduce_messages(ranks),
                )
            )
    sizes = tuple((str(symbol), value) for symbol, value in bound.values.items())
    return Plan(repr(grid), grid.rank, compiled.capture.training, sizes, tuple(rows))
