"""Chooses the attention of a slice: the best estimate among the names that can run.

An estimate takes no compilation, so that many slices can be scanned. Two shares replace what a
compiler would find: the share of the MXU bound that score tiles reach, and the share of peak that
everything else reaches. The collectives are those that the scheme of a plan states, routed
over the links of the slice.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from jax.sharding import Mesh

from maxdiffusion.attention import (
    AttentionOptions,
    AttentionPlan,
    AttentionProblem,
    UnsupportedAttention,
    plan_attention,
    plan_cross_attention,
)
from maxdiffusion.attention.context_parallel.base import Collective
from maxdiffusion.costs.chips import Chip, Topology
from maxdiffusion.costs.flops import ForwardFlops
from maxdiffusion.costs.links import DeviceCollective, Network, network
from maxdiffusion.costs.step_time import kernel_calls
from maxdiffusion.mesh import MeshDevice, MeshShape, build_mesh


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Efficiency of compiled programs: of the MXU bound in kernels, of peak outside of them."""

    kernel: float
    outside: float


# Compiled with WAN 2.2 A14B at 720p for tpu7x; docs/performance.md has the figures. The kernel's
# share is that of its score tiles, in rings of 2, 4 and 8 (docs/design/overlapped_ulysses.md).
SHARES = Shares(kernel=0.985, outside=0.815)
# Cycles for each query of a block, once a call: reading, transposing and writing it and its sums.
QUERY_CYCLES = 0.5
# A shorter tile of queries at the end of a block, as compiled, in whole ones.
SHORT_TILE = 0.66
# Attention without a kernel: scores go through HBM.
DENSE_SHARE = 0.3
# Speed-up of our kernel with Q.K^T in float8, as compiled for tpu7x.
FP8_SPEED = 1.38
# HBM traffic around an all-to-all, in bytes per element of q on a device: v and the output are read
# and written once more; for q and k this is part of norm and RoPE.
ALL_TO_ALL_BYTES = 2
# Fixed cost of a kernel call and the collectives of its heads. An assumption, which keeps the
# planner from splitting heads into groups without a gain.
CALL_SECONDS = 10e-6


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The parts of a step in seconds."""

    kernels: float
    outside: float
    copies: float
    exposed_collectives: float

    @property
    def total(self) -> float:
        """Returns the seconds of the whole step."""
        return self.kernels + self.outside + self.copies + self.exposed_collectives


def estimate_step(
    plan: AttentionPlan,
    flops: ForwardFlops,
    *,
    layers: int,
    network: Network,
    shares: Shares = SHARES,
) -> Estimate:
    """Returns the estimate with `plan` as self-attention; `flops` are those of the whole batch."""
    chip, devices = network.topology.chip, plan.mesh.size
    kernel = kernel_seconds(plan, chip, shares)
    outside = (flops.total - flops.self_attention) / (
        devices * chip.flops_at_clock * shares.outside
    )
    calls, groups = plan.local.num_kv_shards, len(plan.local.heads)
    exposed = sum(
        exposed_seconds(stated, plan.mesh, network, call_seconds=kernel / calls)
        for stated in plan.collectives
    )
    return Estimate(
        kernels=layers * (kernel + calls * groups * CALL_SECONDS),
        outside=outside,
        copies=layers * copied_bytes(plan) / chip.hbm_bandwidth,
        exposed_collectives=layers * exposed,
    )


def kernel_seconds(plan: AttentionPlan, chip: Chip, shares: Shares) -> float:
    """Returns the seconds of one attention's kernel calls, with queries padded to whole tiles."""
    sizes, tile, head_dim = plan.local, plan.backend.tile, plan.problem.head_dim
    pairs = sizes.batch * sum(sizes.heads)
    scores = pairs * plan.padded_kv_len / (chip.flops_at_clock * chip.score_share(head_dim))
    if tile is None:
        return scores * 4.0 * head_dim * sizes.q_len / DENSE_SHARE
    use = kernel_calls(plan)
    tiles = use.passes + use.short_tiles * (SHORT_TILE - use.short_tile)
    share = shares.kernel * (FP8_SPEED if plan.lossy else 1.0)
    ends = pairs * use.calls * use.q_blocks * tile.block_q * QUERY_CYCLES
    return scores * 4.0 * head_dim * tiles * tile.q_tile / share + chip.seconds(ends)


def copied_bytes(plan: AttentionPlan) -> float:
    """Returns the HBM bytes of the copies around one attention's collectives."""
    sizes = plan.local
    elements = sizes.batch * sum(sizes.heads) * sizes.q_len * plan.problem.head_dim
    return elements * plan.scheme.num_relayouts * ALL_TO_ALL_BYTES


def exposed_seconds(
    stated: Collective, mesh: Mesh, network: Network, *, call_seconds: float
) -> float:
    """Returns the seconds of a scheme's collective that are not overlapped."""
    seconds = network.seconds(one_round(stated, mesh))
    return stated.rounds * max(0.0, seconds - stated.overlap * call_seconds)


def one_round(stated: Collective, mesh: Mesh) -> DeviceCollective:
    """Returns one round of a scheme's collective between the devices of a mesh.

    The share of the rounds that is hidden costs nothing, which is averaged over all rounds.
    """
    size = int(stated.round_bytes * (1 - stated.hidden))
    if stated.kind == "collective-permute":
        pairs = tuple(_neighbours(_rings(stated, mesh), wraps=stated.wraps))
        return DeviceCollective(kind=stated.kind, bytes=size, pairs=pairs)
    groups = device_groups(mesh, stated.axes)
    return DeviceCollective(kind=stated.kind, bytes=size, groups=groups)


def _rings(stated: Collective, mesh: Mesh) -> Iterator[tuple[int, ...]]:
    """Yields the devices of each ring of a permutation, in the direction in which it turns."""
    length = math.prod(mesh.shape[axis] for axis in stated.axes)
    for rings in device_groups(mesh, (*stated.counter, *stated.axes)):
        for index, start in enumerate(range(0, len(rings), length)):
            ring = rings[start : start + length]
            yield ring[::-1] if index % 2 else ring


def device_groups(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the devices that differ along `axes` only, by their number in the mesh."""
    names = list(mesh.axis_names)
    along = [names.index(axis) for axis in axes]
    across = [index for index in range(len(names)) if index not in along]
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape).transpose([*across, *along])
    size = int(np.prod([mesh.shape[axis] for axis in axes]))
    return tuple(tuple(row) for row in numbers.reshape(-1, size).tolist())


def _neighbours(groups: Iterable[tuple[int, ...]], *, wraps: bool) -> Iterator[tuple[int, int]]:
    """Yields (source, target) of a hop: round a ring, or both ways along a line."""
    for group in groups:
        if wraps:
            yield from zip(group, (*group[1:], group[0]), strict=True)
        else:
            for here, there in pairwise(group):
                yield from ((here, there), (there, here))


# Both are exact for every head; fixed-m must be asked for, since its gain depends on the norms.
# Both ignore flash_min_seq_length, so that cross-attention runs our kernel too. With a ring of one
# the first is the program of ulysses_custom, except that ulysses_custom applies that limit.
CANDIDATES = ("ulysses_ring_custom", "ulysses_ring_custom_bidir")

# Estimates within this ratio are a tie, which fewer ring hops decide.
TIE = 1.005


@dataclass(frozen=True, kw_only=True)
class Task:
    """The job that attention is chosen for.

    Cross-attention to `text_length` keys uses the same attention, so it must be able to run too.
    `names` are the attentions to choose from. `product_dtype` is that of both operands of the
    linear maps of blocks.
    """

    problem: AttentionProblem
    flops: ForwardFlops
    layers: int
    topology: Topology
    devices: Sequence[MeshDevice]
    options: AttentionOptions = field(default_factory=AttentionOptions)
    text_length: int = 512
    shares: Shares = SHARES
    names: tuple[str, ...] = CANDIDATES
    product_dtype: str = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An attention that can run, its mesh, its plan and its estimate."""

    name: str
    shape: MeshShape
    plan: AttentionPlan
    estimate: Estimate
    chip: Chip

    @property
    def blocks(self) -> str:
        """Returns the block sizes of the kernel in words."""
        return describe_blocks(self.plan)

    def describe(self) -> str:
        """Returns the choice and the parts of its estimate in one phrase."""
        parts = self.estimate
        return (
            f"{self.name} with ulysses {self.shape.ulysses} x ring {self.shape.ring} and "
            f"{self.blocks}: "
            f"{parts.total:.3f} s/step (kernels {parts.kernels:.3f}, other work "
            f"{parts.outside:.3f}, collectives {parts.copies:.3f} in copies and "
            f"{parts.exposed_collectives:.3f} exposed)"
        )


def choices(task: Task, *, data: int, context: int, fsdp: int = 1, tensor: int = 1) -> list[Choice]:
    """Returns every attention that can run on a mesh of these sizes: the best, then by estimate.

    The best is the one with the fewest ring hops among those that tie with the lowest estimate.
    """
    shapes = [
        MeshShape(data=data, fsdp=fsdp, ring=context // ulysses, ulysses=ulysses, tensor=tensor)
        for ulysses in range(1, context + 1)
        if context % ulysses == 0
    ]
    found = [choice for shape in shapes for choice in _of_split(task, shape)]
    if not found:
        return []
    found.sort(key=lambda choice: (round(choice.estimate.total, 4), choice.shape.ring))
    near = [c for c in found if c.estimate.total <= TIE * found[0].estimate.total]
    best = min(near, key=lambda choice: choice.shape.ring)
    return [best, *(choice for choice in found if choice is not best)]


def explain(found: Sequence[Choice]) -> str:
    """Returns a paragraph on the best choice and the runner-up."""
    best, rest = found[0], [choice for choice in found[1:] if choice.shape != found[0].shape]
    words = f"attention auto: {best.describe()}"
    if rest:
        slower = rest[0].estimate.total / best.estimate.total - 1
        words += f". Next is {rest[0].describe()}, {slower:+.1%}"
        if slower <= 0:  # a tie, which `choices` decides
            words += ", too close to tell and with more ring hops"
    return f"{words}. {clock_words(best.chip)} These are estimates; preflight_wan compiles."


def clock_words(chip: Chip) -> str:
    """Returns the clock of estimates, and how much more they are without a pinned one."""
    words = f"Clock: {chip.clock}"
    slower = chip.unpinned()
    if slower is None or chip.clock_share != 1.0:
        return f"{words}."
    return f"{words}; not pinned, work on the core takes {1 / slower.clock_share - 1:.0%} longer."


def _of_split(task: Task, shape: MeshShape) -> Iterator[Choice]:
    for name in task.names:
        if name != task.names[0] and shape.ring == 1:
            continue  # a ring of one is the same program under every name
        mesh = build_mesh(shape, devices=task.devices)
        text = replace(task.problem, kv_len=task.text_length)
        try:
            plan = plan_attention(name, task.problem, mesh, task.options)
            plan_cross_attention(name, text, mesh, task.options)
        except UnsupportedAttention:
            continue
        links = network(task.topology, mesh.devices.flatten().tolist())
        estimate = estimate_step(
            plan, task.flops, layers=task.layers, network=links, shares=task.shares
        )
        yield Choice(name=name, shape=shape, plan=plan, estimate=estimate, chip=task.topology.chip)


def describe_blocks(plan: AttentionPlan) -> str:
    """Returns the block sizes of a plan's kernel, and the share of unpadded queries."""
    tile = plan.backend.tile
    if tile is None:
        return "no blocks"
    sizes, problem, use = plan.local, plan.problem, kernel_calls(plan)
    shards = plan.padded_q_len // sizes.q_len
    full = problem.q_len / (use.passes * tile.q_tile * shards)
    return f"blocks of {tile.block_q} queries ({full:.1%} full) x {tile.block_kv} keys"
