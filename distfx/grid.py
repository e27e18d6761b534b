"""The processor grid: named axes over the ranks, and the segments along them.

>>> grid = Grid.abstract(n=2, c=2, h=2)
>>> grid
Grid(n=2, c=2, h=2)
>>> grid.at(5).coords
{'n': 1, 'c': 0, 'h': 1}
>>> grid.at(5).members(("n", "h"))
(0, 1, 4, 5)

A grid is a plain value: axes, their sizes, and the rank from which it is seen. Everything that needs processes (joining
the other ranks, meshes, process groups) goes through :class:`Processes`, which :mod:`distfx.runtime.comm.groups`
implements.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from distfx.errors import DistfxError
from distfx.ir.layout import Coords

__all__ = ["Grid", "GridLike", "Processes", "Segment", "connect"]

AXES = ("n", "c", "d", "h", "w")
"""The axes in mesh order, the slowest varying first: samples, channels and filters, then space."""

_MEANING = {"n": "samples", "c": "channels and filters", "d": "depth", "h": "height", "w": "width"}


@dataclass(frozen=True)
class Segment:
    """The ranks that differ from this one only along ``axes``; ``members`` are global ranks, row-major in ``axes``."""

    axes: tuple[str, ...]
    members: tuple[int, ...]
    index: int
    group: Any = None
    nccl: bool = False
    """Whether GPU tensors go through NCCL."""

    @property
    def size(self) -> int:
        return len(self.members)

    @cached_property
    def group_ranks(self) -> tuple[int, ...]:
        """Each member's rank inside the process group, which is ordered by global rank."""
        ordered = sorted(self.members)
        return tuple(ordered.index(member) for member in self.members)


class Processes(Protocol):
    """What a grid asks of the runtime."""

    def start(self, read_sizes: Callable[[], dict[str, int]]) -> tuple[dict[str, int], int, int, str]:
        """Join the other ranks and agree on the sizes that ``read_sizes`` returns.

        Returns the sizes, this rank, the number of ranks, and the type of device they compute on. If ``read_sizes``
        raises on one rank, this raises on all.
        """

    def adopt_mesh(self, grid: Grid, mesh: DeviceMesh) -> None:
        """Use the caller's mesh for all grids with these axes."""

    def mesh(self, grid: Grid) -> DeviceMesh:
        """The mesh of the grid's axes."""

    def parameter_mesh(self, grid: Grid) -> DeviceMesh:
        """The mesh of the grid's channel axes."""

    def group(self, grid: Grid, axes: tuple[str, ...]) -> tuple[Any, bool]:
        """The process group of this rank's segment along ``axes``, and whether NCCL carries its GPU tensors."""

    def device(self, device_type: str) -> torch.device:
        """The device of this rank."""


_processes: Processes | None = None


def connect(processes: Processes) -> None:
    """Let grids use these processes. Called once, when the runtime is imported."""
    global _processes
    _processes = processes


def _runtime() -> Processes:
    if _processes is None:
        raise DistfxError("this grid needs processes, but the runtime is not loaded: import distfx")
    return _processes


class Grid:
    """A grid of ranks with the axes ``n`` (samples), ``c`` (channels and filters), ``d``, ``h``, ``w`` (space).

    The sizes multiply to the number of ranks; one may be -1 and is inferred. ``c=(2, 4)`` factors the channel axis
    into ``c0`` and ``c1``, as stationary-w uses it. ``Grid`` calls :func:`distfx.init`.
    """

    def __init__(
        self,
        n: int = 1,
        c: int | tuple[int, int] = 1,
        d: int = 1,
        h: int = 1,
        w: int = 1,
    ) -> None:
        self._start(lambda: _sizes(n, c, d, h, w))

    def _start(self, read_sizes: Callable[[], dict[str, int]]) -> None:
        """Become the grid of these sizes on all ranks."""
        sizes, rank, world, device_type = _runtime().start(read_sizes)
        self._setup(_infer(sizes, world), rank, device_type)
        self._check_world(world)

    def _setup(self, axes: dict[str, int], rank: int, device_type: str | None) -> None:
        self._axes = axes
        self._rank = rank
        self._device_type = device_type
        self._own_mesh: DeviceMesh | None = None

    def _check_world(self, world: int) -> None:
        if self.size != world:
            raise DistfxError(
                f"{self} needs {self.size} rank{'s' * (self.size != 1)}, but {world} "
                f"{'were' if world != 1 else 'was'} started. Start as many as the sizes multiply to "
                f"(torchrun --nproc-per-node {self.size} ..., or mpiexec -n {self.size} ...), or write -1 for one size."
            )

    # -- other ways to make one

    @classmethod
    def abstract(cls, n: int = 1, c: int | tuple[int, int] = 1, d: int = 1, h: int = 1, w: int = 1) -> Grid:
        """A grid without processes, seen from rank 0: for planning."""
        sizes = _sizes(n, c, d, h, w)
        if -1 in sizes.values():
            raise DistfxError("an abstract grid has no processes to infer -1 from: give every size")
        return cls._make(sizes, 0, None)

    @classmethod
    def _make(cls, axes: dict[str, int], rank: int, device_type: str | None) -> Grid:
        grid = cls.__new__(cls)
        grid._setup(axes, rank, device_type)
        return grid

    @classmethod
    def parse(cls, text: str) -> Grid:
        """``Grid.parse("n2c2h2")`` is ``Grid(n=2, c=2, h=2)``; ``c2x4`` is ``c=(2, 4)``; ``n-1`` infers."""
        return cls._started(lambda: _sizes(**_parse(text)))

    @classmethod
    def _started(cls, read: Callable[[], dict[str, int]]) -> Grid:
        grid = cls.__new__(cls)
        grid._start(read)
        return grid

    @classmethod
    def parse_abstract(cls, text: str) -> Grid:
        """As :meth:`parse`, without processes."""
        return cls.abstract(**_parse(text))

    @classmethod
    def of_abstract(cls, grid: GridLike) -> Grid:
        """As :meth:`of`, without processes."""
        if isinstance(grid, str):
            return cls.parse_abstract(grid)
        if isinstance(grid, Grid | DeviceMesh):
            return cls.of(grid).at(0)
        return cls.abstract(**_named(grid))

    @classmethod
    def of(cls, grid: GridLike) -> Grid:
        """A grid from whatever a user may give where a grid is taken: a grid, text, a dict, a ``DeviceMesh``."""
        if isinstance(grid, Grid):
            return grid
        if isinstance(grid, str):
            return cls.parse(grid)
        if isinstance(grid, DeviceMesh):
            return cls._of_mesh(grid)
        return cls._started(lambda: _sizes(**_named(grid)))

    @classmethod
    def _of_mesh(cls, mesh: DeviceMesh) -> Grid:
        grid = cls._started(lambda: _mesh_sizes(mesh))
        grid._device_type = mesh.device_type
        if min(mesh.mesh.shape) == 1:  # has dims that are not axes of the grid, so no other grid may use it
            grid._own_mesh = mesh
        else:
            _runtime().adopt_mesh(grid, mesh)
        return grid

    def factor(self, first: int) -> Grid:
        """This grid with its ``c`` axis factored into ``c0`` of size ``first`` and ``c1``, over the same processes."""
        size = self._axes["c"]
        if size % first:
            raise DistfxError(f"{first} does not divide the c axis of {self}")
        axes: dict[str, int] = {}
        for axis, extent in self._axes.items():
            axes |= {"c0": first, "c1": size // first} if axis == "c" else {axis: extent}
        return self._make(axes, self._rank, self._device_type)

    def at(self, rank: int) -> Grid:
        """The same grid without processes, seen from ``rank``."""
        return self._make(dict(self._axes), rank, None)

    # -- what it is

    @property
    def axes(self) -> dict[str, int]:
        """The axes that divide anything, with their sizes, in mesh order."""
        return {axis: size for axis, size in self._axes.items() if size > 1}

    @property
    def size(self) -> int:
        """How many ranks."""
        return math.prod(self._axes.values())

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def is_abstract(self) -> bool:
        """Whether it has no processes."""
        return self._device_type is None

    @property
    def device_type(self) -> str:
        return self._device_type or "cpu"

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return torch.device("cpu") if self.device_type == "cpu" else _runtime().device(self.device_type)

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate along each axis."""
        return self._coords_of(self._rank)

    def _coords_of(self, rank: int) -> dict[str, int]:
        coords: dict[str, int] = {}
        for axis, size in reversed(self.axes.items()):
            rank, coords[axis] = divmod(rank, size)
        return dict(reversed(coords.items()))

    def placement(self, rank: int | None = None) -> Coords:
        """For each axis a rank's coordinate and the axis' size, as layouts take them."""
        coords = self.coords if rank is None else self._coords_of(rank)
        return {axis: (coords[axis], size) for axis, size in self.axes.items()}

    def members(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The global ranks of this rank's segment along ``axes``, row-major in that order."""
        strides: dict[str, int] = {}
        stride = 1
        for axis, size in reversed(self.axes.items()):
            strides[axis], stride = stride, stride * size
        base = self._rank - sum(strides[axis] * self.coords[axis] for axis in axes)
        steps = itertools.product(*(range(self.axes[axis]) for axis in axes))
        return tuple(base + sum(strides[a] * i for a, i in zip(axes, step, strict=True)) for step in steps)

    def __repr__(self) -> str:
        shown = {axis: size for axis, size in self._axes.items() if size > 1 and axis not in ("c0", "c1")}
        if "c0" in self._axes:
            shown["c"] = (self._axes["c0"], self._axes["c1"])  # type: ignore[assignment]
        order = sorted(shown, key=AXES.index)
        return f"Grid({', '.join(f'{axis}={shown[axis]}' for axis in order)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and (self.axes, self.rank) == (other.axes, other.rank)

    def __hash__(self) -> int:
        return hash((tuple(self.axes.items()), self.rank))

    # -- its processes

    @property
    def mesh(self) -> DeviceMesh:
        """The ``DeviceMesh`` of the axes larger than one. Made once for each shape."""
        if self.is_abstract:
            raise DistfxError(f"{self} is abstract: it has no processes and no mesh")
        return self._own_mesh or _runtime().mesh(self)

    @property
    def parameter_mesh(self) -> DeviceMesh:
        """The ``DeviceMesh`` of the parameters: this rank's part of :attr:`mesh` along the channel axes, which split
        them. A grid without channel axes has all its ranks in one dim.

        DTensor weighs every combination of placements over the dims of a mesh, for each operator of an optimizer and
        each shape. On four dims that takes a second for each parameter, on five 15 seconds.
        """
        return _runtime().parameter_mesh(self)

    def segment(self, axes: tuple[str, ...]) -> Segment:
        """This rank's segment along ``axes``. All ranks must ask for the same axes in the same order."""
        members = self.members(axes)
        if self.is_abstract or len(members) == 1:
            return Segment(axes, members, members.index(self._rank))
        group, nccl = _runtime().group(self, axes)
        return Segment(axes, members, members.index(self._rank), group, nccl)

    def partition(self, axes: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
        """The members of every segment along ``axes``, the same list on every rank."""
        seen: set[int] = set()
        for rank in range(self.size):
            if rank not in seen:
                members = self.at(rank).members(axes)
                seen.update(members)
                yield members


GridLike = Grid | str | Mapping[str, int] | DeviceMesh


def _mesh_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """The axes of a mesh that is built as a grid's own."""
    names = mesh.mesh_dim_names
    if names is None or not set(names) <= {*AXES, "c0", "c1"}:
        raise DistfxError(
            f"the dims of the DeviceMesh must be named after the axes {', '.join(AXES)}, not {names}: "
            "init_device_mesh(..., mesh_dim_names=('n', 'h'))"
        )
    if ("c0" in names) != ("c1" in names) or {"c", "c0"} <= set(names):
        raise DistfxError(f"the DeviceMesh has dims {names}: the channel axis is one, c, or its two factors, c0 and c1")
    order = [axis for axis in ("n", "c", "c0", "c1", "d", "h", "w") if axis in names]
    if list(names) != order or mesh.mesh.flatten().tolist() != list(range(mesh.size())):
        raise DistfxError(f"the DeviceMesh must have its dims in the order {order} and its ranks in row-major order")
    return dict(zip(names, mesh.mesh.shape, strict=True))


def _named(grid: Any) -> dict[str, Any]:
    """A dict of sizes, if it is one."""
    if not isinstance(grid, Mapping):
        kind = type(grid).__name__
        raise DistfxError(f"a grid is a distfx.Grid, a text like 'n2h2', a dict or a DeviceMesh, not {kind}")
    unknown = sorted(set(map(str, grid)) - set(AXES))
    if unknown:
        raise DistfxError(f"unknown axis {unknown[0]!r} in {dict(grid)}: the axes are {', '.join(AXES)}")
    return dict(grid)


def _sizes(n: int = 1, c: int | tuple[int, int] = 1, d: int = 1, h: int = 1, w: int = 1) -> dict[str, int]:
    """The axes in mesh order, validated."""
    sizes = {"n": n, "c": c, "d": d, "h": h, "w": w}
    flat: dict[str, Any] = {}
    for axis, size in sizes.items():
        if isinstance(size, tuple | list) and axis == "c" and len(size) == 2:
            flat |= {"c0": size[0], "c1": size[1]}
        else:
            flat[axis] = size
    for axis, size in flat.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            meaning = _MEANING[axis[0]]
            raise DistfxError(f"axis {axis} ({meaning}) has size {size!r}: give a positive whole number, or -1 for one")
    if list(flat.values()).count(-1) > 1:
        raise DistfxError("only one size of a grid may be -1")
    return flat


def show_sizes(sizes: Mapping[str, int]) -> str:
    """Sizes as the call that makes the grid."""
    return f"Grid({', '.join(f'{axis}={size}' for axis, size in sizes.items() if size != 1)})"


def _infer(sizes: dict[str, int], world: int) -> dict[str, int]:
    """The sizes with -1 replaced by what is left of ``world`` ranks."""
    if -1 not in sizes.values():
        return sizes
    rest = math.prod(size for size in sizes.values() if size != -1)
    if world % rest:
        given = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size not in (1, -1))
        raise DistfxError(
            f"{given or 'the grid'} takes {rest} ranks, which do not divide the {world} started: -1 cannot be inferred"
        )
    return {axis: world // rest if size == -1 else size for axis, size in sizes.items()}


def _parse(text: str) -> dict[str, Any]:
    """``"n2c2x4h2"`` as keyword arguments of a grid."""
    tokens = re.findall(r"([a-z])(-?\d+)(?:x(\d+))?", text)
    sizes: dict[str, Any] = {}
    for axis, size, second in tokens:
        if second and axis != "c":
            raise DistfxError(f"cannot read grid {text!r}: only c has two factors, as in c2x4, not {axis}")
        if axis not in AXES or axis in sizes:
            raise DistfxError(f"cannot read axis {axis!r} of grid {text!r}: the axes are {', '.join(AXES)}, each once")
        sizes[axis] = (int(size), int(second)) if second else int(size)
    if "".join(f"{a}{s}{'x' + t if t else ''}" for a, s, t in tokens) != text.strip() or not sizes:
        raise DistfxError(f"cannot read grid {text!r}: write it like 'n2c2h2'")
    return sizes
