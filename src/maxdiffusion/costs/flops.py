"""FLOPs of one transformer forward, and the lower bounds of a step that follow from them."""

from dataclasses import asdict, dataclass

from maxdiffusion.costs.chips import Chip
from maxdiffusion.models.wan import WanTransformerConfig


@dataclass(frozen=True, kw_only=True)
class ForwardFlops:
    """Floating-point operations (two per multiply-add) of one forward of one expert.

    Keys and values of the text are computed once per prompt and expert, not per step, and are left
    out.
    """

    self_attention: float
    self_projections: float
    cross_attention: float
    cross_projections: float
    feed_forward: float
    embeddings_and_head: float

    @property
    def attention(self) -> float:
        """Returns the FLOPs of scores and weighted sums, over tokens and over text."""
        return self.self_attention + self.cross_attention

    @property
    def dense(self) -> float:
        """Returns the FLOPs of all products with weights."""
        return self.total - self.attention

    @property
    def of_blocks(self) -> float:
        """Returns the FLOPs of the linear maps of all blocks, whose weights may have 8 bits."""
        return self.self_projections + self.cross_projections + self.feed_forward

    @property
    def total(self) -> float:
        """Returns the sum of all parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Returns the parts by name."""
        return asdict(self)


def _squares(config: WanTransformerConfig) -> int:
    """Returns the products of tokens with square weights outside of blocks.

    Control blocks have one projection in for all and one out of each; a face adapter has one of
    queries and one of its result.
    """
    control = 1 + len(config.control_layers) if config.control_layers else 0
    adapters = 0 if config.face is None else config.layers // config.face.every
    return control + 2 * adapters


def forward_flops(
    config: WanTransformerConfig, *, tokens: int, text_length: int, batch: int = 1
) -> ForwardFlops:
    """Returns the FLOPs of a forward over `batch` videos of `tokens` tokens each.

    `text_length` includes image tokens. Control blocks of VACE count as blocks; their projections,
    and those of Animate's face adapters, count as embeddings. Scores of face keys are left out.
    """
    width, layers = config.model_dim, config.block_count
    rows = batch * tokens
    patch = config.patch[0] * config.patch[1] * config.patch[2]
    in_and_out = patch * (config.in_channels + config.out_channels)
    in_and_out += patch * (config.control_channels or 0) + config.model_dim * _squares(config)
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
    """Lower bounds of a step in seconds, and the peak they assume.

    `spec` runs every product at the peak of its dtype. `head_dim_aware` runs attention at the share
    of peak that the MXU reaches with this head_dim.
    """

    spec: float
    head_dim_aware: float
    peak_flops: float
    devices: int

    def mfu(self, flops: float, seconds: float) -> float:
        """Returns the model FLOPs utilisation of `flops` in `seconds`, of bfloat16 peak."""
        return flops / (seconds * self.devices * self.peak_flops)


def step_bounds(
    flops: ForwardFlops,
    chip: Chip,
    *,
    devices: int,
    head_dim: int,
    product_dtype: str = "bfloat16",
) -> Bounds:
    """Returns the bounds of a step whose forward, over the whole batch, takes `flops`.

    `product_dtype` is that of both operands of the linear maps of blocks. Attention, embeddings and
    the head multiply in bfloat16.
    """
    saved = flops.of_blocks * (1 - 1 / chip.rate(product_dtype))
    wasted = flops.attention / chip.score_share(head_dim) - flops.attention
    second = devices * chip.bf16_flops
    return Bounds(
        spec=(flops.total - saved) / second,
        head_dim_aware=(flops.total - saved + wasted) / second,
        peak_flops=chip.bf16_flops,
        devices=devices,
    )
