"""The `mpi` backend against local references, on 1 to 4 real ranks.

Each world is launched once: `mpiexec -n 3 python -m test_mpi` runs all checks, one after the other, and prints a
line for each; the tests read the lines. Every rank can compute the tensors of all ranks (`values`), and so the result.
"""

import functools
import gc
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from test_launch import mpiexec, needs_mpi, start
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from distfx.runtime.comm import mpi
from distfx.runtime.comm.launch import init
from distfx.runtime.comm.mpi.work import MAX_IN_FLIGHT, in_flight

WORLDS = (1, 2, 3, 4)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool)


def values(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """The tensor of `rank`. Integers are small, so that no sum overflows."""
    draw = torch.Generator().manual_seed(rank + 1)
    if dtype is torch.bool:
        return torch.rand(tuple(shape), generator=draw) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(1, 4, tuple(shape), generator=draw).to(dtype)
    parts = [torch.randn(tuple(shape), generator=draw, dtype=torch.float64) for _ in range(2)]
    return (torch.complex(*parts) if dtype.is_complex else parts[0]).to(dtype)


def everyones(world: int, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [values(i, shape, dtype) for i in range(world)]


def reduced(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """The reduction, in the widest type, rounded once."""
    dtype, world = tensors[0].dtype, len(tensors)
    if dtype is torch.bool:
        stack = torch.stack(list(tensors))
        return stack.any(0) if op in (ReduceOp.SUM, ReduceOp.MAX) else stack.all(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stack = torch.stack([t.to(wide) for t in tensors])
    if op == ReduceOp.AVG:
        return (stack.sum(0) / world).to(dtype)
    by: Any = {"SUM": torch.sum, "PRODUCT": torch.prod, "MIN": torch.amin, "MAX": torch.amax}[op.name]
    return by(stack, 0).to(dtype)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want)  # with the default tolerance of the dtype


def same(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype and got.tolist() == want.tolist(), (got, want)


def operations(dtype: torch.dtype) -> list[Any]:
    """The reductions that torch accepts for a dtype."""
    if dtype.is_complex:
        return [ReduceOp.SUM, ReduceOp.AVG]
    mean = [ReduceOp.AVG] if dtype.is_floating_point else []
    return [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, *mean]


def finish(*works: dist.Work | None) -> None:
    for work in works:
        assert work is not None and work.wait()


# Checks: each runs on all ranks.


def check_reductions(rank: int, world: int) -> None:
    for dtype in DTYPES:
        for op in operations(dtype):
            alls = everyones(world, (world, 5), dtype)
            want = reduced(alls, op)

            x = alls[rank].clone()
            dist.all_reduce(x, op)
            close(x, want)

            x = alls[rank].clone()
            dist.reduce(x, world - 1, op)
            if rank == world - 1:
                close(x, want)

            y = torch.empty(1, 5, dtype=dtype)
            dist.reduce_scatter_single(y, alls[rank], op)
            close(y, want[rank : rank + 1])

            uneven = [values(rank, (i,), dtype) for i in range(world)]  # piece i has i elements: the first is empty
            y = torch.empty(rank, dtype=dtype)
            dist.reduce_scatter(y, uneven, op)
            close(y, reduced([values(i, (rank,), dtype) for i in range(world)], op))


def check_short_floats_are_rounded_once(rank: int, world: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        alls = everyones(world, (4096,), dtype)
        want = torch.stack(alls).double().sum(0).to(torch.float32).to(dtype)
        x = alls[rank].clone()
        dist.all_reduce(x)
        assert (x != want).float().mean() < 1e-3, "differs by more than float32's own rounding at ties"
        x = torch.full((3,), 1.0 if rank == 0 else 2.0**-9, dtype=torch.bfloat16)  # lost if added one by one
        dist.all_reduce(x)
        assert x[0] == (torch.tensor(1 + (world - 1) * 2.0**-9)).bfloat16()


def check_moves(rank: int, world: int) -> None:
    for dtype in (*DTYPES, torch.float8_e4m3fn, torch.uint16):
        alls = [t.to(dtype) for t in everyones(world, (2, 3), torch.float32 if dtype not in DTYPES else dtype)]
        bits = {1: torch.uint8, 2: torch.int16}.get(dtype.itemsize, dtype)

        y = torch.empty(2 * world, 3, dtype=dtype)
        dist.all_gather_single(y, alls[rank])
        same(y.view(bits), torch.cat([t.view(bits) for t in alls]))

        ys = [torch.empty(2, 3, dtype=dtype) for _ in range(world)]
        dist.all_gather(ys, alls[rank])
        for y, x in zip(ys, alls, strict=True):
            same(y.view(bits), x.view(bits))

        for root in range(world):
            x = alls[rank].clone()
            dist.broadcast(x, root)
            same(x.view(bits), alls[root].view(bits))

            y = torch.empty(2, 3, dtype=dtype)
            dist.scatter(y, alls if rank == root else None, root)
            same(y.view(bits), alls[rank].view(bits))

            ys = [torch.empty(2, 3, dtype=dtype) for _ in range(world)]
            dist.gather(alls[rank], ys if rank == root else None, root)
            if rank == root:
                same(torch.cat([t.view(bits) for t in ys]), torch.cat([t.view(bits) for t in alls]))


def check_all_to_all(rank: int, world: int) -> None:
    def piece(source: int, target: int, rows: int) -> Tensor:
        return values(source * world + target, (rows, 2, 3))

    y = torch.empty(2 * world, 2, 3, dtype=torch.float64)
    dist.all_to_all_single(y, torch.cat([piece(rank, i, 2) for i in range(world)]))
    same(y, torch.cat([piece(i, rank, 2) for i in range(world)]))

    sizes = [[(3 * i + j) % 3 for j in range(world)] for i in range(world)]  # some are 0
    pieces = [piece(rank, j, sizes[rank][j]) for j in range(world)]
    expected = [piece(i, rank, sizes[i][rank]) for i in range(world)]
    to = [sizes[i][rank] for i in range(world)]
    y = torch.empty(sum(to), 2, 3, dtype=torch.float64)
    dist.all_to_all_single(y, torch.cat(pieces), to, sizes[rank])
    same(y, torch.cat(expected))

    ys = [torch.empty_like(t) for t in expected]
    dist.all_to_all(ys, pieces)
    for y, t in zip(ys, expected, strict=True):
        same(y, t)


def check_uneven_all_gather(rank: int, world: int) -> None:
    ys = [torch.empty(i, 2, dtype=torch.float64) for i in range(world)]
    dist.all_gather(ys, values(rank, (rank, 2)))
    for i, y in enumerate(ys):
        same(y, values(i, (i, 2)))


def check_memory_layouts(rank: int, world: int) -> None:
    """channels_last, transposed, sliced, expanded, lazily negated; ranks may differ in their layouts."""
    shape = (2, 3, 4, 5)
    alls = everyones(world, shape)
    total = reduced(alls, ReduceOp.SUM)
    for other in (False, True):
        form = torch.channels_last if other != (rank == 0) else torch.contiguous_format
        x = alls[rank].clone(memory_format=form)
        dist.all_reduce(x)
        close(x, total)
        assert x.is_contiguous(memory_format=form)

        x = alls[rank].clone(memory_format=form)
        dist.broadcast(x, world - 1)
        same(x, alls[-1])

        y = torch.empty(2 * world, 3, 4, 5, dtype=torch.float64).to(memory_format=form)
        dist.all_gather_single(y, alls[rank].to(memory_format=form))
        same(y, torch.cat(alls))

        y = torch.empty(shape, dtype=torch.float64).to(memory_format=form)
        dist.reduce_scatter_single(y, torch.cat([alls[rank]] * world).to(memory_format=form))
        close(y, total)

    base = torch.zeros(5, 7, dtype=torch.float64)
    base[1:4, 2:5] = values(rank, (3, 3))
    dist.all_reduce(base[1:4, 2:5].t())
    close(base[1:4, 2:5], reduced(everyones(world, (3, 3)), ReduceOp.SUM))
    assert base[0].abs().sum() == 0 and base[:, :2].abs().sum() == 0

    y = torch.empty(world * 3, 2, dtype=torch.float64)
    dist.all_gather_single(y, torch.tensor([[1.0 * rank]], dtype=torch.float64).expand(3, 2))
    same(y[:, 0], torch.arange(world).repeat_interleave(3).double())

    z = everyones(world, (3,), torch.complex128)
    y = torch.empty(3, dtype=torch.float64)
    lazy = z[rank].conj().imag
    assert lazy.is_neg()
    finish(dist.irecv(y, (rank - 1) % world), dist.isend(lazy, (rank + 1) % world))
    same(y, -z[rank - 1].imag)

    leaf = torch.nn.Parameter(values(rank, (3, 2)).t())
    dist.all_reduce(leaf)
    close(leaf.detach(), reduced(everyones(world, (3, 2)), ReduceOp.SUM).t())


def check_empty_tensors(rank: int, world: int) -> None:
    e = torch.empty(0, 3)
    dist.all_reduce(e)
    dist.broadcast(e, 0)
    dist.all_gather_single(torch.empty(0, 3), e)
    dist.reduce_scatter_single(torch.empty(0, 3), torch.empty(0, 3))
    dist.all_to_all_single(torch.empty(0, 3), e)
    dist.all_gather([torch.empty(0, 3) for _ in range(world)], e)
    finish(dist.isend(e, (rank + 1) % world), dist.irecv(torch.empty(0, 3), (rank - 1) % world))
    scalar = torch.tensor(1.0)
    dist.all_reduce(scalar)
    assert scalar == world


def check_point_to_point(rank: int, world: int) -> None:
    right, left = (rank + 1) % world, (rank - 1) % world
    for dtype in DTYPES:
        for shape in ((), (7,), (2, 3)):
            y = torch.empty(shape, dtype=dtype)
            finish(dist.irecv(y, left), dist.isend(values(rank, shape, dtype), right))
            same(y, values(left, shape, dtype))

    big = 1 << 20  # past any eager limit
    ys = [torch.empty(big) for _ in range(3)]
    works = [dist.isend(torch.full((big,), 10.0 * rank + tag), right, tag=tag) for tag in range(3)]
    works += [dist.irecv(ys[tag], left, tag=tag) for tag in (2, 0, 1)]  # tags match, not the order
    finish(*works)
    assert [y.unique().tolist() for y in ys] == [[10.0 * left + tag] for tag in range(3)]

    y, view = torch.empty(4, 6), torch.empty(6, 4).t()
    ops = [dist.P2POp(dist.isend, torch.full((4, 6), float(rank)).t(), right)]
    ops += [dist.P2POp(dist.irecv, view.t(), left), dist.P2POp(dist.irecv, y, left)]
    ops += [dist.P2POp(dist.isend, torch.full((4, 6), -float(rank)), right)]
    finish(*dist.batch_isend_irecv(ops))
    assert (view == left).all() and (y == -left).all()

    if rank == 0:
        came = set()
        for _ in range(world - 1):
            y = torch.empty(1)
            source = dist.recv(y)
            assert y == source
            came.add(source)
        assert came == set(range(1, world))
    else:
        dist.send(torch.tensor([float(rank)]), 0)


def check_objects(rank: int, world: int) -> None:
    thing = {"rank": rank, "text": "x" * (100 * rank)}
    alls: list[Any] = [None] * world
    dist.all_gather_object(alls, thing)
    assert [a["rank"] for a in alls] == list(range(world)) and len(alls[-1]["text"]) == 100 * (world - 1)
    some = [thing, rank] if rank == world - 1 else [None, None]
    dist.broadcast_object_list(some, world - 1)
    assert some[1] == world - 1
    alls = [None] * world
    dist.gather_object(thing, alls if rank == 0 else None, 0)
    assert rank or alls[-1]["rank"] == world - 1
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [i * i for i in range(world)] if rank == 0 else None, 0)
    assert mine == [rank * rank]


def check_groups(rank: int, world: int) -> None:
    sets = [[i] for i in range(world)] + [[i, i + 1] for i in range(world - 1)] + [list(range(0, world, 2))]
    groups = [(ranks, dist.new_group(ranks)) for ranks in sets]
    for ranks, group in groups:
        if rank not in ranks:
            continue
        x = torch.tensor([2.0**rank])
        dist.all_reduce(x, group=group)
        assert x == sum(2.0**i for i in ranks)
        x = torch.tensor([rank])
        dist.broadcast(x, ranks[-1], group=group)
        assert x == ranks[-1]
        if len(ranks) == 2:
            other = ranks[1 - ranks.index(rank)]
            y = torch.empty_like(x)
            ops = [dist.P2POp(dist.irecv, y, other, group), dist.P2POp(dist.isend, x.new_tensor([rank]), other, group)]
            finish(*dist.batch_isend_irecv(ops))
            assert y == other
    for ranks, group in groups:
        if rank in ranks:
            dist.destroy_process_group(group)
    for _ in range(100):  # communicators are freed
        group = dist.new_group(list(range(world)))
        dist.destroy_process_group(group)
    local = dist.new_group([rank], use_local_synchronization=True)  # members alone take part
    dist.barrier(local)


def check_gloo_beside_mpi(rank: int, world: int) -> None:
    group = dist.new_group(list(range(world)), backend="gloo")  # needs a store that all ranks share
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    assert x == world
    dist.barrier()


def meshes(world: int) -> list[DeviceMesh]:
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("x",))
    return [line] if world != 4 else [line, init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))]


def check_dtensor(rank: int, world: int) -> None:
    for mesh in meshes(world):
        whole = values(0, (7, 5))  # uneven on 2, 3 and 4
        plain: list[Placement] = [Replicate(), Shard(0), Shard(1)]
        layouts = [[p] for p in plain] if mesh.ndim == 1 else [[p, q] for p in plain for q in plain]
        for before in layouts:
            x = distribute_tensor(whole, mesh, before)
            for after in layouts:
                same(x.redistribute(mesh, after).full_tensor(), whole)
        part = DTensor.from_local(values(rank, (7, 5)), mesh, [Partial()] * mesh.ndim)
        total = reduced(everyones(world, (7, 5)), ReduceOp.SUM)
        for after in layouts:
            close(part.redistribute(mesh, after).full_tensor(), total)
        mean = DTensor.from_local(values(rank, (7, 5)), mesh, [Partial("avg")] * mesh.ndim)
        close(mean.full_tensor(), total / world)


def check_training_with_dtensor(rank: int, world: int) -> None:
    """Gradients, `clip_grad_norm_`, an optimizer's step: as on one device."""
    mesh = meshes(world)[0]
    shards = [torch.nn.Parameter(distribute_tensor(values(i, (5, 5)), mesh, [Shard(i % 2)])) for i in range(3)]
    wholes = [torch.nn.Parameter(values(i, (5, 5))) for i in range(3)]
    for params, x in ((shards, distribute_tensor(values(9, (4, 5)), mesh, [Replicate()])), (wholes, values(9, (4, 5)))):
        y: Tensor = x
        for p in params:
            y = torch.tanh(y @ p)
        (y * y).sum().backward()
    norms = [torch.nn.utils.clip_grad_norm_(params, 0.1) for params in (shards, wholes)]
    assert isinstance(norms[0], DTensor)
    close(norms[0].full_tensor(), norms[1])
    for params in (shards, wholes):
        torch.optim.Adam(params, lr=0.1).step()
    for shard, whole in zip(shards, wholes, strict=True):
        assert isinstance(shard, DTensor)
        close(shard.full_tensor().detach(), whole.detach())


def check_functional_collectives(rank: int, world: int) -> None:
    import torch.distributed._functional_collectives as functional

    world_group: Any = dist.group.WORLD
    alls = everyones(world, (world, 2))
    close(functional.all_reduce(alls[rank], "sum", world_group) + 0, reduced(alls, ReduceOp.SUM))
    close(functional.all_reduce(alls[rank], "avg", world_group) + 0, reduced(alls, ReduceOp.AVG))
    same(functional.all_gather_single(alls[rank], 0, world_group) + 0, torch.cat(alls))
    y = functional.reduce_scatter_single(alls[rank], "sum", 0, world_group)
    close(y + 0, reduced(alls, ReduceOp.SUM)[rank : rank + 1])
    same(functional.broadcast(alls[rank], 0, world_group) + 0, alls[0])
    y = functional.all_to_all_single(alls[rank], [1] * world, [1] * world, world_group)
    same(y + 0, torch.stack([t[rank] for t in alls]))


def check_data_parallel(rank: int, world: int) -> None:
    """torch's own DDP, whose C++ half calls broadcast, allgather, allreduce and asks for futures."""
    torch.manual_seed(rank)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    single = torch.nn.Linear(3, 2)
    single.load_state_dict(net.module.state_dict())
    x = torch.cat([t.float() for t in everyones(world, (4, 3))])
    net(x[4 * rank : 4 * rank + 4]).square().mean().backward()
    single(x).square().mean().backward()
    assert single.weight.grad is not None
    close(net.module.weight.grad, single.weight.grad)


def check_checkpoint(rank: int, world: int) -> None:
    import torch.distributed.checkpoint as checkpoint

    mesh, whole = meshes(world)[0], values(0, (7, 5))
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    try:
        checkpoint.save({"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": 3}, checkpoint_id=folder[0])
        state = {"w": distribute_tensor(torch.zeros(7, 5, dtype=torch.float64), mesh, [Shard(1)]), "step": 0}
        checkpoint.load(state, checkpoint_id=folder[0])
        dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(folder[0])
    assert isinstance(state["w"], DTensor) and state["step"] == 3
    same(state["w"].full_tensor(), whole)


def check_many_at_once(rank: int, world: int) -> None:
    xs = [torch.full((1000,), float(i * (rank + 1))) for i in range(50)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    for work in reversed(works):
        assert work is not None and work.wait() and work.is_completed() and work.is_success()
    assert all((x == i * world * (world + 1) / 2).all() for i, x in enumerate(xs))

    x = torch.ones(3, 2).t()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    (y,) = work.get_future().wait()
    assert y is x and (x == world).all()

    with dist._coalescing_manager(async_ops=True) as manager:
        pair = [torch.ones(2), torch.ones(3).bfloat16()]
        for x in pair:
            dist.all_reduce(x)
    manager.wait()
    assert all((x == world).all() for x in pair)


def computed_until(arrived: Callable[[], bool]) -> bool:
    """Compute without calling MPI until `arrived`."""
    a, end = torch.rand(200, 200), time.monotonic() + 20
    while not arrived() and time.monotonic() < end:
        a = torch.tanh(a @ a)
    return arrived()


def check_progress_while_computing(rank: int, world: int) -> None:
    """Large messages arrive before the program waits for them."""
    size, left, right = 4 << 20, (rank - 1) % world, (rank + 1) % world
    y = torch.zeros(size)
    works = [dist.irecv(y, left), dist.isend(torch.full((size,), 1.0 + rank), right)]
    assert computed_until(lambda: bool((y == 1.0 + left).all())), "nothing moves while this rank computes"
    finish(*works)
    x = torch.full((size,), 1.0 + rank)
    work = dist.all_reduce(x, async_op=True)
    if world > 1:
        assert computed_until(lambda: bool((x == world * (world + 1) / 2).all())), "nor is anything added"
    finish(work)


def check_inference_mode(rank: int, world: int) -> None:
    """The thread that completes a message does not inherit the inference mode of the program."""
    with torch.inference_mode():
        x = torch.ones(1024, 512).t()
        work = dist.all_reduce(x, async_op=True)
        computed_until(lambda: not in_flight())
        finish(work)
    assert (x == world).all()
    leaf = torch.ones(3, requires_grad=True)
    work = dist.all_reduce(leaf.detach().clone(), async_op=True)
    assert work is not None
    scaled = work.get_future().then(lambda done: done.value()[0] * 2).wait()
    (leaf * scaled).sum().backward()  # not an inference tensor
    assert (leaf.grad == 2 * world).all()


def check_futures(rank: int, world: int) -> None:
    """A future is available at once and completes without a wait. Its callbacks run then."""
    dist.barrier()
    late = rank == world - 1 and world > 1
    if late:
        time.sleep(0.5)
    x, begun = torch.ones(3), time.monotonic()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    future = work.get_future()
    assert future is work.get_future()
    assert late or world == 1 or (not future.done() and time.monotonic() - begun < 0.4)
    doubled = future.then(lambda done: 2 * done.value()[0])
    assert (doubled.wait() == 2 * world).all() and work.is_completed()

    if world > 1:  # one that never comes: the last rank does not take part
        group = dist.new_group(list(range(world)), timeout=timedelta(seconds=1))
        future = None if rank == world - 1 else dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future()
        try:
            if future is not None:
                future.wait()
        except dist.DistBackendError as error:
            assert "mpi allreduce of ranks" in str(error) and "not done after 1 s" in str(error), error
        else:
            assert future is None
        dist.barrier()
        if rank == world - 1:
            dist.all_reduce(torch.ones(2), group=group)
        dist.barrier()


def check_dropped_works(rank: int, world: int) -> None:
    """Works that the program drops are completed and released."""
    x = torch.ones(1000, 3).t()
    for _ in range(2 * MAX_IN_FLIGHT):
        dist.all_reduce(torch.ones(100), async_op=True)
    dist.all_reduce(x, async_op=True)
    gc.collect()
    end = time.monotonic() + 20
    while in_flight() and time.monotonic() < end:
        mpi.progress()
    assert not in_flight() and (x == world).all()


def check_other_threads(rank: int, world: int) -> None:
    """As autograd does for GPUs."""
    x = torch.ones(10)
    thread = threading.Thread(target=lambda: dist.all_reduce(x))
    thread.start()
    thread.join()
    assert (x == world).all()


def check_errors(rank: int, world: int) -> None:
    """Errors are raised on every rank before any communication, and the next collective works."""
    x, group = torch.ones(3), cast(mpi.MpiProcessGroup, dist.group.WORLD)
    wrong: list[tuple[str, Callable[[], object]]] = [
        (f"expected a tensor of {3 * world} elements", lambda: dist.all_gather_single(x.new_empty(17), x)),
        ("one dtype", lambda: dist.reduce_scatter_single(x, x.double().repeat(world))),
        (f"expected a tensor of {3 * world} elements", lambda: dist.reduce_scatter_single(x, x.new_empty(17))),
        ("do not divide", lambda: dist.all_to_all_single(x, x, [3] * world + [1], [3] * world + [1])),
        ("cannot reduce torch.int64 by AVG", lambda: dist.all_reduce(x.long(), ReduceOp.AVG)),
        ("dense", lambda: group.allreduce([x.to_sparse()])),
        ("no rank 99", lambda: group.send([x], 99)),
        ("bitwise operation", lambda: dist.all_reduce(x, ReduceOp.BOR)),
    ]
    for message, call in wrong:
        try:
            call()
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"no error: {message}")
    dist.all_reduce(x)
    assert (x == world).all()


def check_messages_of_a_wrong_size(rank: int, world: int) -> None:
    for size in (2, 6):
        work = dist.irecv(torch.empty(4), (rank - 1) % world)
        dist.isend(torch.ones(size), (rank + 1) % world)
        assert work is not None
        try:
            work.wait()
        except dist.DistBackendError as error:
            assert f"recv from rank {(rank - 1) % world} of ranks" in str(error), error
            assert size > 4 or "received 8 bytes, but shape (4,) of torch.float32 has 16" in str(error), error
        else:
            raise AssertionError("no error")
    dist.barrier()


def check_timeouts(rank: int, world: int) -> None:
    """The error names the operation, the group and the missing ranks."""
    if world == 1:
        return
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=1))
    last = world - 1
    try:
        if rank != last:
            dist.all_reduce(torch.ones(3), group=group)
    except dist.DistBackendError as error:
        assert f"mpi allreduce of ranks {list(range(world))} not done after 1 s" in str(error), error
        assert str(error).endswith(f"; ranks that have not joined it: [{last}]"), error
    else:
        assert rank == last
    dist.barrier()
    if rank == last:  # the others' operation is still under way: join it
        dist.all_reduce(torch.ones(3), group=group)
    if rank == 0:
        try:
            dist.recv(torch.empty(1), last, group=group)
        except dist.DistBackendError as error:
            assert f"mpi recv from rank {last} of ranks" in str(error), error
        else:
            raise AssertionError("no error")
    dist.barrier()
    if rank == last:
        dist.send(torch.ones(1), 0, group=group)
    dist.barrier()
    end = time.monotonic() + 20
    while in_flight() and time.monotonic() < end:
        mpi.progress()
    assert not in_flight()


CHECKS: dict[str, Callable[[int, int], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


# Tests.


@functools.cache
def outcome(world: int) -> tuple[int, str, str]:
    return start(mpiexec(world, "test_mpi")).end()


@needs_mpi
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("check", CHECKS)
def test_check(world: int, check: str) -> None:
    _, out, err = outcome(world)
    assert out.split().count(f"{check}:done") == world, err


@needs_mpi
@pytest.mark.parametrize("world", WORLDS)
def test_end(world: int) -> None:
    """No crash and no message at the end, with an operation in flight."""
    code, _, err = outcome(world)
    assert code == 0, err
    known = re.compile(r"distfx: |\[rank\d+\]:W")  # the second: DTensor's advice on redistribution
    assert not [line for line in err.splitlines() if not known.match(line)], err


def test_import_starts_no_mpi() -> None:
    program = "import sys, distfx.runtime.comm.mpi, distfx.runtime.comm.launch; sys.exit('mpi4py' in sys.modules)"
    assert start([sys.executable, "-c", program]).end()[0] == 0


if __name__ == "__main__":
    launch = init(backend="mpi", timeout=30)
    for name in sys.argv[1:] or CHECKS:
        try:
            CHECKS[name](launch.rank, launch.world)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            mpi.load().COMM_WORLD.Abort(1)
        sys.stdout.write(f"{name}:done\n")
        sys.stdout.flush()
    dist.all_reduce(torch.ones(3), async_op=True)  # still in flight at exit
