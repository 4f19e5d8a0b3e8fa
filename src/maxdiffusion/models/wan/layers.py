"""Linear layers, norms and activations with the roundings that WAN checkpoints expect."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxdiffusion.kernels.heads import Columns
from maxdiffusion.mesh.layout import SPREAD


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What a model computes in, and what its parameters are kept in."""

    dtype: jnp.dtype
    param_dtype: jnp.dtype


FLOAT32 = Numerics(dtype=jnp.dtype(jnp.float32), param_dtype=jnp.dtype(jnp.float32))
_KERNEL = nnx.initializers.lecun_normal()


class Linear(nnx.Module):
    """x @ kernel + bias, summed in float32 and rounded to `dtype` once."""

    def __init__(
        self,
        sizes: tuple[int, int],
        dims: tuple[str, str],
        numerics: Numerics,
        *,
        rngs: nnx.Rngs,
    ):
        self.dtype = numerics.dtype
        self.kernel = nnx.Param(_KERNEL(rngs.params(), sizes, numerics.param_dtype), dims=dims)
        self.bias = nnx.Param(
            jnp.zeros(sizes[1], numerics.param_dtype), dims=(vector_dim(dims[1]),)
        )

    def __call__(self, x: Float[Array, "... K"]) -> Float[Array, "... K"]:
        return affine(x, self.kernel[...], self.bias[...], dtype=self.dtype)


class LayerNorm(nnx.Module):
    """Layer norm with gain and offset, in float32 whatever the model computes in."""

    def __init__(self, features: int, *, eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(features, jnp.float32), dims=("width",))
        self.bias = nnx.Param(jnp.zeros(features, jnp.float32), dims=("width",))

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        normal = standardize(x, eps=self.eps) * self.scale[...] + self.bias[...]
        return normal.astype(x.dtype)


class RmsNorm(nnx.Module):
    """x over its root mean square along all heads together, times a gain; float32, one rounding."""

    def __init__(self, features: int, numerics: Numerics, *, eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(features, numerics.param_dtype), dims=("heads",))

    def columns(self, x: Float[Array, "B S D"]) -> Columns:
        """x with this norm still to be done: attention does it on its way to the heads."""
        return Columns(values=x, gain=self.scale[...], eps=self.eps)


def vector_dim(dim: str) -> str:
    """The word for a vector along `dim`: vectors of the model width are small and stay whole."""
    return "width" if dim in ("model", SPREAD) else dim


def affine(
    x: Float[Array, "... K"],
    kernel: Float[Array, "K M"],
    bias: Float[Array, " M"],
    *,
    dtype: jnp.dtype,
) -> Float[Array, "... M"]:
    """x @ kernel + bias from operands in `dtype`, summed in float32 and rounded once."""
    # A TPU multiplies float32 in bfloat16 unless told otherwise; who asks for float32 means it.
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    product = jnp.matmul(
        x.astype(dtype),
        kernel.astype(dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return (product + bias.astype(jnp.float32)).astype(dtype)


def standardize(x: Float[Array, "... D"], *, eps: float) -> Float[Array, "... D"]:
    """x with mean 0 and variance 1 along its features, in float32."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    # Both moments in one pass, which XLA makes part of the product that writes x. Of the variance
    # this loses 2**-24 mean**2: nothing while a row's mean is no larger than its deviation.
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True) - jnp.square(mean)
    return (wide - mean) * jax.lax.rsqrt(jnp.maximum(variance, 0.0) + eps)


@jax.named_scope("norm")
def modulate(
    x: Float[Array, "B S D"],
    shift_BD: Float[Array, "B D"],
    scale_BD: Float[Array, "B D"],
    *,
    eps: float,
) -> Float[Array, "B S D"]:
    """Layer norm of x moved by a shift and a scale per batch row; float32, one rounding."""
    moved = standardize(x, eps=eps) * (1.0 + scale_BD[:, None, :]) + shift_BD[:, None, :]
    return moved.astype(x.dtype)


def silu(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """x * sigmoid(x), computed in float32 and rounded once."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


def gelu_tanh(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """The tanh approximation of GELU, computed in float32 and rounded once."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def modulation_table(shape: tuple[int, int], rngs: nnx.Rngs) -> nnx.Param[Float[Array, "K D"]]:
    """The learned part of a set of modulations, in float32."""
    values = jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(shape[1])
    return nnx.Param(values, dims=("modulation", "width"))
