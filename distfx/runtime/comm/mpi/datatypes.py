"""The MPI datatypes and reductions for torch dtypes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from distfx.runtime.comm.mpi.library import load

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Datatypes", "datatypes"]


class Datatypes:
    """Tables from torch to MPI.

    Data that is moved but not reduced is sent as opaque elements of its size, so every dtype can be sent. Sums of
    16-bit floats are sent and added as float32. They are rounded once, whatever the number of ranks, and cost the bytes
    of float32.
    """

    def __init__(self) -> None:
        MPI = load()
        self.by_size = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}
        self.by_dtype = {
            torch.float64: MPI.DOUBLE,
            torch.float32: MPI.FLOAT,
            torch.complex128: MPI.C_DOUBLE_COMPLEX,
            torch.complex64: MPI.C_FLOAT_COMPLEX,
            torch.bool: MPI.UINT8_T,
        }
        for bits in (8, 16, 32, 64):
            self.by_dtype[getattr(torch, f"int{bits}")] = getattr(MPI, f"INT{bits}_T")
            self.by_dtype[getattr(torch, f"uint{bits}")] = getattr(MPI, f"UINT{bits}_T")
        bitwise = {"BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}
        self.ops = {"SUM": MPI.SUM, "AVG": MPI.SUM, "PRODUCT": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX, **bitwise}
        self.bool_ops = {"SUM": MPI.LOR, "MAX": MPI.LOR, "BOR": MPI.LOR, "PRODUCT": MPI.LAND, "MIN": MPI.LAND}
        self.bool_ops |= {"BAND": MPI.LAND, "BXOR": MPI.LXOR}

    def reduction(self, dtype: torch.dtype, reduce_op: Any) -> tuple[torch.dtype, MPI.Op]:
        """The dtype in which tensors of `dtype` are reduced, and MPI's operation."""
        name = getattr(reduce_op, "op", reduce_op).name
        integral = not (dtype.is_floating_point or dtype.is_complex)
        known = name in (self.bool_ops if dtype is torch.bool else self.ops)
        if not known or (name == "AVG" and integral) or (name in ("MIN", "MAX") and dtype.is_complex):
            raise ValueError(f'backend "mpi" cannot reduce {dtype} by {name}; use SUM, AVG, PRODUCT, MIN or MAX')
        if name[0] == "B" and not integral:
            raise ValueError(f"{name} is a bitwise operation: it needs integers or bool, not {dtype}")
        if dtype is torch.bool:
            return dtype, self.bool_ops[name]
        if dtype not in self.by_dtype:  # 16-bit and shorter floats
            dtype = torch.complex64 if dtype.is_complex else torch.float32
        return dtype, self.ops[name]


@functools.cache
def datatypes() -> Datatypes:
    """The tables of this process, built when MPI is first used."""
    return Datatypes()
