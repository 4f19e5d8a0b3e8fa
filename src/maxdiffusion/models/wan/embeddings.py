"""What goes into the blocks: patches of the latent video, the time of the step, the text."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Num

from maxdiffusion.models.wan.config import WanTransformerConfig
from maxdiffusion.models.wan.layers import FLOAT32, Linear, Numerics, affine, gelu_tanh, silu

MODULATIONS = 6  # shift, scale and gate of self-attention, then of the feed-forward part
_LONGEST_PERIOD = 10_000.0


class PatchEmbedding(nnx.Module):
    """Makes one token of every patch: a convolution whose stride is its kernel, as one product."""

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        self.dtype = numerics.dtype
        shape = (*config.patch, config.in_channels, config.model_dim)
        draw = nnx.initializers.lecun_normal(in_axis=(0, 1, 2, 3), out_axis=4)
        self.kernel = nnx.Param(
            draw(rngs.params(), shape, numerics.param_dtype),
            dims=("frame", "row", "column", "channels", "model"),
        )
        self.bias = nnx.Param(jnp.zeros(config.model_dim, numerics.param_dtype), dims=("width",))

    def __call__(self, patches_BSK: Float[Array, "B S K"]) -> Float[Array, "B S D"]:
        kernel = self.kernel[...]
        kernel_KD = kernel.reshape(-1, kernel.shape[-1])
        return affine(patches_BSK, kernel_KD, self.bias[...], dtype=self.dtype)


class TimeEmbedding(nnx.Module):
    """The time of the step as a vector (float32 inside) and as six modulations of every block."""

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        width = config.model_dim
        self.dtype = numerics.dtype
        self.frequencies = config.freq_dim // 2
        self.linear_1 = Linear((config.freq_dim, width), ("frequency", "model"), FLOAT32, rngs=rngs)
        self.linear_2 = Linear((width, width), ("width", "model"), FLOAT32, rngs=rngs)
        self.projection = Linear(
            (width, MODULATIONS * width),
            ("model", "modulation"),
            numerics,
            rngs=rngs,
        )

    def __call__(
        self, timestep_B: Num[Array, " B"]
    ) -> tuple[Float[Array, "B D"], Float[Array, "B K D"]]:
        waves_BK = sinusoid(timestep_B, self.frequencies)
        time_BD = self.linear_2(silu(self.linear_1(waves_BK))).astype(self.dtype)
        modulation_BKD = self.projection(silu(time_BD)).reshape(len(time_BD), MODULATIONS, -1)
        return time_BD, modulation_BKD


class TextEmbedding(nnx.Module):
    """Text embeddings brought to the width of the model."""

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        width = config.model_dim
        self.linear_1 = Linear((config.text_dim, width), ("text", "model"), numerics, rngs=rngs)
        self.linear_2 = Linear((width, width), ("width", "model"), numerics, rngs=rngs)

    def __call__(self, text_BTE: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        return self.linear_2(gelu_tanh(self.linear_1(text_BTE)))


def sinusoid(timestep_B: Num[Array, " B"], frequencies: int) -> Float[Array, "B K"]:
    """Cosines, then sines, of the time at `frequencies` periods, in float32."""
    # The exponents are rounded to float32 as in the code that the checkpoints were trained with:
    # exact ones would move the waves of time 999 by 6e-5 from what the weights have seen.
    exponents = np.float32(-math.log(_LONGEST_PERIOD)) * np.arange(frequencies, dtype=np.float32)
    rates = np.exp((exponents / np.float32(frequencies)).astype(np.float64)).astype(np.float32)
    phases_BK = timestep_B.astype(jnp.float32)[:, None] * rates
    return jnp.concatenate([jnp.cos(phases_BK), jnp.sin(phases_BK)], axis=-1)


def patches_of(
    latents_BFYXC: Float[Array, "B F Y X C"], patch: tuple[int, int, int]
) -> Float[Array, "B S K"]:
    """Patches in reading order (frame, row, column); inside a patch the same, channels last."""
    batch, *sizes, channels = latents_BFYXC.shape
    split = [part for size, step in zip(sizes, patch, strict=True) for part in (size // step, step)]
    cut = latents_BFYXC.reshape(batch, *split, channels)
    return cut.transpose(0, 1, 3, 5, 2, 4, 6, 7).reshape(batch, -1, math.prod(patch) * channels)


def video_of(
    patches_BSK: Float[Array, "B S K"], grid: tuple[int, int, int], patch: tuple[int, int, int]
) -> Float[Array, "B F Y X C"]:
    """The latent video that `patches_of` cuts into these patches."""
    batch = patches_BSK.shape[0]
    frames, rows, columns = (count * step for count, step in zip(grid, patch, strict=True))
    cut = patches_BSK.reshape(batch, *grid, *patch, -1)
    return cut.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(batch, frames, rows, columns, -1)


def pad_tokens(tokens_BSK: jax.Array, length: int) -> jax.Array:
    """`tokens_BSK` with zero rows appended up to `length`."""
    return jnp.pad(tokens_BSK, ((0, 0), (0, length - tokens_BSK.shape[1]), (0, 0)))
