"""The documentation is true: generated pages are current, examples run, and passes and runtime are apart."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import runpy
from pathlib import Path

import pytest

import distfx

ROOT = Path(__file__).resolve().parents[2]
MODULES = [m.name for m in pkgutil.walk_packages(distfx.__path__, "distfx.")]


def test_operators_page_is_current() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "generate.py"))["table"]()
    assert (ROOT / "docs" / "operators.md").read_text() == page, "run python docs/generate.py"


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_passes_and_runtime_are_apart() -> None:
    for path in (ROOT / "distfx" / "passes").glob("*.py"):
        assert not any(name.startswith(("torch.distributed", "distfx.runtime")) for name in _imports(path)), path
    for path in (ROOT / "distfx" / "runtime").glob("*.py"):
        assert not any(name.startswith("distfx.passes") for name in _imports(path)), path
