"""Python files with `get_config()`, mappings and ConfigDicts are configs like YAML files."""

import sys

import ml_collections
import pytest

from maxdiffusion.config import load_config, parse_config
from maxdiffusion.errors import ProblemsFound
from tests.config.writing import problems_of, write

SWEEP = """
import ml_collections

def get_config():
    config = ml_collections.ConfigDict()
    config.height = 480
    config.prompt = ["one", "two"]
    config.flash_block_sizes = {"block_q": 512}
    return config
"""


def returning(body):
    return f"import ml_collections\n\ndef get_config():\n    return {body}\n"


def test_a_python_file_is_a_config(tmp_path):
    path = write(tmp_path, SWEEP, "sweep.py")
    config = load_config([path, "seed=7", "flash_block_sizes.block_kv=256"])
    assert (config.height, config.prompt, config.seed) == (480, ("one", "two"), 7)
    assert config.flash_block_sizes == {"block_q": 512, "block_kv": 256}
    assert config.source("height") == path
    assert config.source("seed") == "command line"
    assert config.files == (path,)
    assert f"height: 480  # {path}" in config.describe().splitlines()


def test_python_and_yaml_files_are_bases_of_each_other(tmp_path):
    write(tmp_path, "width: 832\nfps: 8\n", "base.yml")
    values = 'dict(base_config="base.yml", fps=12, height=480)'
    middle = write(tmp_path, returning(f"ml_collections.ConfigDict({values})"), "middle.py")
    top = write(tmp_path, "base_config: middle.py\nheight: 64\n")
    config = load_config([top])
    assert (config.height, config.width, config.fps) == (64, 832, 12)
    assert config.source("fps") == middle
    assert config.source("width").endswith("base.yml:1")


def test_references_are_resolved(tmp_path):
    text = (
        "import ml_collections\n\ndef get_config():\n"
        "    config = ml_collections.ConfigDict({'height': 480})\n"
        "    config.width = config.get_ref('height') * 2\n"
        "    return config\n"
    )
    assert load_config([write(tmp_path, text, "sweep.py")]).width == 960


def test_mistakes_name_the_file_and_the_nearest_field(tmp_path):
    path = write(tmp_path, returning("ml_collections.ConfigDict(dict(heigth=1, fps=0))"), "s.py")
    found = problems_of(path, "sed=1")
    assert str(found["heigth"]) == (
        f"heigth=1: is not a known key ({path}). The nearest is 'height'."
    )
    assert str(found["fps"]) == f"fps=0: must be an integer >= 1 ({path}). Use 1."
    assert "sed" in found


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("seed = 3\n", r"must define get_config\(\), which returns an ml_collections\.ConfigDict"),
        (returning("3"), r"must define get_config\(\)"),
        ("def get_config(:\n", r"fails with SyntaxError: .*\(line 1\)"),
        ("import nowhere_at_all\n", r"fails with ModuleNotFoundError: .*\(line 1\)"),
        (returning("1 / 0"), r"fails with ZeroDivisionError: division by zero \(line 4\)"),
    ],
)
def test_files_without_a_config(tmp_path, text, rule):
    with pytest.raises(ProblemsFound, match=rule) as caught:
        load_config([write(tmp_path, text, "sweep.py"), "heigth=1"])
    assert [problem.name for problem in caught.value.problems] == ["config", "heigth"]


@pytest.mark.parametrize("kind", [dict, ml_collections.ConfigDict])
def test_mappings_are_configs(tmp_path, kind):
    base = write(tmp_path, "width: 832\n", "base.yml")
    values = kind({"base_config": base, "height": 480, "flash_block_sizes": {"block_q": 512}})
    config = parse_config(values, ["seed=7"]).checked()
    assert (config.height, config.width, config.seed) == (480, 832, 7)
    assert config.source("height") == "mapping"
    assert parse_config(values, {"height": 64}).config.height == 64
    with pytest.raises(ProblemsFound, match="height=1: must be a multiple of 16"):
        parse_config(values, {"height": 1}).checked()


def test_a_mapping_may_lack_a_base_file():
    with pytest.raises(ProblemsFound, match=r"base_config='gone\.yml': cannot be read"):
        parse_config({"base_config": "gone.yml"})
    with pytest.raises(ProblemsFound, match="base_config=3: must be the path"):
        parse_config({"base_config": 3})


def test_other_sources_are_refused():
    with pytest.raises(TypeError, match="a path, a mapping or a ConfigDict"):
        parse_config(3)


def test_files_next_to_a_sweep_are_not_importable_by_accident(tmp_path):
    before = list(sys.path)
    load_config([write(tmp_path, SWEEP, "sweep.py")])
    assert sys.path == before
