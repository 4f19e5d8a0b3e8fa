"""A loaded config: typed attributes, sources, printing, comparing, keys without meaning."""

import ast
import dataclasses
import json
import pickle
import types
import typing
from pathlib import Path

import pytest

import maxdiffusion
from maxdiffusion.config import Config, ignored_fields, load_config
from maxdiffusion.config.compat import COMPAT_FIELDS
from maxdiffusion.config.config import ALL_FIELDS, FIELDS
from maxdiffusion.config.files import BASE_FIELD
from maxdiffusion.config.schema import BLOCK_SIZES
from maxdiffusion.kernels.tpu import BlockSizes
from tests.config.writing import write
from tests.processes import output_of


@pytest.fixture
def config(tmp_path):
    text = "height: 480\nscale_lr: true\nflash_block_sizes: {block_q: 512}\n"
    return load_config([write(tmp_path, text), "seed=7", "flash_block_sizes.block_kv=256"])


def test_has_every_key(config):
    assert set(config.values) == set(ALL_FIELDS)


def test_unknown_field_names_the_nearest(config):
    with pytest.raises(AttributeError, match="heigth"):
        _ = config.heigth
    with pytest.raises(KeyError, match=r"no field 'heigth'\. The nearest is 'height'"):
        config.source("heigth")


def test_attributes_have_the_type_of_their_default():
    hints = typing.get_type_hints(Config)
    for name, field in FIELDS.items():
        assert hints[name] is not typing.Any
        kind = typing.get_origin(hints[name]) or hints[name]
        union = kind is types.UnionType
        options = typing.get_args(hints[name]) if union else (kind,)
        assert isinstance(field.default, tuple(typing.get_origin(o) or o for o in options)), name


def test_block_sizes_of_a_config_are_those_of_the_kernels():
    assert set(BLOCK_SIZES.entries) <= {field.name for field in dataclasses.fields(BlockSizes)}


def test_names_of_fields_and_methods_do_not_collide():
    own = {"compat", "sources", "files"}
    methods = {name for name in vars(Config) if not name.startswith("__")}
    assert set(ALL_FIELDS).isdisjoint(own)
    assert methods.isdisjoint(ALL_FIELDS)
    assert {field.name for field in dataclasses.fields(Config)} == {*FIELDS, *own}
    assert len(FIELDS) + len(COMPAT_FIELDS) == len(ALL_FIELDS)


def test_every_live_field_is_read_somewhere():
    read = set()
    for path in Path(maxdiffusion.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    # `base_config` is followed while files are read.
    assert set(FIELDS) - read == {BASE_FIELD}


def test_does_not_change(config):
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.height = 720
    with pytest.raises(TypeError, match="cannot be changed"):
        config.flash_block_sizes["block_q"] = 1
    with pytest.raises(TypeError, match="cannot be changed"):
        config.compat.update(lora_config=1)


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
    assert ignored_fields(config) == "Keys without meaning here, not used (1): scale_lr"
    assert ignored_fields(load_config([write(tmp_path, "seed: 1")])) is None


def test_a_token_is_not_kept(tmp_path):
    config = load_config([write(tmp_path, "seed: 1"), "hf_access_token=hf_abc"])
    assert "hf_abc" not in config.describe() + config.to_json() + repr(config)


def test_loading_needs_no_jax(tmp_path):
    path = write(tmp_path, "seed: 1")
    code = (
        "import sys; from maxdiffusion.config import load_config; "
        f"load_config([{path!r}]).describe(); assert 'jax' not in sys.modules"
    )
    output_of("-c", code)
