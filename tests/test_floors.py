"""The building's rules: imports go down, files and functions keep to their budgets."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "graphshard"

FLOORS = {
    "core": 0,
    "schedule": 1,
    "verify": 2,
    "cost": 2,
    "device": 3,
    "comm": 4,
    "load": 5,
    "runtime": 6,
    "models": 7,
    "bench": 7,
    "report": 7,
    "api": 8,
    "formats": 8,
    "recipes": 8,
    "cli": 8,
    "gpu_check": 8,
    "__init__": 9,
    "__main__": 9,
}
EXTENSION_FLOOR = 3  # the lowest floor that may import graphshard._core
TORCH_FLOOR = 6  # the lowest floor that may import torch
PURE_FLOOR = 2  # up to here: the standard library alone

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
FILE_EXCEPTIONS: dict[str, str] = {}
FUNCTION_EXCEPTIONS: dict[str, str] = {}

SEES_PYTHON = ("bindings", "python_calls")  # how their names begin

PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))
ALL_PYTHON = sorted(path for folder in ("graphshard", "tests", "bench") for path in (ROOT / folder).rglob("*.py"))
CPP_FILES = sorted(path for pattern in ("*.cpp", "*.h") for path in (ROOT / "csrc").rglob(pattern))


def room(path: Path) -> str:
    """The folder (or top-level module) of `path` inside the package."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Every module that `path` imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively; write the whole name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def violations_of(path: Path) -> list[str]:
    here, floor = room(path), FLOORS[room(path)]
    found = []
    for name in imported(path):
        parts = name.split(".")
        if parts[0] in ("torch", "numpy") and floor <= PURE_FLOOR:
            found.append(f"{name} on floor {floor}, which is pure data")
        if parts[0] == "torch" and floor < TORCH_FLOOR:
            found.append(f"torch on floor {floor}, below {TORCH_FLOOR}")
        if parts[0] != "graphshard" or len(parts) < 2:
            continue
        if parts[1] == "_core":
            if floor < EXTENSION_FLOOR:
                found.append(f"the extension on floor {floor}, below {EXTENSION_FLOOR}")
        elif parts[1] not in FLOORS:
            found.append(f"{name}: no such room")
        elif parts[1] != here and FLOORS[parts[1]] >= floor:
            found.append(f"{name} (floor {FLOORS[parts[1]]}) from floor {floor}")
        elif here == "verify" and parts[1] == "schedule":
            found.append("the judge imports the judged")
    return found


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    assert violations_of(path) == []


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in PYTHON_FILES} <= set(FLOORS)


@pytest.mark.parametrize("path", ALL_PYTHON + CPP_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_keep_to_their_budget(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE_LINES or name in FILE_EXCEPTIONS, f"{name} has {lines} lines, not {MAX_FILE_LINES}"


@pytest.mark.parametrize("path", ALL_PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_keep_to_their_budget(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            name = f"{path.relative_to(ROOT)}:{node.name}"
            assert lines <= MAX_FUNCTION_LINES or name in FUNCTION_EXCEPTIONS, f"{name} has {lines} lines"


def test_only_bindings_see_python() -> None:
    for path in CPP_FILES:
        if not path.name.startswith(SEES_PYTHON):
            text = path.read_text()
            assert "Python.h" not in text and "nanobind" not in text, f"{path.relative_to(ROOT)} sees Python"


def test_the_rules_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    bad = tmp_path / "core" / "bad.py"
    bad.parent.mkdir()
    bad.write_text("import torch\nimport graphshard._core\nfrom graphshard.schedule.emit import emit\n")
    assert len(violations_of(bad)) == 4
