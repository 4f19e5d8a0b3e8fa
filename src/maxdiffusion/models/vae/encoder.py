"""The encoder: residual stages that halve height and width, some of them also time."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxdiffusion.models.vae.blocks import MidBlock, Past, RmsNorm, Stage
from maxdiffusion.models.vae.config import WanVaeConfig
from maxdiffusion.models.vae.convolution import CausalConv, FrameConv, HalvingConv, Numerics
from maxdiffusion.models.vae.sharding import WHOLE, SpatialSharding


class Downsample(nnx.Module):
    """Halves height and width, and with `time_conv` then the frames after the first."""

    def __init__(self, dim: int, numerics: Numerics, *, halve_time: bool):
        self.conv = FrameConv((3, 3, dim, dim), numerics)
        self.time_conv = HalvingConv((3, 1, 1, dim, dim), numerics) if halve_time else None

    def __call__(
        self,
        x: Float[Array, "B F Y X C"],
        past: Array | None,
        sharding: SpatialSharding = WHOLE,
    ) -> tuple[Float[Array, "B f y x C"], Array | None]:
        y = self.conv(x, sharding, stride=2, padding=(0, 1))
        if self.time_conv is None:
            return y, None
        last = y[:, -1:]
        if past is not None:
            return self.time_conv(jnp.concatenate([past, y], axis=1), sharding), last
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
        self, x: Float[Array, "B F Y X C"], past: Past, sharding: SpatialSharding
    ) -> tuple[Float[Array, "B f y x D"], Past]:
        """One chunk of frames, and the past for the next one (`None` before the first)."""
        past_in, past_stages, past_mid, past_out = (None,) * 4 if past is None else past
        x, past_in = self.conv_in(sharding.constrain(x), past_in, sharding)
        seen = []
        for level, stage in enumerate(self.stages):
            stage_past = None if past_stages is None else past_stages[level]
            x, stage_past = stage(x, stage_past, sharding)
            x = sharding.constrain(x)
            seen.append(stage_past)
        x, past_mid = self.mid(x, past_mid, sharding)
        x, past_out = self.conv_out(jax.nn.silu(self.norm_out(x)), past_out, sharding)
        return sharding.constrain(x), (past_in, tuple(seen), past_mid, past_out)
