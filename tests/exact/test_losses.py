"""Losses: sums and counts are global for every sharding; ``with_loss`` keeps the model's output sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.captures import remembered
from support.exact import relative
from support.models import on
from support.ranks import run
from torch import Tensor, nn

import distfx

CLASSES = 5


class Segmenter(nn.Module):
    def __init__(self, out: int = CLASSES) -> None:
        super().__init__()
        self.features, self.classes = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(F.relu(self.features(x)))


def dice(y: Tensor, target: Tensor) -> Tensor:
    """The usual form: for each class over the whole batch and volume."""
    p = y.softmax(dim=1)
    t = F.one_hot(target.clamp(min=0), CLASSES).movedim(-1, 1).to(y.dtype)
    overlap, size = (p * t).sum(dim=(0, 2, 3)), (p + t).sum(dim=(0, 2, 3))
    return 1 - ((2 * overlap + 1e-5) / (size + 1e-5)).mean()


def dice_of_monai(y: Tensor, target: Tensor) -> Tensor:
    """Reduces over a list of dims that comes from ``torch.arange``."""
    p = y.softmax(dim=1)
    dims = torch.arange(2, y.dim()).tolist()
    overlap, size = torch.sum(p * target, dim=dims), torch.sum(p + target, dim=dims)
    return (1 - (2 * overlap + 1e-5) / (size + 1e-5)).mean()


def focal(y: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(y, target, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def barred(y: Tensor, target: Tensor) -> Tensor:
    """The first class has probability zero in the first row, where all targets are ignored."""
    first = (torch.arange(y.shape[1])[:, None, None] == 0) & (torch.arange(y.shape[2])[None, :, None] == 0)
    return F.cross_entropy(y.masked_fill(first, -torch.inf), target)


def below(*shape: int) -> Tensor:
    target = classes(*shape)
    target[:, 0] = -100
    return target


def classes(*shape: int) -> Tensor:
    target = torch.randint(0, CLASSES, shape)
    target[0, 0] = -100  # a row of one sample is ignored: ranks count differently
    target[-1, :, :2] = -100
    return target


def real(*shape: int) -> Tensor:
    return torch.randn(shape[0], CLASSES, *shape[1:], dtype=torch.float64)


def share(*shape: int) -> Tensor:
    return torch.rand(shape[0], CLASSES, *shape[1:], dtype=torch.float64)


def weights() -> Tensor:
    return torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)


LOSSES: dict[str, tuple[Any, Any]] = {
    "cross entropy": (lambda: nn.CrossEntropyLoss(), classes),
    "weighted": (lambda: nn.CrossEntropyLoss(weights()), classes),
    "weighted, ignoring 2": (
        lambda: nn.CrossEntropyLoss(weights(), ignore_index=2),
        lambda *s: classes(*s).clamp(min=0),
    ),
    "smoothed": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), classes),
    "weighted and smoothed": (lambda: nn.CrossEntropyLoss(weights(), label_smoothing=0.2), classes),
    "sum": (lambda: nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1), classes),
    "probabilities": (lambda: nn.CrossEntropyLoss(weights(), label_smoothing=0.1), share),
    "nll": (lambda: lambda y, t: F.nll_loss(y.log_softmax(1), t, weights()), classes),
    "mse": (lambda: nn.MSELoss(), real),
    "l1": (lambda: nn.L1Loss(), real),
    "smooth l1": (lambda: nn.SmoothL1Loss(beta=0.7), real),
    "huber": (lambda: nn.HuberLoss(delta=0.6, reduction="sum"), real),
    "bce": (lambda: lambda y, t: F.binary_cross_entropy(y.sigmoid(), t), share),
    "bce with logits": (
        lambda: lambda y, t: F.binary_cross_entropy_with_logits(y, t, pos_weight=weights()[:, None, None]),
        share,
    ),
    "kl": (lambda: lambda y, t: F.kl_div(y.log_softmax(1), t, reduction="batchmean"), share),
    "kl mean": (lambda: lambda y, t: F.kl_div(y.log_softmax(1), t.log(), log_target=True), share),
    "impossible where ignored": (lambda: barred, below),
    "dice": (lambda: dice, classes),
    "dice of MONAI": (lambda: dice_of_monai, share),
    "focal": (lambda: focal, classes),
    "mse to one": (lambda: lambda y, t: F.mse_loss(y, t.mean(dim=(2, 3), keepdim=True).expand_as(y)), real),
}


def compare(name: str, grid: str, shape: tuple[int, ...]) -> tuple[dict[str, float], int, list[str]]:
    torch.manual_seed(3)
    with remembered(name):
        return _compare(name, grid, shape)


def _compare(name: str, grid: str, shape: tuple[int, ...]) -> tuple[dict[str, float], int, list[str]]:
    make, draw = LOSSES[name]
    model = Segmenter().double()
    plain, criterion = copy.deepcopy(model), make()
    net = distfx.parallelize(distfx.with_loss(model, criterion), grid)
    errors: dict[str, float] = {}
    for step in range(2):
        x, target = torch.randn(shape[0], 3, *shape[1:], dtype=torch.float64), draw(*shape)
        for module in (net, plain):
            module.zero_grad()
        with distfx.record_comm() as ledger:
            have = net(x, target)
            have.backward()
        want = criterion(plain(x), target)
        want.backward()
        errors[f"{step} loss"] = relative(have, want)
        for key, parameter in plain.named_parameters():
            errors[f"{step} {key}"] = relative(net.get_parameter(key).grad.full_tensor(), parameter.grad)
        assert net.plan.bytes() == ledger.bytes()
    fallbacks = [row.node for row in net.plan.rows if row.fallback]
    return errors, ledger.bytes(), fallbacks


@pytest.mark.parametrize("name", LOSSES)
@on("c2h2", "n2h2")
def test_losses_are_global(world: int, grid: str, name: str) -> None:
    for errors, _, fallbacks in run(world, compare, name, grid, (4, 7, 6)):
        assert max(errors.values()) < 1e-10, errors
        assert not fallbacks or name == "dice"  # one_hot


def test_the_output_is_not_gathered() -> None:
    small = max(sent for _, sent, _ in run(2, compare, "cross entropy", "h2", (4, 8, 6)))
    large = max(sent for _, sent, _ in run(2, compare, "cross entropy", "h2", (4, 64, 6)))
    assert large == small  # halos and sums do not depend on the height


def names() -> tuple[list[str], list[str], int]:
    torch.manual_seed(0)
    model = Segmenter()
    joint = distfx.with_loss(model, nn.CrossEntropyLoss(torch.ones(CLASSES)), outputs=True)
    assert joint.features.weight is model.features.weight
    net = distfx.parallelize(joint, "h2")
    loss, y = net(torch.randn(2, 3, 8, 8), torch.randint(0, CLASSES, (2, 8, 8)))
    assert y.shape == (2, CLASSES, 8, 8) and loss.shape == ()
    return list(net.state_dict()), list(model.state_dict()), len(list(model.children()))


def test_parameters_keep_their_names_and_outputs_are_returned() -> None:
    for have, want, children in run(2, names):
        assert have == [*want, "criterion.weight"] and children == 2


def test_models_that_iterate_over_their_modules_and_copies() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    joint = distfx.with_loss(model, nn.MSELoss())
    x, target = torch.randn(2, 3, 4, 4), torch.randn(2, 4, 4, 4)
    twin = copy.deepcopy(joint)
    assert torch.equal(joint(x, target), nn.MSELoss()(model(x), target))
    with torch.no_grad():
        model[0].weight.zero_()
    assert not torch.equal(twin(x, target), joint(x, target))


def test_with_loss_rejects_models_that_it_cannot_join() -> None:
    with pytest.raises(distfx.DistfxError, match="takes a torch"):
        distfx.with_loss(Segmenter(), "mse")  # type: ignore[arg-type]
    model = Segmenter()
    model.criterion = nn.MSELoss()
    with pytest.raises(distfx.DistfxError, match="already has a module called 'criterion'"):
        distfx.with_loss(model, nn.MSELoss())
    with pytest.raises(distfx.DistfxError, match="the last positional argument"):
        distfx.with_loss(Segmenter(), nn.MSELoss())()


def median_loss(y: Tensor, target: Tensor) -> Tensor:
    return torch.quantile((y - target).square(), 0.5)


class Median(nn.Module):
    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return median_loss(y, target)


def strictly(criterion: Any) -> str:
    example = torch.randn(2, 3, 8, 8), torch.randn(2, CLASSES, 8, 8)
    with pytest.raises(distfx.DistfxError) as caught:
        distfx.parallelize(distfx.with_loss(Segmenter(), criterion), "h2", example_inputs=example, strict=True)
    return str(caught.value)


def test_a_loss_without_a_rule_is_named_after_the_users_code() -> None:
    of_function, of_module = (run(2, strictly, criterion)[0] for criterion in (median_loss, Median()))
    assert "quantile in the loss" in of_function and "loss.py:" not in of_function.replace("test_losses.py:", "")
    assert "quantile in criterion" in of_module and "test_losses.py:" in of_module


def labels(grid: str, shape: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    x, target = torch.randn(2, 3, *shape), torch.randint(0, CLASSES, (2, *shape))
    conv = nn.Conv2d if len(shape) == 2 else nn.Conv3d
    joint = distfx.with_loss(conv(3, CLASSES, 3, padding=1), nn.CrossEntropyLoss(torch.ones(CLASSES)))
    net = distfx.parallelize(joint, grid, example_inputs=(x, target))
    net(x, target)
    return net.input_slices(0, x.shape), net.input_slices(1, target.shape)


@pytest.mark.parametrize(("grid", "shape"), [("h2w2", (8, 6)), ("d2h2", (6, 8, 5)), ("n2w2", (6, 8, 5))])
def test_labels_are_sharded_like_the_image(grid: str, shape: tuple[int, ...]) -> None:
    for image, target in run(4, labels, grid, shape):
        assert target == (image[0], *image[2:])
