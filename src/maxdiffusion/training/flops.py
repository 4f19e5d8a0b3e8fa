"""How much a training step computes, by the formula that utilisation figures are quoted with."""

from maxdiffusion.models.wan import WanTransformerConfig
from maxdiffusion.training.metrics import Work

BACKWARD = 2  # a backward pass costs two forward passes
FORMULA = (
    "3 x forward; per layer and clip: 8 S D^2 + 4 S^2 D (self), 4 S D^2 + 4 T D^2 + 4 S T D "
    "(text), 4 S D M (feed-forward); S tokens, T text rows, D width, M inner width"
)


def forward_flops(config: WanTransformerConfig, tokens: int, text_rows: int) -> float:
    """FLOP of one forward pass over one clip, two for each multiplication and addition."""
    width, inner = config.model_dim, config.ffn_dim
    own = 8 * tokens * width**2 + 4 * tokens**2 * width
    text = 4 * tokens * width**2 + 4 * text_rows * width**2 + 4 * tokens * text_rows * width
    feed_forward = 4 * tokens * width * inner
    patch = 4 * config.in_channels
    ends = 2 * tokens * width * 2 * patch + 2 * text_rows * width * (config.text_dim + width)
    return float(config.layers * (own + text + feed_forward) + ends)


def step_work(
    config: WanTransformerConfig, *, clips: int, tokens: int, text_rows: int, devices: int
) -> Work:
    """The tokens of a step, and its TFLOP on each device."""
    flops = (1 + BACKWARD) * clips * forward_flops(config, tokens, text_rows)
    return Work(tokens=clips * tokens, tflops_per_device=flops / 1e12 / devices)
