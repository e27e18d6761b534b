"""The layers of the package: which rooms may import which."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "distfx"

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "ir": {"errors"},
    "grid": {"errors", "ir"},
    "rules": {"errors", "ir"},
    "planner": {"errors", "ir", "rules"},
    "report": {"errors", "ir", "grid"},
    "passes": {"errors", "ir", "grid", "rules", "planner", "report"},
    "passes.link": {"errors", "ir", "grid", "runtime"},
    "runtime": {"errors", "ir", "grid", "report"},
    "engine": {"errors", "ir", "grid", "passes", "runtime"},
    "module": {"errors", "ir", "grid", "engine", "passes", "report", "runtime"},
    "loss": {"errors"},
    "testing": {"errors", "ir", "grid", "rules", "planner", "passes", "runtime"},
    "training": {"errors", "module", "runtime"},
    "api": {"errors", "ir", "grid", "engine", "passes", "planner", "report", "runtime", "module", "loss"},
}
"""For each room, or module with rules of its own, the rooms that it may import. Every room may import itself."""


def _modules() -> list[str]:
    paths = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    return sorted(".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for path in paths)


def _imports(module: str) -> set[str]:
    path = PACKAGE / Path(*module.split("."))
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            if node.module == "distfx":
                names |= {f"distfx.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("module", _modules())
def test_imports_go_one_way(module: str) -> None:
    room = module.partition(".")[0]
    allowed = {*ALLOWED.get(module, ALLOWED[room]), room, "__version__"}
    rooms = {name.split(".")[1] for name in _imports(module) if name.startswith("distfx.")}
    assert rooms <= allowed, f"{module} imports {sorted(rooms - allowed)}"


@pytest.mark.parametrize("module", [m for m in _modules() if m.split(".")[0] in ("ir", "rules", "planner", "passes")])
def test_the_compiler_does_not_import_torch_distributed(module: str) -> None:
    assert not [name for name in _imports(module) if name.startswith("torch.distributed")]


def test_only_the_linker_imports_the_runtime() -> None:
    runtime = [m for m in _modules() if any(name.startswith("distfx.runtime") for name in _imports(m))]
    assert [module for module in runtime if module.startswith("passes")] == ["passes.link"]


def test_the_root_is_not_on_the_path() -> None:
    """Its links `passes` and `runtime` would be second copies of packages inside distfx."""
    assert str(ROOT) not in sys.path
    assert importlib.util.find_spec("passes") is None
