"""The state of the random number generators of a rank, as a file."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from distfx.errors import DistfxError
from distfx.training.values import decode, encode

__all__ = ["RandomState", "write_random_state"]


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"random-{rank:05d}.json"


@dataclass(frozen=True)
class RandomState:
    """The generators of one rank. Those of rank 0 decide what the random operators of all ranks draw."""

    torch_state: Tensor
    cuda_state: Tensor | None
    python_state: Any
    numpy_state: Any

    @classmethod
    def read(cls, folder: Path, rank: int) -> RandomState:
        """The state that this rank saved; a rank that did not exist then takes that of rank 0."""
        path = _file_of(folder, rank)
        path = path if path.is_file() else _file_of(folder, 0)
        try:
            state = json.loads(path.read_text())
            name, keys, *rest = state["numpy"]
            return cls(
                _bytes(state["torch"]),
                None if state["cuda"] is None else _bytes(state["cuda"]),
                decode(state["python"]),
                (name, numpy.array(keys, dtype=numpy.uint32), *rest),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DistfxError(f"{path} does not hold the state of random generators ({type(error).__name__})") from None

    def restore(self) -> None:
        torch.set_rng_state(self.torch_state)
        if self.cuda_state is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda_state)
        random.setstate(self.python_state)
        numpy.random.set_state(self.numpy_state)


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def write_random_state(folder: Path, rank: int) -> None:
    """Save the generators of this rank."""
    name, keys, *rest = numpy.random.get_state(legacy=True)
    state = {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": bytes(torch.cuda.get_rng_state().tolist()).hex() if torch.cuda.is_available() else None,
        "python": encode(random.getstate(), "random"),
        "numpy": [name, numpy.asarray(keys).tolist(), *rest],
    }
    with open(_file_of(folder, rank), "w") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
