"""One block of the transformer: self-attention, attention to the text, feed-forward."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxdiffusion.attention import AttentionPlan, BlockAttention
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.wan.config import WanTransformerConfig
from maxdiffusion.models.wan.embeddings import MODULATIONS
from maxdiffusion.models.wan.layers import (
    LayerNorm,
    Linear,
    Numerics,
    RmsNorm,
    gelu_tanh,
    modulate,
    modulation_table,
)
from maxdiffusion.models.wan.rope import rotate


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TextKeysValues:
    """Keys and values of the text for every layer; they are the same at every step."""

    keys: Float[Array, "*L B T N H"]
    values: Float[Array, "*L B T N H"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What all blocks of one forward share: the modulations of the step and the rotations."""

    modulation: Float[Array, "B K D"]
    cosines: Float[Array, "S K"]
    sines: Float[Array, "S K"]


class Projections(nnx.Module):
    """The four linear maps and two norms that every attention of WAN has."""

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        square = (config.model_dim, config.model_dim)
        self.head_dim = config.head_dim
        self.to_q = Linear(square, ("model", "heads"), numerics, rngs=rngs)
        self.to_k = Linear(square, ("model", "heads"), numerics, rngs=rngs)
        self.to_v = Linear(square, ("model", "heads"), numerics, rngs=rngs)
        self.to_out = Linear(square, ("heads", "model"), numerics, rngs=rngs)
        self.norm_q = RmsNorm(config.model_dim, numerics, eps=config.eps)
        self.norm_k = RmsNorm(config.model_dim, numerics, eps=config.eps)

    @jax.named_scope("qkv")
    def queries(self, x: Float[Array, "B S D"]) -> Float[Array, "B S N H"]:
        """Normalised queries of x, by heads."""
        return self._by_heads(self.norm_q(self.to_q(x)))

    @jax.named_scope("qkv")
    def keys(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        """Normalised keys of x, by heads."""
        return self._by_heads(self.norm_k(self.to_k(x)))

    @jax.named_scope("qkv")
    def values(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        """Values of x, by heads."""
        return self._by_heads(self.to_v(x))

    @jax.named_scope("out")
    def output(self, heads_BSNH: Float[Array, "B S N H"]) -> Float[Array, "B S D"]:
        """What the heads found, mixed into one vector per token."""
        return self.to_out(heads_BSNH.reshape(*heads_BSNH.shape[:2], -1))

    def _by_heads(self, x: Float[Array, "B S D"]) -> Float[Array, "B S N H"]:
        return x.reshape(*x.shape[:2], -1, self.head_dim)


class SelfAttention(Projections):
    """Every video token looks at every other one; positions enter as rotations."""

    def __call__(
        self,
        x: Float[Array, "B S D"],
        step: StepContext,
        *,
        attention: AttentionPlan,
        layout: ActivationLayout,
    ) -> Float[Array, "B S D"]:
        queries, keys, values = self.rotated(x, step, layout)
        return self.output(pin_heads(attention(queries, keys, values), layout))

    def rotated(
        self, x: Float[Array, "B S D"], step: StepContext, layout: ActivationLayout
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N H"], Float[Array, "B S N H"]]:
        """Queries and keys, turned by their positions, and values."""
        queries = pin_heads(rotate(self.queries(x), step.cosines, step.sines), layout)
        keys = pin_heads(rotate(self.keys(x), step.cosines, step.sines), layout)
        return queries, keys, pin_heads(self.values(x), layout)


class CrossAttention(Projections):
    """Every video token looks at the whole text, its padding rows included."""

    def __call__(
        self,
        x: Float[Array, "B S D"],
        text: TextKeysValues,
        *,
        attention: AttentionPlan,
        layout: ActivationLayout,
    ) -> Float[Array, "B S D"]:
        queries = pin_heads(self.queries(x), layout)
        return self.output(pin_heads(attention(queries, text.keys, text.values), layout))

    def keys_values(
        self, context_BTD: Float[Array, "B T D"], layout: ActivationLayout
    ) -> TextKeysValues:
        """Keys and values of one layer for an embedded text; every device needs all of its rows."""
        dims = ("batch", "text", "heads", "head")
        return TextKeysValues(
            keys=layout.constrain(self.keys(context_BTD), *dims),
            values=layout.constrain(self.values(context_BTD), *dims),
        )


class FeedForward(nnx.Module):
    """Widens every token, bends it and narrows it again."""

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        narrow, wide = config.model_dim, config.ffn_dim
        self.up = Linear((narrow, wide), ("model", "mlp"), numerics, rngs=rngs)
        self.down = Linear((wide, narrow), ("mlp", "model"), numerics, rngs=rngs)

    @jax.named_scope("mlp")
    def __call__(
        self, x: Float[Array, "B S D"], *, layout: ActivationLayout
    ) -> Float[Array, "B S D"]:
        wide_BSM = layout.constrain(gelu_tanh(self.up(x)), "batch", "sequence", "mlp")
        return self.down(wide_BSM)


class WanBlock(nnx.Module):
    """Self-attention and feed-forward are moved by the time of the step, the text is not."""

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        self.eps = config.eps
        self.attn1 = SelfAttention(config, numerics, rngs=rngs)
        self.attn2 = CrossAttention(config, numerics, rngs=rngs)
        self.ffn = FeedForward(config, numerics, rngs=rngs)
        self.norm2 = LayerNorm(config.model_dim, eps=config.eps)
        self.scale_shift_table = modulation_table((MODULATIONS, config.model_dim), rngs)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        step: StepContext,
        text: TextKeysValues,
        *,
        attention: BlockAttention,
        layout: ActivationLayout,
    ) -> Float[Array, "B S D"]:
        shift, scale, gate, shift_2, scale_2, gate_2 = self.modulations(step)
        with jax.named_scope("self_attention"):
            moved = modulate(x, shift, scale, eps=self.eps)
            seen = self.attn1(moved, step, attention=attention.self_attention, layout=layout)
            x = pin_tokens(gated_sum(x, seen, gate), layout)
        with jax.named_scope("cross_attention"):
            plan = attention.cross_attention
            read = self.attn2(self.norm2(x), text, attention=plan, layout=layout)
            x = pin_tokens(x + read, layout)
        with jax.named_scope("ffn"):
            moved = modulate(x, shift_2, scale_2, eps=self.eps)
            return pin_tokens(gated_sum(x, self.ffn(moved, layout=layout), gate_2), layout)

    def modulations(self, step: StepContext) -> tuple[Float[Array, "B D"], ...]:
        """Shift, scale and gate of self-attention, then of the feed-forward."""
        modulation = self.scale_shift_table[...] + step.modulation.astype(jnp.float32)
        return jnp.unstack(modulation, axis=1)

    def fast_heads(
        self,
        x: Float[Array, "B S D"],
        step: StepContext,
        *,
        attention: BlockAttention,
        layout: ActivationLayout,
    ) -> Int[Array, ""]:
        """How many (batch, head) pairs of self-attention pass the gate of fixed-m softmax."""
        shift, scale, *_ = self.modulations(step)
        moved = modulate(x, shift, scale, eps=self.eps)
        return attention.self_attention.fast_heads(*self.attn1.rotated(moved, step, layout))


@jax.named_scope("gate")
def gated_sum(
    x: Float[Array, "B S D"], change: Float[Array, "B S D"], gate_BD: Float[Array, "B D"]
) -> Float[Array, "B S D"]:
    """x plus what a part of the block adds, weighted per feature; float32, one rounding."""
    added = change.astype(jnp.float32) * gate_BD[:, None, :]
    return (x.astype(jnp.float32) + added).astype(x.dtype)


def pin_tokens(x: Float[Array, "B S D"], layout: ActivationLayout) -> Float[Array, "B S D"]:
    """Tokens, placed on the mesh."""
    return layout.constrain(x, "batch", "sequence", "model")


def pin_heads(x: Float[Array, "B S N H"], layout: ActivationLayout) -> Float[Array, "B S N H"]:
    """Tokens by heads, placed on the mesh."""
    return layout.constrain(x, "batch", "sequence", "heads", "head")
