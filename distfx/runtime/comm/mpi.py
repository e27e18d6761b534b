"""The `mpi` transport: a `torch.distributed` backend on mpi4py, for any MPI library.

torch's own MPI backend needs torch compiled against one MPI; the wheels have none. This one is a Python `ProcessGroup`,
so `DeviceMesh`, `DTensor`, functional collectives, checkpoints and point-to-point calls run on it unchanged. torch
reserves the name `mpi` for its own, so this one is registered as `distfx_mpi`; `distfx.init(backend="mpi")` maps it.

Every operation is a non-blocking MPI call; the `Work` it returns keeps the buffers alive and finishes the call:

- Data that is moved but not added travels as opaque elements of its size: any dtype goes.
- Sums of 16-bit floats travel and are added as float32, so they are rounded once, whatever the number of ranks; they
  cost the bytes of float32.
- MPI sees dense host memory. Other tensors (channels_last, slices, GPU tensors under an MPI that is not CUDA-aware) go
  through a contiguous copy, pinned for GPUs, and are copied back when the work is done.
- MPI moves data only while it is called. `wait` polls: it spins, then yields the core, then sleeps. While the program
  computes instead, a thread polls for it: what is large, and what a future was asked of. It sleeps when there is no
  such thing, is never awake for small messages, and is not there if MPI does not let several threads call it
  (`MPI.THREAD_MULTIPLE`), or with `DISTFX_MPI_PROGRESS=0`. `progress()` does the same once, by hand.
- A wait that exceeds the timeout says which operation on which ranks, and which ranks have not come.

Importing this module does not start MPI: mpi4py is imported with the first group.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from distfx.errors import log_to_stderr
from distfx.runtime.comm import failure

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["BACKEND", "MpiProcessGroup", "MpiWork", "abort_on_error", "cuda_aware", "load", "progress", "register"]

BACKEND = "distfx_mpi"

SPINS = 200  # polls before a waiting rank yields its core, some 50 us
YIELD = 0.02  # seconds of yielding before it sleeps between polls
NAP = 5e-5  # seconds of sleep between polls, at first;
LONG_NAP = 2e-3  # at last: a rank that waits long leaves its core to those it waits for
GRACE = 2.0  # seconds that a timed-out rank gives the others to report the same
DRAIN = 2.0  # seconds at exit for operations that nobody waited for
HEARD = 0.5  # seconds before an abort: what mpiexec has not read of a rank's messages by then is lost
CROWD = 256  # unfinished operations before new ones look after the old
LARGE = 256 << 10  # bytes from which on the thread pushes a message along
PUSH = 2e-4  # seconds between its polls

_UNSET = timedelta(0)
_live: set[MpiWork] = set()  # everything started and not finished: a Work that is dropped keeps its buffers here


def register() -> None:
    """Make the backend known to torch, as `distfx_mpi`, on CPU and CUDA tensors. Once is enough; more do no harm."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def progress() -> None:
    """Let MPI advance everything under way, and finish what has arrived. Never blocks."""
    for work in list(_live):
        work.is_completed()


class _Pusher:
    """The thread that calls MPI while the program computes."""

    def __init__(self) -> None:
        self.works: set[MpiWork] = set()
        self.wanted = threading.Event()
        self.ended = False
        self.thread = threading.Thread(target=self.run, name="distfx mpi progress", daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.ended:
            self.wanted.wait()
            while self.works and not self.ended:
                time.sleep(PUSH)  # first: most of what is waited for at once needs no help
                for work in list(self.works):
                    if work.push():
                        self.works.discard(work)
            self.wanted.clear()
            if self.works:  # came in between
                self.wanted.set()

    def push(self, work: MpiWork) -> None:
        self.works.add(work)
        if not self.wanted.is_set():
            self.wanted.set()

    def end(self) -> None:
        self.ended = True
        self.wanted.set()
        self.thread.join(1)


@functools.cache
def _pusher() -> _Pusher | None:
    """The one of this process, if MPI lets it be."""
    MPI = load()
    allowed = MPI.Query_thread() == MPI.THREAD_MULTIPLE and os.environ.get("DISTFX_MPI_PROGRESS", "1") != "0"
    return _Pusher() if allowed else None


@functools.cache
def cuda_aware() -> bool:
    """Whether MPI reads and writes GPU memory itself. `DISTFX_MPI_CUDA=0` or `=1` overrules what the library says."""
    said = os.environ.get("DISTFX_MPI_CUDA")
    if said is not None:
        return said not in ("", "0")
    if any(os.environ.get(name) == "1" for name in ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "MVP_USE_CUDA")):
        return True
    for library in (None, sys.modules["mpi4py.MPI"].__file__ if "mpi4py.MPI" in sys.modules else None):
        try:
            return bool(ctypes.CDLL(library).MPIX_Query_cuda_support())
        except (OSError, AttributeError):
            continue
    return False


def load() -> Any:
    """The module `mpi4py.MPI`, which starts MPI; `ValueError` with the reason if it cannot be had."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f'backend "mpi" needs mpi4py, which cannot be imported here ({error}): '
            'install mpi4py for the MPI that starts the ranks, or use backend="gloo"'
        ) from error
    return MPI


def abort_on_error() -> None:
    """From now on an uncaught exception on this rank ends the whole job: the other ranks would wait for it for ever.

    So does `sys.exit` with an error code, at the end of the program, unless the others end, too.
    """
    MPI, previous, leave = load(), sys.excepthook, sys.exit

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if not MPI.Is_finalized():
            _abort(1)

    def note(status: Any = None, /) -> NoReturn:
        global _exit_code
        _exit_code = status if isinstance(status, int) else int(status is not None)
        leave(status)

    sys.excepthook, sys.exit = hook, note
    _end_well()


class _Types:
    """The tables from torch to MPI: made once, when MPI is first used."""

    def __init__(self) -> None:
        MPI = load()
        self.moved = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}
        self.added = {
            torch.float64: MPI.DOUBLE,
            torch.float32: MPI.FLOAT,
            torch.complex128: MPI.C_DOUBLE_COMPLEX,
            torch.complex64: MPI.C_FLOAT_COMPLEX,
            torch.bool: MPI.UINT8_T,
        }
        for bits in (8, 16, 32, 64):
            self.added[getattr(torch, f"int{bits}")] = getattr(MPI, f"INT{bits}_T")
            self.added[getattr(torch, f"uint{bits}")] = getattr(MPI, f"UINT{bits}_T")
        exact = {"BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}
        self.ops = {"SUM": MPI.SUM, "AVG": MPI.SUM, "PRODUCT": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX, **exact}
        self.flags = {"SUM": MPI.LOR, "MAX": MPI.LOR, "BOR": MPI.LOR, "PRODUCT": MPI.LAND, "MIN": MPI.LAND}
        self.flags |= {"BAND": MPI.LAND, "BXOR": MPI.LXOR}

    def reduction(self, dtype: torch.dtype, reduce_op: Any) -> tuple[torch.dtype, MPI.Op]:
        """The dtype in which tensors of `dtype` are added, and MPI's operation."""
        name = getattr(reduce_op, "op", reduce_op).name
        integral = not (dtype.is_floating_point or dtype.is_complex)
        known = name in (self.flags if dtype is torch.bool else self.ops)
        if not known or (name == "AVG" and integral) or (name in ("MIN", "MAX") and dtype.is_complex):
            raise ValueError(f'backend "mpi" cannot reduce {dtype} by {name}; use SUM, AVG, PRODUCT, MIN or MAX')
        if name[0] == "B" and not integral:
            raise ValueError(f"{name} works on bits: give integers or bool, not {dtype}")
        if dtype is torch.bool:
            return dtype, self.flags[name]
        if dtype not in self.added:  # 16-bit and shorter floats
            dtype = torch.complex64 if dtype.is_complex else torch.float32
        return dtype, self.ops[name]


@functools.cache
def _types() -> _Types:
    return _Types()


class MpiWork(dist.Work):
    """One operation under way: its MPI requests, the buffers they use, and what remains to be done at the end."""

    def __init__(
        self,
        group: MpiProcessGroup,
        name: str,
        parts: Sequence[_Part],
        outputs: Sequence[Tensor] = (),
        timeout: timedelta | None = None,
        sequence: int | None = None,
    ) -> None:
        super().__init__()
        self._group, self._name, self._parts, self._outputs = group, name, parts, list(outputs)
        self._timeout = group.timeout if timeout is None or timeout <= _UNSET else timeout
        self._sequence = sequence
        self._requests = [part.request for part in parts]
        self._done = False
        self._error: Exception | None = None
        self._asking = threading.Lock()
        self._future: torch.futures.Future | None = None
        self._deadline = math.inf
        device = next((t.device for t in self._outputs if t.is_cuda), None)
        self._stream = None if device is None else torch.cuda.current_stream(device)
        """Of the program where it started the operation: whatever thread finishes that, copies run there."""
        if len(_live) >= CROWD:
            progress()
        _live.add(self)
        self._pusher = _pusher() if any(t.nbytes >= LARGE for part in parts for t in part.keep) else None
        if self._pusher is not None:
            self._pusher.push(self)

    def is_completed(self) -> bool:
        """Whether the result is there. Asking lets MPI make progress, and finishes what has arrived."""
        if self._done:
            return True
        if not self._advance():
            return False
        if self._future is not None:
            self._fulfil()
        return True

    def push(self) -> bool:
        """The same from the progress thread: what is left to do must then be done in the mode of the tensors, and what
        hangs on the future in no special one. Also: whether nobody need ask any more, as the time is over."""
        with torch.inference_mode(any(t.is_inference() for t in self._outputs)):
            done = self._advance()
        if not done and self._future is not None and time.monotonic() > self._deadline:
            self._error = self._timed_out(self._timeout.total_seconds())
        if done or self._error is not None:
            self._fulfil()
            return True
        return False

    def _advance(self) -> bool:
        """Let MPI make progress; whether the operation is finished."""
        if self._asking.acquire(blocking=False):  # else another thread is at it
            try:
                if not self._done:
                    self._ask()
            finally:
                self._asking.release()
        return self._done

    def _ask(self) -> None:
        try:
            if len(self._requests) == 1:
                arrived = self._requests[0].Test(self._parts[0].status)
            else:
                arrived = self._group.mpi.Request.Testall(self._requests)
            if not arrived:
                return
            with torch.cuda.stream(self._stream):  # which does nothing where there is none
                for part in self._parts:
                    if part.finish is not None:
                        part.finish()
        except Exception as error:
            self._error = dist.DistBackendError(f"mpi {self._name} of {self._group}: {error}")
            self._error.__cause__ = error
        _live.discard(self)
        self._requests, self._parts = [], self._parts[:1]  # the status of a receive is still wanted
        self._done = True

    def _fulfil(self) -> None:
        """Complete the future, if there is one."""
        with self._asking:
            future = self._future
            if future is None or future.done():
                return
            if self._error is None:
                future.set_result(self._outputs)
            else:  # C++ sees only that there is no result: the reason would be lost
                log_to_stderr(str(self._error))
                future.set_exception(self._error)

    def _timed_out(self, limit: float) -> dist.DistBackendError:
        return dist.DistBackendError(
            f"mpi {self._name} of {self._group} not done after {limit:g} s{self._group._silent(self)}"
        )

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Finish the operation; `DistBackendError` if it fails, or is not done after the timeout (default: the
        group's)."""
        polls, start, limit = 0, 0.0, 0.0
        if self._pusher is not None and self._future is None:
            self._pusher.works.discard(self)  # from here on it is pushed by this thread
        while not self.is_completed():
            polls += 1
            if polls < SPINS:
                continue
            now = time.monotonic()
            if polls == SPINS:
                start, limit = now, (timeout if timeout > _UNSET else self._timeout).total_seconds()
            if now - start > limit:
                raise self._timed_out(limit)
            if now - start < YIELD:
                os.sched_yield()
            else:
                time.sleep(min(max(NAP, (now - start) / 1000), LONG_NAP))
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return True

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """For a receive: the rank in the group that sent."""
        status = self._parts[0].status
        assert status is not None, f"{self._name} has no source"
        return status.Get_source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future that the progress thread completes; where there is none, a completed one."""
        if self._future is None:
            pusher = _pusher()
            if pusher is None:
                self.wait()
            devices: set[int | str | torch.device] = {t.device for t in self._outputs if t.is_cuda}
            self._deadline = time.monotonic() + self._timeout.total_seconds()
            self._future = torch.futures.Future(devices=list(devices))
            if self._done:
                self._fulfil()
            elif pusher is not None:
                pusher.push(self)
        return self._future


class _Part:
    """One MPI request with the tensors it reads and writes, and what to do when it is done (copy back, divide)."""

    __slots__ = ("finish", "keep", "request", "status")

    def __init__(
        self,
        request: MPI.Request,
        keep: tuple[Tensor, ...],
        finish: Callable[[], object] | None = None,
        status: MPI.Status | None = None,
    ) -> None:
        self.request, self.keep, self.finish, self.status = request, keep, finish, status


# torch's stubs give each method several forms, of which `torch.distributed` calls one: the checker need not see them.
_ProcessGroup: Any = dist.ProcessGroup


class MpiProcessGroup(_ProcessGroup):
    """A group of ranks with an MPI communicator of its own.

    The methods have the names and arguments by which torch calls them, from Python and (`all_gather_single_coalesced`
    and others) from C++. Ranks and roots count within the group.
    """

    def __init__(self, comm: MPI.Comm, ranks: Sequence[int], store: dist.Store, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self._rank, self._size = comm.rank, comm.size  # asked often; by way of C++ each answer takes 2 us
        self.mpi, self.comm, self.ranks, self.timeout = load(), comm, list(ranks), timeout
        self._types, self._store, self._sequence = _types(), store, 0
        self._name = self._desc = ""

    # What torch asks of a group, apart from communication.

    def __repr__(self) -> str:
        return f"ranks {self.ranks}" if self.size() <= 16 else f"ranks {self.ranks[:14]} and {self.size() - 14} more"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return BACKEND

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    group_name = property(getGroupName)
    pg_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def shutdown(self) -> None:
        """Give the communicator back, unless something is still under way on it (MPI then does so at its end)."""
        progress()
        busy = any(work._group is self for work in _live)
        if not (busy or _leaving or self.comm == self.mpi.COMM_NULL or self.mpi.Is_finalized()):
            self.comm.Free()

    # Memory that MPI can use.

    def _direct(self, tensor: Tensor, dtype: torch.dtype | None = None) -> bool:
        """Whether MPI may use the tensor's own memory."""
        return (
            tensor.is_contiguous()
            and (dtype is None or tensor.dtype == dtype)
            and not (tensor.is_conj() or tensor.is_neg())
            and (tensor.is_cpu or (tensor.is_cuda and cuda_aware()))
        )

    def _read(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The values of `tensor` where MPI can read them: itself or, if that cannot be, a new tensor."""
        if tensor.is_cpu and self._direct(tensor, dtype):
            return tensor
        values = tensor.detach().to(dtype or tensor.dtype).resolve_conj().resolve_neg().contiguous()
        if tensor.is_cuda:
            if not cuda_aware():
                values = self._empty(tensor, values.shape, values.dtype).copy_(values, non_blocking=True)
            torch.cuda.current_stream(tensor.device).synchronize()  # MPI knows nothing of streams
        return values

    def _write(self, tensor: Tensor) -> tuple[Tensor, Callable[[], object] | None]:
        """Where MPI may write the new values of `tensor`, and what then brings them there."""
        if self._direct(tensor):
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
            return tensor, None
        buffer = self._empty(tensor, tensor.shape)
        return buffer, lambda: tensor.detach().copy_(buffer, non_blocking=True)

    def _empty(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        staged = like.is_cuda and not cuda_aware()
        device = torch.device("cpu") if staged else like.device
        return torch.empty(shape, dtype=dtype or like.dtype, device=device, pin_memory=staged)

    def _flat(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """All values of the tensors, one after the other."""
        return self._read(torch.cat([t.detach().reshape(-1) for t in tensors]), dtype)

    def _unflat(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """Where MPI may write the values of all tensors, one after the other, and what then distributes them."""
        counts = [t.numel() for t in tensors]
        buffer = self._empty(tensors[0], [sum(counts)])

        def finish() -> None:
            for tensor, piece in zip(tensors, buffer.split(counts), strict=True):
                tensor.detach().copy_(piece.view(tensor.shape), non_blocking=True)

        return buffer, finish

    def _moved(self, x: Tensor, counts: int | Sequence[int] | None = None) -> list[Any]:
        """`x` as mpi4py takes a buffer that is only moved: address, counts (displacements follow from them), type."""
        return self._buffer(x, self._types.moved[x.element_size()], counts)

    def _added(self, x: Tensor) -> list[Any]:
        return self._buffer(x, self._types.added[x.dtype], None)

    def _buffer(self, x: Tensor, kind: MPI.Datatype, counts: int | Sequence[int] | None) -> list[Any]:
        count = x.numel()
        memory = self.mpi.buffer.fromaddress(x.data_ptr(), count * x.element_size())
        return [memory, count if counts is None else counts, kind]

    # Start and bookkeeping.

    def _start(self, name: str, parts: Sequence[_Part], outputs: Sequence[Tensor], opts: Any = None) -> MpiWork:
        self._sequence += 1  # of collectives: the same on all ranks
        return MpiWork(self, name, parts, outputs, getattr(opts, "timeout", None), self._sequence)

    def _silent(self, work: MpiWork) -> str:
        """Which ranks are the cause of a timeout: for a collective, those that do not report to the store that they
        wait in it, too."""
        if work._sequence is None or self._size == 1:
            return ""
        key = f"stuck/{work._sequence}/"
        try:
            self._store.set(f"{key}{self._rank}", work._name)
            time.sleep(GRACE)
            others = {g: f"{key}{i}" for i, g in enumerate(self.ranks) if i != self._rank}
            here = {g: self._store.get(k).decode() for g, k in others.items() if self._store.check([k])}
        except Exception:
            return " (the store does not answer: rank 0 is gone?)"
        silent = [rank for rank in others if rank not in here]
        if silent:
            return f"; not waiting in it: ranks {silent}"
        return "; all ranks wait, in: " + ", ".join(f"{op} (rank {rank})" for rank, op in here.items())

    def _check(self, name: str, tensors: Sequence[Tensor], numel: int | None = None) -> None:
        """Fail before any communication: on what cannot be sent, on mixed dtypes, on a wrong number of elements."""
        first = tensors[0]
        for tensor in tensors:
            if tensor.layout is not torch.strided or not (tensor.is_cpu or tensor.is_cuda):
                raise ValueError(
                    f"mpi {name}: cannot send a tensor of {tensor.layout} on {tensor.device}; "
                    "make it dense, on the CPU or a CUDA GPU"
                )
            if tensor.dtype != first.dtype:
                raise ValueError(f"mpi {name}: all tensors must have one dtype, not {first.dtype} and {tensor.dtype}")
        if numel is not None and first.numel() != numel:
            raise ValueError(
                f"mpi {name} of {self._size} ranks: a tensor of shape {tuple(first.shape)} was given "
                f"where {numel} elements belong"
            )

    def _check_list(self, name: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self._size:
            raise ValueError(f"mpi {name}: the list has {len(tensors)} tensors, the group {self._size} ranks")

    def _peer(self, name: str, peer: int) -> int:
        if not 0 <= peer < self._size:
            raise ValueError(f"mpi {name}: no rank {peer} in a group of {self._size} ranks")
        return peer

    def _settle(self, target: Tensor, values: Tensor, op: Any) -> Callable[[], object] | None:
        """What remains to be done with a reduced buffer: divide it for AVG, bring it to its place."""
        average = getattr(op, "op", op).name == "AVG"
        if not average and target is values:
            return None

        def finish() -> None:
            if average:
                values.detach().div_(self._size)
            if target is not values:
                target.detach().copy_(values, non_blocking=True)

        return finish

    # Point to point.

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> MpiWork:
        (tensor,) = tensors
        self._check("send", tensors)
        x = self._read(tensor)
        request = self.comm.Isend(self._moved(x), self._peer("send", dst), tag)
        return MpiWork(self, f"send to rank {self.ranks[dst]}", [_Part(request, (x,))])

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> MpiWork:
        return self._recv(tensors, self._peer("recv", src), tag, f"recv from rank {self.ranks[src]}")

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MpiWork:
        return self._recv(tensors, self.mpi.ANY_SOURCE, tag, "recv from any rank")

    def _recv(self, tensors: list[Tensor], src: int, tag: int, name: str) -> MpiWork:
        (tensor,) = tensors
        self._check("recv", tensors)
        y, place = self._write(tensor)
        status = self.mpi.Status()

        def finish() -> None:
            came, wanted = status.Get_count(self.mpi.BYTE), y.numel() * y.element_size()
            if came != wanted:
                raise RuntimeError(f"{came} bytes came where shape {tuple(y.shape)} of {y.dtype} needs {wanted}")
            if place is not None:
                place()

        request = self.comm.Irecv(self._moved(y), src, tag)
        return MpiWork(self, name, [_Part(request, (y,), finish, status)], [tensor])

    # One tensor to or from all.

    def barrier(self, opts: Any = None) -> MpiWork:
        return self._start("barrier", [_Part(self.comm.Ibarrier(), ())], [], opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:
        (tensor,), opts = tensors, opts or dist.BroadcastOptions()
        self._check("broadcast", tensors)
        root = self._peer("broadcast", opts.rootRank)
        if root == self._rank:
            x, place = self._read(tensor), None
        else:
            x, place = self._write(tensor)
        return self._start("broadcast", [_Part(self.comm.Ibcast(self._moved(x), root), (x,), place)], tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:
        (tensor,), opts = tensors, opts or dist.ReduceOptions()
        self._check("reduce", tensors)
        root = self._peer("reduce", opts.rootRank)
        dtype, op = self._types.reduction(tensor.dtype, opts.reduceOp)
        x = self._read(tensor, dtype)
        finish = None
        if root == self._rank:
            y = tensor if self._direct(tensor, dtype) else x
            request = self.comm.Ireduce(self.mpi.IN_PLACE, self._added(y), op, root)
            finish = self._settle(tensor, y, opts.reduceOp)
        else:
            request = self.comm.Ireduce(self._added(x), None, op, root)
        return self._start("reduce", [_Part(request, (x,), finish)], tensors, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        opts = opts or dist.GatherOptions()
        root = self._peer("gather", opts.rootRank)
        if root != self._rank:
            self._check("gather", inputs)
            x = self._read(inputs[0])
            request = self.comm.Igatherv(self._moved(x), None, root)
            return self._start("gather", [_Part(request, (x,))], [], opts)
        self._check_list("gather", outputs[0])
        self._check("gather", [*inputs, *outputs[0]], outputs[0][root].numel())
        x = self._read(inputs[0])
        y, finish = self._unflat(outputs[0])
        request = self.comm.Igatherv(self._moved(x), self._moved(y, [t.numel() for t in outputs[0]]), root)
        return self._start("gather", [_Part(request, (x, y), finish)], outputs[0], opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> MpiWork:
        opts = opts or dist.ScatterOptions()
        root = self._peer("scatter", opts.rootRank)
        source, keep = None, []
        self._check("scatter", outputs)
        if root == self._rank:
            self._check_list("scatter", inputs[0])
            self._check("scatter", [*outputs, *inputs[0]], inputs[0][root].numel())
            keep = [self._flat(inputs[0])]
            source = self._moved(keep[0], [t.numel() for t in inputs[0]])
        y, finish = self._write(outputs[0])
        request = self.comm.Iscatterv(source, self._moved(y), root)
        return self._start("scatter", [_Part(request, (y, *keep), finish)], outputs, opts)

    # All to all.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:
        opts = opts or dist.AllreduceOptions()
        for tensor in tensors:
            self._check("allreduce", [tensor])
        kinds = [self._types.reduction(t.dtype, opts.reduceOp) for t in tensors]
        parts = []
        for tensor, (dtype, op) in zip(tensors, kinds, strict=True):
            x = self._read(tensor, dtype)
            y = tensor if self._direct(tensor, dtype) else x
            request = self.comm.Iallreduce(self.mpi.IN_PLACE, self._added(y), op)
            parts.append(_Part(request, (y,), self._settle(tensor, y, opts.reduceOp)))
        return self._start("allreduce", parts, tensors, opts)

    allreduce_coalesced = allreduce

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MpiWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        for output, input in zip(outputs, inputs, strict=True):
            self._check("all_gather", [output, input], input.numel() * self._size)
        parts = []
        for output, input in zip(outputs, inputs, strict=True):
            x, (y, finish) = self._read(input), self._write(output)
            request = self.comm.Iallgather(self._moved(x), self._moved(y, x.numel()))  # for each rank
            parts.append(_Part(request, (x, y), finish))
        return self._start("all_gather", parts, outputs, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        for output, input in zip(outputs, inputs, strict=True):
            self._check_list("all_gather", output)
            self._check("all_gather", [input, *output], output[self._rank].numel())
        parts = []
        for output, input in zip(outputs, inputs, strict=True):
            x, (y, finish) = self._read(input), self._unflat(output)
            request = self.comm.Iallgatherv(self._moved(x), self._moved(y, [t.numel() for t in output]))
            parts.append(_Part(request, (x, y), finish))
        return self._start("all_gather", parts, [t for output in outputs for t in output], opts)

    allgather_coalesced = allgather

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MpiWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        for output, input in zip(outputs, inputs, strict=True):
            self._check("reduce_scatter", [input, output], output.numel() * self._size)
        return self._reduce_scatter(outputs, inputs, [[t.numel()] * self._size for t in outputs], opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> MpiWork:
        for output, pieces in zip(outputs, inputs, strict=True):
            self._check_list("reduce_scatter", pieces)
            self._check("reduce_scatter", [output, *pieces], pieces[self._rank].numel())
        counts = [[t.numel() for t in pieces] for pieces in inputs]
        return self._reduce_scatter(outputs, [torch.cat([t.reshape(-1) for t in ts]) for ts in inputs], counts, opts)

    def _reduce_scatter(
        self, outputs: list[Tensor], inputs: list[Tensor], counts: list[list[int]], opts: Any
    ) -> MpiWork:
        opts = opts or dist.ReduceScatterOptions()
        kinds = [self._types.reduction(t.dtype, opts.reduceOp) for t in outputs]
        parts = []
        for output, input, count, (dtype, op) in zip(outputs, inputs, counts, kinds, strict=True):
            x = self._read(input, dtype)
            y = output if self._direct(output, dtype) else self._empty(output, output.shape, dtype)
            request = self.comm.Ireduce_scatter(self._added(x), self._added(y), count, op)
            parts.append(_Part(request, (x, y), self._settle(output, y, opts.reduceOp)))
        return self._start("reduce_scatter", parts, outputs, opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> MpiWork:
        self._check("all_to_all", [output, input])
        to, out = self._splits(output, output_splits), self._splits(input, input_splits)
        x, (y, finish) = self._read(input), self._write(output)
        request = self.comm.Ialltoallv(self._moved(x, out), self._moved(y, to))
        return self._start("all_to_all", [_Part(request, (x, y), finish)], [output], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        self._check_list("all_to_all", outputs)
        self._check_list("all_to_all", inputs)
        self._check("all_to_all", [*outputs, *inputs])
        x, (y, finish) = self._flat(inputs), self._unflat(outputs)
        to, out = [t.numel() for t in outputs], [t.numel() for t in inputs]
        request = self.comm.Ialltoallv(self._moved(x, out), self._moved(y, to))
        return self._start("all_to_all", [_Part(request, (x, y), finish)], outputs, opts)

    def _splits(self, tensor: Tensor, sizes: list[int] | None) -> list[int]:
        """How many elements go to each rank, from rows (empty: the same number of rows for each)."""
        rows, row = (tensor.shape[0], math.prod(tensor.shape[1:])) if tensor.dim() else (1, 1)
        if not sizes:
            if rows % self._size:
                raise ValueError(f"mpi all_to_all: {rows} rows do not divide among {self._size} ranks; give splits")
            sizes = [rows // self._size] * self._size
        if len(sizes) != self._size or sum(sizes) != rows or min(sizes) < 0:
            raise ValueError(f"mpi all_to_all: splits {sizes} do not divide {rows} rows among {self._size} ranks")
        return [size * row for size in sizes]

    # The former names of these methods, by which older callers ask.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _create(options: Any, _: object = None) -> MpiProcessGroup:
    """Make a group for torch. Only its members come here, so the communicator is made among them alone."""
    MPI = load()
    world, ranks = MPI.COMM_WORLD, list(options.global_ranks_in_group)
    wanted = len(ranks) or options.group_size
    if world.size < wanted:
        raise ValueError(
            f'backend "mpi": {wanted} ranks are wanted, MPI started {world.size}; start them with the mpiexec (or srun '
            f"--mpi=...) of the library that mpi4py uses: {MPI.Get_library_version().splitlines()[0].strip()}"
        )
    if ranks or wanted < world.size:
        ranks = ranks or list(range(wanted))
        members = world.group.Incl(ranks)
        comm = world.Create_group(members, zlib.crc32(str(options.group_id).encode()) & 0x7FFF)
        members.Free()
    else:
        ranks, comm = list(range(wanted)), world.Dup()
    if (comm.rank, comm.size) != (options.group_rank, wanted):
        raise ValueError(
            f"torch and MPI number the ranks differently: rank {options.group_rank} of {wanted} "
            f"is MPI's {comm.rank} of {comm.size}; let distfx.init() number them"
        )
    _end_well()
    return MpiProcessGroup(comm, ranks, options.store, options.timeout)


_leaving = False
_exit_code = 0  # of the last sys.exit


@functools.cache
def _end_well() -> None:
    atexit.register(_leave)


def _abort(code: int) -> NoReturn:
    """End the job, after what this rank has said was read."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(HEARD)
    load().COMM_WORLD.Abort(code)
    raise SystemExit(code)  # not reached


def _leave() -> None:
    """Before Python ends: finish what nobody waited for. Communicators are left to MPI_Finalize, which waits for the
    other ranks: if they do not come, because communication has failed or this rank alone gave up, the job is ended."""
    global _leaving
    _leaving = True
    if failure.broken() or (_exit_code and not failure.all_left(GRACE)):
        _abort(_exit_code or 1)
    if _pusher.cache_info().currsize and (pusher := _pusher()) is not None:
        pusher.end()
    end = time.monotonic() + DRAIN
    while _live and time.monotonic() < end:
        progress()
        os.sched_yield()
