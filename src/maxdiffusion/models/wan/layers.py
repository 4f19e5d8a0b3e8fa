"""Layers of the WAN transformer: RoPE tables, linear maps, norms, activations, input embeddings.

They round where the code that the checkpoints were trained with rounds.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Num

from maxdiffusion.kernels.qk_prep import rms_norm
from maxdiffusion.mesh.mesh import FSDP_CONTEXT
from maxdiffusion.models.wan.config import WanTransformerConfig

if TYPE_CHECKING:
    from maxdiffusion.models.wan.eight_bit import WeightFormat

THETA = 10_000.0


def axis_widths(head_dim: int) -> tuple[int, int, int]:
    """Returns how many features of a head encode the frame, the row and the column."""
    space = 2 * (head_dim // 6)
    return head_dim - 2 * space, space, space


def rotation_tables(
    grid_FYX: tuple[int, int, int], head_dim: int
) -> tuple[Float[Array, "S R"], Float[Array, "S R"]]:
    """Returns cosines and sines of every token and pair of features, by frame, row, column.

    A program holds one small table per axis and broadcasts it over the tokens: the whole table
    would be 19 MB for the 75,600 tokens of a 720p video. Angles are float64 until the last step, so
    that a table does not depend on its length.
    """
    cosines: list[Array] = []
    sines: list[Array] = []
    for axis, (size, width) in enumerate(zip(grid_FYX, axis_widths(head_dim), strict=True)):
        frequencies = THETA ** -(np.arange(0, width, 2, dtype=np.float64) / width)
        angles = np.outer(np.arange(size, dtype=np.float64), frequencies)
        shape = [1, 1, 1, frequencies.size]
        shape[axis] = size
        for tables, function in ((cosines, np.cos), (sines, np.sin)):
            table = jnp.asarray(function(angles).astype(np.float32).reshape(shape))
            tables.append(jnp.broadcast_to(table, (*grid_FYX, frequencies.size)))
    return _by_token(cosines), _by_token(sines)


def _by_token(tables: list[Float[Array, "F Y X _R"]]) -> Float[Array, "S R"]:
    table_FYXR = jnp.concatenate(tables, axis=-1)
    return table_FYXR.reshape(-1, table_FYXR.shape[-1])


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """The dtypes of computation and of parameters; kernels may have an 8-bit format instead."""

    dtype: jnp.dtype
    param_dtype: jnp.dtype
    weight_format: "WeightFormat | None" = None


FLOAT32 = Numerics(dtype=jnp.dtype(jnp.float32), param_dtype=jnp.dtype(jnp.float32))
_KERNEL = nnx.initializers.lecun_normal()


class Linear(nnx.Module):
    """x @ kernel + bias, summed in float32 and rounded to `dtype` once.

    With a rank, x @ lora_down @ lora_up is part of the sum: room for adapters, zero without one.
    With an 8-bit format, `kernel` holds its values and `kernel_scale` those of the output features;
    the metadata of `kernel` say in which format, and in which dtype a checkpoint is read for it.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        dims: tuple[str, str],
        numerics: Numerics,
        *,
        rank: int = 0,
        rngs: nnx.Rngs,
    ):
        self.dtype = numerics.dtype
        self.rank = rank
        self.weight_format = numerics.weight_format
        kernel = _KERNEL(rngs.params(), sizes, numerics.param_dtype)
        if self.weight_format is None:
            self.kernel = nnx.Param(kernel, dims=dims)
        else:
            values, scale = self.weight_format.quantized(kernel)
            self.kernel = nnx.Param(
                values, dims=dims, weight_format=self.weight_format, read_as=kernel.dtype
            )
            self.kernel_scale = nnx.Param(scale, dims=(vector_dim(dims[1]),))
        self.bias = nnx.Param(
            jnp.zeros(sizes[1], numerics.param_dtype), dims=(vector_dim(dims[1]),)
        )
        if rank:
            down, up = (sizes[0], rank), (rank, sizes[1])
            self.lora_down = nnx.Param(
                jnp.zeros(down, numerics.param_dtype), dims=(dims[0], "rank")
            )
            self.lora_up = nnx.Param(jnp.zeros(up, numerics.param_dtype), dims=("rank", dims[1]))

    def remove_room(self) -> None:
        """Removes the room for adapters."""
        del self.lora_down, self.lora_up
        self.rank = 0

    def __call__(self, x: Float[Array, "*dims I"]) -> Float[Array, "*dims O"]:
        whole = self._product(x)
        whole = whole + jnp.broadcast_to(self.bias[...].astype(jnp.float32), whole.shape)
        if self.rank:
            narrow = product(x, self.lora_down[...], dtype=self.dtype)
            whole = whole + product(narrow, self.lora_up[...], dtype=self.dtype)
        return whole.astype(self.dtype)

    def _product(self, x: Float[Array, "*dims I"]) -> Float[Array, "*dims O"]:
        """Returns x @ kernel, summed in float32."""
        if self.weight_format is None:
            return product(x, self.kernel[...], dtype=self.dtype)
        scale = self.kernel_scale[...]
        return self.weight_format.product(x, self.kernel[...], scale, dtype=self.dtype)


class LayerNorm(nnx.Module):
    """Layer norm with scale and bias, always in float32."""

    def __init__(self, features: int, *, eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(features, jnp.float32), dims=("width",))
        self.bias = nnx.Param(jnp.zeros(features, jnp.float32), dims=("width",))

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        scale, bias = (jnp.broadcast_to(part[...], x.shape) for part in (self.scale, self.bias))
        normal = standardize(x, eps=self.eps) * scale + bias
        return normal.astype(x.dtype)


class RmsNorm(nnx.Module):
    """x over its root mean square across all heads, times a scale; float32, rounded once."""

    def __init__(self, features: int, numerics: Numerics, *, eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(features, numerics.param_dtype), dims=("heads",))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return rms_norm(x, self.scale[...], eps=self.eps)


def vector_dim(dim: str) -> str:
    """Returns the dimension of a vector along `dim`: those of the model width are replicated."""
    return "width" if dim in ("model", FSDP_CONTEXT) else dim


def affine(
    x: Float[Array, "*dims I"],
    kernel: Float[Array, "I O"],
    bias: Float[Array, " O"],
    *,
    dtype: jnp.dtype,
) -> Float[Array, "*dims O"]:
    """Returns x @ kernel + bias from operands in `dtype`, summed in float32 and rounded once."""
    total = product(x, kernel, dtype=dtype)
    return (total + jnp.broadcast_to(bias.astype(jnp.float32), total.shape)).astype(dtype)


def product(
    x: Float[Array, "*dims I"], kernel: Float[Array, "I O"], *, dtype: jnp.dtype
) -> Float[Array, "*dims O"]:
    """Returns x @ kernel from operands in `dtype`, summed in float32."""
    # By default a TPU multiplies float32 in bfloat16.
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.matmul(
        x.astype(dtype),
        kernel.astype(dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def standardize(x: Float[Array, "... D"], *, eps: float) -> Float[Array, "... D"]:
    """Returns x with mean 0 and variance 1 along its features, in float32."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    # Both moments in one pass, which XLA fuses into the product that writes x. The variance loses
    # 2**-24 mean**2: nothing while a row's mean is no larger than its deviation.
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True) - jnp.square(mean)
    return (wide - mean) * jax.lax.rsqrt(jnp.maximum(variance, 0.0) + eps)


@jax.named_scope("norm")
def modulate(
    x: Float[Array, "B S D"],
    shift: Float[Array, "B #S D"],
    scale: Float[Array, "B #S D"],
    *,
    eps: float,
) -> Float[Array, "B S D"]:
    """Returns the layer norm of x, scaled and shifted per row or token; float32, rounded once."""
    modulated = standardize(x, eps=eps) * (1.0 + scale) + shift
    return modulated.astype(x.dtype)


def by_token(
    rows: Float[Array, "B A D"], still: Float[Array, "B A D"] | None, *, tokens: int, known: int
) -> tuple[Float[Array, "B #S D"], ...]:
    """Returns each of the A vectors for every token: `still` for the first `known` tokens.

    Without known tokens one row serves all. The choice fuses into what reads it: no array of
    `tokens` rows is written.
    """
    if still is None:
        return tuple(one[:, None, :] for one in jnp.unstack(rows, axis=1))
    is_known = (jnp.arange(tokens) < known)[None, :, None]
    shape = (rows.shape[0], tokens, rows.shape[2])
    return tuple(
        jnp.where(
            jnp.broadcast_to(is_known, shape),
            jnp.broadcast_to(fixed[:, None, :], shape),
            jnp.broadcast_to(moving[:, None, :], shape),
        )
        for moving, fixed in zip(jnp.unstack(rows, axis=1), jnp.unstack(still, axis=1), strict=True)
    )


def silu(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Returns x * sigmoid(x), computed in float32 and rounded once."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


def gelu_tanh(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Returns the tanh approximation of GELU, computed in float32 and rounded once."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def gelu(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Returns the exact GELU, computed in float32 and rounded once."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


def modulation_table(shape: tuple[int, int], rngs: nnx.Rngs) -> nnx.Param[Float[Array, "A D"]]:
    """Returns the learned part of a set of modulations, in float32."""
    values = jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(shape[1])
    return nnx.Param(values, dims=("modulation", "width"))


MODULATIONS = 6  # shift, scale and gate of self-attention, then of the feed-forward part
IMAGE_NORM_EPS = 1e-5  # torch's default; the blocks have 1e-6
_LONGEST_PERIOD = 10_000.0


class PatchEmbedding(nnx.Module):
    """Linear map from patches to tokens: a convolution with stride = kernel size."""

    def __init__(
        self, config: WanTransformerConfig, channels: int, numerics: Numerics, *, rngs: nnx.Rngs
    ):
        self.dtype = numerics.dtype
        shape = (*config.patch, channels, config.model_dim)
        draw = nnx.initializers.lecun_normal(in_axis=(0, 1, 2, 3), out_axis=4)
        self.kernel = nnx.Param(
            draw(rngs.params(), shape, numerics.param_dtype),
            dims=("frame", "row", "column", "channels", "model"),
        )
        self.bias = nnx.Param(jnp.zeros(config.model_dim, numerics.param_dtype), dims=("width",))

    def __call__(self, patches_BSP: Float[Array, "B S P"]) -> Float[Array, "B S D"]:
        kernel = self.kernel[...]
        kernel_PD = kernel.reshape(-1, kernel.shape[-1])
        return affine(patches_BSP, kernel_PD, self.bias[...], dtype=self.dtype)


class TimeEmbedding(nnx.Module):
    """Embeds the time of a step as a vector (float32 inside) and as six modulations per block."""

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
    ) -> tuple[Float[Array, "B D"], Float[Array, "B A D"]]:
        waves_BW = sinusoid(timestep_B, self.frequencies)
        time_BD = self.linear_2(silu(self.linear_1(waves_BW))).astype(self.dtype)
        modulation_BAD = self.projection(silu(time_BD)).reshape(len(time_BD), MODULATIONS, -1)
        return time_BD, modulation_BAD


class TextEmbedding(nnx.Module):
    """Maps text embeddings to the model width: two linear maps with GELU."""

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        width = config.model_dim
        self.linear_1 = Linear((config.text_dim, width), ("text", "model"), numerics, rngs=rngs)
        self.linear_2 = Linear((width, width), ("width", "model"), numerics, rngs=rngs)

    def __call__(self, text_BTE: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        return self.linear_2(gelu_tanh(self.linear_1(text_BTE)))


class ImageEmbedding(nnx.Module):
    """Maps image tokens to the model width: norm, linear, exact GELU, linear, norm.

    A model of first and last frame adds learned positions over the tokens of both images.
    """

    def __init__(
        self,
        config: WanTransformerConfig,
        numerics: Numerics,
        *,
        rngs: nnx.Rngs,
    ):
        assert config.image_dim is not None
        narrow, width = config.image_dim, config.model_dim
        self.norm1 = LayerNorm(narrow, eps=IMAGE_NORM_EPS)
        self.linear_1 = Linear((narrow, narrow), ("image", "image"), numerics, rngs=rngs)
        self.linear_2 = Linear((narrow, width), ("image", "model"), numerics, rngs=rngs)
        self.norm2 = LayerNorm(width, eps=IMAGE_NORM_EPS)
        self.positions = (
            None
            if config.image_positions is None
            else nnx.Param(
                jnp.zeros((config.image_positions, narrow), numerics.param_dtype),
                dims=("tokens", "image"),
            )
        )

    def __call__(self, image_BTE: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        if self.positions is not None:
            positions = self.positions[...].astype(image_BTE.dtype)[None]
            image_BTE = image_BTE + jnp.broadcast_to(positions, image_BTE.shape)
        return self.norm2(self.linear_2(gelu(self.linear_1(self.norm1(image_BTE)))))


def sinusoid(timestep_B: Num[Array, " B"], frequencies: int) -> Float[Array, "B W"]:
    """Returns cosines, then sines, of the time at `frequencies` periods, in float32."""
    # The exponents are rounded to float32 as in the code that the checkpoints were trained with:
    # exact ones would move the waves of time 999 by 6e-5 from what the weights have seen.
    exponents = np.float32(-math.log(_LONGEST_PERIOD)) * np.arange(frequencies, dtype=np.float32)
    rates = np.exp((exponents / np.float32(frequencies)).astype(np.float64)).astype(np.float32)
    phases_BW = timestep_B.astype(jnp.float32)[:, None] * rates[None, :]
    return jnp.concatenate([jnp.cos(phases_BW), jnp.sin(phases_BW)], axis=-1)


def patches_of(
    latents_BFYXC: Float[Array, "B F Y X C"], patch: tuple[int, int, int]
) -> Float[Array, "B S P"]:
    """Returns patches by frame, row, column; inside a patch the same order, channels last."""
    batch, *sizes, channels = latents_BFYXC.shape
    split = [part for size, step in zip(sizes, patch, strict=True) for part in (size // step, step)]
    cut = latents_BFYXC.reshape(batch, *split, channels)
    return cut.transpose(0, 1, 3, 5, 2, 4, 6, 7).reshape(batch, -1, math.prod(patch) * channels)


def video_of(
    patches_BSP: Float[Array, "B S P"], grid: tuple[int, int, int], patch: tuple[int, int, int]
) -> Float[Array, "B F Y X C"]:
    """Returns the latent video of patches; the inverse of `patches_of`."""
    batch = patches_BSP.shape[0]
    frames, rows, columns = (count * step for count, step in zip(grid, patch, strict=True))
    cut = patches_BSP.reshape(batch, *grid, *patch, -1)
    return cut.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(batch, frames, rows, columns, -1)


def pad_tokens(tokens_BSP: Float[Array, "B _ P"], length: int) -> Float[Array, "B S P"]:
    """Returns tokens with zero rows appended up to `length`."""
    return jnp.pad(tokens_BSP, ((0, 0), (0, length - tokens_BSP.shape[1]), (0, 0)))
