"""Compiles the attention kernels of a training alone, and times the calls of its step.

A second process, as in `kernels.py`, compiles forward and backward pass of one attention at the
sizes of one device and dumps their machine code:

    python -m maxdiffusion.preflight.training_kernels FOLDER CONFIG.yml [key=value ...]

The schedule of the step says how often each kernel runs: a forward kernel twice a layer if it is
rematerialised.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxdiffusion.attention import AttentionPlan
from maxdiffusion.attention.backends import LocalReducer
from maxdiffusion.attention.backends.base import Tile
from maxdiffusion.attention.problem import KVMask
from maxdiffusion.config.load import read_config
from maxdiffusion.costs.chips import Chip, read_topology
from maxdiffusion.costs.step_time import KernelFigures, KernelTime, kernel_calls
from maxdiffusion.costs.training import backward_cycles
from maxdiffusion.errors import RunFailed
from maxdiffusion.mesh import single_device_mesh
from maxdiffusion.preflight.devices import prepare_environment
from maxdiffusion.preflight.kernels import local_tokens, measure_lowered, write_figures
from maxdiffusion.preflight.readers.cycles import visits
from maxdiffusion.preflight.readers.hlo import ScheduledProgram

FORWARD, BACKWARD = "forward", "backward"
# Parts of the names of backward kernels: jax's and tokamax's (dq, dkv), ours.
_BACKWARD = re.compile(r"_(dq|dkv|dk|dv|bwd|backward|gradients?)(_|\b)")
_OURS = re.compile(r"flash_backward_(\d+)_(\d+)")
_NUMBER = re.compile(r"\.\d+$")


def direction(kernel: str) -> str:
    """Returns whether a kernel belongs to the forward or the backward pass, by its name."""
    return BACKWARD if _BACKWARD.search(kernel) else FORWARD


def tile_of(plan: AttentionPlan, kernel: KernelFigures, chip: Chip) -> Tile:
    """Returns the tile of a grid step of a kernel of a plan.

    Our backward kernel has its blocks in its name. It lays all five products out best, so the MXU
    bound of its main loop says how many queries one pass of it has.
    """
    tile, blocks = plan.backend.tile, plan.backend.blocks
    assert tile is not None, plan.backend.title
    assert blocks is not None, plan.backend.title
    if direction(kernel.name) == FORWARD:
        return tile
    named = _OURS.search(kernel.name)
    if named is not None:
        queries, keys = int(named[1]), int(named[2])
        pairs = kernel.mxu_bound_bundles / backward_cycles(chip, plan.problem.head_dim)
        at_once = max(1, min(queries, round(pairs / keys)))
        return Tile(block_q=queries, block_kv=keys, q_tile=at_once, kv_step=keys)
    queries, keys = blocks.block_q_dkv, blocks.block_kv_dkv
    if "_dq" in kernel.name:
        queries, keys = blocks.block_q_dq, blocks.block_kv_dq
    queries, keys = queries or tile.block_q, keys or tile.block_kv
    return Tile(block_q=queries, block_kv=keys, q_tile=queries, kv_step=keys)


def attention_alone(plan: AttentionPlan, device: jax.Device) -> jax.stages.Lowered:
    """Returns forward and backward pass of a plan's kernel at its local sizes."""
    mesh, kernel, sizes = single_device_mesh(device), plan.backend, plan.local
    shards = sizes.num_kv_shards
    keys = KVMask(true_length=plan.problem.kv_len, padded_length=plan.padded_kv_len)

    here = keys.whole()

    def by_vjp(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            prepared, stats = kernel.preprocess_kv(k, v, here, LocalReducer())
            return kernel.attend(q, prepared, v, here, kernel.preprocess_q(q, stats))

        out, gradient = jax.vjp(attend, q, k, v)
        return out, gradient(d_out)

    def by_shard(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        mask = here if shards == 1 else keys.shard(jnp.int32(shards - 1), shards)
        prepared, stats = kernel.preprocess_kv(k, v, mask, LocalReducer())
        forward = kernel.attend if shards == 1 else kernel.partials
        out = forward(q, prepared, v, mask, kernel.preprocess_q(q, stats))
        # A stand-in for both sums of a query: only their shapes matter to the machine code.
        sums = jnp.sum(d_out.astype(jnp.float32), axis=-1)
        return out, kernel.gradients(q, prepared, v, mask, sums, sums, d_out)

    lengths = (sizes.q_len, sizes.kv_len, sizes.kv_len, sizes.q_len)
    tokens = [local_tokens(plan, mesh, length) for length in lengths]
    with jax.set_mesh(mesh):
        return jax.jit(by_shard if kernel.has_shard_gradients else by_vjp).lower(*tokens)


def measure_training(plan: AttentionPlan, *, chip: Chip, dump: Path) -> Iterator[KernelFigures]:
    """Yields the figures of all kernels of a plan, forward and backward."""
    lowered = attention_alone(plan, plan.mesh.devices.flat[0])
    yield from measure_lowered(lowered, purpose="self-attention", chip=chip, dump=dump)


def training_kernel_times(
    schedule: ScheduledProgram, figures: Sequence[KernelFigures], plan: AttentionPlan, chip: Chip
) -> dict[str, KernelTime]:
    """Returns the seconds of every attention kernel of a step: of a call, and of all its calls.

    A kernel that was not compiled alone takes as long as the one of its direction that was: they
    differ in what they write.
    """
    calls: defaultdict[str, int] = defaultdict(int)
    for visit in visits(schedule):
        instruction = visit.instruction
        if instruction.is_kernel and instruction.stated_cost == (0, 0):
            calls[_NUMBER.sub("", instruction.name)] += visit.times
    times = {}
    for name, count in calls.items():
        call = chip.seconds(_call_cycles(_figure(name, figures), plan, chip))
        times[name] = KernelTime(call=call, step=count * call)
    return times


def _figure(name: str, figures: Sequence[KernelFigures]) -> KernelFigures:
    same = [kernel for kernel in figures if kernel.name == name]
    alike = [kernel for kernel in figures if direction(kernel.name) == direction(name)]
    if not same and not alike:
        raise RunFailed(f"the machine code of kernel {name} was not found")
    return (same or alike)[0]


def _call_cycles(figure: KernelFigures, plan: AttentionPlan, chip: Chip) -> float:
    use = replace(kernel_calls(plan), tile=tile_of(plan, figure, chip))
    return use.cycles(figure) / (use.calls * use.groups)


def main(arguments: Sequence[str]) -> int:
    """Compiles the kernels of a config and writes their figures; returns the exit code."""
    folder, config = Path(arguments[0]), arguments[1:]
    dump = folder / "dump"
    dump.mkdir()
    parsed = read_config(config)
    topology = read_topology(parsed.config.topology)
    prepare_environment(topology, dump=str(dump))
    from maxdiffusion.preflight.training_job import plan_training

    plan = plan_training(parsed).training.block_attention.self_attention
    write_figures(folder, measure_training(plan, chip=topology.chip, dump=dump))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
