"""Programs that use or modify a model between calls: it works as with the plain model, or raises an error."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.exact import check, relative
from support.models import on, pair
from support.ranks import run, run_raises
from torch import Tensor, nn

import distfx


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classes = 5
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, self.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


def image(seed: int = 1) -> Tensor:
    return torch.randn(4, 3, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------ by type of layer


def by_type(grid: str) -> tuple[float, float, list[int], Any]:
    """Freeze norms and initialise layers by their type."""
    net, plain = pair(grid, Net)
    counts = []
    for module in (net, plain):
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval().requires_grad_(False)
        module.apply(lambda m: nn.init.constant_(m.weight, 0.1) if isinstance(m, nn.Conv2d | nn.Linear) else None)
        counts.append(sum(1 for m in module.modules() if isinstance(m, nn.Conv2d | nn.modules.batchnorm._BatchNorm)))
    before = net.full_state_dict()["norm.running_mean"].clone()
    error = relative(net(image()), plain(image()))
    change = relative(net.full_state_dict()["norm.running_mean"], before)
    return error, change, counts, (net.classes, net.fc.out_features, net.conv.padding, net.norm.eps, repr(net.conv))


@on("h2", "c2")
def test_layers_have_their_types(world: int, grid: str) -> None:
    for error, change, counts, attributes in run(world, by_type, grid):
        assert error < 1e-12 and change == 0 and counts == [2, 2]
        assert attributes == (5, 5, (1, 1), 1e-5, "Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))")


def set_head(net: Any) -> None:
    net.fc = nn.Linear(8, 2)


def set_forward(net: Any) -> None:
    net.norm.forward = lambda x: x


def delete(net: Any) -> None:
    del net.norm


def set_weight(net: Any) -> None:
    net.fc.weight = nn.Parameter(torch.zeros(5, 8))


def set_buffer(net: Any) -> None:
    net.norm.running_mean = torch.zeros(8)


def update_statistics(net: Any) -> None:
    torch.optim.swa_utils.update_bn([image()], net)


def save(net: Any) -> None:
    pickle.dumps(net)


def many_gradients(net: Any) -> None:
    torch.autograd.functional.jacobian(net.eval(), image(), vectorize=True)


def use_after_change(net: Any) -> None:
    loss = net(image()).sum()
    with torch.no_grad():
        net.fc.weight.mul_(2)
    loss.backward()


def use_after_step(net: Any) -> None:
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), [net(image()).sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
        optimizer.step()


def second_backward(net: Any) -> None:
    loss = net(image()).sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        net.fc.weight.mul_(2)
    loss.backward()


def apply_to_net(grid: str, action: Callable[[Any], None]) -> None:
    action(pair(grid, Net)[0])


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (set_head, "fc is an attribute of the model"),
        (set_forward, "norm.forward is an attribute"),
        (delete, "norm is an attribute"),
        (set_weight, "fc.weight is a DTensor"),
        (set_buffer, "norm.running_mean is a DTensor"),
        (update_statistics, "norm.momentum is an attribute"),
        (save, "full_state_dict"),
        (many_gradients, "compute one gradient after the other"),
        (use_after_change, "modified by an inplace operation"),
        (use_after_step, "modified by an inplace operation"),
        (second_backward, "modified by an inplace operation"),
    ],
)
@on("c2")
def test_actions_without_effect_raise(world: int, grid: str, action: Callable[[Any], None], words: str) -> None:
    for failure in run_raises(world, apply_to_net, grid, action):
        assert failure is not None and words in failure.message, failure


class Overridden(nn.Module):
    """Overrides methods of modules, which use attributes that the parts of a parallel module do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self._own = nn.Conv2d(3, 3, 3, padding=1), [1]

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        assert self._own
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> Any:
        assert self._own
        return super().train(mode)

    def _save_to_state_dict(self, *args: Any) -> None:
        assert self._own
        super()._save_to_state_dict(*args)


class WithOverridden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.none = Overridden(), nn.Sequential()
        self.all = nn.ModuleList([self.one, self.none, self.none, Overridden()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.all:
            x = layer(x)
        return x


def use_overridden(grid: str) -> tuple[float, bool, int, bool]:
    net, plain = pair(grid, WithOverridden)
    for module in (net, plain):
        module.eval().float().double()
    net.all.train()
    same = list(net.full_state_dict()) == list(plain.state_dict())
    return relative(net(image()), plain(image())), same, len(net.all), net.all[1] is net.none and net.all[0] is net.one


@on("h2", "c2")
def test_layers_that_override_methods(world: int, grid: str) -> None:
    for error, same, count, shared in run(world, use_overridden, grid):
        assert error < 1e-6 and same and count == 4 and shared


# ---------------------------------------------------------------------------------------- before the first call


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.labels, self.head = nn.Conv2d(3, 8, 3), nn.Embedding(5, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)) + self.labels(label))


def too_early(what: str) -> None:
    net = distfx.parallelize(Conditioned(), "h2")
    {
        "freeze": lambda: net.body.requires_grad_(False),
        "parameters": lambda: list(net.head.parameters()),
        "convert": lambda: net.labels.to(torch.float64),
        "state": lambda: net.body.state_dict(),
    }[what]()


@pytest.mark.parametrize("what", ["freeze", "parameters", "convert", "state"])
def test_parts_have_no_parameters_before_the_first_call(what: str) -> None:
    for failure in run_raises(2, too_early, what):
        assert failure is not None and "example_inputs=(x,)" in failure.message


# ------------------------------------------------------------------------------------------------ order of calls


def call_in_other_order(kind: str) -> None:
    net, _ = pair("h2", Net)
    other = copy.deepcopy(net) if kind == "copy" else pair("h2", Net)[0]
    if kind == "copies" and dist.get_rank() == 0:
        copy.deepcopy(net)  # as programs do on rank 0 to keep the best model
    for module in (net, other):
        module(image())
    for module in (net, other) if dist.get_rank() == 0 or kind == "copies" else (other, net):
        module(image())


@pytest.mark.parametrize("kind", ["copy", "two"])
def test_ranks_that_call_modules_in_another_order(kind: str) -> None:
    for failure in run_raises(2, call_in_other_order, kind):
        assert failure is not None and "parallel module" in failure.message and "rank 1:" in failure.message


def test_one_rank_may_copy_a_module() -> None:
    run(2, call_in_other_order, "copies")


def call_with_different_data() -> list[str]:
    net, _ = pair("n2", Net)
    net(image())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            net.eval()(image(dist.get_rank()))
    return [str(w.message) for w in caught]


def test_ranks_with_different_data() -> None:
    """A habit from data parallelism. In distfx a plain tensor is the whole batch."""
    messages, others = run(2, call_with_different_data)
    (message,) = messages
    assert "a plain tensor is the global one" in message
    assert others == []


# ------------------------------------------------------------------------------------------------ state of models


class Extremes(nn.Module):
    """Two buffers that are not persistent, start with equal values, and are updated."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        for name in ("most", "least"):
            self.register_buffer(name, torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        with torch.no_grad():
            self.most.copy_(torch.maximum(self.most, x.amax((0, 2, 3))))
            self.least.add_(x.amin((0, 2, 3)))
        return x + self.most.view(1, -1, 1, 1) * self.least.view(1, -1, 1, 1)


@on("h2", "c2", "n2")
def test_buffers_that_are_not_persistent(world: int, grid: str) -> None:
    check(Extremes, grid, [(4, 3, 8, 6), (2, 3, 6, 6)], steps=2)


def set_between(grid: str) -> tuple[float, float, bool]:
    net, plain = pair(grid, Extremes)
    for module in (net, plain):
        module(image())
        module.most.fill_(0.5)
    first = relative(net(image(2)), plain(image(2)))
    kept = relative(net.least.full_tensor(), plain.least)
    for module in (net, plain):
        module.float()
    return first, kept, net(image().float()).dtype == torch.float32


@on("h2", "c2")
def test_buffers_that_are_not_persistent_belong_to_the_module(world: int, grid: str) -> None:
    for first, kept, single in run(world, set_between, grid):
        assert first < 1e-12 and kept < 1e-12 and single


class PlainState(nn.Module):
    """Keeps state in attributes that are not buffers: sets, writes into, or extends them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.kind = nn.Conv2d(3, 8, 3, padding=1), kind
        self.h: Any = {"set": None, "reset": torch.zeros(1, 8, 1, 1), "write": torch.zeros(1)}.get(kind, [])
        with torch.inference_mode():
            self.scale = torch.ones(1)
        self.names = set(range(0, 3000, 7))
        for name in range(0, 2900, 7):  # a copy of the remaining set may have another order
            self.names.discard(name)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.kind == "write":
            y = y * self.h.add_(1)
        elif self.kind == "grow":
            self.h.append(1)
        elif self.kind == "new":
            self.features = y.detach()
        else:
            y = y if self.h is None else y + self.h
            self.h = y.detach().mean((0, 2, 3), keepdim=True)
        return y


def call_with_plain_state(kind: str) -> tuple[list[str], str, bool]:
    model, error = PlainState(kind), ""
    before = copy.deepcopy(vars(model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            distfx.parallelize(model, "h2")(image().float())
        except distfx.DistfxError as problem:
            error = str(problem)
    same = (
        model.h is None if kind == "set" else bool(torch.equal(torch.as_tensor(model.h), torch.as_tensor(before["h"])))
    )
    return [str(w.message) for w in caught], error, same and set(vars(model)) == set(before)


@pytest.mark.parametrize("kind", ["set", "reset", "write", "grow", "new"])
def test_state_in_plain_attributes(kind: str) -> None:
    (messages, error, same), (_, other, _) = run(2, call_with_plain_state, kind)
    assert same, "the model was modified"
    if kind == "write":
        assert "not a buffer" in error and "register_buffer" in error and error == other
    else:
        name = "features" if kind == "new" else "h"
        assert not error and len(messages) == 1 and f"forward modifies {name} of the model" in messages[0]


def unsupported(kind: str) -> None:
    layers = {"lazy": nn.LazyConv2d(4, 3), "sync": nn.SyncBatchNorm(3)}
    distfx.parallelize(nn.Sequential(nn.Conv2d(3, 3, 3), layers[kind]), "h2", example_inputs=torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize(
    ("kind", "words"), [("lazy", "1 (LazyConv2d) has parameters whose shape"), ("sync", "before convert_sync")]
)
def test_layers_without_final_parameters_or_ranks(kind: str, words: str) -> None:
    for failure in run_raises(2, unsupported, kind):
        assert failure is not None and words in failure.message


class Constants(nn.Module):
    """Each mode multiplies by another constant tensor of the same dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * (torch.tensor([2.0]) if self.training else torch.tensor([5.0]))


def copies_with_constants() -> float:
    torch.manual_seed(0)
    model = Constants()
    net = distfx.parallelize(model, "h2")
    average = copy.deepcopy(net)
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    calls = ((net, True), (average, False), (net, False), (average, True))
    return max(relative(module.train(mode)(x), model.train(mode)(x)) for module, mode in calls)


def test_a_copy_and_the_original_have_their_own_constants() -> None:
    assert max(run(2, copies_with_constants)) < 1e-6
