"""Encoder and decoder of the VAE: residual stages between resolutions.

A stage of the encoder halves height and width, some also time; one of the decoder doubles them.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxdiffusion.models.vae.config import WanVaeConfig
from maxdiffusion.models.vae.layers import (
    Cache,
    CausalConv,
    FrameConv,
    HalvingConv,
    MidBlock,
    Numerics,
    RmsNorm,
    Stage,
    with_cache,
)
from maxdiffusion.models.vae.sharding import WHOLE, SpatialSharding


class Upsample(nnx.Module):
    """Doubles, with `time_conv`, the frames after the first, then height and width."""

    def __init__(self, dim: int, numerics: Numerics, *, double_time: bool):
        self.conv = FrameConv((3, 3, dim, dim // 2), numerics)
        self.time_conv = CausalConv((3, 1, 1, dim, 2 * dim), numerics) if double_time else None

    def __call__(
        self,
        x: Float[Array, "B F Y X C"],
        cache: Array | None,
        sharding: SpatialSharding = WHOLE,
    ) -> tuple[Float[Array, "B f y x O"], Array | None]:
        if self.time_conv is not None:
            x, cache = self._double_time(partial(self.time_conv, sharding=sharding), x, cache)
        return self.conv(nearest(x), sharding, stride=1, padding=(1, 1)), cache

    def _double_time(
        self, time_conv: Callable[..., tuple[Array, Array]], x: Array, cache: Array | None
    ) -> tuple[Array, Array]:
        """Two frames for every frame but the clip's first, and the cache for the next chunk."""
        if cache is not None:
            y, cache = time_conv(x, cache)
            return interleave(y), cache
        # The first frame of the clip goes through as it is, and the rest never see it.
        first, rest = x[:, :1], x[:, 1:]
        if rest.shape[1] == 0:
            return first, with_cache(rest, None)
        y, cache = time_conv(rest, None)
        return jnp.concatenate([first, interleave(y)], axis=1), cache


class Decoder(nnx.Module):
    """Latents to video, not yet clipped."""

    def __init__(self, config: WanVaeConfig, numerics: Numerics):
        dims = config.decoder_dims
        self.conv_in = CausalConv((3, 3, 3, config.z_dim, dims[0]), numerics)
        self.mid = MidBlock(dims[0], numerics)
        upsamples = [
            Upsample(dim, numerics, double_time=double_time)
            for dim, double_time in zip(
                dims[:-1], reversed(config.temperal_downsample), strict=True
            )
        ]
        # Every Upsample halves the channels.
        widths = (dims[0], *(dim // 2 for dim in dims[:-1]))
        blocks = config.num_res_blocks + 1
        self.stages = nnx.List(
            [
                Stage((before, dim), numerics, blocks=blocks, resample=resample)
                for before, dim, resample in zip(widths, dims, [*upsamples, None], strict=True)
            ]
        )
        self.norm_out = RmsNorm(dims[-1], numerics)
        self.conv_out = CausalConv((3, 3, 3, dims[-1], config.out_channels), numerics)

    def __call__(
        self, x: Float[Array, "B F Y X C"], cache: Cache, sharding: SpatialSharding
    ) -> tuple[Float[Array, "B f y x O"], Cache]:
        """One chunk of latent frames, and the cache for the next one (`None` before the first)."""
        cache_in, cache_mid, cache_stages, cache_out = (None,) * 4 if cache is None else cache
        x, cache_in = self.conv_in(sharding.constrain(x), cache_in, sharding)
        x, cache_mid = self.mid(sharding.constrain(x), cache_mid, sharding)
        caches = []
        for level, stage in enumerate(self.stages):
            stage_cache = None if cache_stages is None else cache_stages[level]
            x, stage_cache = stage(x, stage_cache, sharding)
            x = sharding.constrain(x)
            caches.append(stage_cache)
        x, cache_out = self.conv_out(jax.nn.silu(self.norm_out(x)), cache_out, sharding)
        return sharding.constrain(x), (cache_in, cache_mid, tuple(caches), cache_out)


def nearest(x: Float[Array, "B F Y X C"]) -> Float[Array, "B F y x C"]:
    """Every pixel twice along height and along width."""
    batch, frames, height, width, channels = x.shape
    repeated = jnp.broadcast_to(
        x[:, :, :, None, :, None], (batch, frames, height, 2, width, 2, channels)
    )
    return repeated.reshape(batch, frames, 2 * height, 2 * width, channels)


def interleave(x: Float[Array, "B F Y X C"]) -> Float[Array, "B f Y X O"]:
    """Two frames for every frame: the first half of its channels, then the second."""
    batch, frames, height, width, channels = x.shape
    pairs = x.reshape(batch, frames, height, width, 2, channels // 2)
    return jnp.moveaxis(pairs, 4, 2).reshape(batch, 2 * frames, height, width, channels // 2)


class Downsample(nnx.Module):
    """Halves height and width, and with `time_conv` then the frames after the first."""

    def __init__(self, dim: int, numerics: Numerics, *, halve_time: bool):
        self.conv = FrameConv((3, 3, dim, dim), numerics)
        self.time_conv = HalvingConv((3, 1, 1, dim, dim), numerics) if halve_time else None

    def __call__(
        self,
        x: Float[Array, "B F Y X C"],
        cache: Array | None,
        sharding: SpatialSharding = WHOLE,
    ) -> tuple[Float[Array, "B f y x C"], Array | None]:
        y = self.conv(x, sharding, stride=2, padding=(0, 1))
        if self.time_conv is None:
            return y, None
        last = y[:, -1:]
        if cache is not None:
            return self.time_conv(jnp.concatenate([cache, y], axis=1), sharding), last
        # The first frame of the clip goes through as it is; with the next two it makes the second.
        rest = [self.time_conv(y, sharding)] if y.shape[1] > 1 else []
        return jnp.concatenate([y[:, :1], *rest], axis=1), last


class Encoder(nnx.Module):
    """Video to the unquantised moments of its latents."""

    def __init__(self, config: WanVaeConfig, numerics: Numerics):
        dims = (config.base_dim, *config.encoder_dims)
        self.conv_in = CausalConv((3, 3, 3, config.in_channels, dims[0]), numerics)
        downsamples = [
            Downsample(dim, numerics, halve_time=halve_time)
            for dim, halve_time in zip(dims[1:-1], config.temperal_downsample, strict=True)
        ]
        blocks = config.num_res_blocks
        self.stages = nnx.List(
            [
                Stage((before, dim), numerics, blocks=blocks, resample=resample)
                for before, dim, resample in zip(
                    dims[:-1], dims[1:], [*downsamples, None], strict=True
                )
            ]
        )
        self.mid = MidBlock(dims[-1], numerics)
        self.norm_out = RmsNorm(dims[-1], numerics)
        self.conv_out = CausalConv((3, 3, 3, dims[-1], 2 * config.z_dim), numerics)

    def __call__(
        self, x: Float[Array, "B F Y X C"], cache: Cache, sharding: SpatialSharding
    ) -> tuple[Float[Array, "B f y x O"], Cache]:
        """One chunk of frames, and the cache for the next one (`None` before the first)."""
        cache_in, cache_stages, cache_mid, cache_out = (None,) * 4 if cache is None else cache
        x, cache_in = self.conv_in(sharding.constrain(x), cache_in, sharding)
        caches = []
        for level, stage in enumerate(self.stages):
            stage_cache = None if cache_stages is None else cache_stages[level]
            x, stage_cache = stage(x, stage_cache, sharding)
            x = sharding.constrain(x)
            caches.append(stage_cache)
        x, cache_mid = self.mid(x, cache_mid, sharding)
        x, cache_out = self.conv_out(jax.nn.silu(self.norm_out(x)), cache_out, sharding)
        return sharding.constrain(x), (cache_in, tuple(caches), cache_mid, cache_out)
