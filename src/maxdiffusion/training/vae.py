"""Training of the video autoencoder: reconstruction, edges and KL divergence."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, PRNGKeyArray

from maxdiffusion.models.abstract import AbstractModel, Values, fresh_values
from maxdiffusion.models.vae import ALL_FRAMES, WanVae, WanVaeConfig
from maxdiffusion.models.vae.coders import unfold
from maxdiffusion.training.step import Optimiser, Step, make_step
from maxdiffusion.training.wan import on_mesh

VAE = "vae"
FIRST_LOG_VARIANCE = -6.0  # of the latents: at 0 noise would hide the picture at the start
Video = Float[Array, "B F Y X C"]


@dataclass(frozen=True, kw_only=True)
class VaeWeights:
    """Weights of the terms of the loss."""

    absolute: float = 1.0
    square: float = 1.0
    edges: float = 0.5  # differences of neighbouring pixels: penalises blur
    divergence: float = 3e-4


@dataclass(frozen=True, kw_only=True)
class VaeLoss:
    """Reconstruction error of clips, and KL divergence of their latents from a normal."""

    model: AbstractModel[WanVae]
    weights: VaeWeights = field(default_factory=VaeWeights)

    def __call__(
        self, values: Mapping[str, Values], batch: Mapping[str, Array], key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        vae = self.model.merge(values[VAE])
        video = batch["video"].astype(jnp.float32) / 127.5 - 1.0
        latents = vae.encode(video, chunk=ALL_FRAMES)
        decoded = unclipped(vae, latents.sample(key))
        error = decoded - video
        terms = {
            "absolute": jnp.mean(jnp.abs(error)),
            "square": jnp.mean(jnp.square(error)),
            "edges": _edges(error),
            "divergence": divergence(latents.mean, latents.log_variance),
        }
        weights = asdict(self.weights)
        total = sum(weights[name] * value for name, value in terms.items())
        return jnp.asarray(total), terms


def unclipped(vae: WanVae, latents: Video) -> Float[Array, "B f y x 3"]:
    """Returns the decoded clip before clipping to [-1, 1], which would have no gradient."""
    folded = vae.decoder(vae.post_quant_conv(latents), None)[0]
    return unfold(folded, vae.config.fold_size)


def divergence(mean: Video, log_variance: Video) -> Float[Array, ""]:
    """Returns the mean Kullback-Leibler divergence of the latents from a standard normal."""
    return 0.5 * jnp.mean(jnp.square(mean) + jnp.exp(log_variance) - 1.0 - log_variance)


def _edges(error: Video) -> Float[Array, ""]:
    """Returns the mean absolute difference of the errors of neighbouring pixels."""
    down, right = jnp.diff(error, axis=2), jnp.diff(error, axis=3)
    return jnp.mean(jnp.abs(down)) + jnp.mean(jnp.abs(right))


@dataclass(frozen=True, kw_only=True)
class VaeTraining:
    """Everything that the training step of an autoencoder is built from."""

    config: WanVaeConfig
    optimiser: Optimiser
    mesh: Mesh
    weights: VaeWeights = field(default_factory=VaeWeights)

    def build(self, rngs: nnx.Rngs) -> WanVae:
        """Returns an autoencoder in float32."""
        return WanVae(self.config, rngs=rngs)

    @cached_property
    def model(self) -> AbstractModel[WanVae]:
        """The autoencoder without weights."""
        return AbstractModel.of(self.build)

    def step(self) -> Step:
        """Returns the step, compiled for each size of clips at first use; it donates the state."""
        loss = VaeLoss(model=self.model, weights=self.weights)
        return on_mesh(make_step(loss, self.optimiser, trained=(VAE,)), self.mesh)

    def first_values(self, seed: int) -> Values:
        """Returns random parameters that at first treat every frame as a picture of its own."""
        values = fresh_values(self.build, seed=seed, mesh=self.mesh)
        return {path: first_bias(path, as_pictures(path, value)) for path, value in values.items()}


def first_bias(path: str, value: Array) -> Array:
    """Returns a parameter with a small log variance of the latents as its bias."""
    if path != "quant_conv.bias":
        return value
    is_variance = jnp.arange(value.shape[0]) >= value.shape[0] // 2
    return jnp.where(is_variance, FIRST_LOG_VARIANCE, value)


def as_pictures(path: str, value: Array) -> Array:
    """Returns a kernel with zero taps on earlier frames; time convolutions copy a frame."""
    if not path.endswith(".kernel") or value.ndim != 5 or value.shape[0] != 3:
        return value
    last = jnp.arange(3)[:, None, None, None, None] == 2
    if ".time_conv." in path:
        into, out = value.shape[-2:]
        picked = jnp.tile(jnp.eye(into), (1, out // into))
        return jnp.where(last, picked, 0.0).astype(value.dtype)
    # One tap of three is left, so it is scaled by the square root of three.
    return jnp.where(last, value * np.sqrt(3).astype(np.float32), 0.0)


def with_statistics(config: WanVaeConfig, latents: Iterable[np.ndarray]) -> WanVaeConfig:
    """Returns the config with the mean and deviation of each channel of these encoded latents."""
    rows = np.concatenate([part.reshape(-1, config.z_dim) for part in latents]).astype(np.float64)
    return replace(
        config,
        latents_mean=tuple(round(float(value), 6) for value in rows.mean(axis=0)),
        latents_std=tuple(round(float(value), 6) for value in rows.std(axis=0)),
    )


def peak_signal(decoded: np.ndarray, video: np.ndarray) -> float:
    """Returns the peak signal-to-noise ratio, in dB, of pictures in bytes."""
    error = float(np.mean(np.square(decoded.astype(np.float64) - video.astype(np.float64))))
    return float(10 * np.log10(255.0**2 / max(error, 1e-12)))
