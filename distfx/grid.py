"""The processor grid: named axes over the ranks, and the segments along them.

>>> grid = Grid.abstract(n=2, c=2, h=2)
>>> grid
Grid(n=2, c=2, h=2)
>>> grid.at(5).coords
{'n': 1, 'c': 0, 'h': 1}
>>> grid.at(5).members(("n", "h"))
(0, 1, 4, 5)

A grid is a plain value: its axes, their sizes, and one rank, whose coordinates and segments it returns. Everything that
needs processes (joining the other ranks, meshes, process groups) goes through :class:`Processes`, which
:mod:`distfx.runtime.comm.groups` implements. An *abstract* grid has no processes and serves for planning.
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

MAX_RANKS = 2**24
"""More ranks than any machine has. The limit keeps a typing error from exhausting the memory."""

_MEANING = {"n": "samples", "c": "channels and filters", "d": "depth", "h": "height", "w": "width"}


@dataclass(frozen=True)
class Segment:
    """The ranks whose coordinates differ from this rank's only along ``axes``.

    ``members`` are global ranks, row-major in ``axes``; this rank is ``members[index]``. ``group`` is the process group
    of the members, or ``None`` if there is only one or the grid is abstract.
    """

    axes: tuple[str, ...]
    members: tuple[int, ...]
    index: int
    group: Any = None
    nccl: bool = False
    """Whether the process group sends GPU tensors by NCCL."""

    @property
    def size(self) -> int:
        return len(self.members)

    @cached_property
    def group_ranks(self) -> tuple[int, ...]:
        """Each member's rank inside the process group, which is ordered by global rank."""
        ordered = sorted(self.members)
        return tuple(ordered.index(member) for member in self.members)


class Processes(Protocol):
    """The part of the runtime that grids use."""

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
        """The process group of this rank's segment along ``axes``, and whether it sends GPU tensors by NCCL."""

    def device(self, device_type: str) -> torch.device:
        """The device of this rank."""


_processes: Processes | None = None


def connect(processes: Processes) -> None:
    """Make grids use ``processes``. The runtime calls it once, when it is imported."""
    global _processes
    _processes = processes


def _runtime() -> Processes:
    if _processes is None:
        raise DistfxError("a grid with processes needs the runtime, which is not loaded: import distfx first")
    return _processes


class Grid:
    """A grid of ranks with the axes ``n`` (samples), ``c`` (channels and filters), ``d``, ``h``, ``w`` (space).

    The product of the sizes is the number of ranks. One size may be -1 and is inferred. ``c=(2, 4)`` splits the channel
    axis into the factors ``c0`` and ``c1``, which stationary-w uses. Creating a grid calls :func:`distfx.init`, which
    joins the other ranks; all ranks must create the same grid.

    ==============================  =====================================  ===================================
    from                            with processes                         abstract: for planning
    ==============================  =====================================  ===================================
    sizes                           ``Grid(n=2, h=2)``                     :meth:`abstract`
    text                            :meth:`parse`                          :meth:`parse_abstract`
    grid, text, dict, DeviceMesh    :meth:`of`                             :meth:`of_abstract`
    ==============================  =====================================  ===================================
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
        """Initialise this grid with the sizes that ``read_sizes`` returns; raise on all ranks if it raises on one."""
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
                f"{'were' if world != 1 else 'was'} started. Start {self.size} (torchrun --nproc-per-node {self.size} "
                f"..., or mpiexec -n {self.size} ...), change the sizes, or write -1 for one of them."
            )

    # -- other ways to create a grid

    @classmethod
    def abstract(cls, n: int = 1, c: int | tuple[int, int] = 1, d: int = 1, h: int = 1, w: int = 1) -> Grid:
        """A grid without processes, for planning. Its rank is 0; :meth:`at` selects another.

        >>> Grid.abstract(n=2, c=(2, 4)).axes
        {'n': 2, 'c0': 2, 'c1': 4}
        """
        sizes = _sizes(n, c, d, h, w)
        if -1 in sizes.values():
            raise DistfxError("an abstract grid has no processes from which to infer -1: give every size")
        return cls._make(sizes, 0, None)

    @classmethod
    def _make(cls, axes: dict[str, int], rank: int, device_type: str | None) -> Grid:
        grid = cls.__new__(cls)
        grid._setup(axes, rank, device_type)
        return grid

    @classmethod
    def parse(cls, text: str) -> Grid:
        """A grid from text: ``Grid.parse("n2c2h2")`` is ``Grid(n=2, c=2, h=2)``.

        ``c2x4`` stands for ``c=(2, 4)``, and ``n-1`` for a size to be inferred.
        """
        return cls._launch(lambda: _sizes(**_parse(text)))

    @classmethod
    def _launch(cls, read_sizes: Callable[[], dict[str, int]]) -> Grid:
        grid = cls.__new__(cls)
        grid._start(read_sizes)
        return grid

    @classmethod
    def parse_abstract(cls, text: str) -> Grid:
        """An abstract grid from text, as :meth:`parse` reads it.

        >>> Grid.parse_abstract("n3c2x4")
        Grid(n=3, c=(2, 4))
        """
        return cls.abstract(**_parse(text))

    @classmethod
    def of_abstract(cls, grid: GridLike) -> Grid:
        """An abstract grid from the same arguments as :meth:`of`.

        >>> Grid.of_abstract({"h": 4, "n": 2})
        Grid(n=2, h=4)
        """
        if isinstance(grid, str):
            return cls.parse_abstract(grid)
        if isinstance(grid, Grid | DeviceMesh):
            return cls.of(grid).at(0)
        return cls.abstract(**_named(grid))

    @classmethod
    def of(cls, grid: GridLike) -> Grid:
        """A grid from any value that distfx accepts as one: a grid, text, a dict of sizes, or a ``DeviceMesh``.

        The dims of a ``DeviceMesh`` must be named after the axes and be in mesh order.
        """
        if isinstance(grid, Grid):
            return grid
        if isinstance(grid, str):
            return cls.parse(grid)
        if isinstance(grid, DeviceMesh):
            return cls._of_mesh(grid)
        return cls._launch(lambda: _sizes(**_named(grid)))

    @classmethod
    def _of_mesh(cls, mesh: DeviceMesh) -> Grid:
        grid = cls._launch(lambda: _mesh_sizes(mesh))
        grid._device_type = mesh.device_type
        if min(mesh.mesh.shape) == 1:  # some of its dims are not axes of the grid, so that other grids cannot use it
            grid._own_mesh = mesh
        else:
            _runtime().adopt_mesh(grid, mesh)
        return grid

    def factor(self, first: int) -> Grid:
        """This grid with axis ``c`` replaced by ``c0``, of size ``first``, and ``c1``, on the same processes."""
        size = self._axes["c"]
        if size % first:
            raise DistfxError(f"{first} does not divide the c axis of {self}")
        axes: dict[str, int] = {}
        for axis, extent in self._axes.items():
            axes |= {"c0": first, "c1": size // first} if axis == "c" else {axis: extent}
        return self._make(axes, self._rank, self._device_type)

    def at(self, rank: int) -> Grid:
        """The abstract grid with the same axes, for another ``rank``."""
        return self._make(dict(self._axes), rank, None)

    # -- axes and ranks

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the axes that are larger than one, in mesh order."""
        return {axis: size for axis, size in self._axes.items() if size > 1}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self._axes.values())

    @property
    def rank(self) -> int:
        """The rank whose coordinates and segments the grid returns: this process, unless the grid is abstract."""
        return self._rank

    @property
    def is_abstract(self) -> bool:
        """Whether the grid has no processes."""
        return self._device_type is None

    @property
    def device_type(self) -> str:
        """The type of device on which the ranks compute, ``"cpu"`` or ``"cuda"``."""
        return self._device_type or "cpu"

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
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
        """For each axis, the coordinate of ``rank`` (by default this rank) and the size, as layouts expect them."""
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

    # -- processes

    @property
    def mesh(self) -> DeviceMesh:
        """The ``DeviceMesh`` of the axes larger than one. Grids with the same axes share it."""
        if self.is_abstract:
            raise DistfxError(f"{self} is abstract: it has no processes and no mesh")
        return self._own_mesh or _runtime().mesh(self)

    @property
    def parameter_mesh(self) -> DeviceMesh:
        """The ``DeviceMesh`` of the parameters: the channel axes of :attr:`mesh`, which split the parameters.

        If the grid has no channel axis, it is a mesh of all ranks in one dim. The number of dims is small on purpose:
        for each operator of an optimizer and each shape, DTensor tries every combination of placements on the dims of
        the mesh. This takes a second per parameter on four dims, and 15 seconds on five.
        """
        return _runtime().parameter_mesh(self)

    def segment(self, axes: tuple[str, ...]) -> Segment:
        """This rank's segment along ``axes``. All ranks must call it with the same axes in the same order."""
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
    """The sizes of a mesh whose dims are the axes of a grid."""
    names = mesh.mesh_dim_names
    if names is None or not set(names) <= {*AXES, "c0", "c1"}:
        raise DistfxError(
            f"the dims of the DeviceMesh must be named after the axes {', '.join(AXES)}, not {names}: "
            "init_device_mesh(..., mesh_dim_names=('n', 'h'))"
        )
    if ("c0" in names) != ("c1" in names) or {"c", "c0"} <= set(names):
        raise DistfxError(
            f"the DeviceMesh has dims {names}: name the channel axis c, or its two factors c0 and c1, but not both"
        )
    order = [axis for axis in ("n", "c", "c0", "c1", "d", "h", "w") if axis in names]
    if list(names) != order or mesh.mesh.flatten().tolist() != list(range(mesh.size())):
        raise DistfxError(f"the DeviceMesh must have its dims in the order {order} and its ranks in row-major order")
    return dict(zip(names, mesh.mesh.shape, strict=True))


def _named(grid: Any) -> dict[str, Any]:
    """The sizes in a dict, after a check of its type and its keys."""
    if not isinstance(grid, Mapping):
        kind = type(grid).__name__
        raise DistfxError(f"a grid is a distfx.Grid, a text like 'n2h2', a dict or a DeviceMesh, not {kind}")
    unknown = sorted(set(map(str, grid)) - set(AXES))
    if unknown:
        raise DistfxError(f"unknown axis {unknown[0]!r} in {dict(grid)}: the axes are {', '.join(AXES)}")
    return dict(grid)


def _sizes(n: int = 1, c: int | tuple[int, int] = 1, d: int = 1, h: int = 1, w: int = 1) -> dict[str, int]:
    """The sizes by axis in mesh order, after a check of their types and values."""
    sizes: dict[str, Any] = {}
    for axis, size in {"n": n, "c": c, "d": d, "h": h, "w": w}.items():
        if isinstance(size, tuple | list) and axis == "c" and len(size) == 2:
            sizes |= {"c0": size[0], "c1": size[1]}
        else:
            sizes[axis] = size
    for axis, size in sizes.items():
        where = f"axis {axis} ({_MEANING[axis[0]]})"
        if isinstance(size, bool) or not isinstance(size, int):
            raise DistfxError(f"{where} has size {size!r}: give a positive whole number, or -1 for one axis")
        if abs(size) > MAX_RANKS:
            raise DistfxError(f"{where} has more than {MAX_RANKS} ranks")
        if size < 1 and size != -1:
            raise DistfxError(f"{where} has size {size}: give a positive whole number, or -1 for one axis")
    if list(sizes.values()).count(-1) > 1:
        raise DistfxError("only one size of a grid may be -1")
    if abs(math.prod(sizes.values())) > MAX_RANKS:
        raise DistfxError(f"{show_sizes(sizes)} has more than {MAX_RANKS} ranks")
    return sizes


def show_sizes(sizes: Mapping[str, int]) -> str:
    """Sizes as the call that creates the grid."""
    return f"Grid({', '.join(f'{axis}={size}' for axis, size in sizes.items() if size != 1)})"


def _infer(sizes: dict[str, int], world: int) -> dict[str, int]:
    """The sizes with -1 replaced so that their product is ``world``."""
    if -1 not in sizes.values():
        return sizes
    known = math.prod(size for size in sizes.values() if size != -1)
    if world % known:
        text = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size not in (1, -1))
        raise DistfxError(
            f"-1 cannot be inferred: {text} needs a multiple of {known} ranks, but {world} "
            f"{'were' if world != 1 else 'was'} started"
        )
    return {axis: world // known if size == -1 else size for axis, size in sizes.items()}


_AXIS = re.compile(r"(?P<axis>[a-z])(?P<size>-?[0-9]+)(?:x(?P<second>-?[0-9]+))?")


def _parse(text: str) -> dict[str, Any]:
    """``"n2c2x4h2"`` as keyword arguments of a grid."""
    if not isinstance(text, str):
        raise DistfxError(f"a grid is written as text such as 'n2c2h2', not as {type(text).__name__}")
    body, position = text.strip(), 0
    shown = repr(text) if len(text) <= 60 else f"{text[:60]!r}..."
    sizes: dict[str, Any] = {}
    while match := _AXIS.match(body, position):
        axis, position = match["axis"], match.end()
        if match["second"] and axis != "c":
            raise DistfxError(f"cannot read grid {shown}: only c has two factors, as in c2x4, not {axis}")
        if axis not in AXES or axis in sizes:
            raise DistfxError(f"cannot read axis {axis!r} of grid {shown}: the axes are {', '.join(AXES)}, each once")
        digits = [number for number in match.group("size", "second") if number]
        if max(map(len, digits)) > len(str(MAX_RANKS)):
            raise DistfxError(f"cannot read grid {shown}: axis {axis} has more than {MAX_RANKS} ranks")
        sizes[axis] = tuple(map(int, digits)) if len(digits) == 2 else int(digits[0])
    if position < len(body) or not sizes:
        character = text.find(body) + position + 1
        raise DistfxError(f"cannot read grid {shown} at character {character}: write it like 'n2c2h2'")
    return sizes
