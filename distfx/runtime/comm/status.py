"""Status reports that the ranks leave for each other in the store of the default process group.

A rank reports at most once or twice in its life: that it waits in an operation that failed, that it failed by itself,
or that it has reached the end of the program. A counter of all reports lets others poll one key instead of one per
rank.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch.distributed as dist

__all__ = ["STORE_TIMEOUT", "Status", "call_with_timeout", "count_reports", "default_store", "publish", "read"]

T = TypeVar("T")

STORE_TIMEOUT = 3.0  # seconds after which the store, or the process that hosts it, counts as lost
STATUS_KEY = "distfx/status/"
COUNT_KEY = "distfx/reports"


class Status(NamedTuple):
    """The latest report of a rank: ``dead`` is reported by another rank of the same machine."""

    kind: Literal["waiting", "failed", "exited", "dead"]
    text: str


def default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def publish(status: Status, rank: int | None = None) -> None:
    """Report ``status`` of this rank, or of another one."""
    store = default_store()
    store.set(status_key(dist.get_rank() if rank is None else rank), json.dumps(status))
    store.add(COUNT_KEY, 1)


def read(ranks: Sequence[int]) -> dict[int, Status]:
    """The reports of those ``ranks`` that have made one."""
    store = default_store()
    reports = {}
    for rank in ranks:
        if store.check([status_key(rank)]):
            reports[rank] = Status(*json.loads(store.get(status_key(rank))))
    return reports


def count_reports() -> int:
    """The number of reports of all ranks so far, in one message."""
    return default_store().add(COUNT_KEY, 0)


def status_key(rank: int) -> str:
    return f"{STATUS_KEY}{rank}"


def call_with_timeout(call: Callable[[], T], seconds: float = STORE_TIMEOUT) -> T:
    """Return the result of a call that may block forever, as the store does if its host process is stopped."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise TimeoutError
    return results[0]
