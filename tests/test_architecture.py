"""Rooms import only downwards; files, folders and functions are neither giants nor dust."""

import ast
import re
import statistics
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

import maxdiffusion

PACKAGE = Path(maxdiffusion.__file__).parent
# From what a person types down to what every room may use. `preflight` stands above `generation`
# because it resolves the same job before it compiles it.
ROOMS = (
    "cli",
    "serving",
    "preflight",
    "quality",
    "training",
    "generation",
    "costs",
    "config",
    "pipelines",
    "diffusion",
    "checkpoints",
    "models",
    "attention",
    "kernels",
    "mesh",
    "distributed",
    "runtime",
)
# Imports inside a function that point up: `WanPipeline.from_config` resolves a whole job.
UPWARD = {"pipelines/wan.py": {"generation"}}
# Used by every room.
SHARED = {"errors"}
# Most stories of a room, its folders included; 20 where no number is given.
FILES_OF_ROOM = {"models": 25, "training": 30}
# Mean lines of a room's stories: a room that is cut up falls below.
LEAST_MEAN = 120
# Features that came after the tree was made, and the most files that each may have.
FEATURES = {
    "images, control videos, characters": (
        28,
        *("generate_wan_animate.py", "generation/inputs.py", "models/clip/*"),
        *("models/wan/animate.py", "models/wan/conditioning.py", "models/wan/control.py"),
        *("models/wan/motion.py", "pipelines/preprocess/*", "pipelines/tasks/*"),
        *("runtime/download.py", "runtime/images.py", "training/image_conditioning.py"),
    ),
    "LoRA and original checkpoints": (
        12,
        *("checkpoints/lora*", "checkpoints/original_files.py", "generation/lora.py"),
        *("models/wan/original.py", "training/lora/*"),
    ),
    "step caches, given latents": (
        10,
        *("calibrate_cache.py", "diffusion/caches/*", "generation/calibrate.py"),
        *("generation/latents.py", "generation/step_caches.py"),
    ),
    "gradients of our kernels": (4, "kernels/flash/backward*"),
    "8-bit weights": (2, "models/wan/eight_bit.py"),
    "records, held-out clips, reports of trainings": (
        8,
        *("training/data/records.py", "training/data/tfrecord.py", "training/watch/*"),
    ),
    "quality ledger": (10, "compare_quality.py", "quality/*"),
    "predictions held to runs": (1, "costs/predictions.py"),
    "memory and prediction of trainings": (
        8,
        *("costs/training.py", "preflight/training*", "preflight_train_wan.py"),
        "training/memory/*",
    ),
    "server": (22, "serve_wan.py", "plan_fleet.py", "serving/*", "costs/fleet.py"),
}
# Files of all the rest: text to video, training, preflight, several hosts.
FILES_OF_CORE = 170
FILES = sorted(PACKAGE.rglob("*.py"))
STORIES = [
    path
    for path in FILES
    if path.name not in ("__init__.py", "checkpoint.py") and path.parent != PACKAGE
]
DOCS = Path(__file__).parents[1] / "docs"
# First words of docstrings that name a question instead of an answer.
RIDDLES = {"What", "How", "Where", "Whether", "When", "Which", "Who", "Why"}
UNUSUAL = re.compile(
    r"\b(anew|beside|meanwhile|told|mend|nobody|so many|waited for)\b", re.IGNORECASE
)


def room_of(path: Path) -> str | None:
    """Returns the room of a file; None for entry points and files that belong to all rooms."""
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


def functions(path: Path) -> list[tuple[str, int]]:
    """Returns name and length of every function of a file."""
    return [
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def percentile(values: list[int], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def test_every_folder_is_a_room():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    room = room_of(path)
    if room is None:
        return
    upward = UPWARD.get(path.relative_to(PACKAGE).as_posix(), set())
    allowed = set(ROOMS[ROOMS.index(room) :]) | SHARED | upward
    assert imported_rooms(ast.parse(path.read_text())) <= allowed


def prints(path: Path) -> bool:
    """Returns True if a file calls `print` without naming a stream."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and "file" not in {keyword.arg for keyword in node.keywords}
        for node in ast.walk(ast.parse(path.read_text()))
    )


def public_docstrings(path: Path) -> list[str]:
    """Returns the docstrings of the public classes and functions of a file."""
    return [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    ]


def test_a_feature_has_few_files():
    """A new feature adds a row to FEATURES; the files of the core do not grow with it."""
    rest = {path.relative_to(PACKAGE).as_posix() for path in FILES}
    for feature, (most, *patterns) in FEATURES.items():
        own = {file for file in rest if any(fnmatch(file, pattern) for pattern in patterns)}
        assert len(own) <= most, feature
        rest -= own
    assert len(rest) <= FILES_OF_CORE


def test_a_room_is_neither_crowded_nor_cut_up():
    """A room is read as a whole; `models` and `training` hold folders that are read alone."""
    for room in ROOMS:
        lengths = [len(path.read_text().splitlines()) for path in STORIES if room_of(path) == room]
        assert 2 <= len(lengths) <= FILES_OF_ROOM.get(room, 20), room
        assert statistics.mean(lengths) >= LEAST_MEAN, room


def test_no_folder_is_crowded():
    counts = Counter(path.parent for path in FILES)
    crowded = {str(folder): count for folder, count in counts.items() if count > 15}
    assert not crowded


def test_files_are_neither_dust_nor_giants():
    lengths = {path: len(path.read_text().splitlines()) for path in STORIES}
    dust = [str(path.relative_to(PACKAGE)) for path, length in lengths.items() if length < 60]
    giants = [str(path.relative_to(PACKAGE)) for path, length in lengths.items() if length > 600]
    assert not giants
    assert len(dust) <= len(STORIES) / 10, dust
    assert 130 <= statistics.median(lengths.values()) <= 250
    assert percentile(list(lengths.values()), 95) < 550


def test_functions_are_short():
    lengths = {
        (str(path.relative_to(PACKAGE)), name): length
        for path in FILES
        for name, length in functions(path)
    }
    limits = {place: 150 if place[0].startswith("kernels/") else 80 for place in lengths}
    assert not [place for place, length in lengths.items() if length > limits[place]]
    assert statistics.median(lengths.values()) <= 10
    assert percentile(list(lengths.values()), 95) <= 50


def test_only_commands_print():
    printing = [
        str(path.relative_to(PACKAGE))
        for path in FILES
        if room_of(path) not in (None, "cli") and prints(path)
    ]
    assert not printing


def test_docstrings_say_what_a_thing_does():
    riddles = [
        f"{path.relative_to(PACKAGE)}: {text.splitlines()[0]}"
        for path in FILES
        for text in public_docstrings(path)
        if text.split(maxsplit=1)[:1] and text.split(maxsplit=1)[0] in RIDDLES
    ]
    assert not riddles


def test_prose_is_plain():
    texts = [*FILES, *DOCS.rglob("*.md")]
    found = [
        f"{path.name}:{number}: {match.group()}"
        for path in texts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in UNUSUAL.finditer(line)
    ]
    assert not found
