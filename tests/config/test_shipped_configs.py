"""The configs that come with the program: complete, sparing, and able to run."""

from pathlib import Path

import pytest
import yaml

from maxdiffusion.config import ignored_fields, load_config
from maxdiffusion.config.config import ALL_FIELDS, GROUPS
from maxdiffusion.config.fields import Effect
from maxdiffusion.generation.job import check_without_model

FOLDER = Path(__file__).parents[2] / "configs"
NAMES = (
    *("base_wan_27b", "base_wan_14b", "base_wan_1_3b"),
    *("wan_tiny", "wan_tiny_image"),
    *("base_wan_i2v_27b", "base_wan_i2v_14b", "base_wan_ti2v_5b"),
    *("base_wan_vace_14b", "base_wan_vace_1_3b", "base_wan_animate"),
    *("wan22_4step", "wan22_i2v_4step", "mlperf_wan22"),
)
TRAINING = ("train_embedded", "train_embedded_i2v", "train_lora_embedded")


def config_of(name):
    return load_config([str(FOLDER / f"{name}.yml")])


def test_the_folder_holds_these():
    assert {path.stem for path in FOLDER.glob("*.yml")} == {*NAMES, *TRAINING}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("devices", [1, 8])
def test_makes_one_video(name, devices):
    config = config_of(name)
    assert ignored_fields(config) is None
    assert check_without_model(config, device_count=devices)[0].videos == 1


def test_base_states_used_keys_at_their_defaults():
    stated = yaml.safe_load((FOLDER / "base_wan_27b.yml").read_text())
    used = {name for name, field in ALL_FIELDS.items() if field.effect is Effect.USED}
    # A new field need not be here; most are, so that people find them. Text to video takes no
    # images and videos.
    assert set(stated) <= used
    inputs = {field.name for field in GROUPS["Images and videos"]}
    assert len(stated) > 0.9 * len(used - inputs)
    config = config_of("base_wan_27b")
    assert {name: config.values[name] for name in stated} == {
        name: ALL_FIELDS[name].default for name in stated
    }


@pytest.mark.parametrize("name", [*NAMES[1:], *TRAINING])
def test_others_state_only_differences(name):
    stated = yaml.safe_load((FOLDER / f"{name}.yml").read_text())
    base = load_config([str(FOLDER / stated.pop("base_config"))])
    config = config_of(name)
    assert [key for key in stated if config.values[key] == base.values[key]] == []
