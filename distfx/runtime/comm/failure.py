"""When communication fails: what was under way, and which ranks are the cause.

A rank that gets no answer knows only that. So each that fails says so in the store where the ranks met, waits a moment
for the others to do the same, and names those of which nothing was heard: they died, were stopped, or are busy with
something else. A rank that ends by an exception of its own leaves its words there, too.

Of a silent rank on the same machine more can be said: each leaves its process id at the start, so the system tells
whether it is dead or stopped. A stopped one would outlive the job, for a launcher's SIGTERM does not reach it until it
goes on: the survivors ask it to end, and wake it.

Nothing here runs while all is well: :class:`CommunicationScope` is a ``try`` with a name.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException

from distfx.errors import CommunicationError, log_to_stderr

if TYPE_CHECKING:
    from distfx.grid import Segment

__all__ = ["CommunicationScope", "all_left", "announce", "announce_uncaught", "broken", "explain", "introduce", "leave"]

T = TypeVar("T")

GRACE = 2.0  # seconds that a rank in trouble gives the others to report
ANSWER = 3.0  # seconds in which the store answers, or the rank that keeps it is gone
END = 5  # seconds in which a process whose communication has failed must have ended
MANY = 64  # in larger worlds, only the segment's ranks are asked for
KEY = "distfx/trouble/"
PROCESS = "distfx/process/"

_broken = False
_ended = False  # from outside, by a signal


def broken() -> bool:
    """Whether communication has failed in this process: there is no orderly way to leave a process group then."""
    return _broken


@dataclass(slots=True, eq=False)
class CommunicationScope:
    """``with During(...)``: a failure to communicate inside becomes a :class:`CommunicationError` that says where.

    Other errors stay what they are, and get a note that says where.
    """

    what: str
    """The move or the collective."""
    node: str = ""
    path: str | None = None
    """The module path of the layer that it serves."""
    segment: Segment | None = None
    """The ranks that take part; ``None``: all."""
    phase: str = ""

    def __enter__(self) -> CommunicationScope:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, CommunicationError) or not dist.is_initialized():
            return
        if _of_transport(error):
            raise CommunicationError(_report(str(self), self.members, error)) from error
        error.add_note(f"on rank {dist.get_rank()}, during {self}")

    @property
    def members(self) -> Sequence[int]:
        return range(dist.get_world_size()) if self.segment is None else self.segment.members

    def __str__(self) -> str:
        axes = f" along {','.join(self.segment.axes)}" if self.segment is not None else ""
        layer = f" for {self.node}" if self.node else ""
        path = f" [{self.path}]" if self.path else ""
        phase = f", {self.phase}" if self.phase else ""
        return f"{self.what}{axes}{layer}{path}{phase}, {_ranks(self.members)}"


def explain(error: BaseException) -> None:
    """Say in a note to ``error`` what is known of the other ranks, if they are to blame for it."""
    if _told(error) or not _of_transport(error):
        return
    error.add_note(f"distfx: {_report(_place(error), range(dist.get_world_size()), error)}")


def announce(error: BaseException) -> None:
    """Tell the other ranks that this one ends by ``error``; not if it is ended from outside: that is not the cause."""
    global _ended
    _ended = _ended or isinstance(error, SignalException)
    if _ended or _told(error) or _of_transport(error):
        return
    with contextlib.suppress(Exception):
        text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        _within(ANSWER, lambda: _tell(_store(), "failed", text[:2000]))


def _told(error: BaseException) -> bool:
    """Whether the others know of ``error``, or there are none."""
    return isinstance(error, CommunicationError) or not dist.is_initialized() or dist.get_world_size() == 1


def announce_uncaught(keeps_store: bool) -> None:
    """From now on an exception that nobody catches is told to the other ranks; after its own message is printed.

    ``keeps_store``: this process is where the others look; it stays until they have had time to.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explain(error)  # first, so that all is printed at once: mpiexec may end the job at the next thing it reads
        previous(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        announce(error)
        if keeps_store and _broken:
            time.sleep(GRACE)

    sys.excepthook = hook


def leave() -> None:
    """Tell the other ranks, at the end of the program, that this one will not come any more."""
    with contextlib.suppress(Exception):
        store = _store()
        if not _broken and not _ended and not store.check([_key(dist.get_rank())]):
            _tell(store, "left", "has ended")


def all_left(seconds: float) -> bool:
    """Whether all ranks come to the end of the program, too, while this one waits there."""
    leave()
    end = time.monotonic() + seconds
    with contextlib.suppress(Exception):
        keys = [_key(rank) for rank in range(dist.get_world_size())]
        while time.monotonic() < end:
            if _within(ANSWER, lambda: _store().check(keys)):
                return True
            time.sleep(0.05)
    return False


# ------------------------------------------------------------------------------------------------- the report


def _report(where: str, members: Sequence[int], error: BaseException) -> str:
    """What failed on this rank, and what the others say of it."""
    _break()
    me, world = dist.get_rank(), dist.get_world_size()
    first = str(error).strip().partition("\n")[0]
    with _until_told() as told:
        asked = range(world) if world <= MANY else members
        try:
            found = _states(asked)  # before another rank wakes and ends those that are stopped
            known = _ask(me, where, members, asked, told)
            peers = _blame(me, members, known, found)
        except Exception:
            known = {}
            peers = "the store where the ranks met does not answer: rank 0, or the launcher that keeps it, is gone"
            if 0 in (states := _states([0])):
                peers += f" ({states[0]})"
        where += f" failed{f' with rank {peer}' if (peer := getattr(error, 'peer', None)) is not None else ''}"
        text = f"rank {me}: {where}: {peers}\n  {type(error).__name__}: {first}"
        if known:
            with contextlib.suppress(Exception):
                _within(ANSWER, lambda: _tell(_store(), "waits", f"{where}: {peers}"[:2000]))
        if told.is_set():
            log_to_stderr(text)
    return text


def _ask(
    me: int, where: str, members: Sequence[int], asked: Sequence[int], told: threading.Event
) -> dict[int, tuple[str, str]]:
    """What each rank has said, as soon as all members have, or after the grace."""
    store = _store()
    known = {me: ("waits", where)}
    _within(ANSWER, lambda: _tell(store, "waits", where))
    end = time.monotonic() + GRACE
    while True:
        late = time.monotonic() > end or told.is_set()
        rest = [rank for rank in asked if rank not in known]
        known |= _within(ANSWER, partial(_heard, store, rest))
        if late or all(rank in known for rank in members):
            return known
        told.wait(0.05)


def _blame(
    me: int, members: Sequence[int], known: dict[int, tuple[str, str]], found: dict[int, str] | None = None
) -> str:
    """In one sentence each: the ranks that failed by themselves, those that are silent, those that wait as well.

    ``found``: how processes were when the trouble began.
    """
    said = [f"rank {rank} failed: {text}" for rank, (kind, text) in known.items() if kind == "failed"]
    said += [f"rank {rank} {text}" for rank, (kind, text) in known.items() if kind == "left"]
    silent = [rank for rank in members if rank not in known]
    states = _states(silent) | {rank: state for rank, state in (found or {}).items() if rank in silent}
    for state in dict.fromkeys(states.values()):
        said.append(f"no word from {_ranks([rank for rank in silent if states.get(rank) == state])}: {state}")
    if rest := [rank for rank in silent if rank not in states]:
        said.append(f"no word from {_ranks(rest)}: dead, stopped, or waiting for another")
    waiting = {rank: text for rank, (kind, text) in known.items() if kind == "waits" and rank != me}
    if waiting and not said:
        said.append("no rank is missing; " + "; ".join(f"rank {rank}: {text}" for rank, text in waiting.items()))
    return "; ".join(said) or "the cause is not known"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _of_transport(error: BaseException) -> bool:
    """Whether an error comes from the means of communication: gloo has no type of its own for its errors."""
    return (
        isinstance(error, dist.DistError)
        or (isinstance(error, RuntimeError) and "/gloo/" in str(error))
        or type(error).__module__.startswith("mpi4py")
    )


def _place(error: BaseException) -> str:
    """Which call of torch's failed, and where the program made it: of a checkpoint, a DTensor, the program's own."""
    ours, torchs = Path(__file__).resolve().parents[2], Path(dist.__file__).resolve().parent
    caller, called, innermost = "", "", "a collective"
    for frame, line in traceback.walk_tb(error.__traceback__):
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        if not code.co_filename.startswith(str(torchs)):
            if not called and not code.co_filename.startswith(str(ours)):
                caller = f"{os.path.basename(code.co_filename)}:{line}"
        elif code.co_name not in ("wrapper", "inner", "inner_func"):  # of decorators
            called = called or f"{module}.{code.co_name}"
            if module == "torch.distributed.distributed_c10d":
                innermost = code.co_name
    if called.endswith(f".{innermost}"):
        return f"{innermost} at {caller}"
    return f"{innermost} in {called} at {caller}" if called else innermost


# -------------------------------------------------------------------------------------------------- the store


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _key(rank: int) -> str:
    return f"{KEY}{rank}"


def _tell(store: dist.Store, kind: str, text: str) -> None:
    store.set(_key(dist.get_rank()), json.dumps([kind, text]))


def _heard(store: dist.Store, ranks: Sequence[int]) -> dict[int, tuple[str, str]]:
    found = {}
    for rank in ranks:
        if store.check([_key(rank)]):
            kind, text = json.loads(store.get(_key(rank)))
            found[rank] = (kind, text)
    return found


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call that may never return: the store waits for ever for a process that was stopped."""
    result: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            result.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not result:
        raise TimeoutError
    return result[0]


# ---------------------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class _Process:
    """A rank's process: its machine (since this boot, in this namespace of ids), its id, when it was started."""

    node: str
    pid: int
    born: str


_processes: dict[int, _Process] = {}
"""Those that are known here."""


def introduce() -> None:
    """Leave word of this process for the others. That of rank 0 is read at once: it may keep the store."""
    _processes.clear()
    if node := _node():
        me = [node, os.getpid(), _stat(os.getpid())[1]]
        _store().set(f"{PROCESS}{dist.get_rank()}", json.dumps(me))
        _meet([0], wait=True)


@cache
def _node() -> str:
    """Where process ids mean the same; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _stat(pid: int) -> tuple[str, str]:
    """State and time of start of a process, as the kernel has them; ``("", "")`` if there is none."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    return "", ""


def _meet(ranks: Sequence[int], wait: bool = False) -> None:
    """Learn of the processes of ``ranks``, as far as they can be known."""
    store = _store()
    for rank in ranks:
        if rank not in _processes and (wait or store.check([f"{PROCESS}{rank}"])):
            _processes[rank] = _Process(*json.loads(store.get(f"{PROCESS}{rank}")))


def _states(ranks: Sequence[int]) -> dict[int, str]:
    """Of those ranks that are on this machine, and dead or stopped: which."""
    with contextlib.suppress(Exception):
        _within(ANSWER, lambda: _meet(ranks))
    found = {}
    for rank in ranks:
        if rank in _processes and _processes[rank].node == _node():
            pid = _processes[rank].pid
            state, born = _stat(pid)
            if state in ("", "Z", "X") or born != _processes[rank].born:
                found[rank] = f"process {pid} is dead"
            elif state == "T":
                found[rank] = f"process {pid} is stopped"
    return found


def _end_stopped() -> None:
    """Ask ranks on this machine that are stopped to end, and wake them."""
    world = dist.get_world_size()
    for rank, state in _states(range(world) if world <= MANY else [*_processes]).items():
        if state.endswith("stopped"):
            for sign in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(OSError):
                    os.kill(_processes[rank].pid, sign)


# ---------------------------------------------------------------------------------------------------- the end


def _break() -> None:
    """From now on the process ends quickly: threads of a transport may wait for ever for peers that are gone."""
    global _broken
    if not _broken:
        _broken = True
        atexit.register(_hurry)


def _hurry() -> None:
    with contextlib.suppress(Exception):
        _end_stopped()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(END)


@contextlib.contextmanager
def _until_told() -> Iterator[threading.Event]:
    """Inside, a launcher's SIGTERM only sets the event; afterwards it has its effect. So that the message gets out."""
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield told
        return

    def tell(number: int, frame: FrameType | None) -> None:
        told.set()

    before: Any = signal.signal(signal.SIGTERM, tell)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        if told.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
