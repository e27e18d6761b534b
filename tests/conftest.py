"""Shared by all tests: ranks end with the session, and tests with equal numbers of ranks run one after another."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch
from support import captures, exact, ranks


@pytest.fixture(scope="session", autouse=True)
def _close_ranks() -> Iterator[None]:
    yield
    ranks.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transport",
        choices=ranks.TRANSPORTS,
        default=ranks.TRANSPORTS[0],
        help="transport of the shared ranks: `pytest --transport mpi tests/exact/test_models.py`",
    )


def pytest_configure(config: pytest.Config) -> None:
    if captures.FOLDER not in os.environ:  # otherwise this is a worker of pytest-xdist, and its parent has set it
        folder = os.environ[captures.FOLDER] = tempfile.mkdtemp(prefix="distfx-captures-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    ranks.use(config.getoption("--transport"))


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU if there is none. Mark tests that start ranks. Sort each file by world.

    Process groups are then created once per world. The sort is stable, and tests without a `world` parameter come
    first.
    """
    files: dict[object, int] = {}
    for item in items:
        files.setdefault(item.path, len(files))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if _starts_ranks(item):
            item.add_marker(pytest.mark.ranks)
    items.sort(key=lambda item: (files[item.path], _world(item)))


def _starts_ranks(item: pytest.Item) -> bool:
    """Whether the test function itself calls `run`, `run_raises` or `check`."""
    function = getattr(item, "function", None)
    names = function.__code__.co_names if hasattr(function, "__code__") else ()
    called = [function.__globals__.get(name) for name in names]
    return any(value is starter for value in called for starter in (ranks.run, ranks.run_raises, exact.check))


def _world(item: pytest.Item) -> int:
    callspec = getattr(item, "callspec", None)
    world = callspec.params.get("world", 0) if callspec else 0
    return world if isinstance(world, int) else 0
