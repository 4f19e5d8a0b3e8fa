"""A stack of sharded layers compiled for v6e: weights are gathered under other work."""

import json

import pytest

from tests.processes import run_python

pytestmark = pytest.mark.libtpu
COMPILE = """
import json, sys
from pathlib import Path
from maxdiffusion.costs.chips import read_topology
from maxdiffusion.preflight.devices import describe_devices, prepare_environment
from maxdiffusion.runtime.tpu_flags import apply_flags
topology = read_topology("v6e:2x2")
apply_flags(sys.argv[1], topology.chip.name)
prepare_environment(topology)
import jax
import jax.numpy as jnp
from maxdiffusion.costs.links import network
from maxdiffusion.costs.step_time import exposed_seconds
from maxdiffusion.mesh import ActivationLayout, MeshShape, build_mesh
from maxdiffusion.mesh.mesh import parameter_sharding
from maxdiffusion.preflight.readers.collectives import find_collectives
from maxdiffusion.preflight.readers.hlo import read_program
mesh = build_mesh(MeshShape(ring=2, ulysses=2), devices=describe_devices(topology))
layout, dims = ActivationLayout(mesh=mesh), ("fsdp_context", "heads")
tokens, width, layers = 8192, 512, 4
def layer(x, weights):
    first, last = (layout.gathered(weight, dims) for weight in weights)
    x = jax.lax.optimization_barrier(jnp.tanh(x @ first))
    x = layout.constrain(x @ last, "batch", "sequence", "model")
    return jax.lax.optimization_barrier(x), None
def described(shape, sharding):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
shape = (layers, width, width)
weights = [described(shape, parameter_sharding(mesh, dims, shape))] * 2
rows = described(
    (1, tokens, width),
    layout.sharding(("batch", "sequence", "model"), (1, tokens, width)),
)
stack = jax.jit(lambda x, weights: jax.lax.scan(layer, x, weights)[0])
program = read_program(stack.lower(rows, weights).compile().as_text())
found = find_collectives(program, mesh.shape, topology.chip)
links = network(topology, mesh.devices.flatten().tolist())
waits = exposed_seconds(found, {}, links)
Path(sys.argv[2]).write_text(json.dumps([
    dict(kind=one.kind, axes=one.axes, bytes=one.bytes, times=one.times, wait=wait,
         under=one.overlap.cycles if one.overlap else None, alone=links.seconds(one))
    for one, wait in zip(found, waits, strict=True)
]))
"""


def gathers(tmp_path, flags):
    """Both gathers of a layer, in the order in which they are started."""
    answer = tmp_path / "collectives.json"
    done = run_python("-c", COMPILE, flags, answer, variables={"LIBTPU_INIT_ARGS": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(answer.read_text())
    assert [(one["kind"], one["axes"], one["times"]) for one in found] == [
        ("all-gather", ["ring", "ulysses"], 4)
    ] * 2
    assert {one["bytes"] for one in found} == {512 * 512 * 2}
    return found


def test_weights_are_gathered_under_products(tmp_path):
    first, second = gathers(tmp_path, "auto")
    assert first["under"] is not None, "both are asynchronous"
    assert second["under"] > 0
    assert second["wait"] < second["alone"]
    assert first["wait"] <= first["alone"]
