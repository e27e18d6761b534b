"""Ranks agree before they communicate: what each was given is compared, and if it differs all of them raise."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from distfx.errors import DistfxError, RankMismatchError
from distfx.runtime.comm.failure import CommunicationScope
from distfx.runtime.comm.gloo import deprioritize_polling_threads

__all__ = ["agree", "compare_values", "digest", "host_group", "next_number", "raise_on_all_ranks"]

T = TypeVar("T")

_host: tuple[Any, Any] | None = None
_given = 0


def host_group() -> Any:
    """The process group of all ranks for the few numbers that they compare on the host, which NCCL does not carry.

    Of a program that made its group for GPUs alone a second one is made: all ranks must call this first together.
    """
    global _host
    world = dist.group.WORLD
    if "cpu:" in dist.get_backend_config(world):
        return world
    if _host is None or _host[0] is not world:
        _host = (world, dist.new_group(backend="gloo"))
        deprioritize_polling_threads()
    return _host[1]


def digest(text: str) -> int:
    """63 bits of a hash of ``text``, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def agree(world: int, what: str, mine: str, flags: int = 0) -> int:
    """Raise on every rank if ``mine`` is not the same text on all of them. One message of 16 bytes if it is.

    Gives those bits of ``flags`` (62 at most) that are set on every rank.
    """
    if world == 1:
        return flags
    own = torch.tensor([digest(mine), flags], dtype=torch.int64)
    every = torch.empty(2 * world, dtype=torch.int64)
    texts: list[Any] = [None] * world
    with CommunicationScope(f"comparison of the ranks' {what}"):
        group = host_group()
        dist.all_gather_single(every, own, group=group)
        digests, given = every[::2].tolist(), every[1::2].tolist()
        if len(set(digests)) == 1:
            return reduce(operator.and_, given)
        dist.all_gather_object(texts, mine, group=group)
    raise RankMismatchError(_difference(what, texts))


def _difference(what: str, texts: list[str]) -> str:
    """Which ranks differ in what: the first line in which their texts differ."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    lines = [text.splitlines() for text in groups]
    shown = []
    longest = max(len(text) for text in lines)
    differs = next((i for i in range(longest) if len({tuple(t[i : i + 1]) for t in lines}) > 1), 0)
    for facts, ranks in zip(lines, groups.values(), strict=True):
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"
        shown.append(f"  {who}: {facts[differs] if differs < len(facts) else '(nothing more)'}")
    return f"the ranks were given different {what}:\n" + "\n".join(shown)


def next_number(world: int) -> int:
    """A number that no rank has had before, the same on all: for what they make together."""
    global _given
    number = torch.tensor([_given + 1], dtype=torch.int64)
    if world > 1:
        with CommunicationScope("numbering of what the ranks make together"):
            dist.all_reduce(number, op=dist.ReduceOp.MAX, group=host_group())
    _given = int(number)
    return _given


def compare_values(world: int, inputs: Mapping[str, Tensor], problem: Callable[[str], None] | None = None) -> None:
    """Raise on all ranks if they were given other values of what is one global tensor: loaders may shuffle for each.

    With ``problem``, call it with what would have been raised.
    """
    if world == 1 or not inputs:
        return
    lines = [f"input {name} with checksum {_checksum(value)}" for name, value in inputs.items()]
    what = "values (a plain tensor is the global one, the same on every rank; a part comes as a DTensor)"
    try:
        agree(world, what, "\n".join(lines))
    except RankMismatchError as error:
        if problem is None:
            raise
        problem(str(error))


def _checksum(value: Tensor) -> str:
    step = max(1, value.numel() >> 24)  # of some gigabytes not every element
    data: Any = value.detach().flatten()[::step].cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=4).hexdigest()


def raise_on_all_ranks(world: int, make: Callable[[], T]) -> T:
    """What ``make`` gives; raises on every rank if it fails on any."""
    made, problem = None, None
    try:
        made = make()
    except Exception as error:
        problem = error
    _agree_on_outcome(world, problem)
    return cast(T, made)


def _agree_on_outcome(world: int, error: Exception | None) -> None:
    """Raise on every rank if any of them failed: its own error where it did, the others' words elsewhere."""
    if world > 1:
        failed = torch.tensor([error is not None], dtype=torch.int64)
        texts: list[Any] = [None] * world
        with CommunicationScope("comparison of the ranks' compilations"):
            group = host_group()
            dist.all_reduce(failed, group=group)
            if int(failed) and int(failed) != world:
                said_here = None if error is None else f"{type(error).__name__}: {error}"
                dist.all_gather_object(texts, said_here, group=group)
        said = [f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text is not None]
        if said and error is None:
            raise DistfxError(said[0])
    if error is not None:
        raise error
