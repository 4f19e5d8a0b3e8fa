"""The step-time model against steps that were measured and published, for WAN 2.2 A14B on TPU7x.

The measured program is the public maxdiffusion (August 2026), 1280x720, 81 frames, bfloat16, on
eight devices (tpu7x:2x2x1). What the model needs of it was compiled with libtpu 0.0.42: bundles of
its kernels with the LP scheduler, and XLA's cycles of a layer outside of them at CP8. Its cycles at
CP4 are not known; they are what one of the measured steps (FITTED) leaves, and are used for the
others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from maxdiffusion.preflight.chips import CHIPS
from maxdiffusion.preflight.collectives import Collective
from maxdiffusion.preflight.kernels import KernelFigures, KernelUse, Tile
from maxdiffusion.preflight.links import grid_network
from maxdiffusion.preflight.topology import read_topology

TOKENS, HEADS, WIDTH, LAYERS = 75_600, 40, 5120, 40
TOPOLOGY = read_topology("tpu7x:2x2x1")
CP8_CYCLES = 39_000_000


@dataclass(frozen=True, kw_only=True)
class PublishedStep:
    """A measured step: how devices shared it, its kernel, and the seconds that were measured.

    `cycles` are those of a layer outside kernels; None takes what the FITTED step leaves.
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

    @property
    def use(self) -> KernelUse:
        """How the kernel is called; every device has one row of the batch."""
        return KernelUse(
            pairs=HEADS // self.ulysses,
            calls=self.ring,
            q_len=TOKENS // self.ring,
            kv_len=TOKENS // self.ring,
            tile=self.tile,
        )

    @property
    def kernel_seconds(self) -> float:
        """Seconds of attention kernels in a step."""
        return LAYERS * TOPOLOGY.chip.seconds(self.use.cycles(self.kernel))

    @property
    def exchange_seconds(self) -> float:
        """Seconds of the four all-to-alls of every layer; ring hops run under kernels."""
        if self.ulysses == 1:
            return 0.0
        context = self.ring * self.ulysses
        first = range(0, self.data * context, self.ulysses)
        all_to_all = Collective(
            name="all-to-all",
            kind="all-to-all",
            bytes=TOKENS * WIDTH * 2 // context,
            groups=tuple(tuple(range(start, start + self.ulysses)) for start in first),
            axes=("ulysses",),
            pairs=(),
            times=4 * LAYERS,
            meanwhile=None,
            operation="",
        )
        return all_to_all.times * grid_network(TOPOLOGY).seconds(all_to_all)

    @property
    def outside_seconds(self) -> float:
        """Seconds outside of kernels."""
        if self.cycles is None:
            fitted = FITTED
            return fitted.measured - fitted.kernel_seconds - fitted.exchange_seconds
        return LAYERS * CHIPS["tpu7x"].seconds(self.cycles)

    @property
    def predicted(self) -> float:
        """Seconds that the model gives."""
        return self.kernel_seconds + self.outside_seconds + self.exchange_seconds

    @property
    def error(self) -> float:
        """How far the model is off, as a share of what was measured."""
        return self.predicted / self.measured - 1.0


def _kernel(main_loop: int, bound: int, ragged: int) -> KernelFigures:
    """A kernel of which only the main loop and its masked form are known."""
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
    """A tile that was not compiled, at the share of the MXU bound that its neighbour reaches."""
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
)


def calibration_table() -> str:
    """The steps, predicted and measured, as a table of Markdown."""
    lines = [
        "| step on tpu7x:2x2x1 | kernels | outside | exchange | predicted | measured | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for step in STEPS:
        error = "fitted" if step is FITTED else f"{step.error:+.1%}"
        parts = (step.kernel_seconds, step.outside_seconds, step.exchange_seconds, step.predicted)
        figures = " | ".join(f"{seconds:.3f}" for seconds in parts)
        lines.append(f"| {step.name} ({step.source}) | {figures} | {step.measured:.3f} | {error} |")
    return "\n".join(lines)
