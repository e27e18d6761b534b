"""The documentation is true: generated pages are current, and examples in docstrings run."""

from __future__ import annotations

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
