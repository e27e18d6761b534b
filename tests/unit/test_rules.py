"""Every rule of the table against the plain operator, for every legal assignment of its factors to small grids; rules
from outside; the documented examples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

import distfx
from distfx.ir import ops
from distfx.ir.meta import meta
from distfx.rules.registry import BUILT_IN, TABLE, spec_of
from distfx.rules.rule import Call, LocalContext
from distfx.runtime.kernels import reduce
from distfx.testing import check_rule

aten = torch.ops.aten
inf = float("inf")


def x(*shape: int) -> Tensor:
    """Different values, some of them negative, none of them zero."""
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def ties(*shape: int) -> Tensor:
    return x(*shape).clamp(min=0)


def integers(high: int, *shape: int) -> Tensor:
    return torch.arange(int(torch.tensor(shape).prod())).mul(7).remainder(high).view(shape)


@dataclass(frozen=True)
class Sample:
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    no_grad: tuple[str, ...] = ()


def s(*args: Any, no_grad: tuple[str, ...] = (), **kwargs: Any) -> Sample:
    return Sample(args, kwargs, no_grad)


def conv(rank: int, groups: int = 1, transposed: bool = False, stride: int = 1, padding: int = 1) -> Sample:
    space = (7, 3, 2)[:rank][::-1]
    weight = (4, 4 // groups, *(3, 2, 1)[:rank][::-1])
    each = [[stride] * rank, [padding] + [0] * (rank - 1), [1] * rank]
    return s(x(2, 4, *space), x(*weight), x(4), *each, transposed, [0] * rank, groups)


STATISTICS = ("running_mean", "running_var")
DRAWN = ("random_samples",)
PLACES = torch.tensor([[0, 3], [9, 10]])
MASK = torch.ones(3, 4, dtype=torch.bool).tril(1)
REDUCED = (s(x(4, 5, 3), [1]), s(x(4, 5), [-1, 0], True))
ONE_DIM = (s(x(4, 5, 3), 1), s(ties(5, 4), -1, True))
SOFT = (s(x(4, 5, 3), 1),)
MOMENTS = (s(x(4, 5, 3), [1]), s(x(4, 5)))
POOL = {rank: (2, 2, *(7, 4, 3)[:rank][::-1]) for rank in (1, 2, 3)}


def upsample(rank: int, *options: Any) -> tuple[Sample, ...]:
    image = x(2, 2, *(5, 3, 2)[:rank][::-1])
    sizes = [4, 5, 8][-rank:]
    return (s(image, sizes, *options, None), s(image, None, *options, [2.0] * rank))


def pooling(rank: int, *extra: Any) -> tuple[Sample, ...]:
    return (s(x(*POOL[rank]), [2] * rank, [1] * rank, [1] + [0] * (rank - 1), *extra), s(x(*POOL[rank]), [2] * rank))


def adaptive(rank: int) -> tuple[Sample, ...]:
    return (s(x(*POOL[rank]), [3, 2, 2][:rank][::-1]), s(x(*POOL[rank]), [1] * rank))


SAMPLES: dict[Any, Sequence[Sample]] = {
    # products
    aten.convolution.default: [
        conv(1),
        conv(2, stride=2),
        conv(1, groups=2),
        conv(1, groups=4, padding=2),
        conv(1, transposed=True, stride=2),
        conv(1, groups=2, transposed=True),
        s(x(3, 2, 5), x(3, 2, 2), None, [1], [0], [2], False, [0], 1),
        s(x(2, 4, 5), x(4, 3, 3), None, [2], [1], [1], True, [1], 1),
    ],
    aten.linear.default: [s(x(4, 3, 5), x(2, 5), x(2)), s(x(4, 5), x(3, 5))],
    aten.matmul.default: [s(x(2, 3, 4), x(4, 5)), s(x(3, 1, 3, 4), x(2, 4, 2)), s(x(4), x(3, 4, 2)), s(x(3, 4), x(4))],
    aten.bmm.default: [s(x(2, 3, 4), x(2, 4, 3))],
    aten.mm.default: [s(x(3, 4), x(4, 5))],
    aten.mv.default: [s(x(3, 4), x(4))],
    aten.dot.default: [s(x(5), x(5) + 1)],
    aten.vdot.default: [s(x(5), x(5) + 1)],
    aten.outer.default: [s(x(3), x(5))],
    aten.einsum.default: [s("nch,nkh->nck", [x(2, 3, 4), x(2, 3, 4) + 1]), s("i...j->...", [x(3, 4, 2)])],
    aten.scaled_dot_product_attention.default: [
        s(x(2, 3, 4), x(2, 5, 4), x(2, 5, 2)),
        s(x(2, 2, 3, 4), x(2, 2, 4, 4), x(2, 2, 4, 3), MASK),
        s(x(3, 4, 2), x(3, 4, 2) + 1, x(3, 4, 2) + 2, is_causal=True),
        s(x(2, 4, 3, 2), x(2, 2, 3, 2), x(2, 2, 3, 2) + 1, enable_gqa=True),
    ],
    # indexing
    aten.sort.default: [s(x(4, 5), 0)],
    aten.sort.stable: [s(x(4, 5), stable=True, dim=1)],
    aten.argsort.default: [s(x(4, 5), 0)],
    aten.topk.default: [s(x(4, 5, 3), 2, 1)],
    aten.tril.default: [s(x(4, 3, 5), 1)],
    aten.triu.default: [s(x(4, 3, 5))],
    aten.cosine_similarity.default: [s(x(4, 5, 3), x(5, 3) + 1, 1), s(x(3, 1, 5), x(4, 5), -1)],
    aten.linalg_cross.default: [s(x(4, 3), x(4, 3) + 1), s(x(5, 3, 1), x(1, 3, 4), dim=1)],
    aten.cross.default: [s(x(3, 5), x(3, 5) + 1, 0)],
    aten.cdist.default: [s(x(3, 5, 2), x(3, 4, 2)), s(x(5, 2), x(4, 2) + 1, 1.0), s(x(30, 2), x(4, 2))],
    aten.one_hot.default: [s(integers(4, 3, 5), 4)],
    aten.diagonal.default: [s(x(4, 3, 5), 1, 0, 2)],
    aten.repeat.default: [s(x(4, 5), [2, 1]), s(x(3, 2), [2, 1, 3])],
    aten.tile.default: [s(x(4, 5), [2])],
    aten.repeat_interleave.self_int: [s(x(4, 5), 2, 0)],
    aten.index_select.default: [s(x(4, 5), 1, torch.tensor([3, 0, 3]))],
    aten.gather.default: [s(x(4, 5), 1, integers(5, 4, 2)), s(x(4, 5, 3), 0, integers(4, 2, 5, 2))],
    aten.scatter.src: [s(x(4, 5), 1, integers(5, 4, 3), x(4, 3))],
    aten.scatter.value: [s(x(4, 5), 0, integers(4, 2, 5), 1.5)],
    aten.scatter_add.default: [s(x(4, 5), 1, integers(5, 4, 5), x(4, 5) + 1)],
    aten.take_along_dim.default: [s(x(4, 5), integers(5, 4, 2), 1), s(x(4, 5, 1), integers(4, 2, 1, 3), 0)],
    aten.index.Tensor: [
        s(x(4, 5, 3), [None, torch.tensor([0, 2])]),
        s(x(4, 3, 2), [integers(4, 2), None, integers(2, 2)]),
    ],
    aten.embedding.default: [s(x(4, 5), integers(4, 3, 2))],
    aten.bucketize.Tensor: [s(x(4, 5), torch.linspace(-1, 1, 5))],
    aten.searchsorted.Tensor: [
        s(torch.linspace(-1, 1, 5), x(4, 3)),
        s(x(4, 5).sort(1)[0], x(4, 3)),
        s(x(4, 5), x(4, 3), sorter=x(4, 5).argsort(1)),
    ],
    aten.new_zeros.default: [s(x(4, 3), [5])],
    aten.new_ones.default: [s(x(4, 3), [5, 2])],
    aten.new_full.default: [s(x(4, 3), [5], 2.5)],
    aten.new_empty.default: [s(x(4, 3), [5])],
    aten.unfold.default: [s(x(3, 7), 1, 3, 2), s(x(6, 2), 0, 2, 1)],
    aten.im2col.default: [s(x(2, 3, 4, 3), [2, 2], [1, 1], [1, 0], [1, 1])],
    aten.col2im.default: [s(x(2, 6, 16), [3, 4], [2, 1], [1, 1], [1, 0], [1, 1])],
    aten.grid_sampler.default: [s(x(2, 3, 4, 3), x(2, 5, 2, 2).tanh(), 0, 0, False)],
    aten.affine_grid_generator.default: [s(x(3, 2, 3), [3, 2, 2, 4], False)],
    # normalization
    aten.batch_norm.default: [
        s(x(4, 5, 3), x(5), x(5) + 1, x(5), x(5).abs(), True, 0.1, 1e-5, False, no_grad=STATISTICS),
        s(x(4, 3), None, None, x(3), x(3).abs() + 1, False, 0.1, 1e-5, False, no_grad=STATISTICS),
    ],
    aten.group_norm.default: [s(x(2, 4, 5), 2, x(4), x(4) + 1), s(x(3, 6), 3)],
    aten.instance_norm.default: [s(x(2, 3, 5), x(3), x(3) + 1, None, None, True, 0.1, 1e-5, False)],
    aten.layer_norm.default: [s(x(4, 3, 5), [3, 5], x(3, 5), x(3, 5) + 1), s(x(4, 5), [5])],
    aten.rms_norm.default: [s(x(4, 3, 5), [5], x(5)), s(x(4, 5), [5], None, 1e-3)],
    # element-wise
    ops.add_bias: [s(x(3, 4, 5), x(4), dim=1), s(x(3, 5), x(5), dim=-1)],
    ops.straight: [s(x(4, 5), x(4, 5) + 1)],
    ops.pick_class: [s(x(4, 3, 5), integers(3, 4, 5), -100)],
    ops.class_weights: [s(integers(3, 4, 5), x(3), 1)],
    aten.prelu.default: [s(x(3, 4, 5), x(4)), s(x(3, 4), x(1)), s(x(5), x(1))],
    aten.dropout.default: [s(x(4, 5), 0.4, True), s(x(4, 5), 0.0, True)],
    aten.feature_dropout.default: [s(x(4, 5, 3), 0.4, True)],
    # pooling
    **{op: pooling(rank, [1] * rank, True) for op, rank in zip(
        (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default), (1, 2, 3), strict=True)},
    **{op: pooling(rank, [1] * rank, False) for op, rank in zip(
        (aten.max_pool1d_with_indices.default, aten.max_pool2d_with_indices.default,
         aten.max_pool3d_with_indices.default), (1, 2, 3), strict=True)},
    **{op: pooling(rank, True, False) for op, rank in zip(
        (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default), (1, 2, 3), strict=True)},
    **{op: adaptive(rank) for op, rank in zip(
        (aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default),
        (1, 2, 3), strict=True)},
    **{op: adaptive(rank) for op, rank in zip(
        (aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default),
        (1, 2, 3), strict=True)},
    aten.max_unpool2d.default: [s(x(2, 3, 2, 2), PLACES.repeat(2, 3, 1, 1), [4, 4])],
    aten.max_unpool3d.default: [
        s(x(2, 3, 1, 2, 2), PLACES.repeat(2, 3, 1, 1, 1), [1, 4, 4], [1, 2, 2], [0, 0, 0]),
    ],
    aten.fractional_max_pool2d.default: [s(x(2, 3, 5, 5), [2, 2], [3, 3], x(2, 3, 2).sigmoid(), no_grad=DRAWN)],
    aten.fractional_max_pool3d.default: [
        s(x(2, 3, 4, 4, 4), [2, 2, 2], [2, 2, 2], x(2, 3, 3).sigmoid(), no_grad=DRAWN),
    ],
    # random numbers
    aten.rand.default: [s([4, 5], dtype=torch.float64)],
    aten.randn.default: [s([4, 5], dtype=torch.float64)],
    aten.rand_like.default: [s(x(4, 5))],
    aten.randn_like.default: [s(x(4, 5))],
    aten.bernoulli.default: [s(x(4, 5).sigmoid())],
    aten.bernoulli.p: [s(x(4, 5), 0.5)],
    aten.uniform.default: [s(x(4, 5))],
    aten.normal_functional.default: [s(x(4, 5))],
    # reductions
    aten.mean.dim: REDUCED,
    aten.mean.default: [s(x(4, 5))],
    aten.sum.dim_IntList: [*REDUCED, s(x(4, 5), [])],
    aten.sum.default: [s(x(4, 5))],
    aten.nansum.default: [s(x(4, 5).masked_fill(x(4, 5) > 1, float("nan")), [1]), *REDUCED],
    aten.amax.default: [*REDUCED, s(ties(4, 5), [0])],
    aten.amin.default: [*REDUCED, s(ties(4, 5), [0])],
    aten.max.default: [s(x(4, 5))],
    aten.min.default: [s(ties(4, 5))],
    aten.max.dim: ONE_DIM,
    aten.min.dim: ONE_DIM,
    aten.aminmax.default: [s(x(4, 5), dim=1), s(x(4, 5))],
    aten.argmax.default: [s(x(4, 5, 3), 1), s(ties(4, 5))],
    aten.argmin.default: [s(x(4, 5, 3), 1), s(ties(4, 5))],
    aten.any.default: [s(x(4, 5) > 2)],
    aten.any.dim: [s(x(4, 5) > 1, 1)],
    aten.any.dims: [s(x(4, 5) > 1, [0, 1], True)],
    aten.all.default: [s(x(4, 5) > -2)],
    aten.all.dim: [s(x(4, 5) > -1, 1)],
    aten.all.dims: [s(x(4, 5) > -1, [0])],
    aten.logsumexp.default: REDUCED,
    aten.var.default: [s(x(4, 5))],
    aten.var.correction: [s(x(4, 5, 3), [1]), s(x(4, 5), correction=0, keepdim=True)],
    aten.var.dim: [s(x(4, 5, 3), [1], False)],
    aten.std.default: [s(x(4, 5))],
    aten.std.correction: [s(x(4, 5), [1])],
    aten.std.dim: [s(x(4, 5), [0])],
    aten.var_mean.default: [s(x(4, 5))],
    aten.var_mean.correction: MOMENTS,
    aten.var_mean.dim: [s(x(4, 5), [1])],
    aten.std_mean.default: [s(x(4, 5))],
    aten.std_mean.correction: MOMENTS,
    aten.std_mean.dim: [s(x(4, 5), [1])],
    aten.linalg_vector_norm.default: [s(x(4, 5), 2, [1]), s(x(4, 5), 3), s(x(4, 5), 1, [0], True)],
    aten.prod.default: [s(x(4, 5))],
    aten.prod.dim_int: ONE_DIM,
    aten.softmax.int: SOFT,
    aten.log_softmax.int: SOFT,
    aten._softmax.default: [s(x(4, 5), 0, False)],
    aten._log_softmax.default: [s(x(4, 5), 0, False)],
    aten.cumsum.default: [s(x(4, 5), 1)],
    aten.cumprod.default: [s(x(4, 5), 0)],
    aten.logcumsumexp.default: [s(x(4, 5), 1)],
    aten.cummax.default: [s(x(4, 5), 1)],
    aten.cummin.default: [s(x(4, 5), 0)],
    aten.median.dim: [s(x(4, 5), 1)],
    aten.nanmedian.dim: [s(x(4, 5), 1, True)],
    aten.mode.default: [s(x(4, 5), 1)],
    aten.kthvalue.default: [s(x(4, 5), 2, 1)],
    aten.renorm.default: [s(x(5, 3), 2, 0, 1.0), s(x(4, 5, 2), 1, 1, 0.5)],
    # resampling
    aten.upsample_nearest1d.vec: upsample(1),
    aten.upsample_nearest2d.vec: upsample(2),
    aten.upsample_nearest3d.vec: upsample(3),
    aten._upsample_nearest_exact1d.vec: upsample(1),
    aten._upsample_nearest_exact2d.vec: upsample(2),
    aten._upsample_nearest_exact3d.vec: upsample(3),
    aten.upsample_linear1d.vec: [*upsample(1, False), *upsample(1, True)],
    aten.upsample_bilinear2d.vec: upsample(2, True),
    aten.upsample_trilinear3d.vec: upsample(3, False),
    aten.upsample_bicubic2d.vec: upsample(2, False),
    # shapes
    aten.pad.default: [
        s(x(4, 5), [1, 2], "constant", 1.5),
        s(x(2, 3, 5), [2, 1], "reflect"),
        s(x(2, 3, 5), [1, 2], "circular"),
        s(x(2, 3, 5), [1, 2], "replicate"),
        s(x(4, 5), [-1, 0, 1, 1]),
    ],
    aten.slice.Tensor: [s(x(4, 7), 1, 1, 6, 2), s(x(5, 3), 0, -4)],
    aten.select.int: [s(x(4, 5, 3), 1, 2)],
    aten.cat.default: [s([x(4, 3), x(4, 2), x(4, 1)], 1), s([x(3, 4), x(2, 4)])],
    aten.roll.default: [s(x(5, 4), [2, -1], [1, 0])],
    aten.flip.default: [s(x(5, 4, 2), [0, 1])],
    aten.permute.default: [s(x(4, 3, 5), [2, 0, 1])],
    aten.expand.default: [s(x(4, 1, 5), [2, 4, 3, 5])],
    aten.reshape.default: [s(x(4, 6), [4, 2, 3]), s(x(4, 2, 3), [8, 3]), s(x(4, 3), [12])],
}  # fmt: skip
POINTWISE: dict[Any, Sequence[Sample]] = {
    aten.add.Tensor: [s(x(4, 5), x(4, 1)), s(x(5), x(4, 5) + 1)],
    aten.where.self: [s(x(4, 5) > 0, x(5), x(4, 1))],
    aten.sigmoid.default: [s(x(4, 5))],
    aten.binary_cross_entropy_with_logits.default: [s(x(4, 5), x(4, 5).sigmoid(), None, None, 0)],
}


def _cases() -> list[Any]:
    named = [(op, number, each) for op, group in (SAMPLES | POINTWISE).items() for number, each in enumerate(group)]
    return [pytest.param(op, each, id=f"{getattr(op, '__name__', op)}-{number}") for op, number, each in named]


@pytest.mark.parametrize(("op", "sample"), _cases())
def test_rule(op: Any, sample: Sample) -> None:
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(sample.args) if isinstance(leaf, Tensor)]
    has_many_dims = max((tensor.dim() for tensor in tensors), default=0) > 3
    grids = ("n2", "c3") if has_many_dims else ("n2", "c3", "n2c2")  # pairs of many factors would take long
    assert check_rule(op, sample.args, sample.kwargs, no_grad=sample.no_grad, grids=grids).assignments


def test_every_operator_has_a_sample() -> None:
    assert sorted(str(op) for op in BUILT_IN.keys() - SAMPLES.keys()) == []


# ---------------------------------------------------------------------------------------- rules from outside


@pytest.fixture
def table() -> Iterator[None]:
    """The table as it was, after the test."""
    before = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(before)


def test_documented_examples(table: None, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "adding-an-operator.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1:]  # the first only shows the call
    assert len(blocks) == 4
    names: dict[str, Any] = {"__name__": "example"}
    for block in blocks:
        exec(compile(block, "adding-an-operator.md", "exec"), names)
    assert len(re.findall(r"mylib\.\w+\.default: \d+ assignments checked", capsys.readouterr().out)) == 5


@pytest.mark.usefixtures("table")
def test_operators_of_aten_without_a_rule() -> None:
    op = aten.logaddexp2.default  # element-wise, and tagged so
    with pytest.raises(distfx.DistfxError, match=r"aten\.logaddexp2\.default has a rule already"):
        distfx.register_rule(op, "..., ... -> ...")
    with pytest.raises(AssertionError, match="no rule fits"):
        check_rule(aten.trace, (x(3, 3),))
    distfx.register_rule(aten.linalg_det, "... _ _ -> ...")
    assert check_rule(aten.linalg_det, (x(5, 3, 3),)).assignments == (".0/n on n2", ".0/c on c3", ".0/(n,c) on n2c2",
                                                                      ".0/(c,n) on n2c2")  # fmt: skip
    distfx.register_rule(aten.linalg_det, "b... _ _ -> b...", replace=True)
    assert check_rule(aten.linalg_det, (x(4, 3, 3),), grids=["n2"]).assignments == ("n/n on n2",)


@pytest.mark.usefixtures("table")
def test_a_decorated_function_makes_the_local_call() -> None:
    @distfx.register_rule(aten.softplus_backward, "..., ... -> ...", replace=True)
    def local(context: LocalContext) -> Call:
        called.append(context.is_split(0))
        return context.node.target, context.args, {}

    called: list[bool] = []
    check_rule(aten.softplus_backward, (x(4), x(4) + 1, 1.0, 20.0), grids=["n2"])
    assert called == [True]


REFUSED = [
    (aten.linalg_det, "... _ [_] -> ...", {}, "position 7: expected the name of a factor"),
    (aten.linalg_det, "... _ _, n -> ...", {}, "has 2 operands, but the operator takes 1"),
    (aten.linalg_det, "?... _ _ -> ...", {}, "optional operand 0, but argument 'A' is required"),
    (aten.linalg_det, "... _@dim -> ...", {}, "names argument 'dim', but the operator's arguments are A"),
    (aten.linalg_det, "[n] _ _ -> n", {}, "has windows: pass windows="),
    (aten.linalg_det, "n _ _ -> n", {"windows": distfx.Window()}, "has no windows"),
    (aten.linalg_det, "[n] -> n", {"windows": distfx.Window(), "mode": "mirror"}, "has mode 'mirror'"),
    (aten.nll_loss_nd, "n c, n, c -> ", {}, "argument 'weight' is optional: write '?'"),
    (aten.block_diag, "a b -> a b", {}, "is a list of tensors: write '*'"),
    (aten.index_fill.int_Scalar, "... _@value, _ -> ... _@value", {}, "of type number"),
    (aten.relu_.default, "... -> ...", {}, "writes into its arguments"),
    (aten.multinomial, "n _ -> n _", {}, "draws random numbers"),
    (aten.add, "... -> ...", {}, "pass one, such as aten.add."),
    (torch.relu, "... -> ...", {}, "not for <built-in"),
    (aten.unbind.int, "n ... -> ...", {}, "returns"),
]


@pytest.mark.parametrize(("op", "pattern", "options", "message"), REFUSED)
def test_bad_rules_are_refused(op: Any, pattern: str, options: dict[str, Any], message: str) -> None:
    before = dict(TABLE)
    with pytest.raises(distfx.DistfxError) as error:
        distfx.register_rule(op, pattern, **options)
    assert message in str(error.value)
    assert before == TABLE


WRONG = [
    (aten.logcumsumexp.default, "... -> ...", (x(4, 5), 1), "rank 1: the result differs by"),
    (aten.linalg_vector_norm.default, "... r@dim -> ... _@dim?", (x(4, 5), 2, [1]), "rank 0: the result differs by"),
    (aten.flip.default, "... -> ...", (x(4, 5), [0]), "./n on n2"),
    (aten.triu.default, "... -> ...", (x(4, 5),), "rank 1: the result differs by"),
    (aten.cumsum.default, "... _@dim -> ... _", (x(4, 5), 1), None),
    (aten.select.int, "... r@dim -> ...", (x(4, 5), 0, 3), "rank 0: "),
]


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(("op", "pattern", "args", "message"), WRONG)
def test_wrong_rules_are_found(op: Any, pattern: str, args: tuple[Any, ...], message: str | None) -> None:
    distfx.register_rule(op, pattern, replace=True)
    if message is None:  # right, because that dim is the last
        check_rule(op, args)
        return
    with pytest.raises(AssertionError) as error:
        check_rule(op, args)
    assert message.replace("./n", ".0/n") in str(error.value) and str(op) in str(error.value)


@pytest.mark.usefixtures("table")
def test_wrong_gradients_are_found() -> None:
    """At 0 and 2, doubling has the values of squaring but not its gradient."""

    def local(context: LocalContext) -> Call:
        return aten.mul.Tensor, (context.args[0], 2), {}

    distfx.register_rule(aten.square.default, "... -> ...", local=local, replace=True)
    with pytest.raises(AssertionError, match=r"\.0/n on n2, result 0: the gradient of operand 0 differs by"):
        check_rule(aten.square, (torch.tensor([0.0, 2.0, 2.0, 0.0]),))


def test_a_rank_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = reduce.REDUCTIONS["softmax"]

    def fail(value: Tensor, reduction: reduce.Reduction) -> Tensor:
        if reduction.segment.index == 1:
            raise RuntimeError("no memory")
        return softmax(value, reduction)

    monkeypatch.setitem(reduce.REDUCTIONS, "softmax", fail)
    with pytest.raises(AssertionError, match=r"\.1/n on n2, result 0: rank 1: RuntimeError: no memory"):
        check_rule(aten.softmax.int, (x(4, 5), 1))


def test_specs_follow_the_arguments_of_a_call() -> None:
    """Parts of specs are cached: a rewritten call must not get those of the call that it was."""
    graph = Graph()
    nodes = [graph.placeholder(name) for name in "xy"]
    call = graph.call_function(aten.add.Tensor, tuple(nodes))
    for node in (*nodes, call):
        meta(node).shape, meta(node).dtype = (4, 4), torch.float64
    operands = []
    for target, args in [
        (aten.add.Tensor, tuple(nodes)),
        (aten.add.Tensor, (nodes[1], 1.0)),
        (aten.permute.default, (nodes[0], [1, 0])),
        (aten.permute.default, (nodes[0], [0, 1])),
    ]:
        call.target, call.args = target, args
        spec = spec_of(call)
        assert spec is not None
        operands.append([f"{operand}: {' '.join(map(str, dims))}" for operand, dims in spec.operands])
    assert operands == [["x: .0 .1", "y: .0 .1"], ["y: .0 .1"], ["x: r1 r0"], ["x: r0 r1"]]
