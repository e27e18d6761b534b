"""The documentation is true: pages are current, links and names in them exist, examples in docstrings run."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import runpy
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

import distfx

ROOT = Path(__file__).resolve().parents[2]
MODULES = [module.name for module in pkgutil.walk_packages(distfx.__path__, "distfx.")]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md", *sorted(ROOT.glob("docs/*.md"))]
FOLDERS = ("distfx", "tests", "docs", "examples", "benchmarks")

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`+([^`\n]+)`+")
NAME = re.compile(r"(?<![\w./-])distfx((?:\.[A-Za-z_]\w*)+)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


def _missing_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in map(_anchor, HEADING.findall(target.read_text()))):
            yield link


def _missing_paths(page: Path) -> Iterator[str]:
    """Backticked paths that start with a folder of the repository, such as ``distfx/ir/layout.py``."""
    for code in CODE.findall(page.read_text()):
        for path in re.findall(rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})/[\w./-]*\w", code):
            if not (ROOT / path).exists():
                yield path


def _has_attribute(name: str) -> bool:
    """Whether ``distfx.a.b`` is a module, or an attribute of one, or an operator that printed graphs call."""
    path, value = name.removeprefix("distfx.").split("."), distfx
    for i, part in enumerate(path):
        if not hasattr(value, part):
            try:
                importlib.import_module(f"distfx.{'.'.join(path[: i + 1])}")
            except ImportError:
                return i == 0 and len(path) == 1 and hasattr(importlib.import_module("distfx.ir.ops"), part)
        value = getattr(value, part)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_paths_and_names_exist(page: Path) -> None:
    missing = [*_missing_links(page), *_missing_paths(page)]
    missing += [f"distfx{name}" for name in NAME.findall(page.read_text()) if not _has_attribute(f"distfx{name}")]
    assert not missing


def test_the_architecture_page_lists_all_passes() -> None:
    from distfx.passes.pipeline import BIND, COMPILE

    page = (ROOT / "docs" / "architecture.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| `distfx/passes", page, re.MULTILINE) == [step.name for step in (*COMPILE, *BIND)]


def test_the_troubleshooting_page_lists_all_errors_and_variables() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    errors = importlib.import_module("distfx.errors")
    classes = [
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    ]
    variables = {name for path in ROOT.glob("distfx/**/*.py") for name in re.findall(r"DISTFX_\w+", path.read_text())}
    assert not [name for name in (*classes, *variables) if f"`{name}" not in page]


def test_the_readme_is_short_and_its_example_is_python() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ast.parse(example)


@pytest.mark.parametrize("picture", sorted(ROOT.glob("docs/*.svg")), ids=lambda path: path.name)
def test_pictures_are_well_formed(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    assert root.tag.endswith("svg") and root.get("viewBox")


def test_operators_page_is_current() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "generate.py"))["table"]()
    assert (ROOT / "docs" / "operators.md").read_text() == page, "run python docs/generate.py"


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
