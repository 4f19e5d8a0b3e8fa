"""The configs that come with the program: complete, sparing, and able to run."""

from pathlib import Path

import pytest
import yaml

from maxdiffusion.config import load_config, without_meaning
from maxdiffusion.config.keys import KEYS
from maxdiffusion.config.schema import Use
from maxdiffusion.config.validation import check_job

FOLDER = Path(__file__).parents[2] / "configs"
NAMES = ("base_wan_27b", "base_wan_14b", "base_wan_1_3b", "wan_tiny")
TRAINING = ("train_embedded",)


def config_of(name):
    return load_config([str(FOLDER / f"{name}.yml")])


def test_the_folder_holds_these():
    assert {path.stem for path in FOLDER.glob("*.yml")} == {*NAMES, *TRAINING}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("devices", [1, 8])
def test_makes_one_video(name, devices):
    config = config_of(name)
    assert without_meaning(config) is None
    assert check_job(config, device_count=devices).videos == 1


def test_base_states_every_used_key_at_its_default():
    stated = yaml.safe_load((FOLDER / "base_wan_27b.yml").read_text())
    used = {name for name, key in KEYS.items() if key.use is Use.USED}
    # guidance_scale belongs to WAN 2.1; the other two are about files and printing.
    assert set(stated) == used - {"base_config", "print_config", "guidance_scale"}
    config = config_of("base_wan_27b")
    assert {name: config.values[name] for name in stated} == {
        name: KEYS[name].default for name in stated
    }


@pytest.mark.parametrize("name", [*NAMES[1:], *TRAINING])
def test_others_state_only_differences(name):
    stated = yaml.safe_load((FOLDER / f"{name}.yml").read_text())
    base = load_config([str(FOLDER / stated.pop("base_config"))])
    config = config_of(name)
    assert [key for key in stated if config.values[key] == base.values[key]] == []
