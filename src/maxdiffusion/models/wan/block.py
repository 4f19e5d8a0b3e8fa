"""One block of the transformer: self-attention, attention to the text, feed-forward."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxdiffusion.attention import AttentionPlan, BlockAttention
from maxdiffusion.kernels.heads import Columns, heads_of
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

COLUMNS = ("batch", "sequence", "heads")
"""Heads side by side, as projections write and read them."""


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
        square, width = (config.model_dim, config.model_dim), config.width_word
        self.head_dim = config.head_dim
        self.to_q = Linear(square, (width, "heads"), numerics, rngs=rngs)
        self.to_k = Linear(square, (width, "heads"), numerics, rngs=rngs)
        self.to_v = Linear(square, (width, "heads"), numerics, rngs=rngs)
        self.to_out = Linear(square, ("heads", width), numerics, rngs=rngs)
        self.norm_q = RmsNorm(config.model_dim, numerics, eps=config.eps)
        self.norm_k = RmsNorm(config.model_dim, numerics, eps=config.eps)

    @jax.named_scope("qkv")
    def queries(self, x: Float[Array, "B S D"]) -> Columns:
        """Queries of x, whose norm is still to be done."""
        return self.norm_q.columns(self.to_q(x))

    @jax.named_scope("qkv")
    def keys(self, x: Float[Array, "B T D"]) -> Columns:
        """Keys of x, whose norm is still to be done."""
        return self.norm_k.columns(self.to_k(x))

    @jax.named_scope("qkv")
    def values(self, x: Float[Array, "B T D"]) -> Columns:
        """Values of x."""
        return Columns(values=self.to_v(x))

    @jax.named_scope("out")
    def output(self, columns_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """What the heads found, mixed into one vector per token."""
        return self.to_out(columns_BSD)


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
        seen = attention.of_columns(*self.columns(x, step, layout))
        return self.output(layout.constrain(seen, *COLUMNS))

    def columns(
        self, x: Float[Array, "B S D"], step: StepContext, layout: ActivationLayout
    ) -> tuple[Columns, Columns, Columns]:
        """Queries and keys, to be turned by their positions, and values."""
        turn: dict[str, Any] = {"cosines": step.cosines, "sines": step.sines}
        queries, keys = (replace(part, **turn) for part in (self.queries(x), self.keys(x)))
        return pinned(queries, layout), pinned(keys, layout), pinned(self.values(x), layout)


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
        keys, values = (
            Columns(values=part.reshape(*part.shape[:2], -1)) for part in (text.keys, text.values)
        )
        read = attention.of_columns(pinned(self.queries(x), layout), keys, values)
        return self.output(layout.constrain(read, *COLUMNS))

    def keys_values(
        self, context_BTD: Float[Array, "B T D"], layout: ActivationLayout
    ) -> TextKeysValues:
        """Keys and values of one layer for an embedded text; every device needs all of its rows."""
        dims = ("batch", "text", "heads", "head")
        keys, values = self.keys(context_BTD), self.values(context_BTD)
        return TextKeysValues(
            keys=layout.constrain(heads_of(keys, self.head_dim), *dims),
            values=layout.constrain(heads_of(values, self.head_dim), *dims),
        )


class FeedForward(nnx.Module):
    """Widens every token, bends it and narrows it again."""

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        narrow, wide, width = config.model_dim, config.ffn_dim, config.width_word
        self.up = Linear((narrow, wide), (width, "mlp"), numerics, rngs=rngs)
        self.down = Linear((wide, narrow), ("mlp", width), numerics, rngs=rngs)

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
            moved = written(modulate(x, shift, scale, eps=self.eps))
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
        width = attention.self_attention.problem.head_dim
        columns = self.attn1.columns(moved, step, layout)
        queries, keys, values = (heads_of(part, width) for part in columns)
        return attention.self_attention.fast_heads(queries, keys, values)


@jax.named_scope("gate")
def gated_sum(
    x: Float[Array, "B S D"], change: Float[Array, "B S D"], gate_BD: Float[Array, "B D"]
) -> Float[Array, "B S D"]:
    """x plus what a part of the block adds, weighted per feature; float32, one rounding."""
    added = change.astype(jnp.float32) * gate_BD[:, None, :]
    return (x.astype(jnp.float32) + added).astype(x.dtype)


def written(x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """x, written once for the three products that read it.

    Otherwise XLA norms every row again for each: 0.35 M cycles more a product, where writing takes
    0.62 M (18,904 rows of 5120 on tpu7x). Where one product reads it, that is no gain.
    """
    return jax.lax.optimization_barrier(x)


def pin_tokens(x: Float[Array, "B S D"], layout: ActivationLayout) -> Float[Array, "B S D"]:
    """Tokens, placed on the mesh."""
    return layout.constrain(x, "batch", "sequence", "model")


def pinned(columns: Columns, layout: ActivationLayout) -> Columns:
    """Columns, placed on the mesh."""
    return replace(columns, values=layout.constrain(columns.values, *COLUMNS))
