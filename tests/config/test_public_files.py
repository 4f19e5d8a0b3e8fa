"""Public WAN files load unchanged; what they ask for is run, or refused in one line."""

from pathlib import Path

import pytest
import yaml

from maxdiffusion.config import ignored_fields, load_config
from maxdiffusion.config.config import ALL_FIELDS
from maxdiffusion.config.fields import Effect
from maxdiffusion.generation.job import check_without_model

# Keys and values of the six public files; long prompts, lists and addresses are cut.
FOLDER = Path(__file__).parent / "public_files"
FILES = sorted(FOLDER.glob("*.yml"))
TEXT_TO_VIDEO = ("base_wan_27b", "base_wan_14b", "base_wan_1_3b")
IMAGE_TO_VIDEO = ("base_wan_i2v_27b", "base_wan_i2v_14b", "base_wan_animate")


def config_of(name, *overrides):
    return load_config([str(FOLDER / f"{name}.yml"), *overrides])


def test_there_are_all_six_with_all_keys():
    assert {path.stem for path in FILES} == {*TEXT_TO_VIDEO, *IMAGE_TO_VIDEO}
    assert len(yaml.safe_load((FOLDER / "base_wan_27b.yml").read_text())) == 175
    assert len(yaml.safe_load((FOLDER / "base_wan_i2v_27b.yml").read_text())) == 176


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_values_are_those_of_the_file(path):
    stated = yaml.safe_load(path.read_text())
    config = load_config([str(path)])
    assert set(stated) <= set(ALL_FIELDS)
    for name, value in stated.items():
        assert as_lists(config.values[name]) == value, name
        assert config.source(name).startswith(str(path))


def as_lists(value):
    if isinstance(value, dict):
        return {name: as_lists(item) for name, item in value.items()}
    return [as_lists(item) for item in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_keys_without_meaning_are_named_once_in_one_line(path):
    stated = yaml.safe_load(path.read_text())
    line = ignored_fields(load_config([str(path)]))
    assert "\n" not in line
    named = line.split(": ")[1].split(", ")
    assert sorted(named) == sorted(n for n in stated if ALL_FIELDS[n].effect is Effect.NO_MEANING)


@pytest.mark.parametrize("name", TEXT_TO_VIDEO)
def test_text_to_video_is_a_job(name):
    workload, mesh = check_without_model(config_of(name), device_count=8)
    # 1.0 per device is a video per device, and the context takes all of them.
    assert (workload.videos, workload.batch_size) == (8, 8)
    assert mesh.shape.context == 8


def test_overrides_reach_keys_that_a_file_leaves_out():
    config = config_of("base_wan_1_3b", "use_sen_cache=false")
    assert config.overridden("use_sen_cache")
    assert config.use_sen_cache is False
    animate = config_of("base_wan_animate", "motion_encode_batch_size=4")
    assert animate.motion_encode_batch_size == 4


@pytest.mark.parametrize("name", IMAGE_TO_VIDEO)
def test_image_to_video_files_load_unchanged(name):
    config = config_of(name)
    assert 'model_type: "I2V"' in config.describe()
    assert check_without_model(config, device_count=8)[0].videos >= 1
