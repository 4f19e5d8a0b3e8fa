"""The Pallas kernels of a plan: compiled alone for their machine code, and timed from it."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiffusion.attention import AttentionPlan, BlockAttention
from maxdiffusion.attention.keys import GlobalKeys
from maxdiffusion.attention.on_device import Alone
from maxdiffusion.attention.on_device.flash import FlashKernel
from maxdiffusion.attention.on_device.kernel import DeviceKernel
from maxdiffusion.attention.on_device.splash import JaxSplashKernel, TokamaxKernel
from maxdiffusion.kernels.flash.blocks import LANES
from maxdiffusion.mesh import single_device_mesh
from maxdiffusion.preflight.bundles import KernelCode, read_kernels
from maxdiffusion.preflight.chips import Chip
from maxdiffusion.preflight.cycles import visits
from maxdiffusion.preflight.hlo import read_program


@dataclass(frozen=True, kw_only=True)
class KernelUse:
    """How a plan uses its kernel in one attention: the grid of one call, and how many calls.

    `pairs` are (batch, head) pairs of all calls over the same keys, of which there are `groups`,
    `calls` the shards of keys, `tile` what one grid step does.
    """

    pairs: int
    calls: int
    q_len: int
    kv_len: int
    tile: "Tile"
    groups: int = 1

    @property
    def q_blocks(self) -> int:
        """Blocks of queries of a pair."""
        return -(-self.q_len // self.tile.block_q)

    @property
    def passes(self) -> float:
        """Tiles of queries of a pair; a last block has only those that it needs."""
        whole, rest = divmod(self.q_len, self.tile.block_q)
        per_block = self.tile.block_q / self.tile.q_tile
        return whole * per_block + min(per_block, -(-rest // self.tile.q_tile))

    def cycles(self, code: "KernelFigures") -> float:
        """Cycles of one attention."""
        whole, rest = divmod(self.kv_len, self.tile.block_kv)
        ragged = -(-rest // self.tile.kv_step) * self.tile.kv_step / self.tile.block_kv
        every_pass = whole * code.main_loop_cycles + ragged * code.ragged_cycles
        steps = -(-self.kv_len // self.tile.block_kv)
        every_block = steps * code.step_bundles + code.q_block_bundles
        return self.calls * self.pairs * (self.passes * every_pass + self.q_blocks * every_block)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What a kernel does at once: queries and keys of a grid step, and of its main loop's pass.

    Keys of a last block come in steps of `kv_step`.
    """

    block_q: int
    block_kv: int
    q_tile: int
    kv_step: int = 1


@dataclass(frozen=True, kw_only=True)
class KernelFigures:
    """What the machine code of a kernel says, on one chip."""

    name: str
    purpose: str
    main_loop_bundles: int
    mxu_bound_bundles: int
    ragged_cycles: int
    step_bundles: int
    q_block_bundles: int
    spill_stores: int
    spill_loads: int
    vmem_bytes: int
    vmem_limit_bytes: int

    @property
    def main_loop_cycles(self) -> int:
        """Cycles of one pass of the main loop."""
        return max(self.main_loop_bundles, self.mxu_bound_bundles)

    @property
    def mxu_share(self) -> float:
        """The share of the MXU's speed that the main loop reaches."""
        return self.mxu_bound_bundles / self.main_loop_cycles

    def as_json(self) -> dict[str, Any]:
        """All figures by name."""
        return {**dataclasses.asdict(self), "mxu_share": self.mxu_share}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "KernelFigures":
        """The figures that `as_json` wrote."""
        names = [part.name for part in dataclasses.fields(cls)]
        return cls(**{name: values[name] for name in names})


def kernel_plans(attention: BlockAttention) -> dict[str, AttentionPlan]:
    """The plans of a block that run a Pallas kernel."""
    plans = {
        "self-attention": attention.self_attention,
        "cross-attention": attention.cross_attention,
    }
    return {name: plan for name, plan in plans.items() if tile_of(plan.kernel) is not None}


def tile_of(kernel: DeviceKernel) -> Tile | None:
    """What a grid step of a kernel does; None for a kernel that is not Pallas."""
    if isinstance(kernel, FlashKernel):
        blocks = kernel.blocks
        return Tile(
            block_q=blocks.block_q,
            block_kv=blocks.block_kv,
            q_tile=blocks.q_tile,
            kv_step=LANES,
        )
    if isinstance(kernel, JaxSplashKernel | TokamaxKernel):
        splash = kernel.blocks if isinstance(kernel, JaxSplashKernel) else kernel.settings.blocks
        return Tile(block_q=splash.block_q, block_kv=splash.block_kv, q_tile=splash.block_q)
    return None


def use_of(plan: AttentionPlan) -> KernelUse:
    """How a plan uses its kernel."""
    sizes, tile = plan.kernel.site.sizes, tile_of(plan.kernel)
    assert tile is not None, plan.kernel.title
    return KernelUse(
        pairs=sizes.batch * sum(sizes.heads),
        groups=len(sizes.heads),
        calls=plan.padded_kv_len // sizes.kv_len,
        q_len=sizes.q_len,
        kv_len=sizes.kv_len,
        tile=tile,
    )


def kernel_alone(plan: AttentionPlan, device: jax.Device) -> jax.stages.Lowered:
    """The kernel of a plan at its sizes, as a program of one device."""
    mesh, kernel = single_device_mesh(device), plan.kernel
    sizes, shards = kernel.site.sizes, plan.padded_kv_len // kernel.site.sizes.kv_len

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        keys = GlobalKeys(true_length=plan.problem.kv_len, padded_length=plan.padded_kv_len)
        here = keys.whole() if shards == 1 else keys.shard(jnp.int32(shards - 1), shards)
        k, known = kernel.prepare_keys(k, v, here, Alone())
        attend = kernel.attend if shards == 1 else kernel.partials
        return attend(q, k, v, here, kernel.prepare_queries(q, known))

    tokens = [_tokens(plan, mesh, length) for length in (sizes.q_len, sizes.kv_len, sizes.kv_len)]
    with jax.set_mesh(mesh):
        return jax.jit(run).lower(*tokens)


def _tokens(plan: AttentionPlan, mesh: Mesh, length: int) -> jax.ShapeDtypeStruct:
    sizes, problem = plan.kernel.site.sizes, plan.problem
    shape = (sizes.batch, length, sizes.heads[0], problem.head_dim)
    place = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, problem.dtype, sharding=place)


def measure_kernels(attention: BlockAttention, chip: Chip, dump: Path) -> Iterator[KernelFigures]:
    """Compiles every kernel of a block alone and reads what libtpu wrote into `dump`."""
    for purpose, plan in kernel_plans(attention).items():
        yield from measure_kernel(purpose, plan, chip, dump)


def measure_kernel(
    purpose: str, plan: AttentionPlan, chip: Chip, dump: Path
) -> Iterator[KernelFigures]:
    """Compiles the kernel of a plan alone and reads what libtpu wrote into `dump`."""
    seen = {*dump.iterdir()}
    text = kernel_alone(plan, plan.mesh.devices.flat[0]).compile().as_text() or ""
    calls = {
        _plain(visit.instruction.name): visit.instruction
        for visit in visits(read_program(text))
        if visit.instruction.is_kernel
    }
    for code in read_kernels(dump):
        if code.name in calls:
            call = calls[code.name]
            limit = int(call.attribute(r'"scoped_memory_configs":\[\{[^]]*"size":"(\d+)"') or 0)
            yield figures(code, purpose, chip, (call.vmem_bytes, limit))
    for path in {*dump.iterdir()} - seen:
        path.unlink()


def _plain(name: str) -> str:
    """A kernel's name without the number that XLA gives its calls."""
    stem, dot, number = name.rpartition(".")
    return stem if dot and number.isdigit() else name


def figures(code: KernelCode, purpose: str, chip: Chip, vmem: tuple[int, int]) -> KernelFigures:
    """The figures of a kernel's code on a chip; `vmem` are the bytes used and allowed."""
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
    )
