"""Convolutions: every geometry, and cases that are known to be difficult for distributed convolutions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.exact import check, relative
from support.models import ALGORITHMS, Block, beside, cases, layers, on, same, stack
from support.ranks import run
from torch import Tensor, nn

import distfx

# ------------------------------------------------------------------------------------------------- geometry


GEOMETRIES = [
    "Conv2d(3, 4, 7, 2, 3)",  # the stem of a ResNet
    "Conv2d(3, 4, 7, 2, 3, bias=False)",
    "Conv2d(3, 4, 11, 4, 2)",  # the stem of an AlexNet
    "Conv2d(3, 4, 4, 4)",  # the stem of a vision transformer
    "Conv2d(3, 4, 2)",
    "Conv2d(3, 4, 4, padding=1)",
    "Conv2d(3, 4, 4, 2, 1)",
    "Conv2d(3, 4, 6, 3, 2)",
    "Conv2d(3, 4, 2, padding='same')",
    "Conv2d(3, 4, 4, padding='same')",
    "Conv2d(3, 4, (4, 3), dilation=(3, 2), padding='same')",
    "Conv2d(3, 4, 3, padding='valid')",
    "Conv2d(3, 4, 5)",
    "Conv2d(3, 4, 3, padding=2, dilation=2)",
    "Conv2d(3, 4, 3, 2, 3, dilation=3)",
    "Conv2d(3, 4, 3, padding=3)",  # more padding than the kernel reaches: the border is bias only
    "Conv2d(3, 4, (1, 5), (1, 2), (0, 2))",
    "Conv2d(3, 4, 1, 2)",
    "Conv2d(3, 4, 1, 3, padding=1)",
    "Conv2d(3, 4, 2, 3)",  # a stride that skips rows
]


@on("h2w2", "h3")
def test_geometry(world: int, grid: str) -> None:
    beside(grid, (2, 3, 15, 14), [(layer,) for layer in GEOMETRIES])


@cases(
    "grid extent layer",
    [
        ("h2", 15, "Conv2d(2, 3, 3, 2, 1)"),
        ("h2", 15, "Conv2d(2, 3, 2, 2)"),
        ("h4", 15, "Conv2d(2, 3, 3, 2, 1)"),
        ("h3", 10, "Conv2d(2, 3, 5, 3, 2)"),
        ("h4", 4, "Conv2d(2, 3, 7, padding=3)"),
        ("h4", 5, "Conv2d(2, 3, 7, padding=3)"),
        ("h4", 5, "Conv2d(2, 3, 5, padding=4, dilation=2)"),
        ("h2", 7, "Conv2d(2, 3, (7, 3))"),  # one row of output, so one rank has none
        ("h4", 8, "Conv2d(2, 3, (7, 3))"),
        ("h4", 3, "Conv2d(2, 3, 3, padding=1)"),  # fewer rows than ranks
        ("h8", 3, "Conv2d(2, 3, 3, padding=1)"),
        ("h4", 1, "Conv2d(2, 3, 3, padding=1)"),
        ("h8", 9, "Conv2d(2, 3, 3, 4, 1)"),
        ("h3", 2, "ConvTranspose2d(2, 3, 2, 2)"),
        ("h4", 2, "ConvTranspose2d(2, 3, 7, 2, 3)"),
    ],
)
def test_halo_against_shard(world: int, grid: str, extent: int, layer: str) -> None:
    """Uneven shards, halos wider than the neighbour's shard, empty shards."""
    same(grid, (2, 2, extent, 6), layer)


@cases(
    "grid layer",
    [
        (grid, f"Conv2d({inside}, {outside}, 3, padding=1)")
        for grid in ("c2", "c3", "c4")
        for inside, outside in ((3, 7), (7, 11), (11, 3), (1, 4))
    ],
)
@pytest.mark.parametrize("strategy", ("auto", *ALGORITHMS))
def test_uneven_channels(world: int, grid: str, layer: str, strategy: str) -> None:
    same(grid, (2, int(layer[7:].split(",")[0]), 4, 5), layer, "Tanh()", strategy=strategy)


@cases(
    "grid channels layer",
    [
        ("c2", 8, "Conv2d(8, 4, 3, padding=1, groups=4)"),
        ("c2", 6, "Conv2d(6, 6, 3, padding=1, groups=3)"),
        ("c2", 6, "Conv2d(6, 12, 3, padding=1, groups=2)"),
        ("c3", 6, "Conv2d(6, 4, 3, padding=1, groups=2)"),
        ("c4", 6, "Conv2d(6, 4, 3, padding=1, groups=2)"),
        ("c4", 8, "Conv2d(8, 8, 3, padding=1, groups=2)"),
        ("c2", 6, "Conv2d(6, 6, 3, padding=1, groups=6)"),
        ("c2", 5, "Conv2d(5, 10, 3, padding=1, groups=5)"),
        ("c3", 5, "Conv2d(5, 10, 3, padding=1, groups=5)"),
        ("c4", 5, "Conv2d(5, 10, 3, padding=1, groups=5)"),
        ("c4", 5, "Conv2d(5, 5, 3, 2, 1, groups=5)"),
        ("c2h2", 6, "Conv2d(6, 6, 3, 2, 1, groups=3)"),
        ("n2c2", 6, "Conv2d(6, 12, 5, padding=2, groups=6)"),
        ("c2", 6, "ConvTranspose2d(6, 4, 3, 2, groups=2)"),
        ("c2", 6, "ConvTranspose2d(6, 9, 3, 2, groups=3)"),
        ("c4", 5, "ConvTranspose2d(5, 10, 2, 2, groups=5)"),
    ],
)
@pytest.mark.parametrize("around", (False, True), ids=("alone", "between"))
def test_groups(world: int, grid: str, channels: int, layer: str, around: bool) -> None:
    """Groups that the axis divides or does not divide, fewer groups than ranks, depthwise; alone or between layers."""
    if around:
        outside = eval(layer, vars(nn)).out_channels
        same(grid, (2, 3, 6, 5), f"Conv2d(3, {channels}, 1)", "Tanh()", layer, "Tanh()", f"Conv2d({outside}, 4, 1)")
    else:
        same(grid, (2, channels, 6, 5), layer)


@pytest.mark.parametrize("mode", ("circular", "reflect", "replicate"))
@cases(
    "grid shape layer",
    [
        ("h2", (2, 3, 8, 7), "Conv2d(3, 4, 3, padding=1, padding_mode={})"),
        ("h2w2", (2, 3, 9, 7), "Conv2d(3, 4, 5, 2, 2, padding_mode={})"),
        ("w3", (2, 3, 9, 7), "Conv2d(3, 4, (3, 7), padding=(1, 3), padding_mode={})"),
        ("h4", (1, 2, 5, 5), "Conv2d(2, 2, 7, padding=3, padding_mode={})"),
        ("h4", (1, 2, 3, 5), "Conv2d(2, 2, 5, padding=2, padding_mode={})"),
        ("c2h2", (2, 3, 8, 6), "Conv2d(3, 4, 3, padding=1, padding_mode={})"),
        ("n2c2", (2, 3, 8, 6), "Conv2d(3, 4, 3, padding=1, padding_mode={})"),
        ("w2", (2, 3, 11), "Conv1d(3, 4, 4, padding='same', padding_mode={})"),
        ("d2", (1, 2, 4, 4, 5), "Conv3d(2, 3, 3, padding=1, padding_mode={})"),
        ("d2w2", (1, 2, 4, 4, 5), "Conv3d(2, 3, 3, 2, padding=1, padding_mode={})"),
    ],
)
def test_padding_modes(world: int, grid: str, shape: tuple[int, ...], layer: str, mode: str) -> None:
    same(grid, shape, layer.format(repr(mode)))


TRANSPOSED = [
    *(f"ConvTranspose2d(3, 4, {k}, {s}, {p})" for k in (2, 3, 4) for s in (1, 2, 3) for p in (0, 1)),
    "ConvTranspose2d(3, 4, 3, 2, 1, output_padding=1)",
    "ConvTranspose2d(3, 4, 4, 3, 1, output_padding=2)",
    "ConvTranspose2d(3, 4, 1, 3, output_padding=(2, 1))",
    "ConvTranspose2d(3, 4, 2, 4, output_padding=3)",
    "ConvTranspose2d(3, 4, 3, 2, 2, dilation=2)",
    "ConvTranspose2d(3, 4, 3, 2, dilation=3, bias=False, output_padding=2)",
    "ConvTranspose2d(3, 4, (3, 5), (2, 1), (1, 2))",
]


@on("h2w2", "h3")
def test_transposed(world: int, grid: str) -> None:
    beside(grid, (1, 3, 5, 6), [(layer,) for layer in TRANSPOSED])


@pytest.mark.parametrize("strategy", ("auto", *ALGORITHMS))
@cases(
    "grid shape layer",
    [
        ("c2", (2, 3, 4, 5), "ConvTranspose2d(3, 5, 3, 2, 1, output_padding=1)"),
        ("c4", (2, 6, 4, 5), "ConvTranspose2d(6, 5, 4, 2, 1)"),
        ("c2h2", (2, 4, 4, 5), "ConvTranspose2d(4, 3, 3, 2)"),
        ("n2c2w2", (2, 3, 4, 5), "ConvTranspose2d(3, 4, 2, 2)"),
        ("c2d2", (1, 3, 3, 4, 2), "ConvTranspose3d(3, 2, 3, 2)"),
        ("c2w2", (2, 3, 7), "ConvTranspose1d(3, 2, 4, 3)"),
    ],
)
def test_transposed_channels(world: int, grid: str, shape: tuple[int, ...], layer: str, strategy: str) -> None:
    same(grid, shape, layer, strategy=strategy)


@pytest.mark.parametrize("strategy", ("auto", *ALGORITHMS))
@on("c2h2", "n2c2")
def test_two_convolutions_share_an_input(world: int, grid: str, strategy: str) -> None:
    """The kernels have different sizes, so they need different halos."""
    same(grid, (2, 3, 9, 8), "both('Conv2d(3, 4, 3, padding=1)', 'Conv2d(3, 4, 7, padding=3)')", strategy=strategy)


@on("n2h2", "c2h2", "h2w2")
def test_strided_shortcut(world: int, grid: str) -> None:
    check(Block, grid, [(2, 4, 9, 8)], kwargs={"inside": 4, "outside": 6})


@on("c2h2", "n2c2")
def test_shared_halo_is_sent_once(world: int, grid: str) -> None:
    """Two convolutions of equal geometry on one input share what is gathered or exchanged."""
    conv = "Conv2d(4, 4, 3, padding=1)"
    one = same(grid, (2, 4, 8, 8), "Conv2d(4, 4, 1)", "Tanh()", conv, "Tanh()", strategy="stationary-y")
    twice = f"both({conv!r}, {conv!r})"
    two = same(grid, (2, 4, 8, 8), "Conv2d(4, 4, 1)", "Tanh()", twice, "Tanh()", strategy="stationary-y")

    def forward(results: list[dict[str, Any]]) -> int:
        return sum(row.bytes_forward for row in results[0]["rows"] if row.path.startswith("2"))

    assert forward(two) == forward(one) > 0


# ------------------------------------------------- difficult cases, named after the systems that document them


@on("h2", "w2", "h2w2")
def test_dtensor_input_split_over_h_or_w(world: int, grid: str) -> None:
    same(grid, (2, 3, 8, 8), "Conv2d(3, 4, 3, padding=1)")


@on("c2", "c4")
def test_dtensor_filters_split(world: int, grid: str) -> None:
    same(grid, (2, 3, 8, 8), "Conv2d(3, 8, 3, padding=1)", strategy="stationary-y")


@on("w2", "w4")
def test_dtensor_halo_input_gradient(world: int, grid: str) -> None:
    same(grid, (1, 3, 8, 8), "Conv2d(3, 4, 5, padding=2)", "Conv2d(4, 4, 3, padding=1)")


@on("n2", "n4")
def test_dtensor_strided_padded_stem_with_samples_split(world: int, grid: str) -> None:
    same(grid, (4, 3, 16, 16), "Conv2d(3, 4, 7, 2, 3)")


@on("h2", "h2w2", "h3")
def test_lbann_distconv_max_pool_3_2_1(world: int, grid: str) -> None:
    same(grid, (2, 3, 15, 16), "Conv2d(3, 4, 3, padding=1)", "MaxPool2d(3, 2, 1)")


@pytest.mark.parametrize("include", (True, False))
@pytest.mark.parametrize("ceil", (True, False))
@cases("grid pool", [("h2", "3, 1, 1"), ("h2w2", "3, 1, 1"), ("h2", "3, 2, 1"), ("h3", "4, 3, 2")])
def test_lbann_distconv_avg_pool_3_1_1(world: int, grid: str, pool: str, ceil: bool, include: bool) -> None:
    pool = f"AvgPool2d({pool}, ceil_mode={ceil}, count_include_pad={include})"
    same(grid, (2, 3, 15, 16), "Conv2d(3, 4, 3, padding=1)", pool)


OVER_WHOLE_DIMS = {
    "bilinear": "Upsample(scale_factor=2, mode='bilinear')",
    "aligned": "Upsample(scale_factor=2, mode='bilinear', align_corners=True)",
    "nearest": "Upsample(scale_factor=2)",
    "group_norm": "GroupNorm(2, 4)",
    "instance_norm": "InstanceNorm2d(4, affine=True)",
    "layer_norm": "LayerNorm((4, 8, 6))",
    "softmax_over_h": "Softmax(2)",
    "softmax_over_channels": "Softmax(1)",
    "adaptive": "AdaptiveAvgPool2d((3, 2))",
    "adaptive_max": "AdaptiveMaxPool2d(2)",
}


@pytest.mark.parametrize("what", OVER_WHOLE_DIMS)
@on("h2", "c2h2")
def test_lbann_distconv_operators_over_whole_dims(world: int, grid: str, what: str) -> None:
    """Bilinear upsampling, group and instance norm, softmax over H: right, by a rule or by a fallback."""
    same(
        grid,
        (2, 3, 8, 6),
        "Conv2d(3, 4, 3, padding=1, bias=False)",
        OVER_WHOLE_DIMS[what],
        "Conv2d(4, 3, 3, padding=1)",
    )


@on("h2", "n2h2", "h2w2")
def test_lbann_distconv_batch_norm_in_training(world: int, grid: str) -> None:
    same(grid, (3, 3, 7, 6), "Conv2d(3, 4, 3, padding=1, bias=False)", "BatchNorm2d(4)")


@on("h2", "h2w2", "c2h2", "h3")
def test_lbann_distconv_global_average_pool(world: int, grid: str) -> None:
    same(grid, (2, 3, 7, 6), "Conv2d(3, 4, 3, padding=1)", "AdaptiveAvgPool2d(1)", "Flatten()", "Linear(4, 3)")


@on("h2", "h2w2", "w3")
def test_lbann_distconv_conv_transpose_k3(world: int, grid: str) -> None:
    same(grid, (2, 3, 7, 6), "ConvTranspose2d(3, 4, 3, 2, 1)", "ConvTranspose2d(4, 2, 3)")


@on("h2", "h4")
def test_lbann_distconv_dilation(world: int, grid: str) -> None:
    same(grid, (2, 3, 12, 6), "Conv2d(3, 4, 3, padding=4, dilation=4)", "Conv2d(4, 2, 3, dilation=2)")


@on("h2", "h2w2")
def test_lbann_distconv_valid_padding(world: int, grid: str) -> None:
    same(grid, (2, 3, 12, 10), "Conv2d(3, 4, 3)", "Conv2d(4, 4, 3)", "Conv2d(4, 4, 3)")


@on("h2", "h2w2")
def test_lbann_distconv_k4_s2_p1(world: int, grid: str) -> None:
    same(grid, (2, 3, 16, 16), "Conv2d(3, 4, 4, 2, 1)", "LeakyReLU(0.2)", "Conv2d(4, 6, 4, 2, 1)")


@on("h2", "h2w2")
def test_lbann_distconv_reflect_padding(world: int, grid: str) -> None:
    conv = "Conv2d(4, 2, 3, padding=1, padding_mode='reflect')"
    same(grid, (2, 3, 9, 8), "ReflectionPad2d(3)", "Conv2d(3, 4, 7)", conv)


@on("h2", "c2", "c2h2", "w3")
def test_lbann_distconv_flatten_to_linear(world: int, grid: str) -> None:
    same(grid, (2, 3, 32, 32), "Conv2d(3, 4, 3, 4, 1)", "Flatten()", "Linear(256, 5)")


@on("h4", "h8")
def test_lbann_distconv_halo_wider_than_shard(world: int, grid: str) -> None:
    same(grid, (1, 2, 8, 4), "Conv2d(2, 3, 7, padding=3)", "Conv2d(3, 2, 7, padding=3)")


@on("h2", "w2")
def test_lbann_distconv_two_convs_share_an_input(world: int, grid: str) -> None:
    same(grid, (2, 3, 8, 8), "both('Conv2d(3, 4, 3, padding=1)', 'Conv2d(3, 4, 3, padding=1)')")


@on("h2")
def test_lbann_distconv_h15_over_2_with_stride_2(world: int, grid: str) -> None:
    """An uneven split with stride 2: no rank may raise while another waits."""
    same(grid, (2, 3, 15, 15), "Conv2d(3, 4, 3, 2, 1)", "Conv2d(4, 4, 3, 2, 1)")


def channels_last_model() -> nn.Module:
    """A network whose weights are stored channels last."""
    texts = ("Conv2d(3, 4, 3, 2, 1, bias=False)", "BatchNorm2d(4)", "ReLU()", "MaxPool2d(3, 2, 1)", "Conv2d(4, 6, 3)")
    return stack(*texts).to(memory_format=torch.channels_last)


def channels_last_input(grid: str, model_too: bool) -> dict[str, float]:
    """The errors of a distributed model with a channels_last input."""
    torch.manual_seed(3)
    model = channels_last_model().double()
    if not model_too:
        model.to(memory_format=torch.contiguous_format)
    x = torch.randn(2, 3, 17, 16, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    net = distfx.parallelize(model, grid)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    have, want = net(mine), model(theirs)
    have.square().sum().backward()
    want.square().sum().backward()
    expected = dict(model.named_parameters())
    return {
        "output": relative(have, want),
        "input gradient": relative(mine.grad, theirs.grad),
        **{name: relative(p.grad.full_tensor(), expected[name].grad) for name, p in net.named_parameters()},
    }


@on("n2", "c2", "h2", "c2h2", "h2w2")
def test_lbann_distconv_channels_last_model(world: int, grid: str) -> None:
    check(channels_last_model, grid, [(2, 3, 17, 16)])


@pytest.mark.parametrize("model_too", (True, False), ids=("model_too", "input_only"))
@on("n2", "c2", "h2", "c2h2", "h2w2")
def test_lbann_distconv_channels_last_input(world: int, grid: str, model_too: bool) -> None:
    for errors in run(world, channels_last_input, grid, model_too):
        assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("strategy", ALGORITHMS)
@on("c2", "c2h2")
def test_lbann_dihydrogen_filters_in_the_framework(world: int, grid: str, strategy: str) -> None:
    texts = ("Conv2d(3, 8, 3, padding=1, bias=False)", "BatchNorm2d(8)", "ReLU()", "Conv2d(8, 4, 3, 2, 1)")
    same(grid, (2, 3, 8, 8), *texts, strategy=strategy)


@on("h2", "c2", "c2h2")
def test_lbann_dihydrogen_even_kernels_strides_groups(world: int, grid: str) -> None:
    same(grid, (2, 4, 14, 12), "Conv2d(4, 6, 4, 3)", "Conv2d(6, 6, 2, padding=1, groups=2)", "Conv2d(6, 4, 5, 2, 1)")


class Spectrum(nn.Module):
    """A Fourier transform, which has no rule."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(x).abs()


def warnings_and_fallbacks(grid: str) -> tuple[list[str], list[str]]:
    """For a layer without a rule: the warnings, and the paths of the plan's rows that are marked."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Spectrum())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = distfx.parallelize(model, grid)
        net(torch.randn(2, 3, 8, 8))
    messages = [str(w.message) for w in caught if issubclass(w.category, distfx.FallbackWarning)]
    return messages, [row.path for row in net.plan.rows if row.fallback]


@on("h2")
def test_lbann_dihydrogen_never_silent(world: int, grid: str) -> None:
    """A layer without a rule is named in one warning, and marked in the plan of every rank."""
    results = run(world, warnings_and_fallbacks, grid)
    assert [len(messages) for messages, _ in results] == [1, 0]
    assert "fft" in results[0][0][0]
    assert [paths for _, paths in results] == [["1"], ["1"]]


@cases("grid batch", [("h2", 3), ("h2w2", 2), ("n2h2", 4)])
def test_physicsnemo_batch_larger_than_one(world: int, grid: str, batch: int) -> None:
    same(grid, (batch, 3, 9, 8), "Conv2d(3, 4, 3, padding=1)")


@pytest.mark.parametrize("extent", (8, 9, 10, 11, 12, 13))
@on("h2", "h3")
def test_physicsnemo_strided_odd_kernels_of_any_size(world: int, grid: str, extent: int) -> None:
    same(grid, (1, 2, extent, 4), "Conv2d(2, 3, 3, 2, 1)", "Conv2d(3, 2, 5, 3, 2)")


@on("h2", "h2w2")
def test_physicsnemo_pooling_with_overlap(world: int, grid: str) -> None:
    same(grid, (2, 3, 13, 12), "Conv2d(3, 4, 1)", "MaxPool2d(3, 2)", "AvgPool2d(3, 1)")


@on("h2", "w3")
def test_physicsnemo_batch_norm(world: int, grid: str) -> None:
    same(grid, (1, 3, 7, 9), "Conv2d(3, 4, 1, bias=False)", "BatchNorm2d(4)", "ReLU()", "Conv2d(4, 2, 3)")


@cases("grid layer", [("c2", "Conv2d(4, 8, 3, padding=1, groups=2)"), ("c4", "Conv2d(4, 4, 3, padding=1, groups=4)")])
def test_gspmd_grouped_convolution_is_not_gathered(world: int, grid: str, layer: str) -> None:
    """Nothing is sent if the previous layer leaves the channels of a group on one rank."""
    results = same(grid, (2, 3, 6, 6), "Conv2d(3, 4, 1)", layer, "Tanh()", strategy={"0": "stationary-y"})
    (row,) = (row for row in results[0]["rows"] if row.path == "1")
    assert row.algorithm == "groups" and not row.moves and row.bytes_forward == row.bytes_backward == 0


@on("h2", "h4")
def test_gspmd_base_dilation_is_not_gathered(world: int, grid: str) -> None:
    """A transposed convolution (base dilation) exchanges a halo of one row only."""
    results = same(grid, (1, 2, 8, 4), "ConvTranspose2d(2, 3, 3, 2, 1)", "Tanh()")
    for result in results:
        (row,) = (row for row in result["rows"] if row.path == "0")
        assert row.bytes_forward <= 2 * 4 * 8 and all(move.startswith("halo") for move in row.moves)


@on("n2c2", "n2h2", "n2c2h2")
def test_distdl_samples_split_too(world: int, grid: str) -> None:
    same(grid, (4, 3, 8, 8), "Conv2d(3, 4, 3, padding=1)", "Conv2d(4, 3, 3, 2, 1)")


@on("h4", "w6")
def test_distdl_halo_beyond_the_neighbour(world: int, grid: str) -> None:
    same(grid, (1, 2, 6, 6), "Conv2d(2, 3, 7, padding=3)", "Conv2d(3, 2, 5, padding=2)")


@on("h2", "c2", "c2h2")
def test_distdl_transposed(world: int, grid: str) -> None:
    same(grid, (1, 4, 4, 4), "ConvTranspose2d(4, 3, 2, 2)", "Tanh()", "ConvTranspose2d(3, 4, 4, 2, 1)")


@on("h2", "c2h2")
def test_distdl_adaptive_pooling_and_group_norm(world: int, grid: str) -> None:
    same(grid, (2, 3, 7, 8), "Conv2d(3, 4, 3)", "GroupNorm(2, 4)", "AdaptiveAvgPool2d((2, 3))", "Conv2d(4, 2, 1)")


@on("h2", "w3", "h2w2")
def test_distdl_circular(world: int, grid: str) -> None:
    layer = "Conv2d(2, 3, (3, 5), padding=(1, 2), padding_mode='circular')"
    same(grid, (1, 2, 7, 6), layer, "CircularPad2d((1, 2, 3, 0))", "Conv2d(3, 2, 3)")


@on("n2", "h2", "n2h2", "h3")
def test_distdl_running_var(world: int, grid: str) -> None:
    """Several steps with batches of few values: the unbiased variance counts the values of all ranks."""
    texts = ("Conv2d(2, 3, 1, bias=False)", "BatchNorm2d(3, momentum=0.3)")
    check(stack, grid, [(2, 2, 3, 1), (3, 2, 3, 2), (2, 2, 3, 1)], kwargs=layers(*texts))


def model_is_unmodified(grid: str) -> bool:
    """Whether a training step leaves the user's model unmodified."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    net = distfx.parallelize(model, grid)
    net(torch.randn(2, 3, 6, 6)).sum().backward()
    after = model.state_dict()
    return (
        all(torch.equal(before[name], after[name]) for name in before)
        and all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
        and kinds == [type(module) for module in model.modules()]
        and model.training
    )


@on("h2", "c2")
def test_distdl_model_is_not_modified(world: int, grid: str) -> None:
    assert all(run(world, model_is_unmodified, grid))


@on("n2", "n3", "n2c2")
def test_colossalai_batch_norm_over_samples(world: int, grid: str) -> None:
    same(grid, (5, 3, 4, 4), "Conv2d(3, 4, 1, bias=False)", "BatchNorm2d(4)")


def test_alpa_autoparallel_nnscaler_plan_halos() -> None:
    """Splits of space are planned with halos, without processes."""
    plan = distfx.plan(nn.Conv2d(3, 4, 3, padding=1).double(), "h2w2", (1, 3, 8, 8), outputs="local")
    (row,) = (row for row in plan.rows if row.op == "convolution.default")
    assert len(row.moves) == 2 and all(move.startswith("halo") for move in row.moves)
    assert 8 * 3 * (4 + 5) <= row.bytes_forward <= 8 * 3 * (4 + 6)  # a row of 4, a column with its corners


@on("h2", "h2w2")
def test_mpi4dl_halo_gradient(world: int, grid: str) -> None:
    """Through three layers of halos, down to the input."""
    same(grid, (1, 2, 9, 8), *("Conv2d(2, 2, 3, padding=1)",) * 3)


@on("n2h2", "c2w2", "n2h3", "n2c2h2")
def test_mpi4dl_peers_in_every_segment(world: int, grid: str) -> None:
    """Halos in segments that do not start with rank 0."""
    same(grid, (2, 2, 9, 8), "Conv2d(2, 4, 3, padding=1)", "Conv2d(4, 2, 3, padding=1)")
