"""Bad input: one clear error, the same on every rank, before any communication. No rank raises while another waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Failure, run, run_raises
from torch import Tensor, nn

import distfx


def conv_net(channels: int = 3, outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, outputs, 3, padding=1))


def same(failures: list[Failure | None], kind: str = "DistfxError") -> str:
    """The message, if every rank raised the same."""
    assert len(set(failures)) == 1 and failures[0] is not None, failures
    assert failures[0].kind.rpartition(".")[2] == kind, failures[0]
    return failures[0].message


def make(grid: str, **options: object) -> None:
    distfx.parallelize(conv_net(), distfx.Grid.parse(grid), **options)  # type: ignore[arg-type]


def call(grid: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, train: bool = True) -> None:
    net = distfx.parallelize(conv_net().train(train), distfx.Grid.parse(grid))
    with distfx.record_comm() as ledger:
        try:
            net(torch.randn(shape).to(dtype))
        finally:
            assert not ledger.rows, "something was sent before the error"


def test_grid_that_does_not_match_the_number_of_ranks() -> None:
    message = same(run_raises(2, make, "n2h2"))
    assert "needs 4 ranks, but 2 were started" in message and "torchrun --nproc-per-node 4" in message


@pytest.mark.parametrize("grid", ["d2"])
def test_axis_that_nothing_can_use(grid: str) -> None:
    message = same(run_raises(2, make, grid))
    assert "axis d (a depth dim)" in message and "Remove d=2" in message


def one_dimensional() -> None:
    distfx.parallelize(nn.Sequential(nn.Conv1d(2, 3, 3)), distfx.Grid(h=2))


def test_height_of_a_conv1d() -> None:
    assert "axis h" in same(run_raises(2, one_dimensional))


def test_batch_smaller_than_the_axis() -> None:
    message = same(run_raises(2, call, "n2", (1, 3, 8, 8)))
    assert "batch of 1, smaller than the grid's axis n=2" in message


def test_input_of_another_rank() -> None:
    message = same(run_raises(2, call, "h2", (3, 8, 8)))
    assert "3 dims (3, 8, 8)" in message and "(N, 3, H, W)" in message


def test_input_of_another_dtype() -> None:
    message = same(run_raises(2, call, "h2", (1, 3, 8, 8), torch.float64))
    assert "torch.float64" in message and "captured with torch.float32" in message


def test_input_with_other_channels() -> None:
    message = same(run_raises(2, call, "h2", (1, 4, 8, 8)), "SizeError")
    assert "4 channels, but the model takes 3" in message


def different_models() -> None:
    outputs = 4 + dist.get_rank() // 2
    distfx.parallelize(conv_net(outputs=outputs), distfx.Grid(n=-1))


def test_ranks_with_different_models() -> None:
    message = same(run_raises(3, different_models), "RankMismatchError")
    assert "ranks 0, 1: 2.weight (4, 8, 3, 3)" in message and "rank 2: 2.weight (5, 8, 3, 3)" in message


def different_shapes(first: bool) -> None:
    net = distfx.parallelize(conv_net(), distfx.Grid(h=-1))
    if not first:  # both shapes are compiled already; only one rank uses the second one again
        for size in (8, 12):
            net(torch.randn(1, 3, size, size))
    size = 12 if dist.get_rank() == 1 else 8
    net(torch.randn(1, 3, size, size))


@pytest.mark.parametrize("first", [True, False])
def test_ranks_with_different_input_shapes(first: bool) -> None:
    message = same(run_raises(2, different_shapes, first), "RankMismatchError")
    assert "rank 0: input 0: (1, 3, 8, 8)" in message and "rank 1: input 0: (1, 3, 12, 12)" in message


def different_modes() -> None:
    net = distfx.parallelize(conv_net(), distfx.Grid(h=-1))
    net.train(dist.get_rank() == 0)
    net(torch.randn(1, 3, 8, 8))


def test_ranks_in_different_modes() -> None:
    message = same(run_raises(2, different_modes), "RankMismatchError")
    assert "rank 0: train" in message and "rank 1: eval" in message


class Broken(nn.Module):
    """A model that cannot be captured on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise KeyError("only here")
        return self.conv(x)


def broken() -> None:
    distfx.parallelize(Broken(), distfx.Grid(h=-1), example_inputs=(torch.randn(1, 3, 8, 8),))


def test_capture_that_fails_on_one_rank_raises_on_all() -> None:
    failures = run_raises(2, broken)
    assert all(f is not None and "only here" in f.message for f in failures), failures


class Tied(nn.Module):
    """A flatten followed by a fixed linear layer, valid for one image size only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.fc = nn.Linear(4 * 8 * 8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).flatten(1))


def tied(size: int) -> None:
    distfx.parallelize(Tied(), distfx.Grid(h=-1), example_inputs=(torch.randn(2, 3, 8, 8),))(
        torch.randn(2, 3, size, size)
    )


def test_a_fixed_flatten_names_the_layer_and_the_size() -> None:
    message = same(run_raises(2, tied, 12))
    assert "fc" in message and "256" in message and ("576" in message or "8" in message)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "stationary-z"}, "unknown strategy 'stationary-z'"),
        ({"strategy": {"nothing*": "stationary-x"}}, "matches no convolution or linear layer"),
        ({"outputs": "somewhere"}, "outputs='somewhere'"),
    ],
)
def test_bad_options(options: dict[str, object], words: str) -> None:
    assert words in same(run_raises(2, make, "c2", **options))


class Noisy(nn.Module):
    """Draws random numbers with an operator that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y + torch.poisson(y.abs())


def with_noise() -> None:
    distfx.parallelize(Noisy(), distfx.Grid(h=-1))


def test_random_operators_without_a_rule_raise() -> None:
    message = same(run_raises(2, with_noise))
    assert "draws random numbers" in message and "poisson" in message


class WithoutRule(nn.Module):
    """Uses a Fourier transform, which has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(self.conv(x).flatten(2)).abs()


def strict() -> None:
    distfx.parallelize(WithoutRule(), distfx.Grid(h=-1), strict=True)


def test_strict_raises_if_an_operator_has_no_rule() -> None:
    message = same(run_raises(2, strict))
    assert "fft" in message and "test_errors.py" in message


def lenient() -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = distfx.parallelize(WithoutRule(), distfx.Grid(h=-1))
        net(torch.randn(1, 3, 8, 8))
    assert "(fallback)" in str(net.plan) and "fall back" in distfx.explain(net)
    fallbacks = [w for w in caught if issubclass(w.category, distfx.FallbackWarning)]
    assert all(w.filename == __file__ for w in fallbacks), "a warning names the line that called distfx"
    return [str(w.message) for w in fallbacks]


def test_one_warning_on_rank_0_names_the_fallbacks() -> None:
    first, second = run(2, lenient)
    assert len(first) == 1 and "fft" in first[0] and "test_errors.py" in first[0]
    assert second == []


def not_a_module() -> None:
    distfx.parallelize(lambda x: x, distfx.Grid())  # type: ignore[arg-type]


def twice() -> None:
    distfx.parallelize(distfx.parallelize(conv_net(), distfx.Grid()), distfx.Grid())


def test_arguments_that_are_not_models() -> None:
    assert "torch.nn.Module" in same(run_raises(1, not_a_module))
    assert "parallel already" in same(run_raises(1, twice))


def reflects(grid: str) -> None:
    """Reflect padding that is wider than the image."""
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 4, 9, padding=4, padding_mode="reflect"))
    net = distfx.parallelize(model, distfx.Grid.parse(grid))
    net(torch.randn(2, 3, 4, 3))


@pytest.mark.parametrize("grid", ["h2", "h3"])
def test_padding_wider_than_the_image(grid: str) -> None:
    message = same(run_raises(int(grid[1]), reflects, grid))
    assert "reflect" in message and "extent 4" in message


class Steps(nn.Module):
    """A recurrent network over dim 1, which is time and not channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = torch.tanh(self.conv(state + x[:, step]))
        return state


def vary_steps() -> list[float]:
    """The errors of calls with different numbers of steps."""
    torch.manual_seed(0)
    model = Steps().double()
    net = distfx.parallelize(model, distfx.Grid.parse("h2"), example_inputs=(torch.zeros(2, 3, 3, 6, 5).double(),))
    inputs = [torch.randn(2, steps, 3, 6, 5, dtype=torch.float64) for steps in (3, 2, 4, 3)]
    return [float((net(x) - model(x)).detach().abs().max()) for x in inputs]


def test_each_number_of_steps_has_its_graph() -> None:
    for errors in run(2, vary_steps):
        assert max(errors) < 1e-12


def misuse(how: str) -> None:
    """Call with an argument of the wrong kind."""
    net = distfx.parallelize(conv_net(), distfx.Grid(h=2))
    x: object = torch.randn(2, 3, 8, 8)
    if how == "numpy":
        x = torch.randn(2, 3, 8, 8).numpy()
    elif how == "device":
        x = torch.empty(2, 3, 8, 8, device="meta")
    net(**{"images" if how == "keyword" else "input": x})


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("numpy", "DistfxError", "an argument is a numpy.ndarray: give torch.as_tensor(x)"),
        ("device", "DistfxError", "is on meta, but this rank computes on cpu: give x.to(net.grid.device)"),
        ("keyword", "TypeError", "Sequential.forward()"),
    ],
)
def test_misused_calls(how: str, kind: str, words: str) -> None:
    assert words in same(run_raises(2, misuse, how), kind)


def differ_on_one_rank(how: str) -> None:
    """Rank 0 does something that rank 1 does not."""
    first = dist.get_rank() == 0
    x = torch.randn(2, 3, 8, 8)
    example = (x,) if how == "example" and first else None
    grid: Any = {"grid text": "z2", "grid dict": {"y": 2}, "grid kind": 2}.get(how, "h2") if first else "h2"
    if how == "grid":
        distfx.Grid(h=0 if first else 2)
    net = distfx.parallelize(
        conv_net(), grid, example, outputs="x" if how == "option" and first else "global", check=True
    )
    if how == "values":
        torch.manual_seed(dist.get_rank())
        x = torch.randn(2, 3, 8, 8)
    if how == "state dict" and first:
        net.full_state_dict()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast" and first):
        net(x)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("example", "example_inputs known"),
        ("values", "a plain tensor is the global one, the same on every rank"),
        ("state dict", "full_state_dict"),
        ("autocast", "autocast to torch.bfloat16"),
        ("option", "outputs='x': give 'global'"),
        ("grid", "axis h (height) has size 0"),
        ("grid text", "cannot read axis 'z' of grid 'z2'"),
        ("grid dict", "unknown axis 'y'"),
        ("grid kind", "a grid is a distfx.Grid"),
    ],
)
def test_differences_between_ranks_raise_on_all(how: str, words: str) -> None:
    failures = run_raises(2, differ_on_one_rank, how)
    assert all(failure is not None and words in failure.message for failure in failures), failures


def use_parameters_before_the_first_call(how: str) -> None:
    net = distfx.parallelize(distfx.with_loss(conv_net(), nn.CrossEntropyLoss()), distfx.Grid(h=2))
    {"parameters": lambda: list(net.parameters()), "state": net.state_dict, "half": net.half}[how]()


@pytest.mark.parametrize("how", ["parameters", "state", "half"])
def test_parameters_that_do_not_exist_yet(how: str) -> None:
    assert "example_inputs=(x,) to parallelize (with a loss: (x, target))" in same(
        run_raises(2, use_parameters_before_the_first_call, how)
    )


def abstract() -> None:
    distfx.parallelize(conv_net(), distfx.Grid.abstract(h=2))


def test_an_abstract_grid_is_for_plans() -> None:
    assert "plan with distfx.plan" in same(run_raises(1, abstract))


def other_target(grid: str, criterion: nn.Module, shape: tuple[int, ...]) -> None:
    x, target = torch.randn(2, 3, 8, 8), torch.zeros(2, 8, 8, dtype=torch.int64)
    net = distfx.parallelize(distfx.with_loss(conv_net(), criterion), grid, example_inputs=(x, target))
    net(x, target)
    net(x, torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.NLLLoss(torch.ones(4))], ids=["ce", "weighted nll"])
@pytest.mark.parametrize("shape", [(2, 4, 8), (2, 8, 7), (2, 9, 8)])
@pytest.mark.parametrize("grid", ["n2", "h2"])
def test_targets_of_another_size(grid: str, shape: tuple[int, ...], criterion: nn.Module) -> None:
    message = same(run_raises(2, other_target, grid, criterion, shape))
    assert f"gets a target of shape {shape}" in message and "need a target of shape (2, 8, 8)" in message


def ask_for_slices(which: str, index: int, shape: tuple[int, ...]) -> None:
    net = distfx.parallelize(conv_net(), distfx.Grid(h=2))
    with distfx.record_comm() as ledger:
        try:
            {"input": net.input_slices, "output": net.output_slices}[which](index, shape)
        finally:
            assert not ledger.rows


@pytest.mark.parametrize("which", ["input", "output"])
@pytest.mark.parametrize("index", [9, 1, -2])
def test_slices_of_a_tensor_that_does_not_exist(which: str, index: int) -> None:
    message = same(run_raises(2, ask_for_slices, which, index, (2, 3, 8, 8)))
    assert f"the model has 1 tensor {which}" in message and f"no {which} {index}" in message


@pytest.mark.parametrize("which", ["input", "output"])
@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 3, 8, 8, 8), ()])
def test_slices_of_a_shape_with_another_number_of_dims(which: str, shape: tuple[int, ...]) -> None:
    message = same(run_raises(2, ask_for_slices, which, 0, shape))
    assert f"shape {shape} has {len(shape)} dims, but the tensor has 4" in message


def call_with_sparse_input(layout: str, ranks: tuple[int, ...]) -> None:
    """Call with a sparse tensor on ``ranks``, and with a dense one on the others."""
    net = distfx.parallelize(conv_net(), distfx.Grid(h=2))
    x = torch.randn(2, 3, 8, 8)
    if dist.get_rank() in ranks:
        x = x.to_sparse() if layout == "coo" else x.to_sparse_csr(dense_dim=0)
    with distfx.record_comm() as ledger:
        try:
            net(x)
        finally:
            assert not ledger.rows, "something was sent before the error"


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_inputs(layout: str) -> None:
    message = same(run_raises(2, call_with_sparse_input, layout, (0, 1)))
    assert f"input 0 of Sequential has layout torch.sparse_{layout}" in message and "x.to_dense()" in message


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_sparse_input_on_one_rank(layout: str, rank: int) -> None:
    message = same(run_raises(2, call_with_sparse_input, layout, (rank,)), "RankMismatchError")
    assert f"torch.sparse_{layout}" in message and f"rank {rank}: input 0" in message


def call_on_one_rank(kind: str) -> None:
    """Rank 0 alone makes a mistake before anything was compared."""
    net = distfx.parallelize(conv_net(), distfx.Grid(h=2))
    x = torch.randn(2, 3, 8, 8)
    if net.grid.rank == 0 and kind == "numpy":
        net(x.numpy())
    elif net.grid.rank == 0 and kind == "arguments":
        net(x, x)
    elif net.grid.rank == 0 and kind == "keyword":
        net(y=x)
    net(x)


@pytest.mark.parametrize(
    ("kind", "message"), [("numpy", "numpy.ndarray"), ("arguments", "too many positional"), ("keyword", "missing")]
)
def test_mistakes_of_one_rank_raise_on_all(kind: str, message: str) -> None:
    first, second = run_raises(2, call_on_one_rank, kind, timeout=20)
    assert first is not None and second is not None
    assert first.kind == second.kind == "RankMismatchError" and first.message == second.message
    assert message in first.message and "rank 0" in first.message and "rank 1" in first.message


def warning_as_error() -> None:
    import warnings

    rank = torch.distributed.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("error" if rank == 0 else "ignore", distfx.FallbackWarning)
        distfx.parallelize(WithoutRule(), distfx.Grid(h=2))(torch.randn(2, 3, 8, 8))


def test_a_warning_that_is_an_error_on_rank_0_raises_on_all() -> None:
    first, second = run_raises(2, warning_as_error, timeout=20)
    assert first is not None and first.kind == "FallbackWarning"
    assert second is not None and "rank 0 failed: FallbackWarning" in second.message
