"""Topologies by name, the environment that libtpu needs, and bad input."""

import importlib.util
import sys

import pytest

from maxdiffusion.preflight import topology as topologies
from maxdiffusion.preflight.chips import CHIPS
from maxdiffusion.preflight.topology import (
    GRIDS,
    describe_devices,
    prepare_environment,
    read_topology,
    topology_of_size,
)
from maxdiffusion.runtime.problems import ProblemsFound


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


def test_the_environment_keeps_what_the_user_set():
    environment = {"LIBTPU_INIT_ARGS": "--mine", "JAX_PLATFORMS": "tpu"}
    prepare_environment(read_topology("v5e:2x4"), dump="/d", environment=environment)
    assert environment["JAX_PLATFORMS"] == "cpu"  # nothing may run on a TPU that is there
    assert environment["TPU_ACCELERATOR_TYPE"] == "v5litepod-8"
    assert environment["LIBTPU_INIT_ARGS"].startswith("--mine --xla_jf_dump_to=/d ")
    forbidden = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "0"}
    prepare_environment(read_topology("v5e:2x4"), environment=forbidden)
    assert forbidden["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "0"
    assert "LIBTPU_INIT_ARGS" not in forbidden


def test_no_libtpu_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ProblemsFound, match=r'pip install "maxdiffusion\[tpu\]"'):
        describe_devices(read_topology("tpu7x:2x2x1"))


@pytest.mark.parametrize(
    ("message", "way_out"),
    [
        (
            "ABORTED: The TPU is already in use by process with pid 7",
            "ALLOW_MULTIPLE_LIBTPU_LOAD=1",
        ),
        ("Internal error when accessing libtpu multi-process lockfile", "End that process"),
        ("INVALID_ARGUMENT: Topology layout is odd", "Use one of tpu7x"),
    ],
)
def test_what_libtpu_says_becomes_a_way_out(message, way_out, monkeypatch):
    class Broken:
        @staticmethod
        def get_topology_desc(**_):
            raise RuntimeError(message)

    monkeypatch.setattr(topologies, "check_libtpu", lambda: None)
    monkeypatch.setitem(sys.modules, "jax.experimental.topologies", Broken)
    monkeypatch.setattr("jax.experimental.topologies", Broken, raising=False)
    with pytest.raises(ProblemsFound) as error:
        describe_devices(read_topology("tpu7x:2x2x1"))
    assert message in str(error.value)
    assert way_out in str(error.value)
