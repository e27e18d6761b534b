"""Agreement between ranks: compare their arguments before they communicate, and raise on all ranks if they differ."""

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
_last_number = 0


def host_group() -> Any:
    """The process group of all ranks for small CPU tensors, which NCCL cannot send.

    If the default group is for GPUs only, create a gloo group. So all ranks must make their first call together.
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
    """Raise on every rank if ``mine`` is not the same text on all of them. Costs one message of 16 bytes if it is.

    Return the bits of ``flags`` (62 at most) that are set on every rank.
    """
    if world == 1:
        return flags
    message = torch.tensor([digest(mine), flags], dtype=torch.int64)
    messages = torch.empty(2 * world, dtype=torch.int64)
    texts: list[Any] = [None] * world
    with CommunicationScope(f"comparison of the ranks' {what}"):
        group = host_group()
        dist.all_gather_single(messages, message, group=group)
        digests, flags_of_ranks = messages[::2].tolist(), messages[1::2].tolist()
        if len(set(digests)) == 1:
            return reduce(operator.and_, flags_of_ranks)
        dist.all_gather_object(texts, mine, group=group)
    raise RankMismatchError(_difference(what, texts))


def _difference(what: str, texts: list[str]) -> str:
    """The first line in which the texts differ, with the ranks that have each version."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    versions = [text.splitlines() for text in groups]
    shown = []
    longest = max(len(lines) for lines in versions)
    first = next((i for i in range(longest) if len({tuple(lines[i : i + 1]) for lines in versions}) > 1), 0)
    for lines, ranks in zip(versions, groups.values(), strict=True):
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"
        shown.append(f"  {who}: {lines[first] if first < len(lines) else '(nothing more)'}")
    return f"the ranks were given different {what}:\n" + "\n".join(shown)


def next_number(world: int) -> int:
    """A number that is new and the same on all ranks, to name an object that they create together."""
    global _last_number
    number = torch.tensor([_last_number + 1], dtype=torch.int64)
    if world > 1:
        with CommunicationScope("numbering of a parallel module"):
            dist.all_reduce(number, op=dist.ReduceOp.MAX, group=host_group())
    _last_number = int(number)
    return _last_number


def compare_values(world: int, inputs: Mapping[str, Tensor], problem: Callable[[str], None] | None = None) -> None:
    """Raise on all ranks if their values of a global tensor differ, as when data loaders shuffle independently.

    With ``problem``, call it with the message instead.
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
    step = max(1, value.numel() >> 24)  # a sample of very large tensors
    data: Any = value.detach().flatten()[::step].cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=4).hexdigest()


def raise_on_all_ranks(world: int, make: Callable[[], T]) -> T:
    """Return the result of ``make``. Raise on every rank if it fails on any."""
    result, problem = None, None
    try:
        result = make()
    except Exception as error:
        problem = error
    _agree_on_outcome(world, problem)
    return cast(T, result)


def _agree_on_outcome(world: int, error: Exception | None) -> None:
    """Raise on every rank if any of them failed: a rank's own error, or else the message of another rank."""
    if world > 1:
        failed = torch.tensor([error is not None], dtype=torch.int64)
        texts: list[Any] = [None] * world
        with CommunicationScope("comparison of the ranks' outcomes"):
            group = host_group()
            dist.all_reduce(failed, group=group)
            if int(failed) and int(failed) != world:
                text = None if error is None else f"{type(error).__name__}: {error}"
                dist.all_gather_object(texts, text, group=group)
        messages = [f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text is not None]
        if messages and error is None:
            raise DistfxError(messages[0])
    if error is not None:
        raise error
