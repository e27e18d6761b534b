"""The process group: torch's collectives as non-blocking MPI calls.

MPI reads and writes dense host memory. Other tensors (channels_last, slices, GPU tensors under an MPI that is not
CUDA-aware) go through a contiguous copy, pinned for GPUs, and are copied back when the operation is complete.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from distfx.runtime.comm.mpi.datatypes import datatypes
from distfx.runtime.comm.mpi.exit import finish_at_exit, is_exiting
from distfx.runtime.comm.mpi.library import cuda_aware, load
from distfx.runtime.comm.mpi.work import MpiWork, Part, in_flight, progress

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["BACKEND", "MpiProcessGroup", "register"]

BACKEND = "distfx_mpi"
REPORT_GRACE = 2.0  # seconds that a rank whose operation timed out waits for the others to report the same


def register() -> None:
    """Register the backend with torch as `distfx_mpi`, for CPU and CUDA tensors. Further calls have no effect."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


# Untyped for mypy: torch's stubs overload each method, and `torch.distributed` calls only one of the forms.
_ProcessGroup: Any = dist.ProcessGroup


class MpiProcessGroup(_ProcessGroup):
    """A group of ranks with its own MPI communicator.

    torch calls the methods by these names and arguments, from Python and from C++ (e.g. `all_gather_single_coalesced`).
    Ranks and roots are numbers within the group.
    """

    def __init__(self, comm: MPI.Comm, ranks: Sequence[int], store: dist.Store, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self._rank, self._size = comm.rank, comm.size  # cached, because each call through C++ takes 2 us
        self.mpi, self.comm, self.ranks, self.timeout = load(), comm, list(ranks), timeout
        self._types, self._store, self._sequence = datatypes(), store, 0
        self._name = self._desc = ""
        self._peers = [rank for i, rank in enumerate(self.ranks) if i != comm.rank]
        self._exit_sequences: dict[int, int] = {}

    # Properties that torch reads.

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
        """Free the communicator. If operations are in flight on it, leave it to `MPI_Finalize`."""
        progress()
        busy = any(work._group is self for work in in_flight())
        if not (busy or is_exiting() or self.comm == self.mpi.COMM_NULL or self.mpi.Is_finalized()):
            self.comm.Free()

    # Buffers that MPI can access.

    def _is_direct(self, tensor: Tensor, dtype: torch.dtype | None = None) -> bool:
        """Whether MPI can access the tensor's memory without a copy."""
        return (
            tensor.is_contiguous()
            and (dtype is None or tensor.dtype == dtype)
            and not (tensor.is_conj() or tensor.is_neg())
            and (tensor.is_cpu or (tensor.is_cuda and cuda_aware()))
        )

    def _readable(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """`tensor` itself if MPI can read its memory, else a copy."""
        if tensor.is_cpu and self._is_direct(tensor, dtype):
            return tensor
        values = tensor.detach().to(dtype or tensor.dtype).resolve_conj().resolve_neg().contiguous()
        if tensor.is_cuda:
            if not cuda_aware():
                values = self._empty(tensor, values.shape, values.dtype).copy_(values, non_blocking=True)
            torch.cuda.current_stream(tensor.device).synchronize()  # MPI does not wait for streams
        return values

    def _writable(self, tensor: Tensor) -> tuple[Tensor, Callable[[], object] | None]:
        """A buffer for the new values of `tensor`, and a function that copies them if it is not `tensor` itself."""
        if self._is_direct(tensor):
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
            return tensor, None
        buffer = self._empty(tensor, tensor.shape)
        return buffer, lambda: tensor.detach().copy_(buffer, non_blocking=True)

    def _empty(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        staged = like.is_cuda and not cuda_aware()
        device = torch.device("cpu") if staged else like.device
        return torch.empty(shape, dtype=dtype or like.dtype, device=device, pin_memory=staged)

    def _flatten(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """The values of all tensors in one buffer."""
        return self._readable(torch.cat([t.detach().reshape(-1) for t in tensors]), dtype)

    def _flat_buffer(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """One buffer for the values of all tensors, and a function that copies them to the tensors."""
        counts = [t.numel() for t in tensors]
        buffer = self._empty(tensors[0], [sum(counts)])

        def finish() -> None:
            for tensor, piece in zip(tensors, buffer.split(counts), strict=True):
                tensor.detach().copy_(piece.view(tensor.shape), non_blocking=True)

        return buffer, finish

    def _opaque(self, x: Tensor, counts: int | Sequence[int] | None = None) -> list[Any]:
        """`x` as an mpi4py buffer of opaque elements: memory, counts (which imply the displacements), datatype."""
        return self._buffer(x, self._types.by_size[x.element_size()], counts)

    def _typed(self, x: Tensor) -> list[Any]:
        """`x` as an mpi4py buffer of numbers, for reductions."""
        return self._buffer(x, self._types.by_dtype[x.dtype], None)

    def _buffer(self, x: Tensor, kind: MPI.Datatype, counts: int | Sequence[int] | None) -> list[Any]:
        count = x.numel()
        memory = self.mpi.buffer.fromaddress(x.data_ptr(), count * x.element_size())
        return [memory, count if counts is None else counts, kind]

    # Bookkeeping and checks.

    def _start(self, name: str, parts: Sequence[Part], outputs: Sequence[Tensor], opts: Any = None) -> MpiWork:
        self._sequence += 1  # the number of this collective, the same on all ranks
        return MpiWork(self, name, parts, outputs, getattr(opts, "timeout", None), self._sequence, self._peers)

    def describe_missing(self, name: str, sequence: int | None) -> str:
        """After a timeout: which ranks have not joined the collective with this number.

        A rank that waits in it reports that to the store. For point-to-point operations the result is empty.
        """
        if sequence is None or self._size == 1:
            return ""
        key = f"stuck/{sequence}/"
        try:
            self._store.set(f"{key}{self._rank}", name)
            time.sleep(REPORT_GRACE)
            keys = {rank: f"{key}{i}" for i, rank in enumerate(self.ranks) if i != self._rank}
            waiting = {rank: self._store.get(k).decode() for rank, k in keys.items() if self._store.check([k])}
        except Exception:
            return " (the store does not answer: is rank 0 gone?)"
        missing = [rank for rank in keys if rank not in waiting]
        if missing:
            return f"; ranks that have not joined it: {missing}"
        return "; all ranks wait, in: " + ", ".join(f"{op} (rank {rank})" for rank, op in waiting.items())

    def publish_exit(self) -> None:
        """Publish the number of the last collective that this rank has joined."""
        if self._size > 1:
            self._store.set(f"exit/{self._rank}", str(self._sequence))

    def has_joined(self, rank: int, sequence: int | None) -> bool:
        """Whether a rank that has exited joined the collective with this number first. False for point-to-point."""
        if sequence is None:
            return False
        if rank not in self._exit_sequences:
            key = f"exit/{self.ranks.index(rank)}"
            if not self._store.check([key]):
                return True  # it did not publish its last collective, so nothing is known
            self._exit_sequences[rank] = int(self._store.get(key))
        return self._exit_sequences[rank] >= sequence

    def _check(self, name: str, tensors: Sequence[Tensor], numel: int | None = None) -> None:
        """Raise before any communication if tensors cannot be sent, differ in dtype, or have a wrong size."""
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
                f"mpi {name} of {self._size} ranks: expected a tensor of {numel} elements, "
                f"got shape {tuple(first.shape)}"
            )

    def _check_list(self, name: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self._size:
            raise ValueError(f"mpi {name}: the list has {len(tensors)} tensors, the group {self._size} ranks")

    def _checked_peer(self, name: str, peer: int) -> int:
        if not 0 <= peer < self._size:
            raise ValueError(f"mpi {name}: no rank {peer} in a group of {self._size} ranks")
        return peer

    def _finish_reduction(self, target: Tensor, values: Tensor, op: Any) -> Callable[[], object] | None:
        """A function that completes a reduction: divide for AVG, copy to the target. None if there is nothing to do."""
        average = getattr(op, "op", op).name == "AVG"
        if not average and target is values:
            return None

        def finish() -> None:
            if average:
                values.detach().div_(self._size)
            if target is not values:
                target.detach().copy_(values, non_blocking=True)

        return finish

    # Point-to-point.

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> MpiWork:
        (tensor,) = tensors
        self._check("send", tensors)
        x = self._readable(tensor)
        request = self.comm.Isend(self._opaque(x), self._checked_peer("send", dst), tag)
        return MpiWork(self, f"send to rank {self.ranks[dst]}", [Part(request, (x,))], peers=[self.ranks[dst]])

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> MpiWork:
        self._checked_peer("recv", src)
        return self._recv(tensors, src, tag, f"recv from rank {self.ranks[src]}", [self.ranks[src]])

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MpiWork:
        return self._recv(tensors, self.mpi.ANY_SOURCE, tag, "recv from any rank", [])

    def _recv(self, tensors: list[Tensor], src: int, tag: int, name: str, peers: list[int]) -> MpiWork:
        (tensor,) = tensors
        self._check("recv", tensors)
        y, copy_back = self._writable(tensor)
        status = self.mpi.Status()

        def finish() -> None:
            received, expected = status.Get_count(self.mpi.BYTE), y.numel() * y.element_size()
            if received != expected:
                raise RuntimeError(f"received {received} bytes, but shape {tuple(y.shape)} of {y.dtype} has {expected}")
            if copy_back is not None:
                copy_back()

        request = self.comm.Irecv(self._opaque(y), src, tag)
        return MpiWork(self, name, [Part(request, (y,), finish, status)], [tensor], peers=peers)

    # Collectives with a root, and the barrier.

    def barrier(self, opts: Any = None) -> MpiWork:
        return self._start("barrier", [Part(self.comm.Ibarrier(), ())], [], opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:
        (tensor,), opts = tensors, opts or dist.BroadcastOptions()
        self._check("broadcast", tensors)
        root = self._checked_peer("broadcast", opts.rootRank)
        if root == self._rank:
            x, copy_back = self._readable(tensor), None
        else:
            x, copy_back = self._writable(tensor)
        request = self.comm.Ibcast(self._opaque(x), root)
        return self._start("broadcast", [Part(request, (x,), copy_back)], tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:
        (tensor,), opts = tensors, opts or dist.ReduceOptions()
        self._check("reduce", tensors)
        root = self._checked_peer("reduce", opts.rootRank)
        dtype, op = self._types.reduction(tensor.dtype, opts.reduceOp)
        x = self._readable(tensor, dtype)
        finish = None
        if root == self._rank:
            y = tensor if self._is_direct(tensor, dtype) else x
            request = self.comm.Ireduce(self.mpi.IN_PLACE, self._typed(y), op, root)
            finish = self._finish_reduction(tensor, y, opts.reduceOp)
        else:
            request = self.comm.Ireduce(self._typed(x), None, op, root)
        return self._start("reduce", [Part(request, (x,), finish)], tensors, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        opts = opts or dist.GatherOptions()
        root = self._checked_peer("gather", opts.rootRank)
        if root != self._rank:
            self._check("gather", inputs)
            x = self._readable(inputs[0])
            request = self.comm.Igatherv(self._opaque(x), None, root)
            return self._start("gather", [Part(request, (x,))], [], opts)
        self._check_list("gather", outputs[0])
        self._check("gather", [*inputs, *outputs[0]], outputs[0][root].numel())
        x = self._readable(inputs[0])
        y, finish = self._flat_buffer(outputs[0])
        request = self.comm.Igatherv(self._opaque(x), self._opaque(y, [t.numel() for t in outputs[0]]), root)
        return self._start("gather", [Part(request, (x, y), finish)], outputs[0], opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> MpiWork:
        opts = opts or dist.ScatterOptions()
        root = self._checked_peer("scatter", opts.rootRank)
        send_buffer, buffers = None, []
        self._check("scatter", outputs)
        if root == self._rank:
            self._check_list("scatter", inputs[0])
            self._check("scatter", [*outputs, *inputs[0]], inputs[0][root].numel())
            buffers = [self._flatten(inputs[0])]
            send_buffer = self._opaque(buffers[0], [t.numel() for t in inputs[0]])
        y, finish = self._writable(outputs[0])
        request = self.comm.Iscatterv(send_buffer, self._opaque(y), root)
        return self._start("scatter", [Part(request, (y, *buffers), finish)], outputs, opts)

    # Collectives without a root.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:
        opts = opts or dist.AllreduceOptions()
        for tensor in tensors:
            self._check("allreduce", [tensor])
        reductions = [self._types.reduction(t.dtype, opts.reduceOp) for t in tensors]
        parts = []
        for tensor, (dtype, op) in zip(tensors, reductions, strict=True):
            x = self._readable(tensor, dtype)
            y = tensor if self._is_direct(tensor, dtype) else x
            request = self.comm.Iallreduce(self.mpi.IN_PLACE, self._typed(y), op)
            parts.append(Part(request, (y,), self._finish_reduction(tensor, y, opts.reduceOp)))
        return self._start("allreduce", parts, tensors, opts)

    allreduce_coalesced = allreduce

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MpiWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        for output, input in zip(outputs, inputs, strict=True):
            self._check("all_gather", [output, input], input.numel() * self._size)
        parts = []
        for output, input in zip(outputs, inputs, strict=True):
            x, (y, finish) = self._readable(input), self._writable(output)
            request = self.comm.Iallgather(self._opaque(x), self._opaque(y, x.numel()))  # for each rank
            parts.append(Part(request, (x, y), finish))
        return self._start("all_gather", parts, outputs, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        for output, input in zip(outputs, inputs, strict=True):
            self._check_list("all_gather", output)
            self._check("all_gather", [input, *output], output[self._rank].numel())
        parts = []
        for output, input in zip(outputs, inputs, strict=True):
            x, (y, finish) = self._readable(input), self._flat_buffer(output)
            request = self.comm.Iallgatherv(self._opaque(x), self._opaque(y, [t.numel() for t in output]))
            parts.append(Part(request, (x, y), finish))
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
        reductions = [self._types.reduction(t.dtype, opts.reduceOp) for t in outputs]
        parts = []
        for output, input, count, (dtype, op) in zip(outputs, inputs, counts, reductions, strict=True):
            x = self._readable(input, dtype)
            y = output if self._is_direct(output, dtype) else self._empty(output, output.shape, dtype)
            request = self.comm.Ireduce_scatter(self._typed(x), self._typed(y), count, op)
            parts.append(Part(request, (x, y), self._finish_reduction(output, y, opts.reduceOp)))
        return self._start("reduce_scatter", parts, outputs, opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> MpiWork:
        self._check("all_to_all", [output, input])
        receive_counts, send_counts = self._splits(output, output_splits), self._splits(input, input_splits)
        x, (y, finish) = self._readable(input), self._writable(output)
        request = self.comm.Ialltoallv(self._opaque(x, send_counts), self._opaque(y, receive_counts))
        return self._start("all_to_all", [Part(request, (x, y), finish)], [output], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        self._check_list("all_to_all", outputs)
        self._check_list("all_to_all", inputs)
        self._check("all_to_all", [*outputs, *inputs])
        x, (y, finish) = self._flatten(inputs), self._flat_buffer(outputs)
        receive_counts, send_counts = [t.numel() for t in outputs], [t.numel() for t in inputs]
        request = self.comm.Ialltoallv(self._opaque(x, send_counts), self._opaque(y, receive_counts))
        return self._start("all_to_all", [Part(request, (x, y), finish)], outputs, opts)

    def _splits(self, tensor: Tensor, sizes: list[int] | None) -> list[int]:
        """The number of elements for each rank, from its number of rows. Empty `sizes` divide the rows evenly."""
        rows, row = (tensor.shape[0], math.prod(tensor.shape[1:])) if tensor.dim() else (1, 1)
        if not sizes:
            if rows % self._size:
                raise ValueError(
                    f"mpi all_to_all: {rows} rows do not divide evenly among {self._size} ranks; pass splits"
                )
            sizes = [rows // self._size] * self._size
        if len(sizes) != self._size or sum(sizes) != rows or min(sizes) < 0:
            raise ValueError(f"mpi all_to_all: split sizes {sizes} do not divide {rows} rows among {self._size} ranks")
        return [size * row for size in sizes]

    # Former names of these methods, which some callers still use.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _create(options: Any, _: object = None) -> MpiProcessGroup:
    """Create a group for torch. Only its members call this, so the communicator is created among them alone."""
    MPI = load()
    world, ranks = MPI.COMM_WORLD, list(options.global_ranks_in_group)
    size = len(ranks) or options.group_size
    if world.size < size:
        raise ValueError(
            f'backend "mpi" needs {size} ranks, but MPI started {world.size}; start them with the mpiexec (or srun '
            f"--mpi=...) of the library that mpi4py uses: {MPI.Get_library_version().splitlines()[0].strip()}"
        )
    if ranks or size < world.size:
        ranks = ranks or list(range(size))
        members = world.group.Incl(ranks)
        comm = world.Create_group(members, zlib.crc32(str(options.group_id).encode()) & 0x7FFF)
        members.Free()
    else:
        ranks, comm = list(range(size)), world.Dup()
    if (comm.rank, comm.size) != (options.group_rank, size):
        raise ValueError(
            f"torch and MPI number the ranks differently: rank {options.group_rank} of {size} "
            f"is MPI's {comm.rank} of {comm.size}; let distfx.init() number them"
        )
    group = MpiProcessGroup(comm, ranks, options.store, options.timeout)
    finish_at_exit(group)
    return group
