"""Every flag of every preset is known to libtpu, which ends a process at one that is not."""

import subprocess

import pytest

from maxdiffusion.runtime.tpu_flags import PRESETS, apply_flags
from tests.processes import run_python

pytestmark = pytest.mark.libtpu
SLICES = {"tpu7x": "tpu7x-8", "v6e": "v6e-4", "v5p": "v5p-8", "v5e": "v5litepod-4"}
COMPILE = """
import jax, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
names = {"tpu7x": "tpu7x:2x2x1", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "v5e": "v5e:2x2"}
import sys
devices = topologies.get_topology_desc(platform="tpu", topology_name=names[sys.argv[1]]).devices
place = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
jax.jit(lambda x: 2 * x).lower(jax.ShapeDtypeStruct((1024,), np.float32, sharding=place)).compile()
print("compiled")
"""


def compile_for(chip: str, flags: str) -> subprocess.CompletedProcess[str]:
    """Returns the finished process that compiled for a chip with these flags."""
    variables = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": SLICES[chip],
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": flags,
    }
    return run_python("-c", COMPILE, chip, variables=variables)


@pytest.mark.parametrize("chip", sorted(PRESETS))
def test_libtpu_accepts_every_flag_of_a_preset(chip):
    environment = {}
    apply_flags("auto", chip, environment)
    assert compile_for(chip, environment["LIBTPU_INIT_ARGS"]).stdout == "compiled\n"


def test_libtpu_would_refuse_a_flag_that_it_does_not_know():
    done = compile_for("v6e", "--xla_tpu_no_such_flag=true")
    assert done.returncode != 0
    assert "xla_tpu_no_such_flag" in done.stderr
