"""`attention: auto` becomes an attention and a split, or what runs anywhere."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import jax
import pytest

from maxdiffusion.commands.auto_attention import settle_attention
from maxdiffusion.config.loading import read_config
from maxdiffusion.preflight.released import find_spec

CONFIG = str(Path(__file__).parents[2] / "configs/base_wan_27b.yml")


@dataclass(frozen=True)
class Core:
    """A TPU7x core as far as planning looks at it."""

    coords: tuple[int, int, int]
    core_on_chip: int
    slice_index: int = 0
    device_kind: str = "TPU7x"
    platform: str = "tpu"


CORES = [Core((x, y, 0), core) for x, y, core in product(range(2), range(2), range(2))]


def settled(*overrides, devices=CORES):
    config = read_config([CONFIG, "attention=auto", *overrides]).config
    return settle_attention(config, find_spec(config.pretrained_model_name_or_path), devices)


def test_a_slice_gets_its_quickest_attention():
    config, notes = settled("ici_data_parallelism=2")
    assert (config.attention, config.ulysses_shards) == ("ulysses_ring_custom", 2)
    assert config.source("attention") == "chosen for these devices"
    (note,) = notes
    assert note.startswith("attention auto: ulysses_ring_custom with ulysses 2 x ring 2")


@pytest.mark.parametrize("override", ["ulysses_shards=4", "ici_ring_parallelism=1"])
def test_a_stated_split_is_kept(override):
    config, _ = settled("ici_data_parallelism=2", override)
    assert (config.attention, config.ulysses_shards) == ("ulysses_ring_custom", 4)


def test_another_attention_is_left_alone():
    config = read_config([CONFIG, "attention=flash"]).config
    assert settle_attention(config, find_spec("embedded"), CORES) == (config, ())


def test_devices_that_are_not_known_run_what_runs_anywhere():
    config, notes = settled(devices=jax.devices())
    assert config.attention == "dot_product"
    assert "only one slice of known TPUs" in notes[0]
    two_slices = [*CORES, *[Core(c.coords, c.core_on_chip, slice_index=1) for c in CORES]]
    assert settled("dcn_data_parallelism=2", devices=two_slices)[0].attention == "dot_product"


def test_other_mistakes_are_left_to_the_checks():
    config, notes = settled("ici_data_parallelism=3")
    assert (config.attention, notes) == ("dot_product", ())
