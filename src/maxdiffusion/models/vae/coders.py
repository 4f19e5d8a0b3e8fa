"""Encoder and decoder of the VAE: residual stages between resolutions.

A stage of the encoder halves height and width, some also time; one of the decoder doubles them. In
the 2.2 autoencoder pixels are folded into channels around both, and every stage that changes the
resolution has a shortcut without parameters: means on the way down, copies on the way up.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxdiffusion.models.vae.config import WanVaeConfig
from maxdiffusion.models.vae.layers import (
    LONE,
    Cache,
    CausalConv,
    Chunk,
    FrameConv,
    HalvingConv,
    MidBlock,
    Numerics,
    RmsNorm,
    Stage,
    with_cache,
)


def fold(x: Float[Array, "B F Y X C"], patch: int) -> Float[Array, "B F y x O"]:
    """Returns squares of `patch` pixels as channels, in the order channel, column, row."""
    if patch == 1:
        return x
    batch, frames, height, width, channels = x.shape
    squares = x.reshape(batch, frames, height // patch, patch, width // patch, patch, channels)
    return squares.transpose(0, 1, 2, 4, 6, 5, 3).reshape(
        batch, frames, height // patch, width // patch, channels * patch * patch
    )


def unfold(x: Float[Array, "B F Y X C"], patch: int) -> Float[Array, "B F y x O"]:
    """Returns the pixels that `fold` made channels of."""
    if patch == 1:
        return x
    batch, frames, height, width, channels = x.shape
    squares = x.reshape(batch, frames, height, width, channels // patch**2, patch, patch)
    return squares.transpose(0, 1, 2, 6, 3, 5, 4).reshape(
        batch, frames, height * patch, width * patch, channels // patch**2
    )


@dataclass(frozen=True, kw_only=True)
class AverageDown:
    """Shortcut of an encoder stage: means of `time` x `side` x `side` values and channels.

    The values of a cell become channels (channel, frame, row, column); `channels` means of equal
    groups of them are taken. A zero frame goes before the first chunk if frames are halved, since
    its frames are odd.
    """

    channels: int
    time: int
    side: int

    def __call__(
        self, x: Float[Array, "B F Y X C"], is_first_chunk: bool
    ) -> Float[Array, "B f y x O"]:
        if is_first_chunk:
            missing = -x.shape[1] % self.time
            x = jnp.pad(x, ((0, 0), (missing, 0), (0, 0), (0, 0), (0, 0)))
        batch, frames, height, width, channels = x.shape
        time, side = self.time, self.side
        size = (batch, frames // time, height // side, width // side)
        cells = x.reshape(batch, size[1], time, size[2], side, size[3], side, channels).transpose(
            0, 1, 3, 5, 7, 2, 4, 6
        )
        return jnp.mean(cells.reshape(*size, self.channels, -1), axis=-1)


@dataclass(frozen=True, kw_only=True)
class RepeatUp:
    """Shortcut of a decoder stage: copies of the channels fill `time` x `side` x `side` cells.

    Every channel is repeated as often as needed; the copies, in order, are the values (channel,
    frame, row, column) of the result. Of the first chunk the first frame is kept once.
    """

    channels: int
    time: int
    side: int

    def __call__(
        self, x: Float[Array, "B F Y X C"], is_first_chunk: bool
    ) -> Float[Array, "B f y x O"]:
        batch, frames, height, width, channels = x.shape
        time, side = self.time, self.side
        copies = self.channels * time * side * side // channels
        repeated = jnp.broadcast_to(x[..., None], (*x.shape, copies))
        cells = repeated.reshape(
            batch, frames, height, width, self.channels, time, side, side
        ).transpose(0, 1, 5, 2, 6, 3, 7, 4)
        y = cells.reshape(batch, frames * time, height * side, width * side, self.channels)
        return y[:, time - 1 :] if is_first_chunk else y


class Upsample(nnx.Module):
    """Doubles, with `time_conv`, the frames after the first, then height and width."""

    def __init__(self, dims: tuple[int, int], numerics: Numerics, *, double_time: bool):
        dim, out_dim = dims
        self.conv = FrameConv((3, 3, dim, out_dim), numerics)
        self.time_conv = CausalConv((3, 1, 1, dim, 2 * dim), numerics) if double_time else None

    def __call__(
        self,
        x: Float[Array, "B F Y X C"],
        cache: Array | None,
        chunk: Chunk = LONE,
    ) -> tuple[Float[Array, "B f y x O"], Array | None, Chunk]:
        if self.time_conv is not None:
            x, cache, chunk = self._double_time(self.time_conv, x, cache, chunk)
        return self.conv(nearest(x), chunk.sharding, stride=1, padding=(1, 1)), cache, chunk

    def _double_time(
        self, time_conv: CausalConv, x: Array, cache: Array | None, chunk: Chunk
    ) -> tuple[Array, Array, Chunk]:
        """Two frames for every frame but the clip's first, and the cache for the next chunk."""
        # The first frame of the clip goes through as it is, and the rest never see it.
        doubled = chunk.doubled()
        if cache is not None:
            y, cache = time_conv(x, cache, chunk.after_first())
            pairs = interleave(y)
            if chunk.start is not None:
                pairs = doubled.keep_first(jnp.repeat(x, 2, axis=1), pairs)
            return pairs, cache, doubled
        first, rest = x[:, :1], x[:, 1:]
        if rest.shape[1] == 0:
            return first, with_cache(rest, None), doubled
        y, cache = time_conv(rest, None, chunk)
        return jnp.concatenate([first, interleave(y)], axis=1), cache, doubled


class Decoder(nnx.Module):
    """Latents to video, not yet clipped."""

    def __init__(self, config: WanVaeConfig, numerics: Numerics):
        dims, inputs = config.decoder_dims, config.decoder_inputs
        self.conv_in = CausalConv((3, 3, 3, config.z_dim, dims[0]), numerics)
        self.mid = MidBlock(dims[0], numerics)
        stages = []
        for level, (before, dim) in enumerate(zip(inputs, dims, strict=True)):
            resample, shortcut = None, None
            if level < len(dims) - 1:
                double_time = config.temperal_downsample[-1 - level]
                resample = Upsample((dim, inputs[level + 1]), numerics, double_time=double_time)
                if config.is_residual:
                    shortcut = RepeatUp(channels=dim, time=1 + double_time, side=2)
            stages.append(
                Stage(
                    (before, dim),
                    numerics,
                    blocks=config.num_res_blocks + 1,
                    resample=resample,
                    shortcut=shortcut,
                )
            )
        self.stages = nnx.List(stages)
        self.norm_out = RmsNorm(dims[-1], numerics)
        self.conv_out = CausalConv((3, 3, 3, dims[-1], config.out_channels), numerics)

    def __call__(
        self, x: Float[Array, "B F Y X C"], cache: Cache, chunk: Chunk = LONE
    ) -> tuple[Float[Array, "B f y x O"], Cache]:
        """One chunk of latent frames, and the cache for the next one (`None` before the first)."""
        sharding = chunk.sharding
        cache_in, cache_mid, cache_stages, cache_out = (None,) * 4 if cache is None else cache
        x, cache_in = self.conv_in(sharding.constrain(x), cache_in, chunk)
        x, cache_mid = self.mid(sharding.constrain(x), cache_mid, chunk)
        caches = []
        for level, stage in enumerate(self.stages):
            stage_cache = None if cache_stages is None else cache_stages[level]
            x, stage_cache, chunk = stage(x, stage_cache, chunk)
            x = sharding.constrain(x)
            caches.append(stage_cache)
        x, cache_out = self.conv_out(jax.nn.silu(self.norm_out(x)), cache_out, chunk)
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
        chunk: Chunk = LONE,
    ) -> tuple[Float[Array, "B f y x C"], Array | None, Chunk]:
        sharding = chunk.sharding
        y = self.conv(x, sharding, stride=2, padding=(0, 1))
        if self.time_conv is None:
            return y, None, chunk
        last, halved = y[:, -1:], chunk.halved()
        if cache is not None:
            z = self.time_conv(jnp.concatenate([cache, y], axis=1), sharding)
            if chunk.start is not None:
                z = halved.keep_first(y[:, 1::2], z)
            return z, last, halved
        # The first frame of the clip goes through as it is; with the next two it makes the second.
        rest = [self.time_conv(y, sharding)] if y.shape[1] > 1 else []
        return jnp.concatenate([y[:, :1], *rest], axis=1), last, halved


class Encoder(nnx.Module):
    """Video to the unquantised moments of its latents."""

    def __init__(self, config: WanVaeConfig, numerics: Numerics):
        dims, inputs = config.encoder_dims, config.encoder_inputs
        self.conv_in = CausalConv((3, 3, 3, config.in_channels, inputs[0]), numerics)
        stages = []
        for level, (before, dim) in enumerate(zip(inputs, dims, strict=True)):
            resample, halve_time, side = None, False, 1
            if level < len(dims) - 1:
                halve_time, side = config.temperal_downsample[level], 2
                resample = Downsample(dim, numerics, halve_time=halve_time)
            shortcut = AverageDown(channels=dim, time=1 + halve_time, side=side)
            stages.append(
                Stage(
                    (before, dim),
                    numerics,
                    blocks=config.num_res_blocks,
                    resample=resample,
                    shortcut=shortcut if config.is_residual else None,
                )
            )
        self.stages = nnx.List(stages)
        self.mid = MidBlock(dims[-1], numerics)
        self.norm_out = RmsNorm(dims[-1], numerics)
        self.conv_out = CausalConv((3, 3, 3, dims[-1], 2 * config.z_dim), numerics)

    def __call__(
        self, x: Float[Array, "B F Y X C"], cache: Cache, chunk: Chunk = LONE
    ) -> tuple[Float[Array, "B f y x O"], Cache]:
        """One chunk of frames, and the cache for the next one (`None` before the first)."""
        sharding = chunk.sharding
        cache_in, cache_stages, cache_mid, cache_out = (None,) * 4 if cache is None else cache
        x, cache_in = self.conv_in(sharding.constrain(x), cache_in, chunk)
        caches = []
        for level, stage in enumerate(self.stages):
            stage_cache = None if cache_stages is None else cache_stages[level]
            x, stage_cache, chunk = stage(x, stage_cache, chunk)
            x = sharding.constrain(x)
            caches.append(stage_cache)
        x, cache_mid = self.mid(x, cache_mid, chunk)
        x, cache_out = self.conv_out(jax.nn.silu(self.norm_out(x)), cache_out, chunk)
        return sharding.constrain(x), (cache_in, tuple(caches), cache_mid, cache_out)
