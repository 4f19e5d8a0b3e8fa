"""The WAN video autoencoders, 2.1 and 2.2, over [B F Y X C].

    video 1 + 4n frames --encoder--> moments --mode--> latents 1 + n frames, 1/8 height and width
    latents --decoder--> video in [-1, 1]                      (2.2: 1/16, pixels folded by 2)

Both directions run in chunks of latent frames, in a scan that carries what every layer has seen.
The first chunk is filled up with empty frames in front, so that one program serves all chunks. The
result is the same for every chunk size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.models.vae.coders import Decoder, Encoder, fold, unfold
from maxdiffusion.models.vae.config import WanVaeConfig
from maxdiffusion.models.vae.layers import Chunk, Numerics, Pointwise
from maxdiffusion.models.vae.sharding import WHOLE, SpatialSharding
from maxdiffusion.models.vae.tiling import Tiling, map_tiles

ALL_FRAMES, FITTING_FRAMES = -1, 0
# 1280x720 on eight devices: one latent frame, 177 MB.
MOST_CHUNK_BYTES = 2**28
# step(frames, cache, start) -> (result, cache for the next chunk); `start` is that of `Chunk`
Step = Callable[[Array, Any, Array | None], tuple[Array, Any]]


@partial(jax.tree_util.register_dataclass, data_fields=["moments"], meta_fields=[])
@dataclass(frozen=True)
class LatentDistribution:
    """The normal distribution of latents that a video is encoded to."""

    moments: Float[Array, "B F Y X Z"]  # means, then logarithms of variances

    @property
    def mean(self) -> Float[Array, "B F Y X C"]:
        """The most likely latents."""
        return jnp.split(self.moments, 2, axis=-1)[0]

    @property
    def log_variance(self) -> Float[Array, "B F Y X C"]:
        """Logarithms of the variances, kept within [-30, 20]."""
        return jnp.clip(jnp.split(self.moments, 2, axis=-1)[1], -30.0, 20.0)

    def sample(self, key: PRNGKeyArray) -> Float[Array, "B F Y X C"]:
        """Latents drawn from the distribution."""
        noise = jax.random.normal(key, self.mean.shape, self.mean.dtype)
        return self.mean + jnp.exp(0.5 * self.log_variance) * noise


class WanVae(nnx.Module):
    """Encodes video to latents and decodes latents to video."""

    def __init__(
        self,
        config: WanVaeConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        numerics = Numerics(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config = config
        self.dtype = dtype
        self.encoder = Encoder(config, numerics)
        self.quant_conv = Pointwise((1, 1, 1, 2 * config.z_dim, 2 * config.z_dim), numerics)
        self.post_quant_conv = Pointwise((1, 1, 1, config.z_dim, config.z_dim), numerics)
        self.decoder = Decoder(config, numerics)

    def encode(
        self,
        video: Float[Array, "B F Y X C"],
        *,
        chunk: int = 1,
        tiling: Tiling | None = None,
        sharding: SpatialSharding = WHOLE,
    ) -> LatentDistribution:
        """The distribution of the latents of a video in [-1, 1].

        It is run `chunk` latent frames at a time (-1: all), in tiles or, with None, frames whole.
        As in diffusers, tiles are measured in pixels after folding: those of the 2.2 autoencoder
        cover twice their height and width.
        """
        config = self.config
        _check_shape("video", video.shape, config.video_channels)
        _check_sides(video.shape, config.spatial_factor)
        latent_frames = config.latent_frames(video.shape[1])
        chunk = _chunk(latent_frames, chunk) * config.temporal_factor
        factor = config.spatial_factor // config.fold_size  # folded pixels per latent

        def run(x: Array) -> Array:
            height, width = (size // factor for size in x.shape[2:4])
            split = sharding.resized(height=height, width=width)
            step = partial(_step, self.encoder, split)
            return run_in_chunks(step, x, chunk=chunk, frames=latent_frames)

        folded = fold(video.astype(self.dtype), config.fold_size)
        if tiling is None or tiling.covers(video.shape[2], video.shape[3]):
            return LatentDistribution(self.quant_conv(run(folded)))
        in_latents = tiling.divided(factor)
        tiles = map_tiles(lambda x: self.quant_conv(run(x)), tiling.cut(folded))
        return LatentDistribution(sharding.constrain(in_latents.join(tiles)))

    def decode(
        self,
        latents: Float[Array, "B F Y X C"],
        *,
        chunk: int = 1,
        tiling: Tiling | None = None,
        sharding: SpatialSharding = WHOLE,
    ) -> Float[Array, "B f y x O"]:
        """The video, in [-1, 1], of denormalised latents.

        It is run `chunk` latent frames at a time (-1: all), in tiles or, with None, frames whole.
        """
        _check_shape("latents", latents.shape, self.config.z_dim)
        chunk = _chunk(latents.shape[1], chunk)
        frames = self.config.video_frames(latents.shape[1])

        def run(x: Array) -> Array:
            split = sharding.resized(height=x.shape[2], width=x.shape[3])
            step = partial(_step, self.decoder, split)
            return run_in_chunks(step, x, chunk=chunk, frames=frames)

        x = self.post_quant_conv(latents.astype(self.dtype))
        patch = self.config.fold_size
        in_latents = None if tiling is None else tiling.divided(self.config.spatial_factor)
        if tiling is None or in_latents is None or in_latents.covers(x.shape[2], x.shape[3]):
            return unfold(jnp.clip(run(x), -1.0, 1.0), patch)
        video = tiling.divided(patch).join(map_tiles(run, in_latents.cut(x)))
        return sharding.constrain(unfold(jnp.clip(video, -1.0, 1.0), patch))

    def normalise(self, latents: Float[Array, "*dims C"]) -> Float[Array, "*dims C"]:
        """Encoded latents with the mean 0 and deviation 1 that the transformer works on."""
        mean, std = self._statistics(latents.shape)
        return (latents.astype(jnp.float32) - mean) / std

    def denormalise(self, latents: Float[Array, "*dims C"]) -> Float[Array, "*dims C"]:
        """Latents of the transformer with the mean and deviation that `decode` takes."""
        mean, std = self._statistics(latents.shape)
        return latents.astype(jnp.float32) * std + mean

    def _statistics(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Returns the channels' mean and deviation, broadcast to a shape."""
        mean, std = (
            jnp.broadcast_to(jnp.array(values, jnp.float32), shape)
            for values in (self.config.latents_mean, self.config.latents_std)
        )
        return mean, std


def _step(
    coder: Encoder | Decoder, sharding: SpatialSharding, x: Array, cache: Any, start: Array | None
) -> tuple[Array, Any]:
    """Runs a chunk; see `Step`."""
    y, cache = coder(x, cache, Chunk(sharding=sharding, start=start))
    return y, jax.tree.map(sharding.constrain, cache)


def run_in_chunks(
    step: Step, x: Float[Array, "B F Y X C"], *, chunk: int, frames: int
) -> Float[Array, "B f y x O"]:
    """`step` of `chunk` frames at a time in one scan; the last `frames` frames of its results.

    Empty frames in front fill the first chunk up.
    """
    count = -(-x.shape[1] // chunk)
    if count == 1:
        return step(x, None, None)[0]
    empty = count * chunk - x.shape[1]
    batch, _, *frame = x.shape
    padded = jnp.pad(x, ((0, 0), (empty, 0), (0, 0), (0, 0), (0, 0)))
    chunks = jnp.moveaxis(padded.reshape(batch, count, chunk, *frame), 1, 0)
    starts = jnp.where(jnp.arange(count) == 0, empty, -1)
    _, cache = jax.eval_shape(lambda x: step(x, None, None), x[:, :1])
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)
    _, results = lax.scan(
        lambda cache, xs: step(xs[0], cache, xs[1])[::-1], zeros, (chunks, starts)
    )
    joined = jnp.moveaxis(results, 0, 1)
    return joined.reshape(batch, -1, *joined.shape[3:])[:, -frames:]


def fitting_chunk(config: WanVaeConfig, sharding: SpatialSharding, *, frames: int) -> int:
    """Returns the latent frames to run at a time, of `frames` in chunks of nearly equal length.

    An activation of the widest stage then has at most MOST_CHUNK_BYTES on a device in float32;
    about six of them are alive at once. Frames that a chunk looks back at cost less in longer ones.
    """
    factor = config.spatial_factor // config.fold_size
    pixels = sharding.height * sharding.width * factor**2 // (sharding.rows * sharding.columns)
    channels = max(config.encoder_dims[0], config.decoder_dims[-1])
    most = MOST_CHUNK_BYTES // (4 * pixels * channels * config.temporal_factor)
    chunks = -(-frames // max(1, most))
    return -(-frames // chunks)


def _chunk(latent_frames: int, chunk: int) -> int:
    """Latent frames that are run at a time."""
    if chunk != ALL_FRAMES and chunk < 1:
        rule = "latent frames run at a time: a whole number from 1, or -1 for all"
        raise ProblemsFound([Problem(name="chunk", value=chunk, rule=rule, remedy="Use 1")])
    return latent_frames if chunk == ALL_FRAMES else min(chunk, latent_frames)


def _check_shape(name: str, shape: tuple[int, ...], channels: int) -> None:
    if len(shape) != 5 or shape[-1] != channels or 0 in shape:
        rule = f"must be [batch, frames, height, width, {channels}]"
        remedy = "Move the channels to the last dimension"
        raise ProblemsFound([Problem(name=f"{name}.shape", value=shape, rule=rule, remedy=remedy)])


def _check_sides(shape: tuple[int, ...], factor: int) -> None:
    problems = [
        Problem(
            name=f"video {side}",
            value=size,
            rule=f"must be a multiple of {factor}, the pixels of one latent",
            remedy=f"Use {max(1, size // factor) * factor}",
        )
        for side, size in zip(("height", "width"), shape[2:4], strict=True)
        if size % factor
    ]
    if problems:
        raise ProblemsFound(problems)
