"""AdamW with a rate that rises and falls, clipping, and a running mean of the parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int


class Decay(Enum):
    """What the learning rate does after it has risen."""

    CONSTANT = "constant"
    COSINE = "cosine"


class Clipping(Enum):
    """What of the gradient is kept within a limit."""

    NONE = "none"
    GLOBAL_NORM = "global_norm"
    VALUE = "value"


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The rate at every step: linear up to `peak`, then constant, or a cosine down to a share."""

    peak: float
    steps: int
    warmup_share: float = 0.1
    decay: Decay = Decay.CONSTANT
    final_share: float = 0.02

    def __post_init__(self) -> None:
        if not self.peak > 0 or self.steps < 1:
            raise ValueError(f"peak={self.peak}, steps={self.steps}: both must be above 0")
        if not 0 <= self.warmup_share <= 1 or not 0 <= self.final_share <= 1:
            raise ValueError("warmup_share and final_share: must lie between 0 and 1")

    def __call__(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """The rate of the step that follows `step` finished ones."""
        warmup = max(1, round(self.warmup_share * self.steps))
        rising = (step + 1) / warmup
        if self.decay is Decay.CONSTANT:
            return self.peak * jnp.minimum(rising, 1.0)
        falling = optax.cosine_decay_schedule(
            1.0, max(1, self.steps - warmup), alpha=self.final_share
        )
        return self.peak * jnp.minimum(rising, falling(step - warmup))


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """Turns gradients into better parameters.

    `rates` multiply the learning rate of single parts, such as a text encoder. The running mean
    begins with short memory, so that it does not hold the random start: after n steps it forgets
    as fast as (1 + n) / (10 + n) until that reaches `ema_decay`.
    """

    learning_rate: LearningRate
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clipping: Clipping = Clipping.NONE
    clip_at: float = 1.0
    ema_decay: float = 0.999
    rates: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, value in (("b1", self.b1), ("b2", self.b2), ("ema_decay", self.ema_decay)):
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value}: must be at least 0 and less than 1")
        if not self.clip_at > 0:
            raise ValueError(f"clip_at={self.clip_at}: must be above 0")

    @property
    def _adam(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.eps),
            optax.add_decayed_weights(self.weight_decay),
        )

    def start(self, values: Mapping[str, jax.Array]) -> Any:
        """The moments of one part before its first step."""
        return self._adam.init(values)

    def clip(self, gradients: Any, norm: Float[Array, ""]) -> Any:
        """The gradients of all parts, whose joint norm is `norm`, within the limit."""
        if self.clipping is Clipping.NONE:
            return gradients
        if self.clipping is Clipping.VALUE:
            return jax.tree.map(lambda g: jnp.clip(g, -self.clip_at, self.clip_at), gradients)
        scale = jnp.minimum(1.0, self.clip_at / jnp.maximum(norm, 1e-12))
        return jax.tree.map(lambda g: g * scale, gradients)

    def improve(
        self, name: str, values: Any, gradients: Any, moments: Any, step: Int[Array, ""]
    ) -> tuple[Any, Any]:
        """One part after a step, and its moments."""
        updates, moments = self._adam.update(gradients, moments, values)
        rate = self.learning_rate(step) * self.rates.get(name, 1.0)
        return jax.tree.map(lambda v, u: v - rate * u, values, updates), moments

    def average(self, ema: Any, values: Any, step: Int[Array, ""]) -> Any:
        """The running mean after a step."""
        count = step.astype(jnp.float32)
        keep = jnp.minimum(self.ema_decay, (1 + count) / (10 + count))
        return jax.tree.map(lambda old, new: keep * old + (1 - keep) * new, ema, values)
