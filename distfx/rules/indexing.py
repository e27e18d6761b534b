"""Operators that pick elements by their place or rank. The dims they pick along stay whole; all others may be split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from distfx.ir.layout import Window
from distfx.ir.meta import meta
from distfx.ir.nodes import arguments
from distfx.rules.notation import DimPattern
from distfx.rules.rule import Call, LocalContext, OpSpec, Rule, aten, spec_from_dims, unchanged

__all__ = ["RULES"]

_GATHERED = "nothing where that dim is whole, else it is gathered"


def _whole_dims(dims: Callable[[Node], Sequence[int]], added: int = 0, removed: bool = False) -> Callable[..., OpSpec]:
    """Operands, which broadcast, and result alike; ``dims`` whole, in the result ``removed``, or ``added`` at its
    end."""

    def build(rule: Rule, node: Node) -> OpSpec:
        operands = [(operand, meta(operand).shape) for operand in node.all_input_nodes]
        rank = max(len(shape) for _, shape in operands)
        over = {dim % max(1, rank) for dim in dims(node)}
        words = [None if i in over else i for i in range(rank)]
        result = [word for i, word in enumerate(words) if not (removed and i in over)] + [None] * added
        aligned = [(operand, shape, words[rank - len(shape) :]) for operand, shape in operands]  # from the right
        large = {word for _, shape, own in aligned for size, word in zip(shape, own, strict=True) if size != 1}
        return spec_from_dims(
            rule,
            node,
            [(o, [None if s == 1 and w in large else w for s, w in zip(shape, own, strict=True)])
             for o, shape, own in aligned],
            result,
        )  # fmt: skip

    return build


def _dim(node: Node) -> Sequence[int]:
    return [arguments(node)["dim"]]


RANKED = Rule("sort, topk", "... _ -> ... _", unchanged, build=_whole_dims(_dim), cost=_GATHERED)
TRIANGLE = Rule("triangle", "... _ _ -> ... _ _", unchanged, build=_whole_dims(lambda _: (-2, -1)), cost=_GATHERED)
SIMILARITY = Rule(
    "cosine similarity", "... _, ... _ -> ...", unchanged, build=_whole_dims(_dim, removed=True), cost=_GATHERED
)
ONE_HOT = Rule("one hot", "... -> ... _", unchanged, build=_whole_dims(lambda _: (), added=1), cost="nothing")
DIAGONAL = Rule(
    "diagonal",
    "... _ _ -> ... _",
    unchanged,
    build=_whole_dims(lambda n: (arguments(n)["dim1"], arguments(n)["dim2"]), added=1, removed=True),
    cost=_GATHERED,
)


def _repeated(node: Node) -> Sequence[int]:
    """The dims that a repetition changes: counted from the last, as it may add some in front."""
    x: Any = node.args[0]
    before, after = meta(x).shape, meta(node).shape
    return [i for i, size in enumerate(before) if size != after[len(after) - len(before) + i]]


def _repeat_spec(rule: Rule, node: Node) -> OpSpec | None:
    x: Any = node.args[0]
    rank, more = len(meta(x).shape), len(meta(node).shape) - len(meta(x).shape)
    if more < 0:
        return None
    words = [None if i in _repeated(node) else i for i in range(rank)]
    return spec_from_dims(rule, node, [(x, words)], [None] * more + words)


REPEAT = Rule("repeat", "... _ -> ... _", unchanged, build=_repeat_spec, cost="the repeated dims are gathered")


def _select_spec(rule: Rule, node: Node) -> OpSpec | None:
    """``index_select``: one dim by a list of positions."""
    x, dim, index = (node.args[i] for i in range(3))
    assert isinstance(x, Node) and isinstance(dim, int) and isinstance(index, Node)
    words = [None if i == dim % len(meta(x).shape) else i for i in range(len(meta(x).shape))]
    return spec_from_dims(rule, node, [(x, words), (index, [None] * len(meta(index).shape))], words)


INDEX_SELECT = Rule("index_select", "... _ ..., _ -> ... _ ...", unchanged, build=_select_spec, cost=_GATHERED)


def _gather_spec(rule: Rule, node: Node) -> OpSpec | None:
    """``gather`` and ``scatter``: a position along a dim for each element; the other dims as they are."""
    x: Any = node.args[0]
    dim: Any = node.args[1]
    shape = meta(node).shape
    operands = node.all_input_nodes
    rank = len(shape)
    alike = [all(meta(o).shape[i] == shape[i] for o in operands) and i != dim % max(1, rank) for i in range(rank)]
    words = [i if same else None for i, same in enumerate(alike)]
    return spec_from_dims(rule, node, [(x, words), *((o, words) for o in operands if o is not x)], words)


GATHER = Rule("gather, scatter", "... _ -> ... _", unchanged, build=_gather_spec, cost=_GATHERED)


def _index_spec(rule: Rule, node: Node) -> OpSpec | None:
    """``x[:, i, j]``: the indexed dims are whole, and what the indices make of them stands where the first was."""
    x: Any = node.args[0]
    given: Any = node.args[1]
    at = [i for i, index in enumerate(given) if index is not None]
    tensors = [given[i] for i in at]
    if any(meta(t).dtype == torch.bool for t in tensors):
        return None
    words = [None if i in at else i for i in range(len(meta(x).shape))]
    kept = [word for word in words if word is not None]
    made = [None] * (len(meta(node).shape) - len(kept))
    first = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    operands: list[tuple[Node, Sequence[int | None]]] = [(x, words)]
    operands += [(t, [None] * len(meta(t).shape)) for t in dict.fromkeys(tensors)]
    return spec_from_dims(rule, node, operands, [*kept[:first], *made, *kept[first:]])


INDEX = Rule("index", "... _ ..., _ -> ... _ ...", unchanged, build=_index_spec, cost=_GATHERED)


def _embedding_spec(rule: Rule, node: Node) -> OpSpec | None:
    table, index = node.args[:2]
    assert isinstance(table, Node) and isinstance(index, Node)
    given = arguments(node)
    if given["scale_grad_by_freq"] or given["sparse"]:  # counts over the whole batch; no DTensor's gradient
        return None
    rank = len(meta(index).shape)
    every = list(range(rank))
    return spec_from_dims(rule, node, [(table, [None, rank]), (index, every)], [*every, rank])


EMBEDDING = Rule("embedding", "_ k, ... -> ... k", unchanged, build=_embedding_spec, cost="nothing")


def _new_spec(rule: Rule, node: Node) -> OpSpec | None:
    """A new tensor of a global size: of its operand only the type counts, wherever that lies."""
    x: Any = node.args[0]
    every = list(range(len(meta(x).shape)))
    spec = spec_from_dims(rule, node, [(x, every)], [None] * len(meta(node).shape))
    return replace(spec, inside=frozenset(f"d{i}" for i in every))


NEW = Rule("new", "... -> _...", unchanged, build=_new_spec, cost="nothing")

# ------------------------------------------------------------------------------------------ windows as dims


def _unfold_spec(rule: Rule, node: Node) -> OpSpec | None:
    x: Any = node.args[0]
    dim: Any = node.args[1]
    size: Any = node.args[2]
    step: Any = node.args[3]
    rank = len(meta(x).shape)
    every = list(range(rank))
    windows = {(0, dim % rank): Window(hi=size - step, mul=step)}
    return spec_from_dims(rule, node, [(x, every)], [*every, None], windows)


UNFOLD = Rule("unfold", "... [d] ... -> ... d ... _", unchanged, build=_unfold_spec, cost="halos where windows cross")


def _columns_spec(rule: Rule, node: Node) -> OpSpec | None:
    """``im2col`` and ``col2im``: the dim of columns has the channels as its major factor, the taps as its minor."""
    x: Any = node.args[0]
    if len(meta(x).shape) < 3 or len(meta(node).shape) < 3:
        return None
    image, columns = (x, node) if node.target is aten.im2col.default else (node, x)
    n, c = meta(image).shape[:2]
    taps = meta(columns).shape[1] // c
    words = {
        image: (DimPattern(("n",)), DimPattern(("c",)), DimPattern(()), DimPattern(())),
        columns: (DimPattern(("n",)), DimPattern(("c", "t")), DimPattern(())),
    }
    return OpSpec(rule, node, ((x, words[x]),), words[node], {"n": n, "c": c, "t": taps})


COLUMNS = Rule("im2col, col2im", "n c _ _ -> n (c t) _", unchanged, build=_columns_spec, cost="space is gathered")

# -------------------------------------------------------------------------------------------------- sampling

GRID_SAMPLE = Rule(
    "grid sample",
    "n c _..., n s... _ -> n c s...",
    unchanged,
    tensors=(0, 1),
    cost="the input's space is gathered; the grid, and with it the output, may be split",
)


def _affine_spec(rule: Rule, node: Node) -> OpSpec | None:
    theta: Any = node.args[0]
    return spec_from_dims(rule, node, [(theta, [0, None, None])], [0, *[None] * (len(meta(node).shape) - 1)])


def _local_affine(context: LocalContext) -> Call:
    theta, sizes, *rest = context.args
    return context.node.target, (theta, [context.sizes()[0], *sizes[1:]], *rest), dict(context.node.kwargs)


AFFINE_GRID = Rule("affine grid", "n _ _ -> n _... _", _local_affine, build=_affine_spec, cost="nothing")

RULES: dict[Any, Rule] = {
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
