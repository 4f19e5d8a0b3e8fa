"""Overrides on the command line: `key=value`, entries of tables, and all mistakes at once."""

import pytest

from maxdiffusion.config import load_config
from maxdiffusion.errors import ProblemsFound
from tests.config.writing import problems_of, write


@pytest.fixture
def path(tmp_path):
    return write(tmp_path, "height: 480\nflash_block_sizes: {block_q: 512, block_kv: 512}\n")


def test_override_wins_over_the_file(path):
    config = load_config([path, "height=720", "prompt=a = b", "seed=7"])
    assert (config.height, config.prompt, config.seed) == (720, "a = b", 7)
    assert config.source("height") == "command line"
    assert config.overridden("seed")
    assert not config.overridden("width")


@pytest.mark.parametrize(
    "argument", ["flash_block_sizes.block_q=9472", 'flash_block_sizes={"block_q": 9472}']
)
def test_entry_of_a_table(path, argument):
    config = load_config([path, argument])
    assert config.flash_block_sizes == {"block_q": 9472, "block_kv": 512}
    assert config.source("flash_block_sizes.block_q") == "command line"
    assert config.source("flash_block_sizes.block_kv") == f"{path}:2"


def test_null_empties_a_table(path):
    config = load_config([path, "flash_block_sizes=null", "flash_block_sizes.block_kv=256"])
    assert config.flash_block_sizes == {"block_kv": 256}


def test_entry_of_a_free_table(path):
    config = load_config([path, "timestep_bias.times=[64]", "timestep_bias.strategy=later"])
    assert config.compat["timestep_bias"] == {"times": (64,), "strategy": "later"}


def test_entries_of_lora_config(path):
    config = load_config([path, "lora_config.scale=[1, 0.5]", 'lora_config.weight_name=["a","b"]'])
    assert config.lora_config == {"scale": (1, 0.5), "weight_name": ("a", "b")}


def test_lists_booleans_and_null(path):
    arguments = ['prompt=["one","two"]', "vae_tiling=1", "per_device_batch_size=null"]
    config = load_config([path, *arguments])
    assert config.prompt == ("one", "two")
    assert config.vae_tiling is True
    assert config.per_device_batch_size is None


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("fast", "argument='fast': overrides are written key=value. "
         "Write fast=VALUE, without spaces around `=`."),
        ("--seed", "argument='--seed': overrides are written key=value. "
         "Write seed=VALUE, without spaces around `=`."),
        ("--seed=3", "--seed='3': is not a known key. The nearest is 'seed'."),
        ("atention=flash", "atention='flash': is not a known key. The nearest is 'attention'."),
        ("zzz=1", "zzz='1': is not a known key. docs/configuration.md lists all keys."),
        ("height=721", "height='721': must be a multiple of 16 >= 16. Use 720 or 736."),
        ("width=0", "width='0': must be a multiple of 16 >= 16. Use 16."),
        ("num_frames=80", "num_frames='80': must be an integer of the form 4n+1 >= 1. "
         "Use 77 or 81."),
        ("weights_dtype=bf16", "weights_dtype='bf16': must be one of 'float32', 'bfloat16'. "
         "The nearest is 'bfloat16'."),
        ("num_inference_steps=0", "num_inference_steps='0': must be an integer >= 1. Use 1."),
        ("num_inference_steps=ten", "num_inference_steps='ten': must be an integer >= 1. "
         "The default is 40."),
        ("fps=0", "fps='0': must be an integer >= 1. Use 1."),
        ("num_videos=0", "num_videos='0': must be an integer >= 1. Use 1."),
        ("flow_shift=0", "flow_shift='0': must be a finite number > 0. The default is 12.0."),
        ("guidance_scale_high=nan", "guidance_scale_high='nan': must be a finite number. "
         "The default is 4.0."),
        ("boundary_ratio=1.5", "boundary_ratio='1.5': must be a finite number from 0 to 1. "
         "The default is 0.875."),
        ("per_device_batch_size=-1", "per_device_batch_size='-1': must be a finite number > 0. "
         "The default is None."),
        ("seed=null", "seed='null': null is not an integer from 0 to 4294967295. "
         "The default is 0."),
        ("model_type=TI2V", "model_type='TI2V': must be one of 'T2V', 'I2V'. "
         "The nearest is 'T2V'."),
        ("vae_tiling=2", "vae_tiling='2': must be true or false. The default is False."),
        ("height.rows=3", "height.rows='3': is not a known key. The nearest is 'height'."),
        ("flash_block_sizes.blok_q=128", "flash_block_sizes.blok_q='128': is not a known name in "
         "this table. The nearest is 'block_q'."),
        ("flash_block_sizes.block_kv=100", "flash_block_sizes.block_kv='100': must be a multiple "
         "of 128 >= 128. Use 128."),
        ("flash_block_sizes=512", "flash_block_sizes='512': must be a table of names and values. "
         'Write it as {"name": value}.'),
        ("base_config=other.yml", "base_config='other.yml': belongs in a config file. "
         "Give the other file as the first argument."),
    ],
)  # fmt: skip
def test_mistakes_say_name_value_rule_and_way_out(path, argument, message):
    with pytest.raises(ProblemsFound) as caught:
        load_config([path, argument])
    assert str(caught.value) == message


def test_all_mistakes_of_file_and_command_line_at_once(tmp_path):
    path = write(tmp_path, "num_frames: 80\nnum_frames: 82\nfoo: 1\nflash_block_sizes: {bar: 1}\n")
    problems = problems_of(path, "height=1", "oops", 'flash_block_sizes={"baz": 1, "block_q": 7}')
    assert set(problems) == {
        "num_frames",
        "foo",
        "flash_block_sizes.bar",
        "height",
        "argument",
        "flash_block_sizes.baz",
        "flash_block_sizes.block_q",
    }


def test_mistakes_of_overrides_stand_beside_an_unreadable_file(tmp_path):
    assert set(problems_of(str(tmp_path / "gone.yml"), "height=1")) == {"config", "height"}


@pytest.mark.parametrize("argv", [(), ("seed=7",)])
def test_command_line_without_a_file(argv):
    assert problems_of(*argv)["config"].rule == "the first argument must be a YAML or Python file"
