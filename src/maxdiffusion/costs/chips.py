"""Peak figures of each TPU with their sources, and the slices (topologies) it comes in.

Figures are per jax device: TPU7x has two devices a chip. This file imports no jax, so that a
command can read a topology before it sets jax's environment.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.kernels.tpu import CHIP_NAMES, MXU_DEPTH, VMEM_BYTES

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of TPU; every figure is of one jax device unless its name says `chip` or `link`.

    `usable_hbm_bytes` is the limit that libtpu 0.0.42 sets. `flops_per_cycle` counts bfloat16.
    `mxu_depth` is the length of a dot product that fills the MXU. `link_bandwidth` is one way over
    one link between neighbouring chips, and `core_links` times that between devices of a chip.
    A side of the torus has a wraparound link from `wrap_from` chips on. `clock_share` is the clock
    that times are computed at, as a share of that of the stated peak; `unpinned_share` is the one
    that a job gets under power management, None where no measurement is known. `double_rate` has
    the 8-bit dtypes that the MXU multiplies twice as fast as bfloat16.
    """

    name: str
    title: str
    bf16_flops: float
    hbm_bytes: int
    usable_hbm_bytes: int
    hbm_bandwidth: float
    flops_per_cycle: int
    mxu_depth: int
    link_bandwidth: float
    wrap_from: int
    sources: tuple[str, ...]
    devices_per_chip: int = 1
    core_links: int = 1
    double_rate: tuple[str, ...] = ()
    unpinned_share: float | None = None
    clock_share: float = 1.0

    @property
    def vmem_bytes(self) -> int:
        """Returns the size of VMEM."""
        return VMEM_BYTES[self.name]

    @property
    def core_bandwidth(self) -> float:
        """Returns the bandwidth one way between the two devices of a chip."""
        return self.core_links * self.link_bandwidth

    @property
    def clock_hz(self) -> float:
        """Returns the cycles per second of this chip; at share 1 the stated peak is reached."""
        return self.clock_share * self.bf16_flops / self.flops_per_cycle

    @property
    def flops_at_clock(self) -> float:
        """Returns the bfloat16 peak at this clock."""
        return self.clock_share * self.bf16_flops

    @property
    def clock(self) -> str:
        """Returns the clock in words, for every prediction."""
        if self.clock_share != 1.0:
            return f"{self.clock_hz / 1e9:.3f} GHz, not pinned (effective, as published)"
        return f"{self.clock_hz / 1e9:.3f} GHz, the clock of the stated peak"

    def unpinned(self) -> "Chip | None":
        """Returns the chip at its effective clock under power management; None if not known."""
        if self.unpinned_share is None:
            return None
        return replace(self, clock_share=self.unpinned_share)

    def at_peak(self) -> "Chip":
        """Returns the chip at the clock of the stated peak."""
        return replace(self, clock_share=1.0)

    def as_run(self, *, pinned: bool) -> "Chip":
        """Returns the chip at the clock that a job gets, by whether its flags pin the clock.

        Where no unpinned measurement is known, that is the clock of the stated peak.
        """
        return self if pinned else self.unpinned() or self

    def seconds(self, cycles: float) -> float:
        """Returns the duration of `cycles`."""
        return cycles / self.clock_hz

    def rate(self, dtype: str) -> float:
        """Returns the speed of products of this dtype, as a multiple of that of bfloat16."""
        return 2.0 if dtype in self.double_rate else 1.0

    def score_share(self, head_dim: int) -> float:
        """Returns the share of peak that attention can reach: Q.K^T fills head_dim MXU rows.

        Half of the products are Q.K^T, with head_dim as depth. The other half are P.V, whose depth
        (keys) always fills the MXU.
        """
        filled = min(1.0, head_dim / self.mxu_depth)
        return 2.0 / (1.0 / filled + 1.0)


_CLOUD = "https://docs.cloud.google.com/tpu/docs"
# Two MXUs of 256x256, two rows a cycle each, two operations a cell.
_TWO_LARGE_MXUS = 2 * 256 * 256 * 2 * 2
# Four MXUs of 128x128, one row a cycle each, two operations a cell.
_FOUR_SMALL_MXUS = 4 * 128 * 128 * 2

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="tpu7x",
            title="TPU7x (Ironwood)",
            devices_per_chip=2,
            bf16_flops=1153.5e12,
            hbm_bytes=96 * GIB,
            usable_hbm_bytes=int(94.75 * GIB),
            hbm_bandwidth=3690e9,
            flops_per_cycle=_TWO_LARGE_MXUS,
            mxu_depth=MXU_DEPTH["tpu7x"],
            link_bandwidth=100e9,
            core_links=6,
            wrap_from=4,
            sources=(
                f"{_CLOUD}/tpu7x: per chip 2307 TFLOP/s bf16, 4614 fp8, 192 GiB, 7380 GB/s, "
                "1200 GB/s over 6 links both ways; two devices a chip",
                "int8 on tpu7x: not stated; public measurements reach 31 % of 4614",
                "core to core: six times one link, as the vendor states",
                "clock without pinning: 40 steps of WAN 2.2 in 112.8 s, pinned 99.4 s (public "
                "maxdiffusion PR 479, the same program); other work may get another clock",
            ),
            double_rate=("float8_e4m3fn",),
            unpinned_share=99.4 / 112.8,
        ),
        Chip(
            name="v6e",
            title="TPU v6e (Trillium)",
            bf16_flops=918e12,
            hbm_bytes=32 * GIB,
            usable_hbm_bytes=int(31.25 * GIB),
            hbm_bandwidth=1638e9,
            flops_per_cycle=_TWO_LARGE_MXUS,
            mxu_depth=MXU_DEPTH["v6e"],
            link_bandwidth=100e9,
            wrap_from=16,
            sources=(
                f"{_CLOUD}/v6e: 918 TFLOP/s bf16, 1836 int8, 32 GB, 1638 GB/s, "
                "800 GB/s over 4 links",
            ),
            double_rate=("int8",),
        ),
        Chip(
            name="v5p",
            title="TPU v5p",
            bf16_flops=459e12,
            hbm_bytes=95 * GIB,
            usable_hbm_bytes=int(95.74 * GIB),  # more than the published 95 GB, in whole GiB
            hbm_bandwidth=2765e9,
            flops_per_cycle=2 * _FOUR_SMALL_MXUS,
            mxu_depth=MXU_DEPTH["v5p"],
            link_bandwidth=100e9,
            wrap_from=4,
            sources=(
                f"{_CLOUD}/v5p: 459 TFLOP/s bf16, 918 int8, 95 GB, 2765 GB/s, "
                "1200 GB/s over 6 links",
            ),
            double_rate=("int8",),
        ),
        Chip(
            name="v5e",
            title="TPU v5e",
            bf16_flops=197e12,
            hbm_bytes=16 * GIB,
            usable_hbm_bytes=int(15.75 * GIB),
            hbm_bandwidth=819e9,
            flops_per_cycle=_FOUR_SMALL_MXUS,
            mxu_depth=MXU_DEPTH["v5e"],
            link_bandwidth=50e9,
            wrap_from=16,
            sources=(
                f"{_CLOUD}/v5e: 197 TFLOP/s bf16, 393 int8, 16 GB, 819 GB/s, 400 GB/s over 4 links",
            ),
            double_rate=("int8",),
        ),
    )
}


def multiplies_faster(device_kind: str, dtype: str) -> bool:
    """Returns whether devices of a kind multiply this 8-bit dtype faster than bfloat16."""
    chip = CHIP_NAMES.get(device_kind.lower())
    return chip is not None and dtype in CHIPS[chip].double_rate


# Chips along each side of the slices that libtpu compiles for.
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8")
_SQUARES = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
GRIDS: Mapping[str, tuple[str, ...]] = {
    "tpu7x": _CUBES,
    "v6e": _SQUARES,
    "v5p": _CUBES,
    "v5e": _SQUARES,
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A slice of TPUs: the kind of chip and the number of chips along each side of the grid."""

    chip: Chip
    sides: tuple[int, ...]

    @property
    def name(self) -> str:
        """Returns the name that libtpu knows, such as tpu7x:2x2x1."""
        return f"{self.chip.name}:{'x'.join(map(str, self.sides))}"

    @property
    def chips(self) -> int:
        """Returns the number of chips."""
        return math.prod(self.sides)

    @property
    def device_count(self) -> int:
        """Returns the number of jax devices."""
        return self.chips * self.chip.devices_per_chip

    def describe(self) -> str:
        """Returns one line for a report."""
        return f"{self.name}: {self.chips} chips, {self.device_count} devices"


def read_topology(name: str) -> Topology:
    """Returns the topology of that name; refuses an unknown one and lists the known ones."""
    chip, _, grid = name.partition(":")
    if chip not in GRIDS:
        raise _unknown(name, f"the chips are {', '.join(GRIDS)}", topology_names())
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", grid) or grid not in GRIDS[chip]:
        known = ", ".join(f"{chip}:{sides}" for sides in GRIDS[chip])
        raise _unknown(name, f"{chip} comes in grids of {', '.join(GRIDS[chip])}", known)
    return Topology(chip=CHIPS[chip], sides=tuple(int(side) for side in grid.split("x")))


def topology_of_size(chip: Chip, devices: int) -> Topology | None:
    """Returns the topology of this chip with that number of devices, or None."""
    for grid in GRIDS[chip.name]:
        topology = read_topology(f"{chip.name}:{grid}")
        if topology.device_count == devices:
            return topology
    return None


def topology_under(chip: Chip, devices: Sequence[Any]) -> Topology:
    """Returns the grid of chips that real or described devices occupy."""
    furthest = [max(device.coords[axis] for device in devices) for axis in range(3)]
    return Topology(chip=chip, sides=tuple(coordinate + 1 for coordinate in furthest))


def topology_names() -> str:
    """Returns every known topology in one line, for an error message."""
    return "; ".join(f"{chip}:{{{','.join(grids)}}}" for chip, grids in GRIDS.items())


def _unknown(name: str, rule: str, known: str) -> ProblemsFound:
    problem = Problem(name="topology", value=name, rule=rule, remedy=f"Use one of {known}")
    return ProblemsFound([problem])
