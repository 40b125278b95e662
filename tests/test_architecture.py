"""The project's shape: one-way imports, thin command line, words under everything public."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted([*(ROOT / "planner").rglob("*.py"), *(ROOT / "solver").rglob("*.py")])
CATALOGUE = sorted((ROOT / "planner" / "catalogue").rglob("*.toml"))


def imports(path: Path) -> set[str]:
    """Full names that a module imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_the_solver_knows_no_gpu_and_no_model() -> None:
    for path in (ROOT / "solver").glob("*.py"):
        assert not [name for name in imports(path) if name.split(".")[0] == "planner"], path


def test_the_cost_model_knows_neither_search_nor_reports() -> None:
    for path in (ROOT / "planner" / "cost").glob("*.py"):
        above = ("planner.search", "planner.report", "planner.rank", "planner.explain", "planner.cli")
        assert not [name for name in imports(path) if name.startswith(above)], path


def test_only_the_command_line_knows_click_and_prints() -> None:
    for path in MODULES:
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        prints = [n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]
        if path.parent.name != "cli":
            assert not prints and "click" not in imports(path), path


def test_no_two_modules_share_a_base_name() -> None:
    names = Counter(path.stem for path in MODULES if not path.stem.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_classes_and_public_functions_say_what_they_are(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "module"
    checks = path.name == "advice.py"  # its checks are described by their rows of the table
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node) or (checks and isinstance(node, ast.FunctionDef)), node.name


@pytest.mark.parametrize("path", CATALOGUE, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_catalogue_table_names_its_source(path: Path) -> None:
    tables = tomllib.loads(path.read_text())
    for name, table in tables.items():
        if isinstance(table, dict):
            assert table.get("source") or (name == "model" and tables.get("source")), f"[{name}] of {path.name}"


def test_the_project_speaks_of_itself_only() -> None:
    foreign = ("/" + "work/", "../" + "shared", "Code" + "x session")
    for path in [*ROOT.rglob("*.py"), *ROOT.rglob("*.md"), *ROOT.rglob("*.toml")]:
        if ".venv" not in str(path) and ".git" not in path.parts:
            text = path.read_text(errors="ignore")
            assert not [word for word in foreign if word in text], path
