"""CLIP vision tower: patches and a class token through pre-norm blocks.

WAN 2.1 reads the tokens before the last layer (transformers' `hidden_states[-2]`), so the last
layer and the norm after it are neither built nor loaded.

On a mesh weights are column-sharded and activations are replicated, as in the text encoder: no
contraction is split, and an image gives the same tokens on every mesh up to the order of sums on
one device.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.clip.config import ClipVisionConfig

Tokens = Float[Array, "B T D"]
HEADS = ("image", "token", "columns", "head_dim")
_ONE_DEVICE = ActivationLayout()


def _normal(shape: tuple[int, ...], spread: float, rngs: nnx.Rngs, dtype: DTypeLike) -> jax.Array:
    return (spread * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)


class Linear(nnx.Module):
    """A matrix product and a bias."""

    def __init__(self, sizes: tuple[int, int], *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        kernel = _normal(sizes, sizes[0] ** -0.5, rngs, param_dtype)
        self.kernel = nnx.Param(kernel, dims=("rows", "columns"))
        self.bias = nnx.Param(jnp.zeros(sizes[1:], param_dtype), dims=("columns",))

    def __call__(self, inputs: Float[Array, "B T I"]) -> Float[Array, "B T O"]:
        outputs = inputs @ self.kernel[...].astype(inputs.dtype)
        return outputs + jnp.broadcast_to(self.bias[...].astype(inputs.dtype), outputs.shape)


class LayerNorm(nnx.Module):
    """Layer norm with gain and bias, computed in float32 and rounded once."""

    def __init__(self, width: int, *, eps: float, param_dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones(width, param_dtype), dims=("width",))
        self.bias = nnx.Param(jnp.zeros(width, param_dtype), dims=("width",))
        self.eps = eps

    def __call__(self, hidden: Tokens) -> Tokens:
        wide = hidden.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        scale, bias = (
            jnp.broadcast_to(parameter[...].astype(jnp.float32), hidden.shape)
            for parameter in (self.scale, self.bias)
        )
        return (centred * jax.lax.rsqrt(variance + self.eps) * scale + bias).astype(hidden.dtype)


class Embedding(nnx.Module):
    """One token for every patch, row by row, after the class token; positions are added."""

    def __init__(self, config: ClipVisionConfig, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        width, draw = config.width, functools.partial(_normal, rngs=rngs, dtype=param_dtype)
        shape = (config.patch, config.patch, config.channels, width)
        kernel = draw(shape, math.prod(shape[:-1]) ** -0.5)
        self.kernel = nnx.Param(kernel, dims=("height", "width", "channels", "columns"))
        self.class_token = nnx.Param(draw((width,), width**-0.5), dims=("width",))
        self.positions = nnx.Param(draw((config.tokens, width), 0.02), dims=("token", "width"))

    def __call__(
        self, pixels: Float[Array, "B Y X C"], *, layout: ActivationLayout = _ONE_DEVICE
    ) -> Tokens:
        patch, batch = self.config.patch, pixels.shape[0]
        kernel_PD = self.kernel[...].astype(pixels.dtype).reshape(-1, self.config.width)
        # Pixels beyond the last whole patch are not seen, as with a convolution of this stride.
        rows, columns = (size // patch for size in pixels.shape[1:3])
        squares = pixels[:, : rows * patch, : columns * patch].reshape(
            batch, rows, patch, columns, patch, -1
        )
        patches_BTP = squares.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows * columns, -1)
        patches_BTD = whole(patches_BTP @ kernel_PD, layout)
        class_token, positions = (
            parameter[...].astype(pixels.dtype) for parameter in (self.class_token, self.positions)
        )
        first = jnp.broadcast_to(class_token, (batch, 1, self.config.width))
        tokens = jnp.concatenate([first, patches_BTD], axis=1)
        return tokens + jnp.broadcast_to(positions, tokens.shape)


class SelfAttention(nnx.Module):
    """Attention among all tokens of an image, scores divided by the root of the head width."""

    def __init__(self, config: ClipVisionConfig, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        project = functools.partial(Linear, param_dtype=param_dtype, rngs=rngs)
        self.q, self.k, self.v, self.out = (project((config.width,) * 2) for _ in range(4))

    def __call__(self, hidden: Tokens, *, layout: ActivationLayout = _ONE_DEVICE) -> Tokens:
        heads = (*hidden.shape[:2], self.config.heads, self.config.head_dim)
        q_BSNH, k_BTNH, v_BTNH = (
            layout.constrain(project(hidden).reshape(heads), *HEADS)
            for project in (self.q, self.k, self.v)
        )
        scores_BNST = jnp.einsum(
            "BSNH,BTNH->BNST", q_BSNH, k_BTNH, preferred_element_type=jnp.float32
        )
        weights_BNST = jax.nn.softmax(scores_BNST * self.config.head_dim**-0.5, axis=-1)
        mixed_BSNH = jnp.einsum("BNST,BTNH->BSNH", weights_BNST.astype(hidden.dtype), v_BTNH)
        return self.out(whole(mixed_BSNH.reshape(hidden.shape), layout))


class Block(nnx.Module):
    """Attention and MLP, each added to what it read through a norm."""

    def __init__(self, config: ClipVisionConfig, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        norm = functools.partial(LayerNorm, config.width, eps=config.eps, param_dtype=param_dtype)
        linear = functools.partial(Linear, param_dtype=param_dtype, rngs=rngs)
        self.activation = config.activation
        self.attention_norm = norm()
        self.attention = SelfAttention(config, param_dtype=param_dtype, rngs=rngs)
        self.mlp_norm = norm()
        self.up = linear((config.width, config.mlp_width))
        self.down = linear((config.mlp_width, config.width))

    def __call__(self, hidden: Tokens, *, layout: ActivationLayout = _ONE_DEVICE) -> Tokens:
        attended = self.attention(self.attention_norm(hidden), layout=layout)
        hidden = hidden + whole(attended, layout)
        inner = self._activate(self.up(self.mlp_norm(hidden)))
        return hidden + whole(self.down(whole(inner, layout)), layout)

    def _activate(self, inner: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        if self.activation == "quick_gelu":
            return inner * jax.nn.sigmoid(1.702 * inner)
        return jax.nn.gelu(inner, approximate=False)


def whole(features: Tokens, layout: ActivationLayout) -> Tokens:
    """Returns columns of a product, gathered on every device."""
    features = layout.constrain(features, "image", "token", "columns")
    return layout.constrain(features, "image", "token", "rows")


class ClipVisionEncoder(nnx.Module):
    """Turns images into tokens; the blocks' parameters are stacked and looped over."""

    def __init__(
        self,
        config: ClipVisionConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embedding = Embedding(config, param_dtype=param_dtype, rngs=rngs)
        self.first_norm = LayerNorm(config.width, eps=config.eps, param_dtype=param_dtype)

        @nnx.split_rngs(splits=config.used_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked_blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, param_dtype=param_dtype, rngs=rngs)

        self.blocks = stacked_blocks(rngs)

    def __call__(
        self, pixels: Float[Array, "B Y X C"], *, layout: ActivationLayout = _ONE_DEVICE
    ) -> Tokens:
        """The tokens before the last layer, of images as CLIP's image processor prepares them."""
        _check_shape(pixels.shape, self.config)
        tokens = self.embedding(pixels.astype(self.dtype), layout=layout)
        hidden = layout.constrain(self.first_norm(tokens), "image", "token", "rows")
        structure, layers = nnx.split(self.blocks)

        def run_block(hidden: Tokens, layer: nnx.State) -> tuple[Tokens, None]:
            return nnx.merge(structure, layer)(hidden, layout=layout), None

        return jax.lax.scan(run_block, hidden, layers)[0]


def _check_shape(shape: tuple[int, ...], config: ClipVisionConfig) -> None:
    expected = (config.image_size, config.image_size, config.channels)
    if shape[1:] != expected:
        rule = f"must be [images, {', '.join(map(str, expected))}]"
        remedy = "Prepare images with the image_processor of the same folder, channels last"
        raise ProblemsFound([Problem(name="pixels.shape", value=shape, rule=rule, remedy=remedy)])
