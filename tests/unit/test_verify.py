"""The verifier: a good graph passes, and each way to break one is noticed by the check that guards against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

from distfx.grid import Grid
from distfx.ir import ops
from distfx.ir.layout import Layout
from distfx.passes import verify as module_under_test
from distfx.passes.capture.export import capture
from distfx.passes.pipeline import BIND, COMPILE, BoundGraph, Compiled, Options, bind_graph, compile_graph
from distfx.passes.verify import CHECKS, verify
from distfx.report.readable import readable

Breaker = Callable[[GraphModule], Any]


def graph_after(name: str) -> GraphModule:
    """The graph as a pass leaves it."""
    if name == "capture":
        return compiled().capture.module
    if name in [each.name for each in COMPILE]:
        return compiled().after(name)
    return bound_graph().after(name)


def bound_graph() -> BoundGraph:
    made = compiled()
    trained = dict.fromkeys(made.parameter_layouts, True)
    return bind_graph(made, Grid.abstract(n=2, c=2, h=2), made.capture.hints, trained)


def compiled(outputs: str = "global", pins: dict[str, str] | None = None) -> Compiled:
    """A network with halos, gathers, scatters, sums and slices."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    captured = capture(model, (torch.randn(4, 3, 16, 16),), training=True, batch=4)
    return compile_graph(captured, Options({"n": 2, "c": 2, "h": 2}, pins or {"3": "stationary-x"}, outputs))


def find(module: GraphModule, target: Any) -> Node:
    return next(node for node in module.graph.nodes if node.target is target)


@pytest.mark.parametrize("outputs", ["global", "local"])
@pytest.mark.parametrize("pin", ["stationary-x", "stationary-y", "replicated", "auto"])
def test_good_graphs_pass(outputs: str, pin: str) -> None:
    verify(compiled(outputs, {"3": pin}).module, "localize")


def no_layout(module: GraphModule) -> None:
    del find(module, ops.halo).meta["layout"]


def layout_of_no_kind(module: GraphModule) -> None:
    find(module, ops.halo).meta["layout"] = "N/n C H/h W"


def other_rank(module: GraphModule) -> None:
    node = find(module, torch.ops.aten.relu.default)
    node.meta["layout"] = replace(node.meta["layout"], dims=node.meta["layout"].dims[:-1], names=())


def halo_without_window(module: GraphModule) -> None:
    node = find(module, ops.halo)
    node.meta["layout"] = node.meta["layout"].storage()


def scatter_that_leaves_a_sum(module: GraphModule) -> None:
    node = find(module, ops.reduce_scatter)
    node.meta["layout"] = node.args[0].meta["layout"]


def halo_left_out(module: GraphModule) -> None:
    node = find(module, ops.halo)
    node.replace_all_uses_with(node.all_input_nodes[0])


def operand_laid_out_otherwise(module: GraphModule) -> None:
    conv = find(module, torch.ops.aten.convolution.default)
    weight = conv.all_input_nodes[1]
    weight.meta["layout"] = Layout.replicated(4)


def another_operand(module: GraphModule) -> None:
    relu = find(module, torch.ops.aten.relu.default)
    relu.args = (*relu.args, find(module, ops.halo))


def an_operand_too_few(module: GraphModule) -> None:
    conv = find(module, torch.ops.aten.convolution.default)
    assert isinstance(conv.args[2], Node)
    conv.args = (*conv.args[:2], None, *conv.args[3:])


def sum_left_open(module: GraphModule) -> None:
    node = find(module, ops.reduce_scatter)
    node.replace_all_uses_with(node.all_input_nodes[0])


def sum_returned(module: GraphModule) -> None:
    module.graph.output_node().args = ((find(module, ops.reduce_scatter).args[0],),)


def no_shape(module: GraphModule) -> None:
    del find(module, torch.ops.aten.relu.default).meta["shape"]


def written_in_place(module: GraphModule) -> None:
    find(module, torch.ops.aten.relu.default).target = torch.ops.aten.relu_.default


def undecided(module: GraphModule) -> None:
    del find(module, torch.ops.aten.relu.default).meta["decision"]


def decided_for_another(module: GraphModule) -> None:
    relu = find(module, torch.ops.aten.relu.default)
    relu.args = (find(module, torch.ops.aten.convolution.default),)


def no_local_shape(module: GraphModule) -> None:
    del find(module, torch.ops.aten.relu.default).meta["local_shape"]


def no_format(module: GraphModule) -> None:
    del find(module, torch.ops.aten.relu.default).meta["channels_last"]


def halo_without_transfers(module: GraphModule) -> None:
    del find(module, ops.halo_convolution).meta["transfers"]


def overwritten_for_others(module: GraphModule) -> None:
    """The operand of an in-place activation gets a second reader."""
    node = find(module, torch.ops.aten.relu_.default)
    node.target = ops.activate_in_place
    with module.graph.inserting_after(node):
        module.graph.call_function(torch.ops.aten.neg.default, (node.args[0],)).meta = dict(node.meta)


def kernel_left_out(module: GraphModule) -> None:
    next(node for node in module.graph.nodes if node.op == "call_function").target = ops.halo


def part_of_another_size(module: GraphModule) -> None:
    node = find(module, ops.reduce_scatter)
    node.meta["local_shape"] = (*node.meta["local_shape"][:-1], 1)


BROKEN: list[tuple[Breaker, str, str]] = [
    (no_shape, "_has_shape", "has no shape"),
    (written_in_place, "_is_functional", "writes into a tensor"),
    (undecided, "_is_decided", "has no decision"),
    (decided_for_another, "_is_decided", "which it does not read"),
    (no_local_shape, "_has_local_shape", "has no local shape"),
    (no_format, "_has_format", "has no memory format"),
    (halo_without_transfers, "_halos_have_transfers", "has no transfers"),
    (overwritten_for_others, "_writes_are_private", "overwrites"),
    (kernel_left_out, "_is_linked", "has no kernel"),
    (part_of_another_size, "_parts_fit", "but this rank's part is"),
    (no_layout, "_has_layout", "has no layout"),
    (layout_of_no_kind, "_has_layout", "has no layout"),
    (other_rank, "_ndim_fits", "but shape"),
    (halo_without_window, "_move_is_typed", "halo"),
    (scatter_that_leaves_a_sum, "_move_is_typed", "reduce_scatter"),
    (halo_left_out, "_operands_are_as_needed", "needs"),
    (operand_laid_out_otherwise, "_operands_are_as_needed", "needs"),
    (another_operand, "_operands_are_as_needed", "but was planned for"),
    (an_operand_too_few, "_operands_are_as_needed", "needs"),
    (sum_left_open, "_no_stray_sums", "partial sum"),
    (sum_returned, "_no_stray_sums", "uses the partial sum"),
]


@pytest.mark.parametrize(("break_it", "check", "words"), BROKEN, ids=[b.__name__ for b, _, _ in BROKEN])
def test_broken_graphs_are_noticed(break_it: Breaker, check: str, words: str) -> None:
    after = next(name for name, checks in CHECKS.items() if check in {each.__name__ for each in checks})
    module = graph_after(after)
    verify(module, after)
    break_it(module)
    with pytest.raises(AssertionError, match=f"after pass {after}: "):
        verify(module, after)
    complaints = []
    for node in module.graph.nodes:
        try:
            complaints.append(getattr(module_under_test, check)(node))
        except (AttributeError, KeyError):
            continue  # checks lean on those before them
    assert any(complaint and words in complaint for complaint in complaints), complaints


def test_every_check_is_tried() -> None:
    assert {check.__name__ for checks in CHECKS.values() for check in checks} == {name for _, name, _ in BROKEN}


def test_the_graph_itself_is_checked() -> None:
    module = compiled().module
    relu = find(module, torch.ops.aten.relu.default)
    relu.prev.append(relu)
    first = next(iter(module.graph.nodes))
    first.prepend(relu)  # now it comes before its operand
    with pytest.raises(RuntimeError):
        verify(module, "localize")


def test_a_complaint_names_the_node() -> None:
    module = compiled().module
    halo_left_out(module)
    with pytest.raises(AssertionError, match=r"convolution.*needs halo in .*/h\{a-1:b\+1\}"):
        verify(module, "localize")


def test_passes_are_recorded() -> None:
    bound = bound_graph()
    records = [*bound.compiled.passes, *bound.passes]
    assert [record.name for record in records] == [each.name for each in (*COMPILE, *BIND)]
    insert = next(record for record in records if record.name == "insert")
    assert insert.changed > 0 and all(record.seconds >= 0 and record.nodes > 0 for record in records)
    assert "insert: " in str(insert)


def test_every_pass_has_checks_and_can_be_shown() -> None:
    bound = bound_graph()
    assert list(CHECKS) == ["capture", *(each.name for each in (*COMPILE, *BIND))]
    for name in CHECKS:
        if name != "capture":
            owner = bound.compiled if name in [each.name for each in COMPILE] else bound
            module = owner.after(name)
            assert "conv" in readable(module, name) or "0_" in readable(module, name)
    assert any(node.target is ops.add_bias for node in bound.compiled.after("split_bias").graph.nodes)
    assert not any(node.target is ops.add_bias for node in bound.compiled.after("plan").graph.nodes)
    assert any(node.target is ops.halo_convolution for node in bound.after("fuse").graph.nodes)
    assert not any(node.target is ops.halo_convolution for node in bound.after("share").graph.nodes)
