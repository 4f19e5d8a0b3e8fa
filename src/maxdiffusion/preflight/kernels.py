"""Compiles the Pallas kernels of a job alone and reads the figures of their machine code.

libtpu reads its dump flags once, when it starts, and the dump of whole programs would be too large.
Kernels are therefore compiled in a second process, which runs this file:

    python -m maxdiffusion.preflight.kernels FOLDER CONFIG.yml [key=value ...]

It writes kernels.json into FOLDER.
"""

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiffusion.attention import AttentionPlan, BlockAttention
from maxdiffusion.attention.backends import LocalReducer
from maxdiffusion.attention.problem import KVMask
from maxdiffusion.config.load import read_config
from maxdiffusion.costs.chips import Chip, read_topology
from maxdiffusion.costs.step_time import KernelFigures, kernel_plans
from maxdiffusion.errors import RunFailed
from maxdiffusion.mesh import single_device_mesh
from maxdiffusion.preflight.devices import prepare_environment
from maxdiffusion.preflight.readers.bundles import KernelCode, read_kernels
from maxdiffusion.preflight.readers.cycles import visits
from maxdiffusion.preflight.readers.hlo import read_program

logger = logging.getLogger(__name__)

_OUTPUT, _ERRORS = "kernels.json", "errors"


def kernel_alone(plan: AttentionPlan, device: jax.Device) -> jax.stages.Lowered:
    """Returns the kernel of a plan at its local sizes, lowered for one device."""
    mesh, kernel = single_device_mesh(device), plan.backend
    sizes, shards = plan.local, plan.local.num_kv_shards

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        keys = KVMask(true_length=plan.problem.kv_len, padded_length=plan.padded_kv_len)
        here = keys.whole() if shards == 1 else keys.shard(jnp.int32(shards - 1), shards)
        k, known = kernel.preprocess_kv(k, v, here, LocalReducer())
        attend = kernel.attend if shards == 1 else kernel.partials
        return attend(q, k, v, here, kernel.preprocess_q(q, known))

    tokens = [
        local_tokens(plan, mesh, length) for length in (sizes.q_len, sizes.kv_len, sizes.kv_len)
    ]
    with jax.set_mesh(mesh):
        return jax.jit(run).lower(*tokens)


def local_tokens(plan: AttentionPlan, mesh: Mesh, length: int) -> jax.ShapeDtypeStruct:
    """Returns the abstract queries or keys of one kernel call."""
    sizes, problem = plan.local, plan.problem
    shape = (sizes.batch, length, sizes.heads[0], problem.head_dim)
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, problem.dtype, sharding=replicated)


def measure_kernels(attention: BlockAttention, chip: Chip, dump: Path) -> Iterator[KernelFigures]:
    """Compiles every kernel of a block alone and reads the code that libtpu dumps into `dump`."""
    for purpose, plan in kernel_plans(attention).items():
        yield from measure_kernel(plan, purpose=purpose, chip=chip, dump=dump)


def measure_kernel(
    plan: AttentionPlan, *, purpose: str, chip: Chip, dump: Path
) -> Iterator[KernelFigures]:
    """Compiles the kernel of a plan alone and reads the code that libtpu dumps into `dump`."""
    lowered = kernel_alone(plan, plan.mesh.devices.flat[0])
    yield from measure_lowered(lowered, purpose=purpose, chip=chip, dump=dump)


def measure_lowered(
    lowered: jax.stages.Lowered, *, purpose: str, chip: Chip, dump: Path
) -> Iterator[KernelFigures]:
    """Compiles a program of a few kernels and reads the code that libtpu dumps into `dump`."""
    seen = {*dump.iterdir()}
    text = lowered.compile().as_text() or ""
    calls = {
        _plain(visit.instruction.name): visit.instruction
        for visit in visits(read_program(text))
        if visit.instruction.is_kernel
    }
    for code in read_kernels(dump):
        if code.name in calls:
            call = calls[code.name]
            limit = int(call.attribute(r'"scoped_memory_configs":\[\{[^]]*"size":"(\d+)"') or 0)
            yield figures(code, chip, purpose=purpose, vmem=(call.vmem_bytes, limit))
    for path in {*dump.iterdir()} - seen:
        path.unlink()


def _plain(name: str) -> str:
    """Returns a kernel's name without the number that XLA gives its calls."""
    stem, dot, number = name.rpartition(".")
    return stem if dot and number.isdigit() else name


def figures(code: KernelCode, chip: Chip, *, purpose: str, vmem: tuple[int, int]) -> KernelFigures:
    """Returns the figures of a kernel's code on a chip; `vmem` is (bytes used, bytes allowed)."""
    main = code.main_loop
    return KernelFigures(
        name=code.name,
        purpose=purpose,
        main_loop_bundles=main.bundles,
        mxu_bound_bundles=main.mxu_bound(chip),
        ragged_cycles=code.ragged_cycles(chip),
        step_bundles=code.every_step,
        q_block_bundles=code.every_q_block,
        spill_stores=main.spill_stores,
        spill_loads=main.spill_loads,
        vmem_bytes=vmem[0],
        vmem_limit_bytes=vmem[1],
        code_bundles=code.bundles,
        short_tile_bundles=code.short_tile,
    )


class KernelProcess:
    """The process that compiles the kernels of a config and dumps their machine code."""

    def __init__(self, arguments: Sequence[str], folder: Path, module: str):
        command = [sys.executable, "-m", module, str(folder), *arguments]
        self._folder = folder
        with (folder / _ERRORS).open("wb") as errors:
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)

    def result(self) -> tuple[KernelFigures, ...]:
        """Waits for the process and returns its figures."""
        logger.info("waiting for the machine code of the kernels ...")
        if self._process.wait() != 0:
            errors = (self._folder / _ERRORS).read_text(errors="replace").strip().splitlines()
            reason = errors[-1] if errors else f"exit code {self._process.returncode}"
            raise RunFailed(f"the kernels could not be compiled alone: {reason}")
        rows = json.loads((self._folder / _OUTPUT).read_text())
        return tuple(KernelFigures.from_json(row) for row in rows)

    def stop(self) -> None:
        """Ends the process if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


@contextmanager
def kernel_process(
    arguments: Sequence[str], module: str = "maxdiffusion.preflight.kernels"
) -> Iterator[KernelProcess]:
    """Starts `module` to compile the kernels of a config; stops when the block ends."""
    with tempfile.TemporaryDirectory(prefix="preflight_") as folder:
        process = KernelProcess(arguments, Path(folder), module)
        try:
            yield process
        finally:
            process.stop()


def main(arguments: Sequence[str]) -> int:
    """Compiles the kernels of a config and writes their figures; returns the exit code."""
    folder, config = Path(arguments[0]), arguments[1:]
    dump = folder / "dump"
    dump.mkdir()
    parsed = read_config(config)
    topology = read_topology(parsed.config.topology)
    prepare_environment(topology, dump=str(dump))
    from maxdiffusion.preflight.command import plan_for_topology

    job = plan_for_topology(parsed).planned
    write_figures(folder, measure_kernels(job.attention, topology.chip, dump))
    return 0


def write_figures(folder: Path, figures: Iterable[KernelFigures]) -> None:
    """Writes the figures where the process that waits for them looks."""
    (folder / _OUTPUT).write_text(json.dumps([kernel.as_json() for kernel in figures]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
