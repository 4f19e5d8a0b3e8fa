"""The package as a whole: a quick import, and versions that agree."""

import tomllib
from pathlib import Path

import pytest

import maxdiffusion
from tests.processes import output_of

REPO = Path(__file__).parents[1]


def test_import_is_light_and_touches_no_device():
    heavy = ("jax", "flax", "diffusers", "transformers", "tokamax", "torch")
    code = (
        "import sys, maxdiffusion, maxdiffusion.generate_wan;"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert output_of("-c", code).strip() == "[]"


def test_versions_agree():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["version"] == maxdiffusion.__version__


def test_every_dependency_has_an_upper_bound_and_a_tested_version():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    constraints = (REPO / "constraints.txt").read_text().lower().replace("_", "-")
    for requirement in [*project["dependencies"], *(line for extra in extras for line in extra)]:
        name = requirement.split("[")[0].split(">")[0].split("=")[0].lower().replace("_", "-")
        assert "<" in requirement or "==" in requirement, requirement
        assert f"\n{name}==" in constraints, requirement


def test_unknown_attributes_are_named():
    with pytest.raises(AttributeError, match="WanPipelin"):
        maxdiffusion.WanPipelin  # noqa: B018
