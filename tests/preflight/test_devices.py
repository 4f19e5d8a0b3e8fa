"""The environment that libtpu needs, and the refusals of libtpu."""

import importlib.util
import subprocess
import sys

import pytest

from maxdiffusion.costs.chips import read_topology
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.preflight import devices
from maxdiffusion.preflight.devices import describe_devices, prepare_environment


def test_the_environment_can_be_set_before_jax_is_imported():
    code = (
        "import sys, maxdiffusion.costs.chips, maxdiffusion.preflight.devices;"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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

    monkeypatch.setattr(devices, "check_libtpu", lambda: None)
    monkeypatch.setitem(sys.modules, "jax.experimental.topologies", Broken)
    monkeypatch.setattr("jax.experimental.topologies", Broken, raising=False)
    with pytest.raises(ProblemsFound) as error:
        describe_devices(read_topology("tpu7x:2x2x1"))
    assert message in str(error.value)
    assert way_out in str(error.value)
