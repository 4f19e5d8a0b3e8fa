"""The rooms of the package import only downwards, and files and functions stay small."""

import ast
from pathlib import Path

import pytest

import maxdiffusion

PACKAGE = Path(maxdiffusion.__file__).parent
# From what a person types down to what every room may lean on.
ROOMS = (
    "commands",
    "preflight",
    "config",
    "pipelines",
    "training",
    "weights",
    "models",
    "schedulers",
    "attention",
    "kernels",
    "mesh",
    "runtime",
)
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str | None:
    """The room of a file; None for entry points and files that belong to all rooms."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else None


def imported_rooms(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    parts = [name.split(".") for name in names if name.startswith("maxdiffusion.")]
    return {part[1] for part in parts}


def test_every_folder_is_a_room():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    room = room_of(path)
    if room is None:
        return
    allowed = set(ROOMS[ROOMS.index(room) :]) | {"dimensions"}
    assert imported_rooms(ast.parse(path.read_text())) <= allowed


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= 500
    longest = 150 if room_of(path) == "kernels" else 80
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < longest, node.name
