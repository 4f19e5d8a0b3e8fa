"""The decoder: residual stages that double height and width, some of them also time."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxdiffusion.models.vae.blocks import MidBlock, Past, RmsNorm, Stage
from maxdiffusion.models.vae.config import WanVaeConfig
from maxdiffusion.models.vae.convolution import CausalConv, FrameConv, Numerics, with_past
from maxdiffusion.models.vae.sharding import WHOLE, SpatialSharding


class Upsample(nnx.Module):
    """Doubles, with `time_conv`, the frames after the first, then height and width."""

    def __init__(self, dim: int, numerics: Numerics, *, double_time: bool):
        self.conv = FrameConv((3, 3, dim, dim // 2), numerics)
        self.time_conv = CausalConv((3, 1, 1, dim, 2 * dim), numerics) if double_time else None

    def __call__(
        self,
        x: Float[Array, "B F Y X C"],
        past: Array | None,
        sharding: SpatialSharding = WHOLE,
    ) -> tuple[Float[Array, "B f y x D"], Array | None]:
        if self.time_conv is not None:
            x, past = self._double_time(partial(self.time_conv, sharding=sharding), x, past)
        return self.conv(nearest(x), sharding, stride=1, padding=(1, 1)), past

    def _double_time(
        self, time_conv: Callable[..., tuple[Array, Array]], x: Array, past: Array | None
    ) -> tuple[Array, Array]:
        """Two frames for every frame but the clip's first, and the past for the next chunk."""
        if past is not None:
            y, past = time_conv(x, past)
            return interleave(y), past
        # The first frame of the clip goes through as it is, and the rest never see it.
        first, rest = x[:, :1], x[:, 1:]
        if rest.shape[1] == 0:
            return first, with_past(rest, None)
        y, past = time_conv(rest, None)
        return jnp.concatenate([first, interleave(y)], axis=1), past


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
        self, x: Float[Array, "B F Y X C"], past: Past, sharding: SpatialSharding
    ) -> tuple[Float[Array, "B f y x D"], Past]:
        """One chunk of latent frames, and the past for the next one (`None` before the first)."""
        past_in, past_mid, past_stages, past_out = (None,) * 4 if past is None else past
        x, past_in = self.conv_in(sharding.constrain(x), past_in, sharding)
        x, past_mid = self.mid(sharding.constrain(x), past_mid, sharding)
        seen = []
        for level, stage in enumerate(self.stages):
            stage_past = None if past_stages is None else past_stages[level]
            x, stage_past = stage(x, stage_past, sharding)
            x = sharding.constrain(x)
            seen.append(stage_past)
        x, past_out = self.conv_out(jax.nn.silu(self.norm_out(x)), past_out, sharding)
        return sharding.constrain(x), (past_in, past_mid, tuple(seen), past_out)


def nearest(x: Float[Array, "B F Y X C"]) -> Float[Array, "B F y x C"]:
    """Every pixel twice along height and along width."""
    batch, frames, height, width, channels = x.shape
    repeated = jnp.broadcast_to(
        x[:, :, :, None, :, None], (batch, frames, height, 2, width, 2, channels)
    )
    return repeated.reshape(batch, frames, 2 * height, 2 * width, channels)


def interleave(x: Float[Array, "B F Y X C"]) -> Float[Array, "B f Y X c"]:
    """Two frames for every frame: the first half of its channels, then the second."""
    batch, frames, height, width, channels = x.shape
    pairs = x.reshape(batch, frames, height, width, 2, channels // 2)
    return jnp.moveaxis(pairs, 4, 2).reshape(batch, 2 * frames, height, width, channels // 2)
