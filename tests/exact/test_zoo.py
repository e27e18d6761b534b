"""Models of other libraries, unmodified: the distributed model equals the plain one. Slow; run with ``-m zoo``.

    pip install --no-deps torchvision timm monai segmentation-models-pytorch diffusers dynamic-network-architectures
    pytest -m zoo tests/exact/test_zoo.py            # with -k for some of them
    DISTFX_ZOO_TABLE=docs/zoo.md pytest ...          # also writes the results into this table

Models run in float64 and in training mode, with dropout and stochastic depth set to zero. Outputs, all gradients and
running statistics are compared. Deep batch norms with few samples magnify rounding, and the gradient of a bias before a
norm consists of rounding alone. So each value may differ by 1e-10, or by a multiple of its sensitivity: its change in
one process when the last bits of the input change. The table shows both.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact import exact, ranks_of
from support.models import cases
from support.ranks import RankError, run
from torch import nn

pytestmark = [pytest.mark.zoo, pytest.mark.timeout(1200)]

TOLERANCE = 1e-10
ROUNDING = 100.0
"""The largest allowed ratio of error to sensitivity. The largest observed is 40, for biases before instance norms."""
IMAGE, SMALL, VOLUME = (4, 3, 64, 64), (4, 3, 32, 32), (2, 1, 32, 32, 32)
ALL = "n2 c2 h2 n2h2 c2h2"
TWO = "n2 c2 h2"

VISION = "torchvision.models.{}(num_classes=10)"
TIMM = "timm.create_model('{}', num_classes=10)"
MONAI = "monai.networks.nets.{}"
SMP = "segmentation_models_pytorch.{}(encoder_name='resnet18', encoder_weights=None, classes=3)"

ZOO: list[tuple[str, str, tuple[int, ...], str]] = [
    # name, how to build it, input, grids
    *((name, VISION.format(name), IMAGE, grids) for name, grids in [("resnet18", ALL), ("resnet50", TWO)]),
    *((name, VISION.format(name), IMAGE, TWO) for name in ("densenet121", "efficientnet_b0", "mobilenet_v3_large")),
    ("convnext_tiny", VISION.format("convnext_tiny"), IMAGE, ALL),
    ("vgg11", VISION.format("vgg11"), SMALL, TWO),
    ("googlenet", "torchvision.models.googlenet(num_classes=10, init_weights=False)", IMAGE, TWO),
    ("inception_v3", "torchvision.models.inception_v3(num_classes=10, init_weights=False)", (2, 3, 299, 299), TWO),
    *((name, VISION.format(name), IMAGE, TWO) for name in ("shufflenet_v2_x1_0", "squeezenet1_1", "alexnet")),
    *((name, VISION.format(name), IMAGE, TWO) for name in ("mnasnet1_0", "regnet_y_400mf", "mobilenet_v2")),
    *(
        (name, f"torchvision.models.segmentation.{name}(num_classes=4, weights_backbone=None)", IMAGE, TWO)
        for name in ("fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large")
    ),
    *(
        (name, f"torchvision.models.video.{name}(num_classes=5)", (2, 3, 4, 32, 32), TWO)
        for name in ("r3d_18", "mc3_18")
    ),
    ("monai UNet", MONAI.format("UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=2)"), VOLUME, ALL + " d2"),
    ("monai SegResNet", MONAI.format("SegResNet(3, 8, 1, 2, blocks_down=(1, 2, 2), blocks_up=(1, 1))"), VOLUME, TWO),
    (
        "monai DynUNet",
        MONAI.format("DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[8, 16, 32], res_block=True)"),
        VOLUME,
        TWO,
    ),
    ("monai VNet", MONAI.format("VNet(3, 1, 2)"), VOLUME, TWO),
    ("monai AttentionUnet", MONAI.format("AttentionUnet(3, 1, 2, (8, 16, 32), (2, 2))"), VOLUME, TWO),
    ("monai BasicUNet", MONAI.format("BasicUNet(3, 1, 2, (8, 8, 16, 32, 64, 8))"), VOLUME, TWO),
    (
        "monai DenseNet",
        MONAI.format("DenseNet(3, 1, 4, init_features=16, growth_rate=8, block_config=(2, 4, 4))"),
        VOLUME,
        TWO,
    ),
    ("monai FlexibleUNet", MONAI.format("FlexibleUNet(3, 2, 'efficientnet-b0')"), SMALL, TWO),
    ("monai HighResNet", MONAI.format("HighResNet(3, 1, 2)"), (2, 1, 16, 16, 16), TWO),
    (
        "monai AutoencoderKL",
        MONAI.format(
            "AutoencoderKL(2, 3, 3, (1, 1), (8, 16), attention_levels=(False, True), norm_num_groups=4).encoder"
        ),
        SMALL,
        TWO,
    ),
    *(
        (name, TIMM.format(name), SMALL, TWO)
        for name in (
            *("regnety_002", "tf_efficientnetv2_b0", "nf_regnet_b1", "nfnet_l0", "resnext50_32x4d", "resnest14d"),
            *("hrnet_w18_small", "cspresnet50", "darknet53", "convnextv2_atto", "mobilevit_xxs", "edgenext_xx_small"),
            *("ghostnet_100", "seresnet18", "dla34", "dpn48b", "inception_next_atto", "repvgg_a0", "vovnet39a"),
            *("xception41", "skresnet18", "res2net50_14w_8s", "fastvit_t8", "mobileone_s0", "lcnet_050", "tinynet_e"),
        )
    ),
    *((f"smp {name}", SMP.format(name), SMALL, TWO) for name in ("Unet", "FPN", "UnetPlusPlus", "DeepLabV3Plus")),
    (
        "diffusers AutoencoderKL",
        "diffusers.AutoencoderKL(block_out_channels=(8, 16), down_block_types=('DownEncoderBlock2D',) * 2, "
        "up_block_types=('UpDecoderBlock2D',) * 2, norm_num_groups=4).decoder",
        (2, 4, 8, 8),
        TWO,
    ),
    (
        "nnU-Net PlainConvUNet",
        "dynamic_network_architectures.architectures.unet.PlainConvUNet(1, 3, (8, 16, 32), nn.Conv3d, 3, (1, 2, 2), "
        "(2, 2, 2), 3, (2, 2), conv_bias=True, norm_op=nn.InstanceNorm3d, norm_op_kwargs={'affine': True}, "
        "nonlin=nn.LeakyReLU, nonlin_kwargs={'inplace': True})",
        VOLUME,
        ALL,
    ),
]
PACKAGES = {text.split(".")[0] for _, text, _, _ in ZOO}


def build(text: str) -> nn.Module:
    """Import the library and evaluate ``text``; returns the model without dropout."""
    package = text.split(".")[0]
    if package in ("torchvision", "timm", "segmentation_models_pytorch"):
        _define_missing_operators()
    where = re.split(r"\(", text)[0].rsplit(".", 1)[0]
    for depth in range(1, where.count(".") + 2):
        importlib.import_module(".".join(where.split(".")[:depth]))
    model: nn.Module = eval(text, {package: importlib.import_module(package), "nn": nn})
    for module in model.modules():
        for name in ("p", "drop_prob", "drop_rate", "dropout", "drop_connect_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def _define_missing_operators() -> None:
    """Define operators that torchvision's wheels lack with a CPU build of torch. Its models need only their names."""
    if hasattr(torch.ops.torchvision, "nms"):
        return
    global _library
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def compare(text: str, grid: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Run the exactness test on a rank and return a summary."""
    result = exact(build, grid, [shape], kwargs={"text": text}, example=True, sensitive=True)
    errors, sensitivity = result["errors"], result["sensitivity"]
    worst = max(errors, key=errors.__getitem__)
    limits = {name: max(TOLERANCE, ROUNDING * sensitivity[name]) for name in errors}
    return {
        "error": errors[worst],
        "worst": worst.removeprefix("0 "),
        "sensitivity": sensitivity[worst],
        "wrong": {name: f"{error:.1e} > {limits[name]:.1e}" for name, error in errors.items() if error > limits[name]},
        "fallbacks": sorted({str(row.op) for row in result["rows"] if row.fallback}),
        "count": sum(row.fallback for row in result["rows"]),
        "bytes": result["bytes"],
    }


def runs() -> Iterator[tuple[str, str]]:
    for name, _, _, grids in ZOO:
        for grid in grids.split():
            yield grid, name


@cases("grid name", runs())
def test_zoo(world: int, grid: str, name: str, record: Callable[..., None]) -> None:
    _, text, shape, _ = next(row for row in ZOO if row[0] == name)
    package = text.split(".")[0]
    if package in ("torchvision", "timm", "segmentation_models_pytorch"):
        _define_missing_operators()
    pytest.importorskip(package)
    start = time.monotonic()
    try:
        results = run(ranks_of(grid), compare, text, grid, shape, timeout=1000)
    except RankError as error:
        record(name, package, grid, str(next(iter(error.failures.values()))), None, time.monotonic() - start)
        raise
    worst = max(results, key=lambda result: result["error"])
    outcome = f"{worst['error']:.0e}"
    if worst["error"] > 1e-11:
        outcome += f" ({worst['worst']}; last bits {worst['sensitivity']:.0e})"
    record(name, package, grid, outcome, worst["fallbacks"], time.monotonic() - start)
    for rank, result in enumerate(results):
        assert not result["wrong"], f"rank {rank}: {result['wrong']}"
    for predicted, counted in worst["bytes"]:
        assert predicted == counted, f"the plan says {predicted}, the ledger {counted}"


HEAD = """# The zoo

Models of other libraries, unmodified, in float64 and in training mode.

- **error**: the largest relative error of any output, gradient or running statistic against the model in one process.
  For errors above 1e-11 the table names the tensor, and how much it changes in one process when the last bits of the
  input change. Deep batch norms with few samples magnify rounding, and the gradient of a bias before a norm consists of
  rounding alone.
- **fallbacks**: operators that fall back to replicated execution because no rule applies.
- **seconds**: capture, compilation, one step and the comparison, on two busy cores. The grids of a model share its
  capture.

`tests/exact/test_zoo.py` writes this table. Its docstring says how.

| model | package | grid | error | fallbacks | seconds |
|---|---|---|---|---|---|
"""


@pytest.fixture(scope="session")
def record() -> Iterator[Callable[..., None]]:
    """Returns a function that adds a row to the table and writes it, in the order of ``ZOO``. Earlier rows stay."""
    path = Path(os.environ["DISTFX_ZOO_TABLE"]) if "DISTFX_ZOO_TABLE" in os.environ else None
    rows: dict[tuple[str, str], str] = {}
    if path and path.exists():
        for line in path.read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 6 and cells[0] not in ("model", "---"):
                rows[cells[0], cells[2]] = line
    order = {(name, grid): i for i, (grid, name) in enumerate(runs())}

    def note(name: str, package: str, grid: str, outcome: str, fallbacks: list[str] | None, seconds: float) -> None:
        version = importlib.metadata.version(package.replace("_", "-"))
        text = " ".join(outcome.split())[:160].replace("|", "/")
        names = ", ".join(each.replace("aten.", "") for each in fallbacks) or "-" if fallbacks is not None else ""
        rows[name, grid] = f"| {name} | {package} {version} | {grid} | {text} | {names} | {seconds:.0f} |"
        if path:
            known = sorted((key for key in rows if key in order), key=order.__getitem__)
            path.write_text(HEAD + "\n".join(rows[key] for key in known) + "\n")

    yield note
