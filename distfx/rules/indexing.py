"""Operators that pick elements by their place or rank. The dims they pick along stay whole; all others may be split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from distfx.ir.layout import Window
from distfx.ir.nodes import arguments
from distfx.rules.notation import Word
from distfx.rules.row import Call, Row, Site, Spec, aten, dims_spec, unchanged

__all__ = ["ROWS"]

_GATHERED = "nothing where that dim is whole, else it is gathered"


def _whole_dims(dims: Callable[[Node], Sequence[int]], added: int = 0, removed: bool = False) -> Callable[..., Spec]:
    """Operands, which broadcast, and result alike; ``dims`` whole, in the result ``removed``, or ``added`` at its
    end."""

    def build(row: Row, node: Node) -> Spec:
        operands = [(operand, operand.meta["shape"]) for operand in node.all_input_nodes]
        rank = max(len(shape) for _, shape in operands)
        over = {dim % max(1, rank) for dim in dims(node)}
        words = [None if i in over else i for i in range(rank)]
        result = [word for i, word in enumerate(words) if not (removed and i in over)] + [None] * added
        aligned = [(operand, shape, words[rank - len(shape) :]) for operand, shape in operands]  # from the right
        large = {word for _, shape, own in aligned for size, word in zip(shape, own, strict=True) if size != 1}
        return dims_spec(
            row,
            node,
            [(o, [None if s == 1 and w in large else w for s, w in zip(shape, own, strict=True)])
             for o, shape, own in aligned],
            result,
        )  # fmt: skip

    return build


def _dim(node: Node) -> Sequence[int]:
    return [arguments(node)["dim"]]


RANKED = Row("sort, topk", "... _ -> ... _", unchanged, build=_whole_dims(_dim), cost=_GATHERED)
TRIANGLE = Row("triangle", "... _ _ -> ... _ _", unchanged, build=_whole_dims(lambda _: (-2, -1)), cost=_GATHERED)
SIMILARITY = Row(
    "cosine similarity", "... _, ... _ -> ...", unchanged, build=_whole_dims(_dim, removed=True), cost=_GATHERED
)
ONE_HOT = Row("one hot", "... -> ... _", unchanged, build=_whole_dims(lambda _: (), added=1), cost="nothing")
DIAGONAL = Row(
    "diagonal",
    "... _ _ -> ... _",
    unchanged,
    build=_whole_dims(lambda n: (arguments(n)["dim1"], arguments(n)["dim2"]), added=1, removed=True),
    cost=_GATHERED,
)


def _repeated(node: Node) -> Sequence[int]:
    """The dims that a repetition changes: counted from the last, as it may add some in front."""
    x: Any = node.args[0]
    before, after = x.meta["shape"], node.meta["shape"]
    return [i for i, size in enumerate(before) if size != after[len(after) - len(before) + i]]


def _repeat_spec(row: Row, node: Node) -> Spec | None:
    x: Any = node.args[0]
    rank, more = len(x.meta["shape"]), len(node.meta["shape"]) - len(x.meta["shape"])
    if more < 0:
        return None
    words = [None if i in _repeated(node) else i for i in range(rank)]
    return dims_spec(row, node, [(x, words)], [None] * more + words)


REPEAT = Row("repeat", "... _ -> ... _", unchanged, build=_repeat_spec, cost="the repeated dims are gathered")


def _select_spec(row: Row, node: Node) -> Spec | None:
    """``index_select``: one dim by a list of positions."""
    x, dim, index = (node.args[i] for i in range(3))
    assert isinstance(x, Node) and isinstance(dim, int) and isinstance(index, Node)
    words = [None if i == dim % len(x.meta["shape"]) else i for i in range(len(x.meta["shape"]))]
    return dims_spec(row, node, [(x, words), (index, [None] * len(index.meta["shape"]))], words)


INDEX_SELECT = Row("index_select", "... _ ..., _ -> ... _ ...", unchanged, build=_select_spec, cost=_GATHERED)


def _gather_spec(row: Row, node: Node) -> Spec | None:
    """``gather`` and ``scatter``: a position along a dim for each element; the other dims as they are."""
    x: Any = node.args[0]
    dim: Any = node.args[1]
    shape = node.meta["shape"]
    operands = node.all_input_nodes
    rank = len(shape)
    alike = [all(o.meta["shape"][i] == shape[i] for o in operands) and i != dim % max(1, rank) for i in range(rank)]
    words = [i if same else None for i, same in enumerate(alike)]
    return dims_spec(row, node, [(x, words), *((o, words) for o in operands if o is not x)], words)


GATHER = Row("gather, scatter", "... _ -> ... _", unchanged, build=_gather_spec, cost=_GATHERED)


def _index_spec(row: Row, node: Node) -> Spec | None:
    """``x[:, i, j]``: the indexed dims are whole, and what the indices make of them stands where the first was."""
    x: Any = node.args[0]
    given: Any = node.args[1]
    at = [i for i, index in enumerate(given) if index is not None]
    tensors = [given[i] for i in at]
    if any(t.meta["dtype"] == torch.bool for t in tensors):
        return None
    words = [None if i in at else i for i in range(len(x.meta["shape"]))]
    kept = [word for word in words if word is not None]
    made = [None] * (len(node.meta["shape"]) - len(kept))
    first = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    operands: list[tuple[Node, Sequence[int | None]]] = [(x, words)]
    operands += [(t, [None] * len(t.meta["shape"])) for t in dict.fromkeys(tensors)]
    return dims_spec(row, node, operands, [*kept[:first], *made, *kept[first:]])


INDEX = Row("index", "... _ ..., _ -> ... _ ...", unchanged, build=_index_spec, cost=_GATHERED)


def _embedding_spec(row: Row, node: Node) -> Spec | None:
    table, index = node.args[:2]
    assert isinstance(table, Node) and isinstance(index, Node)
    given = arguments(node)
    if given["scale_grad_by_freq"] or given["sparse"]:  # counts over the whole batch; no DTensor's gradient
        return None
    rank = len(index.meta["shape"])
    every = list(range(rank))
    return dims_spec(row, node, [(table, [None, rank]), (index, every)], [*every, rank])


EMBEDDING = Row("embedding", "_ k, ... -> ... k", unchanged, build=_embedding_spec, cost="nothing")


def _new_spec(row: Row, node: Node) -> Spec | None:
    """A new tensor of a global size: of its operand only the type counts, wherever that lies."""
    x: Any = node.args[0]
    every = list(range(len(x.meta["shape"])))
    spec = dims_spec(row, node, [(x, every)], [None] * len(node.meta["shape"]))
    return replace(spec, inside=frozenset(f"d{i}" for i in every))


NEW = Row("new", "... -> _...", unchanged, build=_new_spec, cost="nothing")

# ------------------------------------------------------------------------------------------ windows as dims


def _unfold_spec(row: Row, node: Node) -> Spec | None:
    x: Any = node.args[0]
    dim: Any = node.args[1]
    size: Any = node.args[2]
    step: Any = node.args[3]
    rank = len(x.meta["shape"])
    every = list(range(rank))
    windows = {(0, dim % rank): Window(hi=size - step, mul=step)}
    return dims_spec(row, node, [(x, every)], [*every, None], windows)


UNFOLD = Row("unfold", "... [d] ... -> ... d ... _", unchanged, build=_unfold_spec, cost="halos where windows cross")


def _columns_spec(row: Row, node: Node) -> Spec | None:
    """``im2col`` and ``col2im``: the dim of columns has the channels as its major factor, the taps as its minor."""
    x: Any = node.args[0]
    if len(x.meta["shape"]) < 3 or len(node.meta["shape"]) < 3:
        return None
    image, columns = (x, node) if node.target is aten.im2col.default else (node, x)
    n, c = image.meta["shape"][:2]
    taps = columns.meta["shape"][1] // c
    words = {
        image: (Word(("n",)), Word(("c",)), Word(()), Word(())),
        columns: (Word(("n",)), Word(("c", "t")), Word(())),
    }
    return Spec(row, node, ((x, words[x]),), words[node], {"n": n, "c": c, "t": taps})


COLUMNS = Row("im2col, col2im", "n c _ _ -> n (c t) _", unchanged, build=_columns_spec, cost="space is gathered")

# -------------------------------------------------------------------------------------------------- sampling

GRID_SAMPLE = Row(
    "grid sample",
    "n c _..., n s... _ -> n c s...",
    unchanged,
    tensors=(0, 1),
    cost="the input's space is gathered; the grid, and with it the output, may be split",
)


def _affine_spec(row: Row, node: Node) -> Spec | None:
    theta: Any = node.args[0]
    return dims_spec(row, node, [(theta, [0, None, None])], [0, *[None] * (len(node.meta["shape"]) - 1)])


def _local_affine(site: Site) -> Call:
    theta, sizes, *rest = site.args
    return site.node.target, (theta, [site.sizes()[0], *sizes[1:]], *rest), dict(site.node.kwargs)


AFFINE_GRID = Row("affine grid", "n _ _ -> n _... _", _local_affine, build=_affine_spec, cost="nothing")

ROWS: dict[Any, Row] = {
    aten.sort.default: RANKED,
    aten.sort.stable: RANKED,
    aten.argsort.default: RANKED,
    aten.topk.default: RANKED,
    aten.tril.default: TRIANGLE,
    aten.triu.default: TRIANGLE,
    aten.cosine_similarity.default: SIMILARITY,
    aten.one_hot.default: ONE_HOT,
    aten.diagonal.default: DIAGONAL,
    aten.repeat.default: REPEAT,
    aten.tile.default: REPEAT,
    aten.repeat_interleave.self_int: REPEAT,
    aten.index_select.default: INDEX_SELECT,
    aten.gather.default: GATHER,
    aten.scatter.src: GATHER,
    aten.scatter.value: GATHER,
    aten.scatter_add.default: GATHER,
    aten.index.Tensor: INDEX,
    aten.embedding.default: EMBEDDING,
    aten.new_zeros.default: NEW,
    aten.new_ones.default: NEW,
    aten.new_full.default: NEW,
    aten.new_empty.default: NEW,
    aten.unfold.default: UNFOLD,
    aten.im2col.default: COLUMNS,
    aten.col2im.default: COLUMNS,
    aten.grid_sampler.default: GRID_SAMPLE,
    aten.affine_grid_generator.default: AFFINE_GRID,
}
