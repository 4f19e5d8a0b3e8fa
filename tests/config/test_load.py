"""YAML files: their form, what they are based on, and everything that can be wrong with them."""

import pytest

from maxdiffusion.config import load_config
from tests.config.writing import problems_of, write


def only_problem(*argv):
    problems = list(problems_of(*argv).values())
    assert len(problems) == 1
    return problems[0]


def test_missing_file_offers_its_neighbour(tmp_path):
    write(tmp_path, "seed: 1", "wan_tiny.yml")
    problem = only_problem(str(tmp_path / "wan_tyni.yml"))
    assert problem.name == "config"
    assert problem.rule == "cannot be read: No such file or directory"
    assert problem.remedy == f"The nearest there is {tmp_path / 'wan_tiny.yml'}"


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_empty_file(tmp_path, text):
    problem = only_problem(write(tmp_path, text))
    assert problem.rule == "is empty"
    assert problem.remedy == "Give a file with lines of the form `key: value`"


@pytest.mark.parametrize(("text", "held"), [("- a\n- b\n", "a list"), ("words", "plain text")])
def test_top_level_that_is_not_keys(tmp_path, text, held):
    problem = only_problem(write(tmp_path, text))
    assert problem.rule == f"must have keys and values at its top level, but has {held}"


@pytest.mark.parametrize(
    "text",
    [
        "height: [480\nwidth: 832",
        "a: b: c",
        "\tseed: 1",
        "x: !!python/object:os.system {}",
        "a: *b",
    ],
)
def test_not_yaml_says_where(tmp_path, text):
    problem = only_problem(write(tmp_path, text))
    assert problem.rule.startswith("is not YAML: line ")
    assert "\n" not in str(problem)


@pytest.mark.parametrize("text", ["seed: !!int x", "vae_tiling: !!bool maybe", "a: " + "[" * 5000])
def test_not_yaml_in_odd_ways(tmp_path, text):
    assert only_problem(write(tmp_path, text)).rule.startswith("is not YAML: ")


def test_numbers_beyond_all_bounds(tmp_path):
    path = write(tmp_path, f"seed: {'9' * 5000}\nheight: 1e999\nflow_shift: .inf\n")
    assert set(problems_of(path, "width=" + "9" * 5000)) == {
        "seed",
        "height",
        "flow_shift",
        "width",
    }


def test_binary_file(tmp_path):
    path = tmp_path / "video.mp4"
    path.write_bytes(b"\x00\xff\xfe\x80")
    assert only_problem(str(path)).rule == "is not a text file in UTF-8"


def test_folder_instead_of_a_file(tmp_path):
    assert only_problem(str(tmp_path)).rule == "cannot be read: Is a directory"


def test_alias_of_itself(tmp_path):
    problem = only_problem(write(tmp_path, "lora_config: &a {again: *a}"))
    assert "an alias (*) refers to a value that contains the alias" in problem.rule


def test_repeated_key(tmp_path):
    path = write(tmp_path, "height: 480\nwidth: 832\nheight: 720\n")
    problem = problems_of(path)["height"]
    assert str(problem) == (f"height='720': is given twice ({path}, lines 1 and 3).")


def test_repeated_key_in_a_table(tmp_path):
    path = write(tmp_path, "flash_block_sizes:\n  block_q: 512\n  block_q: 1024\n")
    assert problems_of(path)["flash_block_sizes.block_q"].rule == (
        f"is given twice ({path}, lines 2 and 3)"
    )


def test_repeated_keys_are_reported_with_bad_values(tmp_path):
    path = write(tmp_path, "fps: 16\nfps: 24\nheight: 1\n")
    assert set(problems_of(path)) == {"fps", "height"}


def test_unknown_key_names_the_nearest_and_the_line(tmp_path):
    path = write(tmp_path, "seed: 1\nheigth: 480\n")
    assert str(problems_of(path)["heigth"]) == (
        f"heigth=480: is not a known key ({path}:2). The nearest is 'height'."
    )


def test_null_where_a_value_is_needed(tmp_path):
    path = write(tmp_path, "height:\n")
    assert str(problems_of(path)["height"]) == (
        f"height=None: null is not a multiple of 16 >= 16 ({path}:1). The default is 720."
    )


def test_words_are_read_as_yaml_1_2_reads_them(tmp_path):
    text = "learning_rate: 1e-5\nprompt: no\nnegative_prompt: 2024-01-31\nseed: 010\n"
    config = load_config([write(tmp_path, text + "embed_metadata: no\nenable_lora: off\n")])
    assert config.learning_rate == 1e-5
    assert config.prompt == "no"
    assert config.negative_prompt == "2024-01-31"
    assert config.seed == 10
    assert config.embed_metadata is False
    assert config.enable_lora is False


def test_base_is_relative_to_the_file_and_loses(tmp_path):
    (tmp_path / "bases").mkdir()
    base = write(tmp_path / "bases", "height: 480\nwidth: 832\nfps: 8\n", "base.yml")
    write(tmp_path / "bases", "base_config: base.yml\nfps: 12\n", "middle.yml")
    top = write(tmp_path, "base_config: bases/middle.yml\nheight: 64\n")
    config = load_config([top])
    assert (config.height, config.width, config.fps) == (64, 832, 12)
    assert config.source("height") == f"{top}:2"
    assert config.source("width") == f"{base}:2"
    assert config.files[-1] == base


def test_tables_of_base_and_file_are_merged(tmp_path):
    write(tmp_path, "flash_block_sizes: {block_q: 512, block_kv: 512}\n", "base.yml")
    top = write(tmp_path, "base_config: base.yml\nflash_block_sizes: {block_q: 1024}\n")
    config = load_config([top])
    assert config.flash_block_sizes == {"block_q": 1024, "block_kv": 512}
    assert config.source("flash_block_sizes.block_q") == f"{top}:2"
    assert config.source("flash_block_sizes.block_kv").endswith("base.yml:1")


def test_null_empties_a_table_of_the_base(tmp_path):
    write(tmp_path, "flash_block_sizes: {block_q: 512}\n", "base.yml")
    top = write(tmp_path, "base_config: base.yml\nflash_block_sizes: null\n")
    assert load_config([top]).flash_block_sizes == {}


def test_missing_base_says_who_asked(tmp_path):
    top = write(tmp_path, "base_config: gone.yml\n")
    problem = only_problem(top)
    assert (problem.name, problem.value) == ("base_config", str(tmp_path / "gone.yml"))
    assert problem.rule == f"cannot be read: No such file or directory (asked for by {top})"


def test_files_based_on_each_other(tmp_path):
    first = write(tmp_path, "base_config: second.yml\n", "first.yml")
    second = write(tmp_path, "base_config: first.yml\n", "second.yml")
    problem = only_problem(first)
    assert problem.rule == (
        f"files must not be based on each other: {first} -> {second} -> {first}"
    )


def test_base_that_is_not_a_path(tmp_path):
    assert (
        "must be the path of a YAML or Python file"
        in only_problem(write(tmp_path, "base_config: 3")).rule
    )
