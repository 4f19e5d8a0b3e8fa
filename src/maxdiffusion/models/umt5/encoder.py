"""UMT5 encoder: pre-norm blocks, each with its own bias over relative positions.

Relative positions fall into buckets: exact nearby, logarithmic far away, one set per direction.

On a mesh weights are column-sharded and activations are replicated, so that no contraction is
split: a text gives the same rows on every mesh up to the order of sums on one device.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.umt5.config import Umt5Config


def relative_buckets(offsets: np.ndarray, *, buckets: int, max_distance: int) -> np.ndarray:
    """The bucket of each offset (key position minus query position).

    Half of the buckets are for keys after the query. Within a direction the first half hold one
    distance each, the others grow by a constant factor, and the last holds all that is farther.
    """
    one_way = buckets // 2
    exact = one_way // 2
    distance = np.abs(offsets)
    # float32, as transformers computes it, so that a distance on the edge falls on the same side
    ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
    growth = np.log(ratio) / np.float32(math.log(max_distance / exact))
    far = exact + (growth * np.float32(one_way - exact)).astype(np.int32)
    bucket = np.where(distance < exact, distance, np.minimum(far, one_way - 1))
    return (bucket + one_way * (offsets > 0)).astype(np.int32)


def position_bias(
    table: Float[Array, "buckets N"], length: int, config: Umt5Config
) -> Float[Array, "N T T"]:
    """Returns the bias of each head for every (query, key) pair of a text of `length` tokens."""
    offsets = np.arange(1 - length, length)
    buckets = relative_buckets(offsets, buckets=config.buckets, max_distance=config.max_distance)
    by_offset = table[buckets]
    positions = jnp.arange(length)
    pairs = positions[None, :] - positions[:, None] + length - 1
    return jnp.moveaxis(by_offset[pairs], -1, 0)


Hidden = Float[Array, "B T E"]
Mask = Bool[Array, "B T"]
HEADS = ("text", "token", "columns", "head_dim")
_ONE_DEVICE = ActivationLayout()


def _normal(shape: tuple[int, ...], spread: float, rngs: nnx.Rngs, dtype: DTypeLike) -> jax.Array:
    return (spread * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)


class Projection(nnx.Module):
    """A matrix product without bias."""

    def __init__(
        self,
        sizes: tuple[int, int],
        dims: tuple[str, str],
        *,
        spread: float,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.kernel = nnx.Param(_normal(sizes, spread, rngs, param_dtype), dims=dims)

    def __call__(self, inputs: Float[Array, "... I"]) -> Float[Array, "... O"]:
        return inputs @ self.kernel[...].astype(inputs.dtype)


class RmsNorm(nnx.Module):
    """Divides by the root mean square (in float32), then scales by a gain in the input's dtype."""

    def __init__(self, width: int, *, eps: float, param_dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones(width, param_dtype), dims=("width",))
        self.eps = eps

    def __call__(self, hidden: Hidden) -> Hidden:
        wide = hidden.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(hidden.dtype)
        return jnp.broadcast_to(self.scale[...].astype(hidden.dtype), hidden.shape) * normed


class SelfAttention(nnx.Module):
    """Attention over the real tokens, scores unscaled, plus the layer's bias over positions."""

    def __init__(self, config: Umt5Config, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        width, inner = config.width, config.heads * config.head_dim
        project = functools.partial(Projection, param_dtype=param_dtype, rngs=rngs)
        into = functools.partial(project, (width, inner), ("rows", "columns"))
        self.q = into(spread=(width * config.head_dim) ** -0.5)
        self.k = into(spread=width**-0.5)
        self.v = into(spread=width**-0.5)
        self.o = project((inner, width), ("rows", "columns"), spread=inner**-0.5)
        table = _normal((config.buckets, config.heads), width**-0.5, rngs, param_dtype)
        self.position_table = nnx.Param(table, dims=("buckets", "head"))

    def _split_heads(self, features: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        return features.reshape(*features.shape[:2], self.config.heads, self.config.head_dim)

    def __call__(
        self, hidden: Hidden, mask: Mask, *, layout: ActivationLayout = _ONE_DEVICE
    ) -> Hidden:
        q_BSNH, k_BTNH, v_BTNH = (
            layout.constrain(self._split_heads(project(hidden)), *HEADS)
            for project in (self.q, self.k, self.v)
        )
        scores_BNST = jnp.einsum(
            "BSNH,BTNH->BNST", q_BSNH, k_BTNH, preferred_element_type=jnp.float32
        )
        bias_NST = position_bias(self.position_table[...], hidden.shape[1], self.config)
        bias_NST = layout.constrain(bias_NST, "columns", "token", "token")
        scores_BNST += bias_NST.astype(jnp.float32)[None]
        # The lowest finite number: a text without tokens gives no NaN, and is zeroed at the end.
        hidden_key = jnp.finfo(jnp.float32).min
        scores_BNST = jnp.where(mask[:, None, None, :], scores_BNST, hidden_key)
        weights_BNST = jax.nn.softmax(scores_BNST, axis=-1).astype(hidden.dtype)
        mixed_BSNH = jnp.einsum("BNST,BTNH->BSNH", weights_BNST, v_BTNH)
        return self.o(whole(mixed_BSNH.reshape(*hidden.shape[:2], -1), layout))


class GatedMlp(nnx.Module):
    """A tanh-gelu gate times a linear branch, projected back."""

    def __init__(self, config: Umt5Config, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        width, inner = config.width, config.mlp_width
        project = functools.partial(Projection, param_dtype=param_dtype, rngs=rngs)
        self.gate = project((width, inner), ("rows", "columns"), spread=width**-0.5)
        self.up = project((width, inner), ("rows", "columns"), spread=width**-0.5)
        self.down = project((inner, width), ("rows", "columns"), spread=inner**-0.5)

    def __call__(self, hidden: Hidden, *, layout: ActivationLayout = _ONE_DEVICE) -> Hidden:
        gated = jax.nn.gelu(self.gate(hidden), approximate=True) * self.up(hidden)
        return self.down(whole(gated, layout))


class Block(nnx.Module):
    """Attention and MLP, each added to what it read through a norm."""

    def __init__(self, config: Umt5Config, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        norm = functools.partial(RmsNorm, config.width, eps=config.eps, param_dtype=param_dtype)
        self.attention_norm = norm()
        self.attention = SelfAttention(config, param_dtype=param_dtype, rngs=rngs)
        self.mlp_norm = norm()
        self.mlp = GatedMlp(config, param_dtype=param_dtype, rngs=rngs)

    def __call__(
        self, hidden: Hidden, mask: Mask, *, layout: ActivationLayout = _ONE_DEVICE
    ) -> Hidden:
        attended = self.attention(self.attention_norm(hidden), mask, layout=layout)
        hidden = hidden + whole(attended, layout)
        return hidden + whole(self.mlp(self.mlp_norm(hidden), layout=layout), layout)


def whole(features: Float[Array, "B T D"], layout: ActivationLayout) -> Float[Array, "B T D"]:
    """Columns of a product, gathered on every device."""
    features = layout.constrain(features, "text", "token", "columns")
    return layout.constrain(features, "text", "token", "rows")


class Umt5Encoder(nnx.Module):
    """Turns token ids into embeddings; the blocks' parameters are stacked and looped over.

    A row depends on the real tokens alone (keys are masked, positions are relative), so a text may
    be padded to any length and gives the same rows.
    """

    def __init__(
        self,
        config: Umt5Config,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        table = _normal((config.vocab, config.width), 1.0, rngs, param_dtype)
        self.embedding = nnx.Param(table, dims=("vocab", "width"))

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked_blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, param_dtype=param_dtype, rngs=rngs)

        self.blocks = stacked_blocks(rngs)
        self.final_norm = RmsNorm(config.width, eps=config.eps, param_dtype=param_dtype)

    def __call__(
        self,
        ids: Int[Array, "B T"],
        mask: Int[Array, "B T"] | Mask,
        *,
        layout: ActivationLayout = _ONE_DEVICE,
    ) -> Hidden:
        """The embedding of every token; rows where `mask` is zero are zero."""
        mask = mask.astype(bool)
        hidden = self.embedding[...][ids].astype(self.dtype)
        hidden = layout.constrain(hidden, "text", "token", "rows")
        structure, layers = nnx.split(self.blocks)

        def run_block(hidden: Hidden, layer: nnx.State) -> tuple[Hidden, None]:
            return nnx.merge(structure, layer)(hidden, mask, layout=layout), None

        hidden, _ = jax.lax.scan(run_block, hidden, layers)
        return jnp.where(mask[..., None], self.final_norm(hidden), 0)
