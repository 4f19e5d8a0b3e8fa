"""A loaded config: attributes, sources, printing, comparing, and keys without meaning."""

import dataclasses
import json
import pickle
import subprocess
import sys

import pytest
from config.writing import write

from maxdiffusion.config import load_config, without_meaning
from maxdiffusion.config.keys import KEYS


@pytest.fixture
def config(tmp_path):
    text = "height: 480\nscale_lr: true\nflash_block_sizes: {block_q: 512}\n"
    return load_config([write(tmp_path, text), "seed=7", "flash_block_sizes.block_kv=256"])


def test_has_every_key(config):
    assert set(config.values) == set(KEYS)


def test_unknown_attribute_names_the_nearest(config):
    with pytest.raises(AttributeError, match=r"no key 'heigth'\. The nearest is 'height'"):
        _ = config.heigth
    with pytest.raises(KeyError, match="heigth"):
        config.source("heigth")


def test_does_not_change(config):
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.height = 720
    with pytest.raises(TypeError, match="does not change"):
        config.flash_block_sizes["block_q"] = 1
    with pytest.raises(TypeError, match="does not change"):
        config.values.update(height=720)


def test_survives_pickling(config):
    assert pickle.loads(pickle.dumps(config)) == config


def test_prints_each_value_with_its_source(config):
    lines = config.describe().splitlines()
    file = config.files[0]
    assert lines[0] == f"# read from {file}"
    assert f"height: 480  # {file}:1" in lines
    assert "width: 1280  # default" in lines
    assert "seed: 7  # command line" in lines
    blocks = '{"block_q": 512, "block_kv": 256}'
    assert f"flash_block_sizes: {blocks}  # block_kv: command line, block_q: {file}:3" in lines


def test_what_it_prints_is_a_config(config, tmp_path):
    again = load_config([write(tmp_path, config.describe(), "printed.yml")])
    assert again.values == config.values


def test_digest_follows_values_and_not_sources(config, tmp_path):
    again = load_config([write(tmp_path, config.describe(), "printed.yml")])
    other = load_config([write(tmp_path, config.describe(), "printed.yml"), "seed=8"])
    assert again.digest() == config.digest() != other.digest()
    place = ("jax_coordinator_address=host:1234", "jax_process_id=1")
    elsewhere = load_config([write(tmp_path, config.describe(), "printed.yml"), *place])
    assert elsewhere.digest() == config.digest()  # a job that starts again meets elsewhere
    assert json.loads(config.to_json())["height"] == 480


def test_names_given_keys_without_meaning_in_one_line(config, tmp_path):
    assert without_meaning(config) == "Keys without meaning here, not used (1): scale_lr"
    assert without_meaning(load_config([write(tmp_path, "seed: 1")])) is None


def test_a_token_is_not_kept(tmp_path):
    config = load_config([write(tmp_path, "seed: 1"), "hf_access_token=hf_abc"])
    assert "hf_abc" not in config.describe() + config.to_json() + repr(config)


def test_loading_needs_no_jax(tmp_path):
    path = write(tmp_path, "seed: 1")
    code = (
        "import sys; from maxdiffusion.config import load_config; "
        f"load_config([{path!r}]).describe(); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
