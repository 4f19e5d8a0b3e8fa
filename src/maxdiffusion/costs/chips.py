"""What each TPU can do, per device as jax counts them, with where the figures come from."""

from dataclasses import dataclass

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of TPU; every figure is of one jax device unless its name says `chip` or `link`.

    `usable_hbm_bytes` is what libtpu 0.0.42 lets a program have. `flops_per_cycle` counts bfloat16;
    `mxu_depth` is the length of a dot product that fills the MXU. `link_bandwidth` is one way over
    one link between neighbouring chips, `core_bandwidth` one way between the two devices of a chip.
    `wrap_from` is the side of a torus from which its ends are joined.
    """

    name: str
    title: str
    devices_per_chip: int
    bf16_flops: float
    fp8_flops: float
    hbm_bytes: int
    usable_hbm_bytes: int
    hbm_bandwidth: float
    vmem_bytes: int
    flops_per_cycle: int
    mxu_depth: int
    link_bandwidth: float
    core_bandwidth: float
    wrap_from: int
    sources: tuple[str, ...]

    @property
    def clock_hz(self) -> float:
        """Cycles per second at which the stated peak is reached."""
        return self.bf16_flops / self.flops_per_cycle

    def seconds(self, cycles: float) -> float:
        """The time of so many cycles."""
        return cycles / self.clock_hz

    def score_share(self, head_dim: int) -> float:
        """The share of peak that attention can reach: Q.K^T fills head_dim rows of the MXU.

        Half of attention's products are Q.K^T, with head_dim as depth, and half P.V, whose depth
        (keys) fills the MXU whatever head_dim is.
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
            fp8_flops=2307e12,
            hbm_bytes=96 * GIB,
            usable_hbm_bytes=int(94.75 * GIB),
            hbm_bandwidth=3690e9,
            vmem_bytes=64 * MIB,
            flops_per_cycle=_TWO_LARGE_MXUS,
            mxu_depth=256,
            link_bandwidth=100e9,
            core_bandwidth=600e9,
            wrap_from=4,
            sources=(
                f"{_CLOUD}/tpu7x: per chip 2307 TFLOP/s bf16, 4614 fp8, 192 GiB, 7380 GB/s, "
                "1200 GB/s over 6 links both ways; two devices a chip",
                "core to core: six times one link, as the vendor states",
            ),
        ),
        Chip(
            name="v6e",
            title="TPU v6e (Trillium)",
            devices_per_chip=1,
            bf16_flops=918e12,
            fp8_flops=918e12,
            hbm_bytes=32 * GIB,
            usable_hbm_bytes=int(31.25 * GIB),
            hbm_bandwidth=1638e9,
            vmem_bytes=128 * MIB,
            flops_per_cycle=_TWO_LARGE_MXUS,
            mxu_depth=256,
            link_bandwidth=100e9,
            core_bandwidth=100e9,
            wrap_from=16,
            sources=(f"{_CLOUD}/v6e: 918 TFLOP/s bf16, 32 GB, 1638 GB/s, 800 GB/s over 4 links",),
        ),
        Chip(
            name="v5p",
            title="TPU v5p",
            devices_per_chip=1,
            bf16_flops=459e12,
            fp8_flops=459e12,
            hbm_bytes=95 * GIB,
            usable_hbm_bytes=int(95.74 * GIB),  # more than the published 95 GB, in whole GiB
            hbm_bandwidth=2765e9,
            vmem_bytes=64 * MIB,
            flops_per_cycle=2 * _FOUR_SMALL_MXUS,
            mxu_depth=128,
            link_bandwidth=100e9,
            core_bandwidth=100e9,
            wrap_from=4,
            sources=(f"{_CLOUD}/v5p: 459 TFLOP/s bf16, 95 GB, 2765 GB/s, 1200 GB/s over 6 links",),
        ),
        Chip(
            name="v5e",
            title="TPU v5e",
            devices_per_chip=1,
            bf16_flops=197e12,
            fp8_flops=197e12,
            hbm_bytes=16 * GIB,
            usable_hbm_bytes=int(15.75 * GIB),
            hbm_bandwidth=819e9,
            vmem_bytes=128 * MIB,
            flops_per_cycle=_FOUR_SMALL_MXUS,
            mxu_depth=128,
            link_bandwidth=50e9,
            core_bandwidth=50e9,
            wrap_from=16,
            sources=(f"{_CLOUD}/v5e: 197 TFLOP/s bf16, 16 GB, 819 GB/s, 400 GB/s over 4 links",),
        ),
    )
}
