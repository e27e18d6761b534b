"""How one tensor lies on the grid.

A :class:`Layout` says for each dim which grid axes split it, major axis first, and over which axes the tensor is a
partial sum. It is a frozen value that prints as a person would write it, and parses back:

>>> Layout.parse("N/n C/c H/h W")
Layout('N/n C/c H/h W')
>>> Layout.parse("N/n K/(c1,c0) H/h{2a-3:2b+2} W sum(c)").dims[2].window
Window('2a-3:2b+2')

Over an axis that does not split it a tensor is in one of three states. What it *is* going forward fixes what its
gradient is going backward; this is the whole type system, and the verifier holds every graph to it:

=========== ================================================ ======================================
state       forward                                          its gradient
=========== ================================================ ======================================
replicated  every rank has the tensor and does the same work the same on every rank
varying     every rank has the tensor, each uses it its own  a partial sum: the ranks' parts add up
            way (written ``each(c)``)
partial     the ranks' values add up to the tensor           varying
            (written ``sum(c)``)
=========== ================================================ ======================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distfx.ir.symbolic import Size, ceildiv, floordiv, minimum, parse_size

__all__ = ["DIM_NAMES", "Layout", "Split", "Window", "piece"]

DIM_NAMES = {1: "N", 2: "NC", 3: "NCW", 4: "NCHW", 5: "NCDHW"}
"""What the dims of an activation of so many dims are called, by a letter each."""

Coords = Mapping[str, tuple[Size, int]]
"""For each axis: the coordinate along it and its size."""


def piece(extent: Size, parts: int, index: Size, *, chunk: bool) -> tuple[Size, Size]:
    """The part ``[lo, hi)`` of ``extent`` that coordinate ``index`` of ``parts`` owns.

    Samples and space are balanced, ``[floor(i E / p), floor((i+1) E / p))``; channels follow ``torch.chunk``, so that
    parameters are ordinary DTensor shards.

    >>> [piece(7, 3, i, chunk=False) for i in range(3)], [piece(7, 3, i, chunk=True) for i in range(3)]
    ([(0, 2), (2, 4), (4, 7)], [(0, 3), (3, 6), (6, 7)])
    """
    if chunk:
        step = ceildiv(extent, parts)
        return minimum(index * step, extent), minimum((index + 1) * step, extent)
    return floordiv(index * extent, parts), floordiv((index + 1) * extent, parts)


def is_channel_axis(axis: str) -> bool:
    """Axes ``c``, ``c0``, ``c1`` split channels; all others split samples or space."""
    return axis.startswith("c")


@dataclass(frozen=True)
class Window:
    """The interval of its input that an operator needs for the block ``[a, b)`` of its output.

    ``[floor((mul*a - lo) / div), floor((mul*b + hi) / div))``. A convolution of kernel k, stride s, padding p and
    dilation d has ``mul=s, lo=p, hi=d*(k-1)+1-s-p``; a transposed one has ``div=s``; a crop, a pad and pooling are
    others. ``lo`` and ``hi`` are the halo's widths when the extents divide evenly. A negative ``mul`` reads backwards,
    and the ends change places: a flip of extent e has ``mul=-1, lo=-e, hi=e``.

    >>> Window(lo=3, hi=2, mul=2).need(0, 4)      # 7 taps, stride 2, padding 3
    (-3, 10)
    >>> Window(lo=-9, hi=9, mul=-1).need(0, 4)    # a flip
    (5, 9)
    """

    lo: Size = 0
    hi: Size = 0
    mul: Size = 1
    div: Size = 1

    def need(self, a: Size, b: Size) -> tuple[Size, Size]:
        """What the output block ``[a, b)`` needs; nothing for an empty block."""
        first = floordiv(self.mul * a - self.lo, self.div)
        if isinstance(a, int) and a == b:
            return first, first
        last = floordiv(self.mul * b + self.hi, self.div)
        return (last, first) if isinstance(self.mul, int) and self.mul < 0 else (first, last)

    @property
    def trivial(self) -> bool:
        """Whether every block needs just itself."""
        return self == Window()

    def __str__(self) -> str:
        if not all(isinstance(size, int) for size in (self.lo, self.hi, self.mul, self.div)):
            return ";".join(str(size).replace(" ", "") for size in (self.lo, self.hi, self.mul, self.div))

        def term(name: str, shift: Size) -> str:
            return f"{self.mul if self.mul != 1 else ''}{name}{f'{shift:+d}' if shift else ''}"

        text = f"{term('a', -self.lo)}:{term('b', self.hi)}"
        return f"({text})/{self.div}" if self.div != 1 else text

    def __repr__(self) -> str:
        return f"Window({str(self)!r})"

    @classmethod
    def parse(cls, text: str) -> Window:
        """The inverse of ``str``."""
        if ";" in text:
            return cls(*(parse_size(size) for size in text.split(";")))
        match = re.fullmatch(r"\(?(-?\d*)a([+-]\d+)?:(-?\d*)b([+-]\d+)?\)?(?:/(\d+))?", text)
        if match is None or match[1] != match[3]:
            raise ValueError(f"not a window: {text!r}; write it like '2a-3:2b+2'")
        return cls(-int(match[2] or 0), int(match[4] or 0), int(match[1] or 1), int(match[5] or 1))


@dataclass(frozen=True)
class Split:
    """How one dim is split: the axes, major first; the granule that stays whole; the halo, where there is one.

    ``unit`` is for dims merged of several: ``C*H*W`` split by whole channels has ``unit = H*W``.
    """

    axes: tuple[str, ...] = ()
    unit: Size = 1
    window: Window | None = None

    def __post_init__(self) -> None:
        if not self.axes:  # a whole dim has neither granules nor a halo
            object.__setattr__(self, "unit", 1)
            object.__setattr__(self, "window", None)

    def bounds(self, extent: Size, coords: Coords) -> tuple[Size, Size]:
        """The part ``[lo, hi)`` of a dim of ``extent`` that lies at ``coords`` (without its halo)."""
        lo: Size = 0
        size = extent if self.unit == 1 else floordiv(extent, self.unit)
        for axis in self.axes:
            index, parts = coords[axis]
            first, last = piece(size, parts, index, chunk=is_channel_axis(axis))
            lo, size = lo + first, last - first
        return lo * self.unit, (lo + size) * self.unit

    def __str__(self) -> str:
        text = ""
        if self.axes:
            text = f"/{self.axes[0]}" if len(self.axes) == 1 else f"/({','.join(self.axes)})"
        if self.unit != 1:
            text += f"[{str(self.unit).replace(' ', '')}]"
        return text + (f"{{{self.window}}}" if self.window else "")


UNSPLIT = Split()
_DIM = re.compile(r"([A-Za-z]\w*|\d+)(?:/(\w+|\([\w,]+\)))?(?:\[([^\]]+)\])?(?:\{([^}]*)\})?")
_STATE = re.compile(r"(sum|each)\(([\w,]+)\)")


@dataclass(frozen=True)
class Layout:
    """One tensor's layout. ``names`` are for readers only and take no part in comparison."""

    dims: tuple[Split, ...]
    partial: frozenset[str] = frozenset()
    varying: frozenset[str] = frozenset()
    names: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        used = [axis for split in self.dims for axis in split.axes] + [*self.partial, *self.varying]
        twice = sorted({axis for axis in used if used.count(axis) > 1})
        if twice:
            raise ValueError(f"layout {self} uses axis {', '.join(twice)} twice")

    @classmethod
    def replicated(cls, rank: int, names: Sequence[str] = ()) -> Layout:
        """A tensor of ``rank`` dims that is whole on every rank."""
        return cls((UNSPLIT,) * rank, names=tuple(names))

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The inverse of ``str``."""
        dims: list[Split] = []
        names: list[str] = []
        states: dict[str, frozenset[str]] = {}
        for token in text.split():
            if state := _STATE.fullmatch(token):
                states[state[1]] = states.get(state[1], frozenset()) | set(state[2].split(","))
            elif match := _DIM.fullmatch(token):
                axes = tuple(match[2].strip("()").split(",")) if match[2] else ()
                window = Window.parse(match[4]) if match[4] else None
                names.append(match[1])
                dims.append(Split(axes, parse_size(match[3] or "1"), window))
            elif token != "()":
                raise ValueError(
                    f"cannot read {token!r} in layout {text!r}; write it like 'N/n C/(c0,c1) H/h W sum(w)'"
                )
        return cls(tuple(dims), states.get("sum", frozenset()), states.get("each", frozenset()), tuple(names))

    def __str__(self) -> str:
        names = self.names or tuple(f"d{i}" for i in range(len(self.dims)))
        words = [f"{name}{split}" for name, split in zip(names, self.dims, strict=True)] or ["()"]
        words += [f"sum({','.join(sorted(self.partial))})"] if self.partial else []
        words += [f"each({','.join(sorted(self.varying))})"] if self.varying else []
        return " ".join(words)

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    @property
    def split_axes(self) -> frozenset[str]:
        """All axes that split some dim."""
        return frozenset(axis for split in self.dims for axis in split.axes)

    def dim_of(self, axis: str) -> int | None:
        """The dim that ``axis`` splits."""
        return next((dim for dim, split in enumerate(self.dims) if axis in split.axes), None)

    def with_dim(self, dim: int, split: Split) -> Layout:
        return replace(self, dims=(*self.dims[:dim], split, *self.dims[dim + 1 :]))

    def with_names(self, names: Iterable[str]) -> Layout:
        return replace(self, names=tuple(names))

    def storage(self) -> Layout:
        """The layout without halos and without the varying state: how the values are stored."""
        return replace(self, dims=tuple(replace(s, window=None) for s in self.dims), varying=frozenset())

    def bounds(self, shape: Sequence[Size], coords: Coords) -> tuple[tuple[Size, Size], ...]:
        """For each dim the part ``[lo, hi)`` of the global tensor that lies at ``coords``.

        >>> import sympy
        >>> H, i = sympy.symbols("H i", integer=True, nonnegative=True)
        >>> Layout.parse("C H/h").bounds((8, H), {"h": (i, 2)})
        ((0, 8), (((H*i)//2), ((H*(i + 1))//2)))
        """
        return tuple(split.bounds(extent, coords) for split, extent in zip(self.dims, shape, strict=True))

    def local_shape(self, shape: Sequence[Size], coords: Coords) -> tuple[Size, ...]:
        """The shape of the part at ``coords``, without halos."""
        return tuple(hi - lo for lo, hi in self.bounds(shape, coords))
