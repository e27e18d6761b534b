"""The grid: how it is made, what its segments are, and the errors of those who get it wrong."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import over, run, run_raises
from torch.distributed.device_mesh import init_device_mesh

import distfx
from distfx.errors import DistfxError
from distfx.grid import AXES, Grid
from distfx.runtime.comm import groups as process_groups
from distfx.runtime.comm.agreement import agree, host_group

# -- without processes


@pytest.mark.parametrize(
    ("text", "shown", "axes"),
    [
        ("n2c2h2", "Grid(n=2, c=2, h=2)", {"n": 2, "c": 2, "h": 2}),
        ("h4n2", "Grid(n=2, h=4)", {"n": 2, "h": 4}),
        ("c2x4", "Grid(c=(2, 4))", {"c0": 2, "c1": 4}),
        ("n3c2x4w5", "Grid(n=3, c=(2, 4), w=5)", {"n": 3, "c0": 2, "c1": 4, "w": 5}),
        ("n1c4d1", "Grid(c=4)", {"c": 4}),
        ("n1", "Grid()", {}),
        (" d2 ", "Grid(d=2)", {"d": 2}),
        ("n64c64", "Grid(n=64, c=64)", {"n": 64, "c": 64}),
    ],
)
def test_parse(text: str, shown: str, axes: dict[str, int]) -> None:
    grid = Grid.parse_abstract(text)
    assert repr(grid) == shown
    assert grid.axes == axes and list(grid.axes) == list(axes)
    assert grid.size == np.prod(list(axes.values()), dtype=int)
    assert eval(repr(grid), {"Grid": Grid.abstract}) == grid


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x2", ["'x'", "n, c, d, h, w"]),
        ("n2n2", ["'n'", "each once"]),
        ("n2x2", ["'n2x2'", "only c has two factors, as in c2x4, not n"]),
        ("n", ["'n'", "write it like 'n2c2h2'"]),
        ("", ["''", "write it like"]),
        ("2n", ["'2n'", "write it like"]),
        ("n2 h2", ["'n2 h2'", "write it like"]),
        ("n2.5", ["'n2.5'"]),
        ("N2", ["'N2'"]),
        ("n0", ["axis n (samples) has size 0", "positive whole number"]),
        ("h-2", ["axis h (height) has size -2"]),
        ("n-1h-1", ["only one"]),
        ("n-1", ["-1", "give every size"]),
    ],
)
def test_what_cannot_be_parsed(text: str, words: list[str]) -> None:
    with pytest.raises(DistfxError) as error:
        Grid.parse_abstract(text)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"n": 0}, ["axis n (samples) has size 0", "positive whole number"]),
        ({"n": True}, ["axis n", "True"]),
        ({"c": (2, True)}, ["axis c1 (channels and filters)", "True"]),
        ({"c": (2, 2, 2)}, ["axis c", "(2, 2, 2)"]),
        ({"h": (2, 2)}, ["axis h (height)", "(2, 2)"]),
        ({"n": 2.0}, ["axis n", "2.0"]),
        ({"n": "2"}, ["axis n", "'2'"]),
        ({"n": None}, ["axis n", "None"]),
        ({"w": -3}, ["axis w (width)", "-3"]),
        ({"n": -1, "h": -1}, ["only one", "-1"]),
        ({"c": (-1, -1)}, ["only one"]),
    ],
)
def test_sizes_are_checked(sizes: dict[str, Any], words: list[str]) -> None:
    for make in (Grid.abstract, Grid):  # before anything is started
        with pytest.raises(DistfxError) as error:
            make(**sizes)
        for word in words:
            assert word in str(error.value)


def test_unknown_axes() -> None:
    with pytest.raises(TypeError, match="x"):
        Grid(x=2)  # type: ignore[call-arg]
    with pytest.raises(DistfxError, match=r"unknown axis 'x'.*n, c, d, h, w"):
        Grid.of({"n": 1, "x": 2})
    with pytest.raises(DistfxError, match="a grid is a"):
        Grid.of(4)  # type: ignore[arg-type]


def test_an_abstract_grid_has_no_processes() -> None:
    grid = Grid.abstract(n=64, c=(4, 4), h=4)
    assert grid.is_abstract and grid.size == 4096 and grid.rank == 0
    assert grid.segment(("c0", "c1")).group is None
    with pytest.raises(DistfxError, match="abstract"):
        _ = grid.mesh
    assert Grid.of(grid) is grid


def test_equality() -> None:
    grid = Grid.abstract(n=2, h=2)
    assert grid == Grid.parse_abstract("n2h2") and hash(grid) == hash(Grid.parse_abstract("n2h2"))
    assert grid == Grid.abstract(n=2, c=1, h=2)
    assert grid != grid.at(1) and grid != Grid.abstract(n=2, w=2) and grid != "n2h2"


@pytest.mark.parametrize("text", ["n2c2h2", "c2x3", "n2c2x2w3", "d2h3w2", "n5", "n1"])
def test_coordinates_and_members(text: str) -> None:
    """Against numpy: ranks are row-major in the axes, segments are slices of that array."""
    grid = Grid.parse_abstract(text)
    names = list(grid.axes)
    ranks = np.arange(grid.size).reshape(tuple(grid.axes.values()))
    for rank in range(grid.size):
        here = grid.at(rank)
        place = tuple(int(i[0]) for i in np.where(ranks == rank)) if names else ()
        assert here.rank == rank and tuple(here.coords.values()) == place and list(here.coords) == names
        assert here.placement() == grid.placement(rank)
        assert here.placement() == {a: (i, grid.axes[a]) for a, i in zip(names, place, strict=True)}
        for count in range(len(names) + 1):
            for axes in itertools.permutations(names, count):
                index = tuple(slice(None) if a in axes else i for a, i in zip(names, place, strict=True))
                kept = [a for a in names if a in axes]
                block = ranks[index].transpose([kept.index(a) for a in axes])
                members = here.members(axes)
                assert members == tuple(block.reshape(-1).tolist())
                segment = here.segment(axes)
                assert (segment.axes, segment.members, segment.size) == (axes, members, len(members))
                assert members[segment.index] == rank and segment.group is None
                for i, member in enumerate(members):
                    assert segment.group_ranks[i] == sorted(members).index(member)


def test_segments_partition_the_ranks() -> None:
    grid = Grid.abstract(n=2, c=3, h=2)
    for count in range(4):
        for axes in itertools.combinations(("n", "c", "h"), count):
            segments = {grid.at(rank).members(axes) for rank in range(12)}
            assert sorted(r for members in segments for r in members) == list(range(12))
            assert set(grid.partition(axes)) == segments


def test_factor() -> None:
    grid = Grid.abstract(n=2, c=12, h=3)
    factored = grid.factor(3)
    assert factored.axes == {"n": 2, "c0": 3, "c1": 4, "h": 3}
    assert repr(factored) == "Grid(n=2, c=(3, 4), h=3)"
    assert factored.size == grid.size
    for rank in range(grid.size):
        whole, parts = grid.at(rank).coords, factored.at(rank).coords
        assert whole["c"] == parts["c0"] * 4 + parts["c1"] and whole["h"] == parts["h"] and whole["n"] == parts["n"]
        assert grid.at(rank).members(("c",)) == factored.at(rank).members(("c0", "c1"))
    with pytest.raises(DistfxError, match="5 does not divide the c axis"):
        grid.factor(5)


# -- with processes


def make_everywhere() -> dict[str, Any]:
    """The same grid in every way a user may write it."""
    grid = Grid(n=2, c=1, h=2)
    same = [
        Grid(n=2, h=-1),
        Grid(n=-1, h=2),
        Grid.parse("n2h2"),
        Grid.parse("h2n-1"),
        Grid.of("n2h2"),
        Grid.of({"h": 2, "n": 2}),
        Grid.of({"n": -1, "h": 2}),
        Grid.of(grid),
        Grid.of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("n", "h"))),
    ]
    return {
        "same": [other == grid and other.coords == grid.coords for other in same],
        "meshes": [other.mesh == grid.mesh for other in same],
        "coords": grid.coords,
        "rank": (grid.rank, dist.get_rank()),
        "mesh": (
            grid.mesh.mesh.tolist(),
            grid.mesh.mesh_dim_names,
            dict(zip("nh", grid.mesh.get_coordinate(), strict=True)),
        ),
        "made once": grid.mesh is Grid.parse("n2h2").mesh,
        "abstract": grid.is_abstract,
        "device": grid.device_type,
    }


@pytest.mark.parametrize("world", [4])
def test_all_ways_to_make_one(world: int) -> None:
    for rank, result in enumerate(run(world, make_everywhere)):
        assert all(result["same"]), result["same"]
        assert all(result["meshes"]), result["meshes"]
        assert result["coords"] == {"n": rank // 2, "h": rank % 2} == result["mesh"][2]
        assert result["rank"] == (rank, rank)
        assert result["mesh"][:2] == ([[0, 1], [2, 3]], ("n", "h"))
        assert result["made once"] and not result["abstract"] and result["device"] == "cpu"


def infer_channels() -> list[str]:
    return [repr(Grid(c=(2, -1))), repr(Grid(c=-1)), repr(Grid.parse("c2x2")), repr(Grid(n=-1, c=4))]


@pytest.mark.parametrize("world", [4])
def test_channels_are_inferred_too(world: int) -> None:
    for shown in run(world, infer_channels):
        assert shown == ["Grid(c=(2, 2))", "Grid(c=4)", "Grid(c=(2, 2))", "Grid(c=4)"]


def make(sizes: Any) -> str:
    return repr(Grid.of(sizes))


def mesh_of_parameters(text: str) -> tuple[tuple[str, ...], list[Any], list[tuple[int, ...]], bool]:
    grid = Grid.parse(text)
    mesh = grid.parameter_mesh
    names = mesh.mesh_dim_names or ()
    groups = [tuple(dist.get_process_group_ranks(mesh.get_group(name))) for name in names]
    return names, mesh.mesh.tolist(), groups, mesh is Grid.parse(text).parameter_mesh


def test_parameters_have_a_mesh_of_few_dims() -> None:
    """The optimizers' first step takes DTensor a time that grows as a power of the number of dims."""
    for rank, (names, ranks, groups, once) in enumerate(run(8, mesh_of_parameters, "n2c2h2")):
        assert (names, ranks, once) == (("c",), [rank & ~2, rank | 2], True)
        assert groups == [(rank & ~2, rank | 2)]
    for rank, (names, ranks, _, _) in enumerate(run(8, mesh_of_parameters, "c2x2w2")):
        assert (names, ranks) == (("c0", "c1"), [[rank % 2, 2 + rank % 2], [4 + rank % 2, 6 + rank % 2]])
    for text, want in {"n2h2": ("nh",), "c2h2": ("c",), "h4": ("h",), "n2c2": ("c",), "c4": ("c",)}.items():
        assert {names for names, *_ in run(4, mesh_of_parameters, text)} == {want}


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None) -> str:
    return repr(Grid.of(init_device_mesh("cpu", shape, mesh_dim_names=names)))


def part_of_the_world() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    Grid.of(DeviceMesh("cpu", torch.tensor([[1, 0], [2, 3]]), mesh_dim_names=("n", "h")))


@pytest.mark.parametrize(
    ("world", "fn", "args", "words"),
    [
        (2, make, ({"n": 4},), ["Grid(n=4) needs 4 ranks, but 2 were started", "torchrun --nproc-per-node 4"]),
        (2, make, ("n1",), ["needs 1 rank,", "2 were started"]),
        (2, make, ({"n": 3, "h": -1},), ["n=3 takes 3 ranks", "do not divide the 2 started"]),
        (2, make, ({"y": 2},), ["unknown axis 'y'"]),
        (1, make, ("n2",), ["Grid(n=2) needs 2 ranks, but 1 was started"]),
        (4, mesh_of, ((2, 2), ("dp", "tp")), ["named after the axes", "('dp', 'tp')", "mesh_dim_names"]),
        (4, mesh_of, ((2, 2), None), ["named after the axes", "None"]),
        (4, mesh_of, ((2, 2), ("h", "n")), ["in the order ['n', 'h']"]),
        (4, part_of_the_world, (), ["row-major"]),
    ],
)
def test_errors_on_every_rank(world: int, fn: Any, args: tuple[Any, ...], words: list[str]) -> None:
    failures = run_raises(world, fn, *args)
    assert all(failure is not None and failure == failures[0] for failure in failures)
    assert failures[0] is not None and failures[0].kind == "DistfxError"
    for word in words:
        assert word in failures[0].message


def groups_by_rank_set() -> dict[str, bool]:
    """Groups reached by different axes, on different grids."""
    grid = Grid.parse("n2h2")
    other = Grid.parse("c2x2")
    flat = Grid.parse("c4")
    return {
        "same axes": grid.segment(("n",)).group is grid.segment(("n",)).group,
        "another grid": grid.segment(("n",)).group is other.segment(("c0",)).group,
        "other order": grid.segment(("n", "h")).group is grid.segment(("h", "n")).group,
        "one axis or two": flat.segment(("c",)).group is other.segment(("c0", "c1")).group,
        "factored": flat.factor(2).segment(("c1",)).group is other.segment(("c1",)).group,
        "others differ": grid.segment(("n",)).group is not grid.segment(("h",)).group,
        "none for one": grid.segment(()).group is None and grid.segment(()).size == 1,
        "size": dist.get_world_size(grid.segment(("h",)).group) == 2,
        "ranks": dist.get_process_group_ranks(grid.segment(("h",)).group) == sorted(grid.members(("h",))),
        "order": grid.segment(("h", "n")).members != grid.segment(("n", "h")).members,
    }


@pytest.mark.parametrize("world", [4])
def test_groups_are_keyed_by_their_ranks(world: int) -> None:
    for result in run(world, groups_by_rank_set):
        assert all(result.values()), result


def sums(text: str) -> dict[str, float]:
    """The sum of the ranks along every set of axes."""
    grid = Grid.parse(text)
    result = {}
    for count in range(1, len(grid.axes) + 1):
        for axes in itertools.permutations(grid.axes, count):
            x = torch.tensor([float(2**grid.rank)])
            dist.all_reduce(x, group=grid.segment(axes).group)
            result[" ".join(axes)] = float(x)
    return result


@pytest.mark.parametrize(("world", "text"), [(2, "h2"), (4, "c2x2"), (8, "n2c2h2")])
def test_collectives_run_in_their_segments(world: int, text: str) -> None:
    for rank, result in enumerate(run(world, sums, text)):
        grid = Grid.parse_abstract(text).at(rank)
        for axes, total in result.items():
            assert total == sum(2.0**member for member in grid.members(tuple(axes.split())))


def alone() -> dict[str, Any]:
    grid = Grid()
    net = distfx.parallelize(torch.nn.Conv2d(3, 4, 3), grid)
    y = net(torch.ones(2, 3, 8, 8))
    y.sum().backward()
    ones = Grid(n=1, c=(1, 1), h=1)
    return {
        "axes": (grid.axes, ones.axes),
        "shown": (repr(grid), ones == grid),
        "coords": grid.coords,
        "segment": (grid.segment(()).members, grid.segment(()).group),
        "mesh": tuple(grid.mesh.mesh.shape),
        "output": tuple(y.shape),
        "sent": net.plan.bytes(),
        "inferred": Grid(n=-1).size,
    }


def test_one_rank() -> None:
    (result,) = run(1, alone)
    assert result == {
        "axes": ({}, {}),
        "shown": ("Grid()", True),
        "coords": {},
        "segment": ((0,), None),
        "mesh": (1,),
        "output": (2, 4, 6, 6),
        "sent": 0,
        "inferred": 1,
    }


def test_axes_are_named() -> None:
    assert AXES == ("n", "c", "d", "h", "w")


def after_another_group() -> tuple[bool, bool]:
    """Whether meshes of a process group that is gone are made anew, and kept then."""
    grid = Grid(h=2)
    before = grid.mesh
    with patch.object(process_groups._groups, "world", object()):  # as if another had been there until now
        after = grid.mesh
        return after is not before, grid.mesh is after


def test_caches_follow_the_process_group() -> None:
    assert run(2, after_another_group) == [(True, True)] * 2


def group_for_gpus_alone() -> tuple[str, bool]:
    with patch.object(dist, "get_backend_config", lambda group=None: "cuda:nccl"):
        agree(2, "things", "the same")
        group = host_group()
        return dist.get_backend(group), group is host_group() and group is not dist.group.WORLD


def test_what_ranks_compare_has_a_group_for_the_host() -> None:
    assert run(2, group_for_gpus_alone) == [("gloo", True)] * 2


def polling_threads() -> list[int]:
    """The scheduling classes of gloo's polling threads, after groups for two axes and all ranks were made."""
    grid = Grid.parse("n2h2")
    for axes in (("n",), ("h",), ("n", "h")):
        grid.segment(axes)
    threads = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "gloo_tcp_loop\n"]
    return [os.sched_getscheduler(int(thread.name)) for thread in threads]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")
def test_gloos_polling_threads_interrupt_nobody() -> None:
    with over("gloo"):
        for classes in run(4, polling_threads):
            assert len(classes) >= 3 and set(classes) == {os.SCHED_BATCH}
