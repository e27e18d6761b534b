"""The symbols of a capture: readable names, example values, and the conditions under which the graph is valid."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch
from torch.fx import Graph

from distfx.ir.layout import DIM_NAMES
from distfx.ir.meta import Meta
from distfx.ir.symbolic import size_of
from distfx.ir.torch_private import guards_of, size_hint

__all__ = ["example_values", "name_symbols", "size_guards"]

Renaming = Mapping[sympy.Symbol, sympy.Symbol]


def name_symbols(graph: Graph) -> dict[sympy.Symbol, sympy.Symbol]:
    """Name the input's symbols N, C, D, H, W; numbered if several inputs have different sizes."""
    names: dict[sympy.Symbol, sympy.Symbol] = {}
    taken: set[str] = set()
    for node in graph.find_nodes(op="placeholder"):
        value = Meta.val.get(node)
        if not isinstance(value, torch.Tensor):
            continue
        dim_names = DIM_NAMES.get(value.dim(), [f"S{i}" for i in range(value.dim())])
        for size, name in zip(value.shape, dim_names, strict=False):
            symbol = size_of(size)
            if isinstance(symbol, sympy.Symbol) and symbol not in names:
                unique = next(n for n in (name, *(f"{name}{i}" for i in range(2, 99))) if n not in taken)
                taken.add(unique)
                names[symbol] = sympy.Symbol(unique, integer=True, positive=True)
    return names


def example_values(graph: Graph, names: Renaming) -> dict[sympy.Symbol, int]:
    """For each symbol its value in the example."""
    values: dict[sympy.Symbol, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = Meta.val.get(node)
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            symbol = size_of(size)
            if isinstance(symbol, sympy.Symbol):
                values[names[symbol]] = size_hint(size)
    return values


def size_guards(graph: Graph, names: Renaming) -> tuple[sympy.Expr, ...]:
    """The conditions on the input's sizes that the trace has assumed."""
    known = set(names.values())
    for node in graph.find_nodes(op="placeholder"):
        guards = guards_of(Meta.val.get(node))
        if guards is not None:
            renamed = (guard.xreplace(dict(names)) for guard in guards)
            return tuple(guard for guard in renamed if guard.free_symbols and guard.free_symbols <= known)
    return ()
