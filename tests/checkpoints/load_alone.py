"""Loads in a process of its own and writes what it cost to a file; started by the tests."""

import json
import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from maxdiffusion.checkpoints.device_buffers import DeviceBuffer, HostBuffer
from maxdiffusion.checkpoints.load import ComponentSource, LoadOptions, load_parameters
from maxdiffusion.checkpoints.safetensors_io import open_weights
from maxdiffusion.mesh import AXES
from maxdiffusion.models.checkpoint_map import CheckpointMap, linear


def stack_source(folder: Path, layers: int, width: int) -> ComponentSource:
    """A stack of square Linears, in bfloat16."""
    kernel = nnx.Param(jax.ShapeDtypeStruct((layers, width, width), jnp.bfloat16))
    abstract = nnx.State({"blocks": {"kernel": kernel}})
    table = CheckpointMap(
        entries=tuple(linear("blocks", "blocks.{layer}", bias=False)), layers=layers
    )
    return ComponentSource(stored=open_weights(folder), table=table, abstract=abstract)


def memory(folder: Path, buffer: str, layers: int, width: int) -> dict[str, int]:
    """The growth of the peak resident size during a load."""
    kinds = {"HostBuffer": HostBuffer, "DeviceBuffer": DeviceBuffer}
    source = stack_source(folder, layers, width)
    # The compiler itself takes tens of megabytes when it is first used.
    jax.jit(lambda x: jax.lax.dynamic_update_slice(x, x[:2], (3,)))(
        jnp.zeros(8)
    ).block_until_ready()
    before = peak()
    state, report = load_parameters(source, options=LoadOptions(buffer=kinds[buffer], threads=4))
    held = state["blocks"]["kernel"].get_value().nbytes
    return {"growth": peak() - before, "held": held, "read": report.bytes_read}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def slices(folder: Path, address: str, process: int, order: list[int]) -> dict[str, object]:
    """One of two processes with four devices each; checks its slices and counts its bytes."""
    from tests.checkpoints.small_model import expected, flat, source_of, tensors

    jax.distributed.initialize(address, num_processes=2, process_id=process)
    devices = np.array(jax.devices())[order].reshape(1, 2, 1, 1, 4)
    state, report = load_parameters(source_of(folder), mesh=Mesh(devices, AXES))
    wanted = expected(tensors())
    for name, array in flat(state).items():
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), wanted[name][shard.index])
    held = {
        (name, str(shard.index)): shard.data.nbytes
        for name, array in flat(state).items()
        for shard in array.addressable_shards
    }
    return {
        "read": report.bytes_read,
        "needed": report.bytes_needed,
        "held": sum(held.values()),
        "devices": jax.device_count(),
    }


if __name__ == "__main__":
    outcome, task, folder, *rest = sys.argv[1:]
    arguments = [json.loads(argument) for argument in rest]
    result = {"memory": memory, "slices": slices}[task](Path(folder), *arguments)
    Path(outcome).write_text(json.dumps(result))
