"""The exactness test: a distributed model against the same model in one process. Everything is compared.

``exact`` runs on a rank (see :mod:`support.ranks`). It builds the model from a seed, runs it distributed and plain, and
returns:

- the relative error of every output, input gradient, parameter gradient and entry of the state dict;
- the same after some steps of SGD, with the losses;
- the bytes and messages of the plan and of the ledger;
- the parameters without a gradient, or with a gradient of zeros, for tests that would otherwise compare nothing;
- on request, how much the plain model changes when the last bits of its input change. This tells models that magnify
  rounding from wrong results.

A shape is that of the model's one input, ``(2, 3, 8, 8)``, or a nested list of shapes as the model takes its arguments:
``[(2, 3, 8, 8), [(2, 4, 8, 8), (2, 4, 8, 8)]]`` for ``model(x, (h, c))``.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import distfx
from support.captures import remembered
from support.ranks import run

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def relative(have: Tensor, want: Tensor) -> float:
    """The norm of the difference, relative to the norm of ``want``, or to 1e-3 per element if that is larger.

    Some gradients are zero except for rounding, such as that of a bias before a batch norm.
    """
    assert have.shape == want.shape, f"shape {tuple(have.shape)} instead of {tuple(want.shape)}"
    have, want = have.detach(), want.detach()
    scale = max(float(want.double().norm()), 1e-3 * math.sqrt(max(1, want.numel())))
    difference = float((have.double() - want.double()).norm())
    return difference / scale if difference else 0.0


def exact(
    build: Callable[..., nn.Module], grid: str, shapes: Sequence[Sequence[Any]], **options: Any
) -> dict[str, Any]:
    """Compare for each of ``shapes`` in turn (one parallel module serves them all). See :func:`_exact`."""
    with remembered(build, repr(options.get("kwargs")), options.get("dtype")):
        return _exact(build, grid, shapes, **options)


def _exact(
    build: Callable[..., nn.Module],
    grid: str,
    shapes: Sequence[Sequence[Any]],
    *,
    strategy: Any = "auto",
    dtype: torch.dtype = torch.float64,
    train: bool = True,
    input_grad: bool = True,
    steps: int = 1,
    sgd: int = 0,
    example: bool = False,
    again: bool = False,
    kwargs: dict[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    sensitive: bool = False,
) -> dict[str, Any]:
    """Compare for each of ``shapes`` in turn (one parallel module serves them all), then train both for ``sgd`` steps.

    ``example``: give ``parallelize`` an input of the first shape. ``again``: let the first call plan again if the input
    was inferred. ``sensitive``: also measure how sensitive the plain model is to rounding. See the module's docstring.
    """
    torch.manual_seed(7)
    model = build(**(kwargs or {})).to(dtype)
    kept = set(model.state_dict())  # the others are not loaded into the plain model
    for buffer in (buffer for name, buffer in model.named_buffers() if name in kept):
        if buffer.dtype.is_floating_point:
            buffer.add_(torch.rand_like(buffer) - 0.5)  # not 0 and 1; of both signs, or every ReLU after it is dead
    model.train(train)
    plain = build(**(kwargs or {})).to(dtype).train(train)  # not all models can be deep-copied
    plain.load_state_dict(model.state_dict())
    start = copy.deepcopy(plain.state_dict())
    example_inputs = draw(shapes[0], dtype) if example else None
    place = distfx.Grid.parse(grid) if grid else distfx.Grid()
    net = distfx.parallelize(model, place, example_inputs=example_inputs, strategy=strategy)
    if not again:  # keep the plan for large images, so that parts may be smaller than halos, or empty
        net._engine.example_is_guessed = False
    errors: dict[str, float] = {}
    idle: set[str] = set()
    bytes_: list[tuple[int, int]] = []
    messages: list[tuple[int, int]] = []
    loss = loss or (
        lambda y: sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t)).sum() for t in _tensors(y))
    )
    for number, shape in enumerate(itertools.chain.from_iterable([shapes] * steps)):
        x = draw(shape, dtype)
        mine, theirs = (pytree.tree_map(lambda t: t.clone().requires_grad_(input_grad), x) for _ in range(2))
        for module in (net, plain):
            module.zero_grad()
        with distfx.record_comm() as ledger:
            have = net(*mine)
            loss(have).backward()
        want = want_output = plain(*theirs)
        loss(want).backward()
        bytes_.append((net.plan.bytes(), ledger.bytes()))
        messages.append((net.plan.messages(), ledger.messages()))
        errors |= _all_relative(f"{number} output", _tensors(have), _tensors(want))
        if input_grad:
            grads = ([t.grad for t in _tensors(inputs)] for inputs in (mine, theirs))
            errors |= _all_relative(f"{number} input gradient", *grads)
        expected = dict(plain.named_parameters())
        assert list(expected) == [name for name, _ in net.named_parameters()]
        for name, parameter in net.named_parameters():
            have, want = parameter.grad, expected[name].grad
            assert (have is None) == (want is None), f"gradient of {name}: {have} instead of {want}"
            if have is not None:
                errors[f"{number} gradient {name}"] = relative(have.full_tensor(), want)
            if want is None or not want.any():
                idle.add(name)
        errors |= _state_errors(f"{number} state", net, plain)
    answers: dict[str, float] = {}
    if sensitive:
        other = build(**(kwargs or {})).to(dtype).train(train)
        other.load_state_dict(start)
        nudged = pytree.tree_map(lambda t: (t * (1 + 2.0**-52 * torch.randn_like(t).sign())).requires_grad_(), x)
        y = other(*nudged)
        loss(y).backward()
        answers |= _all_relative("0 output", _tensors(y), _tensors(want_output))
        answers |= _all_relative("0 input gradient", *([t.grad for t in _tensors(i)] for i in (nudged, theirs)))
        for (name, p), q in zip(other.named_parameters(), plain.parameters(), strict=True):
            if p.grad is not None:
                answers[f"0 gradient {name}"] = relative(p.grad, q.grad)
        for name, value in other.state_dict().items():
            answers[f"0 state {name}"] = relative(value, plain.state_dict()[name])
    if sgd:
        losses = [train_steps(module, x, loss, sgd) for module in (net, plain)]
        for i, (a, b) in enumerate(zip(*losses, strict=True)):
            errors[f"sgd {i} loss"] = relative(a, b)
        errors |= _state_errors("sgd state", net, plain)
    return {
        "errors": errors,
        "sensitivity": answers,
        "bytes": bytes_,
        "messages": messages,
        "rows": net.plan.rows,
        "idle": idle,
        "sum": math.fsum(errors.values()),
    }


def draw(shape: Sequence[Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """Random arguments of a call: one tensor of ``shape``, or tensors of the nested shapes."""

    def tensor(sizes: Sequence[Any]) -> Any:
        if all(isinstance(size, int) for size in sizes):
            return torch.randn(*sizes, dtype=dtype)
        return tuple(tensor(each) for each in sizes)

    return (tensor(shape),) if all(isinstance(size, int) for size in shape) else tensor(shape)


def train_steps(module: nn.Module, x: tuple[Any, ...], loss: Callable[[Any], Tensor], steps: int) -> list[Tensor]:
    """The losses of ``steps`` steps of SGD, and the loss after them."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(loss(module(*x)))
        losses[-1].backward()
        optimizer.step()
    with torch.no_grad():
        return [*losses, loss(module(*x))]


def _state_errors(what: str, net: Any, plain: nn.Module) -> dict[str, float]:
    have, want = net.full_state_dict(), plain.state_dict()
    assert list(have) == list(want)
    return {f"{what} {name}": relative(value, want[name]) for name, value in have.items()}


def _all_relative(what: str, have: Sequence[Any], want: Sequence[Any]) -> dict[str, float]:
    return {f"{what} {i}": relative(a, b) for i, (a, b) in enumerate(zip(have, want, strict=True))}


def _tensors(value: Any) -> list[Tensor]:
    return list(pytree.tree_leaves(value))


def check(
    build: Callable[..., nn.Module],
    grid: str,
    shapes: Sequence[Sequence[Any]],
    *,
    bytes_equal: bool = True,
    **options: Any,
) -> list[dict[str, Any]]:
    """Run :func:`exact` on the ranks of ``grid``, and assert that everything is equal on every rank.

    ``bytes_equal=False``: the loss ignores an output. The plan cannot know that, so bytes are not compared.
    """
    results = run(ranks_of(grid), exact, build, grid, shapes, timeout=120, **options)
    limit = TOLERANCE[options.get("dtype", torch.float64)]
    for rank, result in enumerate(results):
        wrong = {name: error for name, error in result["errors"].items() if not error <= limit}
        assert not wrong, f"rank {rank} on grid {grid or '1'}: {wrong}"
        for predicted, counted in (*result["bytes"], *result["messages"]) if bytes_equal else ():
            assert predicted == counted, f"rank {rank}: the plan says {predicted}, the ledger {counted}"
    return results


def ranks_of(grid: str) -> int:
    """The number of ranks of a grid, from its text."""
    digits = "".join(ch if ch.isdigit() else " " for ch in grid).split()
    return math.prod(int(d) for d in digits)


def grids(ranks: int, axes: str = "nchw") -> Iterator[str]:
    """Every factorisation of ``ranks`` over ``axes``, as text.

    >>> list(grids(4, "nh"))
    ['h4', 'n2h2', 'n4']
    """

    def split(rest: int, names: str) -> Iterator[tuple[int, ...]]:
        if len(names) == 1:
            yield (rest,)
            return
        for size in (d for d in range(1, rest + 1) if rest % d == 0):
            for others in split(rest // size, names[1:]):
                yield (size, *others)

    for sizes in split(ranks, axes):
        yield "".join(f"{axis}{size}" for axis, size in zip(axes, sizes, strict=True) if size > 1)
