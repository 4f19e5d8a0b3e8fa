"""Calibration: compares the step-time model with published measurements of WAN 2.2 A14B.

The measured program is the public maxdiffusion (August 2026): 1280x720, 81 frames, bfloat16, eight
devices (tpu7x:2x2x1 or v6e:2x4). The inputs of the model were compiled with libtpu 0.0.42 for
tpu7x: kernel bundles with the LP scheduler, and XLA's cycles of a layer outside of kernels at CP8.
The cycles at CP4 are not known. They are fitted to one measured step (FITTED) and used for all
other CP4 steps, on both chips. Steps of a clock that is not stated are computed at the peak clock.

The steps of September 2026 are runs of later code, whose recipe is not stated in full. They are
computed with the inputs of August, except for two parts that the public project timed by themselves
on both chips or one: text attention, by XLA and by a kernel that the "full stack" has, and the
transpositions that its fused norm and RoPE pass leaves out. They are taken as measured, at any
clock. What that code saves elsewhere is in the errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from maxdiffusion.attention.backends.base import Tile
from maxdiffusion.costs.chips import Chip, Topology, read_topology
from maxdiffusion.costs.links import DeviceCollective, grid_network
from maxdiffusion.costs.step_time import KernelCalls, KernelFigures

TOKENS, HEADS, WIDTH, LAYERS = 75_600, 40, 5120, 40
TOPOLOGY = read_topology("tpu7x:2x2x1")
V6E = read_topology("v6e:2x4")
CP8_CYCLES = 39_000_000
PINNED, UNPINNED, NOT_STATED = "pinned", "not pinned", "not stated"
# Seconds of text attention in a layer at CP4 (18,900 queries, 512 keys, 40 heads), as measured by
# the public project (unmerged kernels/cross_attention_pallas.py); the XLA path is that of August.
XLA_TEXT = {"tpu7x": 1.81e-3, "v6e": 3.94e-3}
KERNEL_TEXT = {"tpu7x": 0.487e-3, "v6e": 0.512e-3}
# Seconds of a layer that transposing heads took (1.75 s of 40 steps; unmerged
# kernels/fused_rmsnorm_rope_pallas.py). No figure of v6e is published.
TRANSPOSITIONS = {"tpu7x": 1.75 / 40 / LAYERS, "v6e": 0.0}


@dataclass(frozen=True, kw_only=True)
class PublishedStep:
    """A measured step: its mesh, its kernel and the measured seconds.

    `cycles` are those of a layer outside of kernels; None takes those of the FITTED step, without
    its text attention, and adds the text attention of this step as it was measured.
    """

    name: str
    source: str
    data: int
    ring: int
    ulysses: int
    kernel: KernelFigures
    tile: Tile
    cycles: int | None
    measured: float
    topology: Topology = TOPOLOGY
    clock: str = NOT_STATED
    full_stack: bool = False

    @property
    def chip(self) -> Chip:
        """Returns the chip at the clock of the measurement."""
        slower = self.topology.chip.unpinned() if self.clock == UNPINNED else None
        return slower or self.topology.chip

    @property
    def calls(self) -> KernelCalls:
        """Returns the kernel calls of one attention; every device has one batch row."""
        return KernelCalls(
            pairs=HEADS // self.ulysses,
            calls=self.ring,
            q_len=TOKENS // self.ring,
            kv_len=TOKENS // self.ring,
            tile=self.tile,
        )

    @property
    def kernel_seconds(self) -> float:
        """Returns the seconds of attention kernels in a step."""
        return LAYERS * self.chip.seconds(self.calls.cycles(self.kernel))

    @property
    def collective_seconds(self) -> float:
        """Returns the seconds of the four all-to-alls of every layer; ring hops are overlapped."""
        if self.ulysses == 1:
            return 0.0
        context = self.ring * self.ulysses
        first = range(0, self.data * context, self.ulysses)
        all_to_all = DeviceCollective(
            kind="all-to-all",
            bytes=TOKENS * WIDTH * 2 // context,
            groups=tuple(tuple(range(start, start + self.ulysses)) for start in first),
            times=4 * LAYERS,
        )
        return all_to_all.times * grid_network(self.topology).seconds(all_to_all)

    @property
    def outside_seconds(self) -> float:
        """Returns the seconds of everything outside of kernels and collectives."""
        if self.cycles is not None:
            return LAYERS * self.chip.seconds(self.cycles)
        fitted = FITTED
        seconds = fitted.measured - fitted.kernel_seconds - fitted.collective_seconds
        seconds -= fitted.timed_seconds
        return seconds * fitted.chip.clock_hz / self.chip.clock_hz + self.timed_seconds

    @property
    def timed_seconds(self) -> float:
        """Returns the seconds of the parts that were timed by themselves, less those left out."""
        chip = self.topology.chip.name
        if self.full_stack:
            return LAYERS * (KERNEL_TEXT[chip] - TRANSPOSITIONS[chip])
        return LAYERS * XLA_TEXT[chip]

    @property
    def predicted(self) -> float:
        """Returns the seconds that the model predicts."""
        return self.kernel_seconds + self.outside_seconds + self.collective_seconds

    @property
    def error(self) -> float:
        """Returns the relative error of the prediction."""
        return self.predicted / self.measured - 1.0


def _kernel(main_loop: int, bound: int, ragged: int) -> KernelFigures:
    """Returns a kernel of which only the main loop and its masked form are known."""
    return KernelFigures(
        name="public",
        purpose="self-attention",
        main_loop_bundles=main_loop,
        mxu_bound_bundles=bound,
        ragged_cycles=ragged,
        step_bundles=0,
        q_block_bundles=0,
        spill_stores=0,
        spill_loads=0,
        vmem_bytes=0,
        vmem_limit_bytes=0,
    )


def _scaled(block_q: int, block_kv: int, share: float) -> tuple[KernelFigures, Tile]:
    """Returns a tile that was not compiled, at the MXU share of a similar one."""
    bound = block_q * block_kv * 3 // 2048
    bundles = round(bound / share)
    return _kernel(bundles, bound, bundles), Tile(
        block_q=block_q, block_kv=block_kv, q_tile=block_q
    )


ONLINE = (_kernel(14_104, 12_672, 13_187), Tile(block_q=8448, block_kv=1024, q_tile=8448))
ONLINE_RING = _scaled(9472, 1024, 0.898)
FIXED_M_RING = _scaled(6400, 2048, 0.978)


def _step(
    name: str,
    source: str,
    split: tuple[int, int, int],
    kernel: tuple[KernelFigures, Tile],
    *,
    cycles: int | None,
    measured: float,
    topology: Topology = TOPOLOGY,
    clock: str = NOT_STATED,
    full_stack: bool = False,
) -> PublishedStep:
    data, ring, ulysses = split
    return PublishedStep(
        name=name,
        source=source,
        data=data,
        ring=ring,
        ulysses=ulysses,
        kernel=kernel[0],
        tile=kernel[1],
        cycles=cycles,
        measured=measured,
        topology=topology,
        clock=clock,
        full_stack=full_stack,
    )


def _september(
    name: str,
    source: str,
    split: tuple[int, int, int],
    *,
    measured: float,
    topology: Topology,
    clock: str,
    full_stack: bool,
) -> PublishedStep:
    """Returns a step of September 2026: 40 steps of denoising took `measured` seconds."""
    return _step(
        name,
        source,
        split,
        FIXED_M_RING,
        cycles=None,
        measured=measured / 40,
        topology=topology,
        clock=clock,
        full_stack=full_stack,
    )


FITTED = _step(
    "2D ring, dp2-cp4 (U2R2)", "PR 430", (2, 2, 2), ONLINE_RING, cycles=None, measured=2.74
)
STEPS: Sequence[PublishedStep] = (
    _step("Ulysses, dp2-cp4 (U4)", "PR 430", (2, 1, 4), ONLINE, cycles=None, measured=3.06),
    FITTED,
    _step(
        "2D ring, fixed-m, dp2-cp4 (U2R2)",
        "PR 452",
        (2, 2, 2),
        FIXED_M_RING,
        cycles=None,
        measured=2.633,
    ),
    _step(
        "2D ring, cp8 (U4R2), no guidance",
        "PR 430",
        (1, 2, 4),
        ONLINE_RING,
        cycles=CP8_CYCLES,
        measured=1.595,
    ),
    _step(
        "Ulysses, cp8 (U8), no guidance",
        "PR 430",
        (1, 1, 8),
        ONLINE,
        cycles=CP8_CYCLES,
        measured=1.590,
    ),
    *(
        _september(
            *(name, source, (2, 2, 2)),
            measured=total,
            topology=TOPOLOGY,
            clock=clock,
            full_stack=full_stack,
        )
        for name, source, total, clock, full_stack in (
            ("main 1bc54811", "comment, Sept. 2026", 119.0, UNPINNED, False),
            ("launcher 0a2db3a0", "PR 479", 112.8, UNPINNED, False),
            ("launcher 0a2db3a0", "PR 479", 99.4, PINNED, False),
            ("full stack", "unmerged, Sept. 2026", 93.2, PINNED, True),
        )
    ),
    *(
        _september(
            *(name, source, (2, 1, 4)),
            measured=total,
            topology=V6E,
            clock=NOT_STATED,
            full_stack=full_stack,
        )
        for name, source, total, full_stack in (
            ("main a4ff3aec, fixed-m", "comment, Sept. 2026", 153.3, False),
            ("launcher, fixed-m per q block (U4)", "PR 479", 136.0, False),
            ("full stack", "unmerged, Sept. 2026", 122.2, True),
        )
    ),
)


def calibration_table() -> str:
    """Returns predictions and measurements as a Markdown table."""
    lines = [
        "| step | slice | clock | kernels | outside | collectives | predicted | measured | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for step in STEPS:
        error = "fitted" if step is FITTED else f"{step.error:+.1%}"
        parts = (step.kernel_seconds, step.outside_seconds, step.collective_seconds, step.predicted)
        figures = " | ".join(f"{seconds:.3f}" for seconds in parts)
        where = f"{step.topology.name} | {step.clock}"
        lines.append(
            f"| {step.name} ({step.source}) | {where} | {figures} | {step.measured:.3f} | {error} |"
        )
    return "\n".join(lines)
