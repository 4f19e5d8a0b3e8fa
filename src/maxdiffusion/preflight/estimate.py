"""Seconds of a step without compiling anything: for planning, and for scans over many devices.

Two shares stand for what a compiler would find: how much of the MXU bound the attention kernel
reaches, and how much of peak everything outside of kernels does. Exchanges are routed over links.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jax.sharding import Mesh

from maxdiffusion.attention import AttentionPlan
from maxdiffusion.attention.exchanges import (
    BidirectionalRing,
    ByXla,
    Exchange,
    Gather,
    Ring,
    Stay,
    Ulysses,
    UlyssesPair,
)
from maxdiffusion.attention.on_device.fp8 import Fp8FlashKernel
from maxdiffusion.preflight.chips import Chip
from maxdiffusion.preflight.collectives import Collective
from maxdiffusion.preflight.flops import ForwardFlops
from maxdiffusion.preflight.kernels import tile_of
from maxdiffusion.preflight.links import Network


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What compiled programs reach: of the MXU bound in kernels, of peak outside of them."""

    kernel: float
    outside: float


# Measured with WAN 2.2 A14B at 720p on tpu7x; docs/performance.md has the figures.
SHARES = Shares(kernel=0.97, outside=0.815)
# What XLA makes of attention without a kernel: scores go through HBM.
DENSE_SHARE = 0.3
# How much faster our kernel is with Q.K^T in float8, as compiled for tpu7x.
FP8_SPEED = 1.38
# HBM traffic around an all-to-all, in bytes for each element of q that a device holds: values on
# their way in and the output on its way back are read and written once more, the rest is part of
# norms and rotations.
ALL_TO_ALL_BYTES = 2
# What a kernel call and the exchanges of its heads cost by being one more: an assumption, so that
# heads are not cut into groups for nothing.
CALL_SECONDS = 10e-6


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The parts of a step, in seconds."""

    kernels: float
    outside: float
    exchange_copies: float
    exposed_exchange: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.kernels + self.outside + self.exchange_copies + self.exposed_exchange


def estimate_step(
    plan: AttentionPlan,
    flops: ForwardFlops,
    layers: int,
    network: Network,
    shares: Shares = SHARES,
) -> Estimate:
    """The step whose self-attention runs by `plan`; `flops` are those of the whole batch."""
    chip, devices = network.topology.chip, plan.mesh.size
    kernel = kernel_seconds(plan, chip, shares)
    outside = (flops.total - flops.self_attention) / (devices * chip.bf16_flops * shares.outside)
    calls = max(1, plan.padded_kv_len // plan.kernel.site.sizes.kv_len)
    groups = len(plan.kernel.site.sizes.heads)
    return Estimate(
        kernels=layers * (kernel + calls * groups * CALL_SECONDS),
        outside=outside,
        exchange_copies=layers * copied_bytes(plan) / chip.hbm_bandwidth,
        exposed_exchange=layers * exposed_exchange(plan, network, kernel / calls),
    )


def copied_bytes(plan: AttentionPlan) -> float:
    """HBM bytes that the exchanges of one attention cost beside the links."""
    sizes = plan.kernel.site.sizes
    elements = sizes.batch * sum(sizes.heads) * sizes.q_len * plan.problem.head_dim
    all_to_alls = 4 if isinstance(plan.exchange, Ulysses) else 0
    return elements * all_to_alls * ALL_TO_ALL_BYTES


def kernel_seconds(plan: AttentionPlan, chip: Chip, shares: Shares) -> float:
    """Seconds of the kernel calls of one attention, with queries filled up to whole tiles."""
    sizes, tile = plan.kernel.site.sizes, tile_of(plan.kernel)
    q_len = sizes.q_len if tile is None else -(-sizes.q_len // tile.q_tile) * tile.q_tile
    pairs = sizes.batch * sum(sizes.heads)
    flops = 4.0 * pairs * q_len * plan.padded_kv_len * plan.problem.head_dim
    share = DENSE_SHARE if tile is None else shares.kernel
    if isinstance(plan.kernel, Fp8FlashKernel):
        share *= FP8_SPEED
    return flops / (chip.bf16_flops * chip.score_share(plan.problem.head_dim) * share)


def exposed_exchange(plan: AttentionPlan, network: Network, call_seconds: float) -> float:
    """Seconds of one attention's exchanges that no kernel call hides."""
    exposed = 0.0
    for collective, hidden_by in exchanges(plan):
        seconds = network.seconds(collective)
        exposed += collective.times * max(0.0, seconds - hidden_by * call_seconds)
    return exposed


def exchanges(plan: AttentionPlan) -> Iterator[tuple[Collective, float]]:
    """The exchanges of one attention, each with how many kernel calls run meanwhile."""
    yield from _exchanges(plan.exchange, plan)


def _exchanges(
    exchange: Exchange | ByXla, plan: AttentionPlan
) -> Iterator[tuple[Collective, float]]:
    geometry, mesh = plan.geometry, plan.mesh
    sizes = plan.kernel.site.sizes
    width = plan.problem.head_dim * plan.problem.dtype.itemsize
    # What a device holds of one of q, k and v: the same bytes before and after an all-to-all.
    local = sizes.batch * sum(sizes.heads) * sizes.q_len * width
    if isinstance(exchange, UlyssesPair):
        groups = _groups(mesh, exchange.axes)
        # Of keys and values the second to go waits for nobody: nothing is left to run meanwhile.
        yield _collective("all-to-all", local, groups, times=1), 0.0
        # Queries and outputs go under a call for the tokens of this device, half of all queries.
        pairs = tuple(_neighbours(groups, wraps=True))
        yield _collective("collective-permute", local // 2, (), pairs=pairs, times=2), 0.5
        yield from _exchanges(exchange.inner, plan)
    elif isinstance(exchange, Ulysses):
        groups = _groups(mesh, exchange.axes)
        # XLA keeps one all-to-all in flight: half of the exchanges find a product or a kernel to
        # run under, however many groups of heads there are (2 of 4, 4 of 8, 8 of 16 in compiled
        # layers).
        yield _collective("all-to-all", local // 2, groups, times=4), 0.0
        yield from _exchanges(exchange.inner, plan)
    elif isinstance(exchange, Ring | BidirectionalRing):
        keys = local * geometry.padded_kv_len // geometry.padded_q_len
        wraps = isinstance(exchange, Ring)
        pairs = tuple(_neighbours(_groups(mesh, exchange.axes), wraps=wraps))
        # k and v of a hop go together, under one call.
        hop = _collective(
            "collective-permute", 2 * keys, (), pairs=pairs, times=exchange.degree - 1
        )
        yield hop, 1.0
    elif isinstance(exchange, Gather) or (
        isinstance(exchange, ByXla) and geometry.shape.context > 1
    ):
        axes = exchange.axes if isinstance(exchange, Gather) else ("ring", "ulysses")
        whole = sizes.batch * sum(sizes.heads) * geometry.padded_kv_len * width
        yield _collective("all-gather", whole, _groups(mesh, axes), times=2), 0.0
    else:
        assert isinstance(exchange, Stay | ByXla), exchange


def _collective(
    kind: str,
    size: int,
    groups: tuple[tuple[int, ...], ...],
    *,
    pairs: tuple[tuple[int, int], ...] = (),
    times: int,
) -> Collective:
    return Collective(
        name=kind,
        kind=kind,
        bytes=size,
        groups=groups,
        axes=(),
        pairs=pairs,
        times=times,
        meanwhile=None,
        operation="",
    )


def _groups(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Devices that differ along `axes` only, by their number in the mesh."""
    names = list(mesh.axis_names)
    together = [names.index(axis) for axis in axes]
    apart = [index for index in range(len(names)) if index not in together]
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape).transpose([*apart, *together])
    size = int(np.prod([mesh.shape[axis] for axis in axes]))
    return tuple(tuple(row) for row in numbers.reshape(-1, size).tolist())


def _neighbours(groups: tuple[tuple[int, ...], ...], *, wraps: bool) -> Iterator[tuple[int, int]]:
    """Who sends to whom in a hop: round a ring, or both ways along a line."""
    for group in groups:
        if wraps:
            yield from zip(group, (*group[1:], group[0]), strict=True)
        else:
            for here, there in pairwise(group):
                yield from ((here, there), (there, here))
