"""The pool of ranks: it must not hang, report failures correctly, and leave nothing behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.ranks import Failure, RankError, run, run_raises
from test_launch import environment


def is_alive(pid: int) -> bool:
    """Whether a process runs. Zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone_within(seconds: float, pids: list[int]) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


# Functions that the ranks run.


def summed(x: torch.Tensor, *, scale: int = 1) -> torch.Tensor:
    x = x * scale * (dist.get_rank() + 1)
    dist.all_reduce(x)
    return x


def identity() -> tuple[int, int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid(), torch.get_num_threads()


def dtensor_total() -> float:
    """Use DTensor's cache, which would return results on an equal mesh of an earlier world."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("n",))
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    total = (x + x).sum()
    assert isinstance(total, DTensor) and total.device_mesh is mesh
    return total.full_tensor().item()


def fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"no such layout on rank {rank}")
    return dist.get_rank()


def fail_on_all() -> None:
    raise ValueError("grid axis 'h' has no dim to split")


def fail_while_others_wait() -> None:
    fail_on(0)
    dist.barrier()


def sleep_in_my_frame(seconds: float, pid_file: str) -> None:
    child = subprocess.Popen(["sleep", str(seconds)])
    Path(f"{pid_file}.{dist.get_rank()}").write_text(str(child.pid))
    time.sleep(seconds)


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def unpicklable() -> object:
    return lambda: None


def get_environ() -> dict[str, str]:
    return dict(os.environ)


def nap(seconds: float) -> None:
    if dist.get_rank() == 0:
        os.write(1, b"ready\n")
    time.sleep(seconds)


# Calls that succeed.


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_reduce(world: int) -> None:
    expected = torch.full((3,), 2.0 * world * (world + 1) / 2)
    for result in run(world, summed, torch.ones(3), scale=2):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("world", [1, 3])
def test_ranks_are_ordered_and_single_threaded(world: int) -> None:
    results = run(world, identity)
    assert [(rank, size, threads) for rank, size, _, threads in results] == [(r, world, 1) for r in range(world)]
    assert [pid for _, _, pid, _ in results] == ranks.pids()[:world]


def test_processes_are_kept_across_worlds() -> None:
    run(4, identity)
    before = ranks.pids()
    for world in (2, 4, 1, 3):
        assert [size for _, size, _, _ in run(world, identity)] == [world] * world
    assert ranks.pids() == before


def test_meshes_of_an_old_world_are_dropped() -> None:
    for world in (2, 4, 2, 1, 2):
        assert run(world, dtensor_total) == [56.0] * world


def test_a_warm_call_is_quick() -> None:
    run(2, identity)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        run(2, identity)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02


# Calls that fail.


@pytest.mark.parametrize("world", [2, 4])
def test_one_rank_raises(world: int) -> None:
    before = run(world, identity)
    with pytest.raises(RankError) as caught:
        run(world, fail_on, 1)
    text = str(caught.value)
    assert "rank 1: ValueError: no such layout on rank 1" in text
    assert "in fail_on" in text and "test_ranks.py" in text
    assert list(caught.value.failures) == [1]
    assert run(world, identity) == before, "no rank hung, so none was killed"


@pytest.mark.parametrize("world", [1, 3])
def test_all_ranks_raise_the_same(world: int) -> None:
    failures = run_raises(world, fail_on_all)
    assert failures == [Failure("ValueError", "grid axis 'h' has no dim to split", "")] * world
    assert len(set(failures)) == 1


def test_run_raises_has_none_for_ranks_that_return() -> None:
    failures = run_raises(3, fail_on, 2)
    assert failures[:2] == [None, None]
    assert str(failures[2]) == "ValueError: no such layout on rank 2"


def test_one_rank_raises_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE", 0.5)
    run(4, identity)
    before = ranks.pids()
    with pytest.raises(RankError) as caught:
        run_raises(2, fail_while_others_wait)
    text = str(caught.value)
    assert "rank 0: ValueError: no such layout on rank 0" in text
    assert "rank 1: Hung" in text and "in fail_while_others_wait" in text and "barrier" in text
    assert gone_within(1, before[:2])
    assert ranks.pids() == before[2:], "other workers are kept"
    assert [rank for rank, *_ in run(4, identity)] == [0, 1, 2, 3]


def test_a_hang_fails_by_its_timeout_and_leaves_nothing(tmp_path: Path) -> None:
    workers = [pid for _, _, pid, _ in run(2, identity)]
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0: Hung: not done after") as caught:
        run(2, sleep_in_my_frame, 1000, str(tmp_path / "pid"), timeout=1)
    assert time.monotonic() - start < 8
    assert str(caught.value).count("in sleep_in_my_frame") == 2, "the stack of each rank"
    children = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(children) == 2 and gone_within(1, workers + children)
    torch.testing.assert_close(run(2, summed, torch.ones(1)), [torch.tensor([3.0])] * 2)


def test_a_rank_that_dies_is_reported_and_replaced() -> None:
    with pytest.raises(RankError, match="rank 1: Died: exit code 3"):
        run(2, exit_on, 1)
    assert [rank for rank, *_ in run(2, identity)] == [0, 1]


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_rank() -> None:
    with pytest.raises(RankError, match=r"rank 0: .*pickle"):
        run(1, unpicklable)


def test_only_top_level_functions_are_accepted() -> None:
    def local() -> None: ...

    for fn in (local, lambda: None):
        with pytest.raises(TypeError, match="at the top level of a test module"):
            run(1, fn)
    with pytest.raises(ValueError, match="1 to 8 ranks"):
        run(9, identity)


# Start and end of workers.


def test_launcher_variables_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"]
    for name in hidden:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("UNRELATED", "7")
    ranks.close()  # so that new workers see the new environment
    [environ] = run(1, get_environ)
    ranks.close()  # and others do not
    assert environ["UNRELATED"] == "7"
    assert not set(hidden) & set(environ)


def test_close_leaves_no_process() -> None:
    run(2, identity)
    before = ranks.pids()
    ranks.close()
    assert ranks.pids() == [] and not any(map(is_alive, before))
    assert len(run(2, identity)) == 2


def test_ranks_die_with_their_parent() -> None:
    script = (
        "import test_ranks; from support import ranks\n"
        "ranks.run(2, test_ranks.identity)\n"
        "print(*ranks.pids(), flush=True)\n"
        "ranks.run(2, test_ranks.nap, 1000, timeout=1000)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ranks.ROOT / "tests", env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    try:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2 and parent.stdout.readline() == "ready\n"  # printed by a rank: it is busy now
        assert all(map(is_alive, workers))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert gone_within(3, workers)
