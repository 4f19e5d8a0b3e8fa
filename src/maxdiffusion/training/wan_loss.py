"""The loss of a WAN expert: noise the latents, ask for the velocity, compare."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from maxdiffusion.attention import BlockAttention
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.wan import WanTransformer
from maxdiffusion.training.flow_matching import (
    BucketLosses,
    LossWeighting,
    NoiseLevels,
    add_noise,
    sample_losses,
    timestep_of,
)
from maxdiffusion.training.parts import Part, Values
from maxdiffusion.training.text import Captions, EncodedBefore, TextReader


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ClipBatch:
    """Normalised latents of clips, and their captions: tokens, or what was made of them before."""

    latents: Float[Array, "B F Y X C"]
    captions: Captions | EncodedBefore


@dataclass(frozen=True, kw_only=True)
class WanLoss:
    """The weighted squared error of one expert's velocity over its noise levels."""

    expert: str
    transformer: Part[WanTransformer]
    text: TextReader
    attention: BlockAttention
    layout: ActivationLayout
    levels: NoiseLevels
    weighting: LossWeighting

    def __call__(
        self, values: Mapping[str, Values], batch: ClipBatch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], BucketLosses]:
        level_key, noise_key, text_key = jax.random.split(key, 3)
        levels = self.levels.draw(level_key, batch.latents.shape[0])
        sample = add_noise(batch.latents.astype(jnp.float32), levels, noise_key)
        model = self.transformer.merge(values[self.expert])
        rows = self.text(values, batch.captions, text_key)
        predicted = self._velocity(model, sample.latents, levels, rows)
        losses = sample_losses(predicted, sample)
        return jnp.mean(losses * self.weighting(levels)), BucketLosses.of(losses, levels)

    def _velocity(self, model: Any, latents: Array, levels: Array, rows: Array) -> Array:
        text = model.text_keys_values(rows.astype(model.dtype), layout=self.layout)
        return model(
            latents.astype(model.dtype),
            timestep_of(levels),
            text,
            attention=self.attention,
            layout=self.layout,
        )
