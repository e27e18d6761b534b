"""Layouts: how one tensor is distributed over the grid.

A :class:`Layout` names, for each dim, the grid axes that split it, and the axes over which the tensor is a partial
sum. It is a frozen value. It prints as a person would write it, and the printed text parses back:

>>> Layout.parse("N/n C/c H/h W")
Layout('N/n C/c H/h W')
>>> Layout.parse("N/n K/(c1,c0) H/h{2a-3:2b+2} W sum(c)").dims[2].window
Window('2a-3:2b+2')

=================  ===================================================================================
text               meaning
=================  ===================================================================================
``H/h``            axis ``h`` splits dim ``H``
``C/(c1,c0)``      axes ``c1`` and ``c0`` split dim ``C``, ``c1`` first: each part of it is split by ``c0``
``F/c[H*W]``       axis ``c`` splits dim ``F`` into multiples of ``H*W``
``H/h{a-1:b+1}``   each part ``[a, b)`` is stored with a halo, as ``[a-1, b+1)``
``sum(c)``         the tensor is a partial sum over axis ``c``
``each(c)``        the tensor is varying over axis ``c``
=================  ===================================================================================

Along an axis that does not split it, a tensor is in one of three states. Its state in the forward pass determines the
state of its gradient in the backward pass. These pairs are the whole type system, and the verifier checks every graph
against it:

=========== ================================================== ==============================================
state       forward                                            gradient
=========== ================================================== ==============================================
replicated  every rank has the tensor, and all do the same     replicated
            work with it
varying     every rank has the tensor, and each uses it in a   partial: each rank has the contribution of its
            different way (written ``each(c)``)                use, and the contributions add up
partial     every rank has a tensor of the same shape; their   varying: every rank needs the gradient of the
            sum is the value (written ``sum(c)``)              sum
=========== ================================================== ==============================================
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distfx.errors import DistfxError
from distfx.ir.expressions import MAX_LENGTH, MAX_NAME, excerpt
from distfx.ir.symbolic import Size, ceildiv, floordiv, minimum, parse_size

__all__ = ["DIM_NAMES", "Layout", "Split", "Window", "piece"]

DIM_NAMES = {1: "N", 2: "NC", 3: "NCW", 4: "NCHW", 5: "NCDHW"}
"""Names of an activation's dims, one letter each, by the number of dims."""

Coords = Mapping[str, tuple[Size, int]]
"""For each axis, a coordinate along it and its size."""


def piece(extent: Size, parts: int, index: Size, *, chunk: bool) -> tuple[Size, Size]:
    """The part ``[lo, hi)`` of ``extent`` that belongs to coordinate ``index`` of ``parts``.

    Samples and space are split evenly: ``[floor(i E / p), floor((i+1) E / p))``. Channels (``chunk``) are split as
    ``torch.chunk`` does, so that parameters are ordinary DTensor shards.

    >>> [piece(7, 3, i, chunk=False) for i in range(3)], [piece(7, 3, i, chunk=True) for i in range(3)]
    ([(0, 2), (2, 4), (4, 7)], [(0, 3), (3, 6), (6, 7)])
    """
    if chunk:
        step = ceildiv(extent, parts)
        return minimum(index * step, extent), minimum((index + 1) * step, extent)
    return floordiv(index * extent, parts), floordiv((index + 1) * extent, parts)


def is_channel_axis(axis: str) -> bool:
    """Whether ``axis`` is ``c``, ``c0`` or ``c1``. All other axes split samples or space."""
    return axis.startswith("c")


@dataclass(frozen=True)
class Window:
    """The halo formula: the interval of its input that an operator needs for a block ``[a, b)`` of its output.

    The interval is ``[floor((mul*a - lo) / div), floor((mul*b + hi) / div))``. A convolution with kernel size k, stride
    s, padding p and dilation d has ``mul=s, lo=p, hi=d*(k-1)+1-s-p``. A transposed convolution has ``div=s``. Pooling,
    cropping and padding have windows, too. If the extents divide evenly, ``lo`` and ``hi`` are the widths of the halo.
    If ``mul`` is negative, the input is read backwards and the ends are swapped: a flip of a dim with extent e has
    ``mul=-1, lo=-e, hi=e``.

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
        """The interval that the output block ``[a, b)`` needs. An empty block needs an empty interval."""
        first = floordiv(self.mul * a - self.lo, self.div)
        if isinstance(a, int) and a == b:
            return first, first
        last = floordiv(self.mul * b + self.hi, self.div)
        return (last, first) if isinstance(self.mul, int) and self.mul < 0 else (first, last)

    @property
    def trivial(self) -> bool:
        """Whether every block needs only itself."""
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
        """The inverse of ``str``: ``2a-3:2b+2``, ``(a-1:b+1)/2``, or ``lo;hi;mul;div`` if one of them is symbolic."""
        _check_text("window", text, "'2a-3:2b+2'")
        if ";" in text:
            sizes = [parse_size(size) for size in text.split(";", 4)]
            if len(sizes) != 4:
                raise DistfxError(f"cannot read window {excerpt(text)}: write four sizes, 'lo;hi;mul;div'")
            window = cls(*sizes)
        else:
            match = _WINDOW.fullmatch(text) or _DIVIDED_WINDOW.fullmatch(text)
            if match is None:
                raise DistfxError(f"cannot read window {excerpt(text)}: write it like '2a-3:2b+2' or '(a-1:b+1)/2'")
            groups = match.groupdict()
            mul = int(f"{match['mul']}1" if match["mul"] in ("", "-") else match["mul"])
            window = cls(-int(match["lo"] or 0), int(match["hi"] or 0), mul, int(groups.get("div", 1)))
        if isinstance(window.div, int) and window.div < 1:
            raise DistfxError(f"cannot read window {excerpt(text)}: it divides by {window.div}, which is not positive")
        return window


_INTERVAL = r"(?P<mul>-?[0-9]{0,18})a(?P<lo>[+-][0-9]{1,18})?:(?P=mul)b(?P<hi>[+-][0-9]{1,18})?"
_WINDOW = re.compile(_INTERVAL)
_DIVIDED_WINDOW = re.compile(rf"\({_INTERVAL}\)/(?P<div>[0-9]{{1,18}})")


def _check_text(kind: str, text: object, example: str) -> None:
    if not isinstance(text, str):
        raise DistfxError(f"a {kind} is written as text such as {example}, not as {type(text).__name__}")
    if len(text) > 4 * MAX_LENGTH:
        raise DistfxError(f"{kind} {excerpt(text)} has {len(text)} characters: the limit is {4 * MAX_LENGTH}")


@dataclass(frozen=True)
class Split:
    """How one dim is split: by which axes, in multiples of which unit, and with which halo.

    ``axes`` are ordered: the first one is the major axis. ``unit`` is for dims that merge several others: the dim
    ``C*H*W``, split between channels, has ``unit = H*W``. ``window`` is the halo that is stored with each part, or
    ``None``. A dim without axes has neither unit nor halo.
    """

    axes: tuple[str, ...] = ()
    unit: Size = 1
    window: Window | None = None

    def __post_init__(self) -> None:
        if not self.axes:
            object.__setattr__(self, "unit", 1)
            object.__setattr__(self, "window", None)

    def bounds(self, extent: Size, coords: Coords) -> tuple[Size, Size]:
        """The part ``[lo, hi)`` of a dim with ``extent`` that belongs to ``coords``, without its halo."""
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
_NAME = rf"\w{{1,{MAX_NAME}}}"
_DIM = re.compile(
    rf"(?P<name>[A-Za-z]\w{{0,{MAX_NAME - 1}}}|\d{{1,18}})(?:/(?P<axes>{_NAME}|\({_NAME}(?:,{_NAME})*\)))?"
    r"(?:\[(?P<unit>[^\]]+)\])?(?:\{(?P<window>[^}]*)\})?",
    re.ASCII,
)
_STATE = re.compile(rf"(?P<state>sum|each)\((?P<axes>{_NAME}(?:,{_NAME})*)\)", re.ASCII)
_EXAMPLE = "'N/n C/(c0,c1) H/h W sum(w)'"


@dataclass(frozen=True)
class Layout:
    """How one tensor is distributed: the split of each dim, and the axes over which it is partial or varying.

    ``names`` name the dims in the printed text. Comparison ignores them.
    """

    dims: tuple[Split, ...]
    partial: frozenset[str] = frozenset()
    varying: frozenset[str] = frozenset()
    names: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        used = [axis for split in self.dims for axis in split.axes] + [*self.partial, *self.varying]
        repeated = sorted(axis for axis, count in Counter(used).items() if count > 1)
        if repeated:
            raise DistfxError(f"layout {excerpt(str(self))} uses axis {', '.join(repeated[:5])} twice")

    @classmethod
    def replicated(cls, rank: int, names: Sequence[str] = ()) -> Layout:
        """The layout of a tensor with ``rank`` dims that every process has in full."""
        return cls((UNSPLIT,) * rank, names=tuple(names))

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The inverse of ``str``. Raises :class:`DistfxError` if the text is not a layout, and never executes it."""
        _check_text("layout", text, _EXAMPLE)
        dims: list[Split] = []
        names: list[str] = []
        states: dict[str, frozenset[str]] = {"sum": frozenset(), "each": frozenset()}
        for word in re.finditer(r"\S+", text):
            token = word[0]
            if match := _STATE.fullmatch(token):
                states[match["state"]] |= set(match["axes"].split(","))
            elif match := _DIM.fullmatch(token):
                axes = tuple(match["axes"].strip("()").split(",")) if match["axes"] else ()
                unit = parse_size(match["unit"] or "1")
                if isinstance(unit, int) and unit < 1:
                    raise DistfxError(f"cannot read {excerpt(token)} in a layout: the unit {unit} is not positive")
                names.append(match["name"])
                window = None if match["window"] is None else Window.parse(match["window"])
                dims.append(Split(axes, unit, window))
            elif token != "()":
                raise DistfxError(
                    f"cannot read {excerpt(token)} at character {word.start() + 1} of layout "
                    f"{excerpt(text, word.start())}: write it like {_EXAMPLE}"
                )
        return cls(tuple(dims), states["sum"], states["each"], tuple(names))

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
        """The axes that split a dim."""
        return frozenset(axis for split in self.dims for axis in split.axes)

    def dim_of(self, axis: str) -> int | None:
        """The dim that ``axis`` splits, or ``None``."""
        return next((dim for dim, split in enumerate(self.dims) if axis in split.axes), None)

    def with_dim(self, dim: int, split: Split) -> Layout:
        """This layout with another split of ``dim``."""
        return replace(self, dims=(*self.dims[:dim], split, *self.dims[dim + 1 :]))

    def with_names(self, names: Iterable[str]) -> Layout:
        """This layout with other names of its dims."""
        return replace(self, names=tuple(names))

    def storage(self) -> Layout:
        """The layout without halos and varying axes: which values each rank stores."""
        return replace(self, dims=tuple(replace(s, window=None) for s in self.dims), varying=frozenset())

    def bounds(self, shape: Sequence[Size], coords: Coords) -> tuple[tuple[Size, Size], ...]:
        """For each dim, the part ``[lo, hi)`` of the global tensor that belongs to ``coords``.

        >>> import sympy
        >>> H, i = sympy.symbols("H i", integer=True, nonnegative=True)
        >>> Layout.parse("C H/h").bounds((8, H), {"h": (i, 2)})
        ((0, 8), (((H*i)//2), ((H*(i + 1))//2)))
        """
        return tuple(split.bounds(extent, coords) for split, extent in zip(self.dims, shape, strict=True))

    def local_shape(self, shape: Sequence[Size], coords: Coords) -> tuple[Size, ...]:
        """The shape of the part at ``coords``, without halos."""
        return tuple(hi - lo for lo, hi in self.bounds(shape, coords))
