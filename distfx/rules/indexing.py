"""Operators that pick elements by position or rank. The dims they pick along are not split; all others may be."""

from __future__ import annotations

from typing import Any

import sympy
from torch.fx import Node

from distfx.ir.layout import Window
from distfx.ir.meta import meta
from distfx.ir.nodes import arguments
from distfx.ir.symbolic import maximum
from distfx.rules.builders import index
from distfx.rules.rule import Call, LocalContext, Rule, RuleChoice, aten, unchanged

__all__ = ["RULES"]

_GATHERED = "nothing if that dim is not split; otherwise it is gathered"

RANKED = Rule("sort, topk", "... _@dim -> ... _@dim", cost=_GATHERED)
TRIANGLE = Rule("triangle", "... _ _ -> ... _ _", cost="nothing if these dims are not split; otherwise gathered")
SIMILARITY = Rule("cosine similarity", "... _@dim, ... _@dim -> ...", cost=_GATHERED)
CROSS = Rule("cross product", "... _@dim, ... _@dim -> ... _@dim", cost=_GATHERED)
ONE_HOT = Rule("one hot", "... -> ... _", cost="nothing")
DIAGONAL = Rule("diagonal", "... _@dim1 _@dim2 -> ... _", cost="these dims are gathered if they are split")
REPEAT = Rule("repeat", "=... -> =...", cost="the repeated dims are gathered if they are split")
INDEX_SELECT = Rule("index_select", "... _@dim, _... -> ... _@dim", cost=_GATHERED)
GATHER = Rule("gather, scatter", "=... _@dim, =... _@dim, *=... _@dim -> =... _@dim", cost=_GATHERED)
TAKE_ALONG_DIM = Rule("take_along_dim", "... _@dim, ... _@dim -> ... _@dim", cost=_GATHERED)
INDEX = Rule("index", build=index, cost="the indexed dims are gathered if they are split")
EMBEDDING = Rule("embedding", "_ k, ... -> ... k", cost="nothing")
NEW = Rule("new", "a!... -> _...", cost="nothing")
BUCKETIZE = Rule("bucketize", "..., _ -> ...", cost="nothing")
SEARCH_ONE = Rule("searchsorted in one sequence", "_, ..., ?_ -> ...", cost="nothing")
SEARCH_ROWS = Rule("searchsorted by row", "b... _, b... v, ?b... _ -> b... v", cost="sequences are gathered if split")


_MATRIX_PRODUCT, _DIFFERENCES = 1, 2
"""Values of the argument ``compute_mode`` of cdist."""


def _local_cdist(context: LocalContext) -> Call:
    """Euclidean distances of more than 25 rows are computed by a matrix product: the global number of rows decides."""
    a = context.arguments()
    if a["p"] != 2 or a["compute_mode"] or not (context.is_split(-1) or context.is_split(-2)):
        return unchanged(context)
    most = maximum(*meta(context.node).shape[-2:])
    mode: Any
    if isinstance(most, int):
        mode = _MATRIX_PRODUCT if most > 25 else _DIFFERENCES
    else:
        mode = sympy.Piecewise((_MATRIX_PRODUCT, most > 25), (_DIFFERENCES, True))
    return context.node.target, (a["x1"], a["x2"], a["p"], mode), {}


CDIST = Rule(
    "distances", "b... p _, b... r _ -> b... p r", _local_cdist, cost="the rows of one operand are gathered if split"
)


def _one_hot(node: Node) -> Rule | None:
    """Without a number of classes the result depends on the largest element of the whole tensor."""
    return None if arguments(node)["num_classes"] == -1 else ONE_HOT


def _cross(node: Node) -> Rule | None:
    return None if arguments(node)["dim"] is None else CROSS


def _embedding(node: Node) -> Rule | None:
    """Scaling by frequency counts indices over the whole batch, and DTensors have no sparse gradients."""
    a = arguments(node)
    return None if a["scale_grad_by_freq"] or a["sparse"] else EMBEDDING


def _searchsorted(node: Node) -> Rule:
    sequence: Any = node.args[0]
    return SEARCH_ONE if len(meta(sequence).shape) == 1 else SEARCH_ROWS


# ------------------------------------------------------------------------------------------ windows as dims


def _unfold_windows(node: Node) -> list[Window]:
    a = arguments(node)
    return [Window(hi=a["size"] - a["step"], mul=a["step"])]


UNFOLD = Rule(
    "unfold",
    "... [r]@dimension -> ... r@dimension _",
    windows=_unfold_windows,
    cost="halos where windows cross",
)
IM2COL = Rule("im2col", "n c _ _ -> n (c t) _", cost="space is gathered")
COL2IM = Rule("col2im", "n (c t) _ -> n c _ _", cost="space is gathered")

# -------------------------------------------------------------------------------------------------- sampling

GRID_SAMPLE = Rule(
    "grid sample",
    "n c _..., n s... _ -> n c s...",
    cost="the input's space is gathered; the grid, and with it the output, may be split",
)


def _local_affine(context: LocalContext) -> Call:
    theta, sizes, *rest = context.args
    return context.node.target, (theta, [context.sizes()[0], *sizes[1:]], *rest), dict(context.node.kwargs)


AFFINE_GRID = Rule("affine grid", "n _ _ -> n _...", _local_affine, cost="nothing")

RULES: dict[Any, Rule | RuleChoice] = {
    aten.sort.default: RANKED,
    aten.sort.stable: RANKED,
    aten.argsort.default: RANKED,
    aten.topk.default: RANKED,
    aten.tril.default: TRIANGLE,
    aten.triu.default: TRIANGLE,
    aten.cosine_similarity.default: SIMILARITY,
    aten.linalg_cross.default: CROSS,
    aten.cross.default: RuleChoice(_cross, (CROSS,)),
    aten.cdist.default: CDIST,
    aten.one_hot.default: RuleChoice(_one_hot, (ONE_HOT,)),
    aten.diagonal.default: DIAGONAL,
    aten.repeat.default: REPEAT,
    aten.tile.default: REPEAT,
    aten.repeat_interleave.self_int: REPEAT,
    aten.index_select.default: INDEX_SELECT,
    aten.gather.default: GATHER,
    aten.scatter.src: GATHER,
    aten.scatter.value: GATHER,
    aten.scatter_add.default: GATHER,
    aten.take_along_dim.default: TAKE_ALONG_DIM,
    aten.index.Tensor: INDEX,
    aten.embedding.default: RuleChoice(_embedding, (EMBEDDING,)),
    aten.bucketize.Tensor: BUCKETIZE,
    aten.searchsorted.Tensor: RuleChoice(_searchsorted, (SEARCH_ONE, SEARCH_ROWS)),
    aten.new_zeros.default: NEW,
    aten.new_ones.default: NEW,
    aten.new_full.default: NEW,
    aten.new_empty.default: NEW,
    aten.unfold.default: UNFOLD,
    aten.im2col.default: IM2COL,
    aten.col2im.default: COL2IM,
    aten.grid_sampler.default: GRID_SAMPLE,
    aten.affine_grid_generator.default: AFFINE_GRID,
}
