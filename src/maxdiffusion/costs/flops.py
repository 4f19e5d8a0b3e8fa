"""Work of one transformer forward, part by part, and the least time that a slice needs for it."""

from dataclasses import dataclass, fields

from maxdiffusion.models.wan import WanTransformerConfig
from maxdiffusion.preflight.chips import Chip


@dataclass(frozen=True, kw_only=True)
class ForwardFlops:
    """Floating-point operations (two per multiply-add) of one forward of one expert.

    Keys and values of the text are computed once per prompt and expert, not per step, and are not
    part of it.
    """

    self_attention: float
    self_projections: float
    cross_attention: float
    cross_projections: float
    feed_forward: float
    embeddings_and_head: float

    @property
    def attention(self) -> float:
        """Scores and weighted sums, of tokens and of text."""
        return self.self_attention + self.cross_attention

    @property
    def dense(self) -> float:
        """Everything that is a product with a weight."""
        return self.total - self.attention

    @property
    def total(self) -> float:
        """All parts together."""
        return sum(getattr(self, part.name) for part in fields(self))

    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return {part.name: getattr(self, part.name) for part in fields(self)}


def forward_flops(
    config: WanTransformerConfig, *, tokens: int, text_length: int, batch: int = 1
) -> ForwardFlops:
    """The work of a forward over `batch` videos of `tokens` tokens each."""
    width, layers = config.model_dim, config.layers
    rows = batch * tokens
    patch = config.patch[0] * config.patch[1] * config.patch[2]
    in_and_out = patch * (config.in_channels + config.out_channels)
    time = config.freq_dim * width + width * width + width * 6 * width
    return ForwardFlops(
        self_attention=layers * 4.0 * rows * tokens * width,
        self_projections=layers * 8.0 * rows * width**2,
        cross_attention=layers * 4.0 * rows * text_length * width,
        cross_projections=layers * 4.0 * rows * width**2,
        feed_forward=layers * 4.0 * rows * width * config.ffn_dim,
        embeddings_and_head=2.0 * rows * in_and_out * width + 2.0 * batch * time,
    )


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The least seconds of a step on a number of devices, and the peak they are taken from.

    `spec` has every product at peak; `head_dim_aware` has attention at what the MXU can reach with
    heads of this width.
    """

    spec: float
    head_dim_aware: float
    peak_flops: float
    devices: int

    def mfu(self, flops: float, seconds: float) -> float:
        """The share of the devices' bfloat16 peak that `flops` in `seconds` are."""
        return flops / (seconds * self.devices * self.peak_flops)


def step_bounds(flops: ForwardFlops, chip: Chip, devices: int, head_dim: int) -> Bounds:
    """Bounds of a step whose forward (of the whole batch) is `flops`."""
    peak = chip.bf16_flops
    attention = flops.attention / chip.score_share(head_dim)
    return Bounds(
        spec=flops.total / (devices * peak),
        head_dim_aware=(attention + flops.dense) / (devices * peak),
        peak_flops=peak,
        devices=devices,
    )
