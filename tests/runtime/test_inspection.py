"""Looking into a parallel module: its graphs after each pass, on one rank alone and without communication."""

from __future__ import annotations

import pytest
import torch
from support.ranks import run
from torch import nn

import distfx
from distfx.ir import ops
from distfx.passes.pipeline import BIND, COMPILE

NAMES = [each.name for each in (*COMPILE, *BIND)]


def small() -> nn.Module:
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    return nn.Sequential(*layers)


def every_pass() -> dict[str, str]:
    """The text after each pass, before and after the first call, printed on one rank only."""
    net = distfx.parallelize(small(), "c2h2")
    texts = {}
    if net.grid.rank == 1:  # no other rank takes part
        texts |= {f"before {name}": net.print_readable(print_output=False, after=name) for name in NAMES}
    net(torch.randn(2, 3, 12, 10)).sum().backward()
    if net.grid.rank == 2:
        with distfx.record_comm() as ledger:
            texts |= {f"after {name}": net.print_readable(print_output=False, after=name) for name in NAMES}
        assert not ledger.rows
    net(torch.randn(2, 3, 12, 10))
    return texts


def test_every_pass_can_be_printed_on_one_rank() -> None:
    _, before, after, _ = run(4, every_pass)
    assert set(before) == {f"before {name}" for name in NAMES} and set(after) == {f"after {name}" for name in NAMES}
    for text in (*before.values(), *after.values()):
        assert text.startswith("Sequential on Grid(c=2, h=2), train, after ")
    assert "distfx.halo(" in after["after insert"] and "distfx.halo(" not in after["after plan"]
    assert "distfx.halo_convolution(" in after["after fuse"] and "distfx.halo_convolution(" not in after["after share"]
    assert "(2, 4, 12, 10)" in after["after bind"] and "(N, 4, H, W)" in after["after localize"]


def records() -> tuple[list[str], list[str], int, str]:
    net = distfx.parallelize(small(), "h2")
    before = [record.name for record in net.passes]
    net(torch.randn(2, 3, 8, 8))
    after = [record.name for record in net.passes]
    fused = net.graph_after("fuse").graph.find_nodes(op="call_function", target=ops.halo_convolution)
    try:
        net.graph_after("nonsense")
    except distfx.DistfxError as error:
        message = str(error)
    return before, after, len(fused), message


def test_passes_are_recorded_and_named() -> None:
    before, after, fused, message = run(2, records)[0]
    assert before == [each.name for each in COMPILE] and after == NAMES and fused == 2
    assert message == f"no pass is called 'nonsense': they are capture, {', '.join(NAMES)}"


def graphs_of_two_shapes() -> tuple[int, int]:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x) * 2 if x.shape[2] > 20 else self.conv(x)

    net = distfx.parallelize(Branching(), "h2", example_inputs=(torch.randn(2, 3, 24, 24),))
    first = len(net.graphs)
    net(torch.randn(2, 3, 8, 8))
    return first, len(net.graphs)


def test_graphs_lists_all_graphs_of_the_mode() -> None:
    assert run(2, graphs_of_two_shapes) == [(1, 2)] * 2


@pytest.mark.parametrize("name", ["plan", "link"])
def test_a_graph_after_a_pass_is_a_copy(name: str) -> None:
    assert run(1, _copies, name) == [True]


def _copies(name: str) -> bool:
    net = distfx.parallelize(small(), distfx.Grid())
    x = torch.randn(2, 3, 8, 8)
    expected = net(x)
    graph = net.graph_after(name).graph
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function":
            graph.erase_node(node)
    return bool(torch.equal(net(x), expected)) and net.graph_after(name).graph is not graph
