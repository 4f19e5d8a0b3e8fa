"""Motion and face encoders of Animate: a few tokens of every latent frame from pictures of a face.

    faces [B F Y X 3] -> motion encoder -> features [B F I] -> face encoder -> tokens [B f T D]

The motion encoder is a StyleGAN discriminator without its head: convolutions whose weights are
scaled by 1/sqrt(fan-in) when they are used, and a blur before each halving. It ends in a few
coefficients of orthonormal directions. The face encoder is causal over frames and halves them
twice, as the VAE does: 4n + 1 frames become n + 1.
"""

import itertools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.wan.config import MOTION_LINEARS, FaceConfig
from maxdiffusion.models.wan.layers import Linear, Numerics, affine, silu, standardize

SLOPE = 0.2  # of the leaky ReLU below zero
BLUR = (1 / 8, 3 / 8, 3 / 8, 1 / 8)
TAPS = 3  # of the causal convolutions over frames
NORM_EPS = 1e-6
_NORMAL = nnx.initializers.normal(1.0)
_SMALL_SHIFT = 1e-8  # added to the directions before they are made orthonormal


class ScaledConv(nnx.Module):
    """Convolution over rows and columns whose kernel is scaled by 1/sqrt(fan-in) at each use.

    With `activated`, a bias, a leaky ReLU and a gain of sqrt(2) follow.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        numerics: Numerics,
        *,
        stride: int = 1,
        activated: bool = True,
        rngs: nnx.Rngs,
    ):
        taps, narrow, wide = sizes
        self.dtype, self.stride = numerics.dtype, stride
        self.scale = 1 / math.sqrt(narrow * taps**2)
        self.kernel = nnx.Param(
            _NORMAL(rngs.params(), (taps, taps, narrow, wide), numerics.param_dtype),
            dims=("row", "column", "channels", "channels"),
        )
        self.bias = (
            nnx.Param(jnp.zeros(wide, numerics.param_dtype), dims=("channels",))
            if activated
            else None
        )

    def __call__(self, x: Float[Array, "B Y X I"], *, padding: int = 0) -> Float[Array, "B y x O"]:
        y = jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            self.kernel[...].astype(self.dtype) * self.scale,
            window_strides=(self.stride, self.stride),
            padding=((padding, padding),) * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision=_precision(self.dtype),
        )
        if self.bias is None:
            return y
        shifted = y + jnp.broadcast_to(self.bias[...].astype(self.dtype), y.shape)
        return jax.nn.leaky_relu(shifted, SLOPE) * math.sqrt(2)


class MotionBlock(nnx.Module):
    """Residual block that halves rows and columns; each halving reads a blurred picture."""

    def __init__(self, narrow: int, wide: int, numerics: Numerics, *, rngs: nnx.Rngs):
        self.conv1 = ScaledConv((3, narrow, narrow), numerics, rngs=rngs)
        self.conv2 = ScaledConv((3, narrow, wide), numerics, stride=2, rngs=rngs)
        self.conv_skip = ScaledConv(
            (1, narrow, wide), numerics, stride=2, activated=False, rngs=rngs
        )

    def __call__(self, x: Float[Array, "B Y X I"]) -> Float[Array, "B y x O"]:
        changed = self.conv2(blurred(self.conv1(x, padding=1), padding=2))
        return (changed + self.conv_skip(blurred(x, padding=1))) / math.sqrt(2)


class MotionEncoder(nnx.Module):
    """Features of a face: coefficients of orthonormal directions, times these directions."""

    def __init__(self, config: FaceConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        widths, style = config.widths, config.style_dim
        self.dtype = numerics.dtype
        self.conv_in = ScaledConv((1, 3, widths[0]), numerics, rngs=rngs)
        self.blocks = nnx.List(
            [
                MotionBlock(narrow, wide, numerics, rngs=rngs)
                for narrow, wide in itertools.pairwise(widths)
            ]
        )
        self.conv_out = ScaledConv((4, widths[-1], style), numerics, activated=False, rngs=rngs)
        linears = [(style, style)] * (MOTION_LINEARS - 1) + [(style, config.motion_dim)]
        self.linears = nnx.List([ScaledLinear(sizes, numerics, rngs=rngs) for sizes in linears])
        shape = (config.feature_dim, config.motion_dim)
        self.directions = nnx.Param(
            _NORMAL(rngs.params(), shape, jnp.float32), dims=("features", "motions")
        )

    def __call__(self, faces_BYXC: Float[Array, "B Y X C"]) -> Float[Array, "B I"]:
        x = self.conv_in(faces_BYXC)
        for block in self.blocks:
            x = block(x)
        motion = self.conv_out(x)[:, 0, 0]
        for linear in self.linears:
            motion = linear(motion)
        directions, _ = jnp.linalg.qr(self.directions[...].astype(jnp.float32) + _SMALL_SHIFT)
        with jax.default_matmul_precision("float32"):
            return (motion.astype(jnp.float32) @ directions.T).astype(self.dtype)


class ScaledLinear(nnx.Module):
    """Linear map whose kernel is scaled by 1/sqrt(fan-in) at each use."""

    def __init__(self, sizes: tuple[int, int], numerics: Numerics, *, rngs: nnx.Rngs):
        self.dtype, self.scale = numerics.dtype, 1 / math.sqrt(sizes[0])
        self.kernel = nnx.Param(
            _NORMAL(rngs.params(), sizes, numerics.param_dtype), dims=("features", "features")
        )
        self.bias = nnx.Param(jnp.zeros(sizes[1], numerics.param_dtype), dims=("features",))

    def __call__(self, x: Float[Array, "B I"]) -> Float[Array, "B O"]:
        kernel = self.kernel[...].astype(self.dtype) * self.scale
        return affine(x, kernel, self.bias[...], dtype=self.dtype)


class CausalConv(nnx.Module):
    """Convolution over frames; frames before the first are copies of it."""

    def __init__(
        self, sizes: tuple[int, int], numerics: Numerics, *, stride: int = 1, rngs: nnx.Rngs
    ):
        narrow, wide = sizes
        self.dtype, self.stride = numerics.dtype, stride
        draw = nnx.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
        self.kernel = nnx.Param(
            draw(rngs.params(), (TAPS, narrow, wide), numerics.param_dtype),
            dims=("frame", "features", "features"),
        )
        self.bias = nnx.Param(jnp.zeros(wide, numerics.param_dtype), dims=("features",))

    def __call__(self, x: Float[Array, "B F I"]) -> Float[Array, "B f O"]:
        y = jax.lax.conv_general_dilated(
            jnp.pad(x.astype(self.dtype), ((0, 0), (TAPS - 1, 0), (0, 0)), mode="edge"),
            self.kernel[...].astype(self.dtype),
            window_strides=(self.stride,),
            padding="VALID",
            dimension_numbers=("NWC", "WIO", "NWC"),
            precision=_precision(self.dtype),
        )
        return y + jnp.broadcast_to(self.bias[...].astype(self.dtype), y.shape)


class FaceEncoder(nnx.Module):
    """Tokens of every latent frame: one per head, and a learned one that is always the same."""

    def __init__(self, config: FaceConfig, model_dim: int, numerics: Numerics, *, rngs: nnx.Rngs):
        hidden = config.hidden_dim
        self.heads, self.dtype = config.heads, numerics.dtype
        self.conv1 = CausalConv((config.feature_dim, hidden * config.heads), numerics, rngs=rngs)
        self.conv2 = CausalConv((hidden, hidden), numerics, stride=2, rngs=rngs)
        self.conv3 = CausalConv((hidden, hidden), numerics, stride=2, rngs=rngs)
        self.out_proj = Linear((hidden, model_dim), ("features", "width"), numerics, rngs=rngs)
        self.padding_token = nnx.Param(jnp.zeros(model_dim, numerics.param_dtype), dims=("width",))

    def __call__(self, features_BFI: Float[Array, "B F I"]) -> Float[Array, "B f T D"]:
        batch, frames, _ = features_BFI.shape
        by_head = self.conv1(features_BFI).reshape(batch, frames, self.heads, -1)
        x = _activated(by_head.swapaxes(1, 2).reshape(batch * self.heads, frames, -1))
        for convolution in (self.conv2, self.conv3):
            x = _activated(convolution(x))
        tokens = self.out_proj(x).reshape(batch, self.heads, x.shape[1], -1).swapaxes(1, 2)
        padding = self.padding_token[...].astype(self.dtype)[None, None, None]
        shape = (batch, x.shape[1], 1, padding.shape[-1])
        return jnp.concatenate([tokens, jnp.broadcast_to(padding, shape)], axis=2)


def encode_motion(
    encoder: MotionEncoder,
    faces_BFYXC: Float[Array, "B F Y X C"],
    *,
    batch: int,
    layout: ActivationLayout,
) -> Float[Array, "B F I"]:
    """Returns the motion features of every frame, `batch` faces at a time, or one per device."""
    videos, frames, *pixels = faces_BFYXC.shape
    devices = 1 if layout.mesh is None else layout.mesh.size
    at_once = -(-min(batch, videos * frames) // devices) * devices
    missing = -videos * frames % at_once
    faces = faces_BFYXC.reshape(videos * frames, *pixels)
    faces = jnp.pad(faces, ((0, missing), (0, 0), (0, 0), (0, 0)))

    def encode(some: Float[Array, "B Y X C"]) -> Float[Array, "B I"]:
        spread = layout.constrain(some, "frames", "row", "column", "channels")
        return layout.constrain(encoder(spread), "frames", "features")

    features = jax.lax.map(encode, faces.reshape(-1, at_once, *pixels))
    return features.reshape(-1, features.shape[-1])[: videos * frames].reshape(videos, frames, -1)


def blurred(x: Float[Array, "B Y X C"], *, padding: int) -> Float[Array, "B y x C"]:
    """Returns x, with zeros around it, smoothed along rows and columns."""
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    for dim in (1, 2):
        length = x.shape[dim] - len(BLUR) + 1
        parts = [
            jax.lax.slice_in_dim(x, tap, tap + length, axis=dim) * weight
            for tap, weight in enumerate(BLUR)
        ]
        x = sum(parts[1:], start=parts[0])
    return x


def _activated(x: Float[Array, "B F D"]) -> Float[Array, "B F D"]:
    return silu(standardize(x, eps=NORM_EPS).astype(x.dtype))


def _precision(dtype: jnp.dtype) -> jax.lax.Precision:
    # By default a TPU multiplies float32 in bfloat16.
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
