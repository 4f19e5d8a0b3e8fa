"""The table of modes: kinds are never mixed, every lossy feature has a row, names are found."""

import dataclasses

import pytest

from maxdiffusion.attention.backends.base import Precision
from maxdiffusion.attention.registry import ATTENTION_OPS
from maxdiffusion.cli.commands import COMPARE_QUALITY
from maxdiffusion.config import load_config
from maxdiffusion.config.config import FIELDS
from maxdiffusion.config.load import read_config
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.quality.modes import MODES, Kind, find_modes, modes_of, split_arguments
from tests.generation.command_line import TINY

LOSSY, ROUNDING = modes_of(Kind.LOSSY), modes_of(Kind.ROUNDING)


def attention_names(modes):
    stated = [text for mode in modes for text in mode.overrides]
    return {text.split("=")[1] for text in stated if text.startswith("attention=")}


def test_names_are_unique_and_in_the_help():
    assert len({mode.name for mode in MODES}) == len(MODES)
    words = COMPARE_QUALITY.details.replace(",", " ").split()
    assert not [mode.name for mode in MODES if mode.name not in words]


def test_every_lossy_attention_is_in_the_lossy_part_alone():
    lossy = {name for name, op in ATTENTION_OPS.items() if op.precision is Precision.FP8}
    assert attention_names(LOSSY) == lossy
    assert not attention_names(ROUNDING) & lossy


def test_every_key_that_calls_itself_lossy_has_a_row():
    keys = {name for name, field in FIELDS.items() if field.meaning.startswith("Lossy")}
    stated = {text.split("=")[0] for mode in LOSSY for text in mode.overrides}
    assert keys <= stated
    assert not keys & {text.split("=")[0] for mode in ROUNDING for text in mode.overrides}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_overrides_are_valid_and_change_the_config(mode):
    base = load_config([str(TINY)])
    parsed = read_config([str(TINY), *mode.arguments(base)])
    assert not parsed.problems
    assert parsed.config.to_json() != base.to_json()


def test_values_of_the_exact_run():
    config = load_config([str(TINY), "num_inference_steps=7"])
    found = {mode.name: mode.arguments(config) for mode in MODES}
    assert found["half_steps"] == ("num_inference_steps=3",)
    assert found["other_dtype"] == ("weights_dtype=bfloat16", "activations_dtype=bfloat16")


def test_modes_are_found_by_name():
    assert [mode.name for mode in find_modes(["sen_cache", "ring", "sen_cache"])] == [
        "ring",
        "sen_cache",
    ]
    with pytest.raises(ProblemsFound, match=r"--modes='magcash': is not a mode. The nearest"):
        find_modes(["magcash"])


@pytest.mark.parametrize(
    ("arguments", "rest", "names"),
    [
        (["c.yml", "seed=1"], ["c.yml", "seed=1"], []),
        (["c.yml", "--modes", "a,b", "c", "seed=1"], ["c.yml", "seed=1"], ["a", "b", "c"]),
        (["c.yml", "seed=1", "--modes=a,b"], ["c.yml", "seed=1"], ["a", "b"]),
        (["c.yml", "--modes", "a", "--other", "b"], ["c.yml", "--other", "b"], ["a"]),
    ],
)
def test_arguments(arguments, rest, names):
    assert split_arguments(arguments) == (rest, names)


def test_a_row_is_a_value():
    assert all(dataclasses.is_dataclass(mode) and hash(mode) for mode in MODES)
