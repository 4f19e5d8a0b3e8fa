"""Topologies by name and by size, and bad input."""

import pytest

from maxdiffusion.costs.chips import CHIPS, GRIDS, read_topology, topology_of_size
from maxdiffusion.errors import ProblemsFound


@pytest.mark.parametrize(
    ("name", "chips", "devices"),
    [("tpu7x:2x2x1", 4, 8), ("tpu7x:4x4x4", 64, 128), ("v6e:2x4", 8, 8), ("v5p:2x2x1", 4, 4)],
)
def test_a_name_becomes_chips_and_devices(name, chips, devices):
    topology = read_topology(name)
    assert (topology.chips, topology.device_count, topology.name) == (chips, devices, name)


@pytest.mark.parametrize(
    "name", ["tpu8x:2x2x1", "tpu7x", "tpu7x:2x2", "tpu7x:3x3x3", "v6e:2x2x1", ""]
)
def test_an_unknown_name_is_refused_with_the_list(name):
    with pytest.raises(ProblemsFound) as error:
        read_topology(name)
    chip = name.split(":")[0]
    assert repr(name) in str(error.value)
    assert (f"{chip}:{GRIDS[chip][0]}" if chip in GRIDS else "tpu7x:{2x2x1") in str(error.value)


def test_every_grid_can_be_read():
    for chip, grids in GRIDS.items():
        for grid in grids:
            assert read_topology(f"{chip}:{grid}").chip is CHIPS[chip]


def test_a_size_finds_its_topology():
    assert topology_of_size(CHIPS["tpu7x"], 128).name == "tpu7x:4x4x4"
    assert topology_of_size(CHIPS["tpu7x"], 12) is None
