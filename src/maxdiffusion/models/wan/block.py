"""One block of the transformer: self-attention, cross-attention to the text, MLP.

Queries and keys are normed across all heads; positions enter as RoPE. A fused attention takes the
projections and runs qk-norm, RoPE and the head layout of its context-parallel scheme in one pass
(`kernels.qk_prep.qk_norm_rope_scatter`). Any other takes finished heads.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxdiffusion.attention import Attention, AttentionPlan, BlockAttention
from maxdiffusion.attention.context_parallel.base import ScatteredHeads
from maxdiffusion.attention.plan import merge_heads, split_heads
from maxdiffusion.kernels.qk_prep import ProjectedHeads, rotate
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.wan.config import WanTransformerConfig
from maxdiffusion.models.wan.layers import (
    MODULATIONS,
    LayerNorm,
    Linear,
    Numerics,
    RmsNorm,
    by_token,
    gelu_tanh,
    modulate,
    modulation_table,
)

# Names of what the three parts of a block add to the tokens. Rematerialisation may keep them: the
# gradient of a gate reads them, and they are results of products that nothing else needs again.
SELF_CHANGE, CROSS_CHANGE, MLP_CHANGE = "attn1_change", "attn2_change", "ffn_change"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TextKeysValues:
    """Keys and values of the text for every layer; they are the same at every step.

    A model that attends to image tokens has those of the image too, one with control blocks those
    of its control blocks, and Animate those of the face for its adapters.
    """

    # As a pytree it also holds descriptions of arrays in their place.
    __no_type_check__: ClassVar[bool] = True

    keys: Float[Array, "*L B T N H"]
    values: Float[Array, "*L B T N H"]
    image_keys: Float[Array, "*L B T N H"] | None = None
    image_values: Float[Array, "*L B T N H"] | None = None
    control: "TextKeysValues | None" = None
    face: "TextKeysValues | None" = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Inputs that all blocks of one forward share: modulations of the step, and RoPE tables.

    The first `known_tokens` are of frames without noise: their modulations are `still`, those of
    time 0.
    """

    # As a pytree it also holds descriptions of arrays in their place.
    __no_type_check__: ClassVar[bool] = True

    modulation: Float[Array, "B A D"]
    cosines: Float[Array, "S R"]
    sines: Float[Array, "S R"]
    still: Float[Array, "B A D"] | None = None
    known_tokens: int = field(default=0, metadata={"static": True})

    def by_token(
        self, table: Float[Array, "A D"], *, tokens: int
    ) -> tuple[Float[Array, "B #S D"], ...]:
        """Returns the modulations of a block with this table, in float32, for every token."""
        rows, still = (
            None if part is None else table[None] + part.astype(jnp.float32)
            for part in (self.modulation, self.still)
        )
        assert rows is not None
        return by_token(rows, still, tokens=tokens, known=self.known_tokens)


class LayerTerm(ABC):
    """A term that some layers add to their result; `rows` has its row for each, -1 for none."""

    rows: Int[Array, " L"]

    @abstractmethod
    def added(self, x: Float[Array, "B S D"], row: Int[Array, ""]) -> Float[Array, "B S D"]:
        """Returns the result of a layer plus the term of a row, or as it is for row -1."""


class Projections(nnx.Module):
    """The four linear maps and two norms of an attention."""

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        square, width = (config.model_dim, config.model_dim), config.model_dim_axis
        rank = config.adapter_rank
        self.head_dim = config.head_dim
        self.to_q = Linear(square, (width, "heads"), numerics, rank=rank, rngs=rngs)
        self.to_k = Linear(square, (width, "heads"), numerics, rank=rank, rngs=rngs)
        self.to_v = Linear(square, (width, "heads"), numerics, rank=rank, rngs=rngs)
        self.to_out = Linear(square, ("heads", width), numerics, rank=rank, rngs=rngs)
        self.norm_q = RmsNorm(config.model_dim, numerics, eps=config.eps)
        self.norm_k = RmsNorm(config.model_dim, numerics, eps=config.eps)

    @jax.named_scope("qkv")
    def queries(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Returns the queries of x before their norm, heads side by side."""
        return self.to_q(x)

    @jax.named_scope("qkv")
    def keys(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the keys of x before their norm, heads side by side."""
        return self.to_k(x)

    @jax.named_scope("qkv")
    def values(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the values of x, heads side by side."""
        return self.to_v(x)

    @jax.named_scope("out")
    def output(self, heads_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Returns the output projection of all heads."""
        return self.to_out(heads_BSD)


class SelfAttention(Projections):
    """Attention of every video token to every other, with RoPE."""

    def __call__(
        self,
        x: Float[Array, "B S D"],
        step: StepContext,
        *,
        attention: AttentionPlan,
        layout: ActivationLayout,
    ) -> Float[Array, "B S D"]:
        if attention.fused:
            parts = self.project_in_order(x, step, attention=attention, layout=layout)
            out = attention.attend_projected(*parts)
        else:
            q, k, v = self.heads(*self.project(x, layout), step)
            out = merge_heads(attention(q, k, v))
        return self.output(constrain_heads(out, layout))

    def project_in_order(
        self,
        x: Float[Array, "B S D"],
        step: StepContext,
        *,
        attention: AttentionPlan,
        layout: ActivationLayout,
    ) -> tuple[ProjectedHeads, ScatteredHeads, ScatteredHeads]:
        """Returns queries, keys and values of x, with the products of k, v and q in this order.

        The collective of k then runs under the product of v, and that of v under the product of q:
        XLA starts one early only if all that may run under it is needed by what needs its result.
        """
        k = constrain_heads(self.keys(x), layout)
        keys = attention.scatter_keys(pending(k, self.norm_k, step))
        x, keys = jax.lax.optimization_barrier((x, keys))
        values = attention.scatter_values(pending(constrain_heads(self.values(x), layout)))
        keys = attention.send_keys(keys)
        x, keys, values = jax.lax.optimization_barrier((x, keys, values))
        q = constrain_heads(self.queries(x), layout)
        values = attention.send_keys(values)
        return pending(q, self.norm_q, step), keys, values

    def project(
        self, x: Float[Array, "B S D"], layout: ActivationLayout
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B S D"], Float[Array, "B S D"]]:
        """Returns queries, keys and values of x, before qk-norm and RoPE."""
        q, k = self.queries(x), self.keys(x)
        q, k = constrain_heads(q, layout), constrain_heads(k, layout)
        return q, k, constrain_heads(self.values(x), layout)

    def heads(
        self,
        q: Float[Array, "B S D"],
        k: Float[Array, "B S D"],
        v: Float[Array, "B S D"],
        step: StepContext,
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N H"], Float[Array, "B S N H"]]:
        """Returns the heads of projections: qk-norm and RoPE applied."""
        q, k = (
            rotate(split_heads(norm(x), self.head_dim), step.cosines, step.sines)
            for norm, x in ((self.norm_q, q), (self.norm_k, k))
        )
        return q, k, split_heads(v, self.head_dim)


class CrossAttention(Projections):
    """Attention of every video token to the whole text, its padding rows included.

    WAN 2.1 image-to-video also attends to the image's tokens, with keys and values of their own;
    the two results are added.
    """

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        super().__init__(config, numerics, rngs=rngs)
        self.has_image = config.image_dim is not None
        if self.has_image:
            square, width = (config.model_dim, config.model_dim), config.model_dim_axis
            rank = config.adapter_rank
            self.add_k_proj = Linear(square, (width, "heads"), numerics, rank=rank, rngs=rngs)
            self.add_v_proj = Linear(square, (width, "heads"), numerics, rank=rank, rngs=rngs)
            self.norm_added_k = RmsNorm(config.model_dim, numerics, eps=config.eps)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        text: TextKeysValues,
        *,
        attention: BlockAttention,
        layout: ActivationLayout,
    ) -> Float[Array, "B S D"]:
        q = constrain_heads(self.queries(x), layout)
        out = None
        for k, v, plan in self.sources(text, attention):
            if plan.fused:
                keys = plan.send_keys(plan.scatter_keys(pending(merge_heads(k))))
                values = plan.send_keys(plan.scatter_values(pending(merge_heads(v))))
                part = plan.attend_projected(pending(q, self.norm_q), keys, values)
            else:
                part = merge_heads(plan(split_heads(self.norm_q(q), self.head_dim), k, v))
            out = part if out is None else out + part
        assert out is not None
        return self.output(constrain_heads(out, layout))

    def sources(
        self, text: TextKeysValues, attention: BlockAttention
    ) -> Iterator[tuple[Float[Array, "B _ N H"], Float[Array, "B _ N H"], Attention]]:
        """Yields keys, values and plan of the text, and of the image if the model has one."""
        yield text.keys, text.values, attention.cross_attention
        if self.has_image:
            assert attention.image_attention is not None
            assert text.image_keys is not None
            assert text.image_values is not None
            yield text.image_keys, text.image_values, attention.image_attention

    def keys_values(
        self,
        context_BTD: Float[Array, "B T D"],
        image_BID: Float[Array, "B I D"] | None,
        layout: ActivationLayout,
    ) -> TextKeysValues:
        """Returns keys and values of one layer for embedded text and image tokens.

        They are replicated on a context.
        """
        k, v = self.keys(context_BTD), self.values(context_BTD)
        text = TextKeysValues(
            keys=self._constrained(self.norm_k(k), layout), values=self._constrained(v, layout)
        )
        if image_BID is None:
            return text
        return replace(
            text,
            image_keys=self._constrained(self.norm_added_k(self.add_k_proj(image_BID)), layout),
            image_values=self._constrained(self.add_v_proj(image_BID), layout),
        )

    def _constrained(
        self, x: Float[Array, "B T D"], layout: ActivationLayout
    ) -> Float[Array, "B T N H"]:
        return layout.constrain(split_heads(x, self.head_dim), "batch", "text", "heads", "head")


class FeedForward(nnx.Module):
    """Position-wise MLP: D -> M, GELU, M -> D."""

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        narrow, wide, width = config.model_dim, config.ffn_dim, config.model_dim_axis
        rank = config.adapter_rank
        self.up = Linear((narrow, wide), (width, "mlp"), numerics, rank=rank, rngs=rngs)
        self.down = Linear((wide, narrow), ("mlp", width), numerics, rank=rank, rngs=rngs)

    @jax.named_scope("mlp")
    def __call__(
        self, x: Float[Array, "B S D"], *, layout: ActivationLayout
    ) -> Float[Array, "B S D"]:
        wide_BSM = layout.constrain(gelu_tanh(self.up(x)), "batch", "sequence", "mlp")
        return self.down(wide_BSM)


class WanBlock(nnx.Module):
    """DiT block: AdaLN-modulated self-attention and MLP; cross-attention is unmodulated."""

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        self.eps = config.eps
        # Rows that are rounded to 8 bits are written in that form.
        weight_format = numerics.weight_format
        self.materializes = weight_format is None or not weight_format.rounds_activations
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
        shift, scale, gate, shift_2, scale_2, gate_2 = self.modulations(step, x.shape[1])
        with jax.named_scope("self_attention"):
            if self.materializes:
                modulated = modulated_rows(x, shift, scale, eps=self.eps, layout=layout)
            else:
                modulated = modulate(x, shift, scale, eps=self.eps)
            change = self.attn1(modulated, step, attention=attention.self_attention, layout=layout)
            change = checkpoint_name(change, SELF_CHANGE)
            x = constrain_tokens(gated_sum(x, change, gate), layout)
        with jax.named_scope("cross_attention"):
            change = self.attn2(self.norm2(x), text, attention=attention, layout=layout)
            change = checkpoint_name(change, CROSS_CHANGE)
            x = constrain_tokens(x + change, layout)
        with jax.named_scope("ffn"):
            modulated = modulate(x, shift_2, scale_2, eps=self.eps)
            change = checkpoint_name(self.ffn(modulated, layout=layout), MLP_CHANGE)
            return constrain_tokens(gated_sum(x, change, gate_2), layout)

    def modulations(self, step: StepContext, tokens: int) -> tuple[Float[Array, "B #S D"], ...]:
        """Returns shift, scale and gate of self-attention, then of the MLP."""
        return step.by_token(self.scale_shift_table[...], tokens=tokens)

    def fixed_m_eligible_heads(
        self,
        x: Float[Array, "B S D"],
        step: StepContext,
        *,
        attention: BlockAttention,
        layout: ActivationLayout,
    ) -> Int[Array, ""]:
        """Returns how many (batch, head) pairs of self-attention pass the gate of fixed-m."""
        shift, scale, *_ = self.modulations(step, x.shape[1])
        q, k, v = self.attn1.project(modulate(x, shift, scale, eps=self.eps), layout)
        q, k, v = self.attn1.heads(q, k, v, step)
        return attention.self_attention.fixed_m_eligible_heads(q, k, v)


def gathered(layer: nnx.State, layout: ActivationLayout) -> nnx.State:
    """Returns one layer's weights with the FSDP dimension gathered.

    XLA gathers the weights of late products while attention runs.
    """
    flat = [
        (path, one.replace(layout.gathered(one[...], one.dims)))
        for path, one in nnx.to_flat_state(layer)
    ]
    return nnx.from_flat_state(flat)


@jax.named_scope("gate")
def gated_sum(
    x: Float[Array, "B S D"], change: Float[Array, "B S D"], gate: Float[Array, "B #S D"]
) -> Float[Array, "B S D"]:
    """Returns x + gate * change in float32, rounded once."""
    added = change.astype(jnp.float32) * gate
    return (x.astype(jnp.float32) + added).astype(x.dtype)


@jax.named_scope("norm")
def modulated_rows(
    x: Float[Array, "B S D"],
    shift: Float[Array, "B #S D"],
    scale: Float[Array, "B #S D"],
    *,
    eps: float,
    layout: ActivationLayout,
) -> Float[Array, "B S D"]:
    """Returns `modulate`, written to HBM once for the three products that read it.

    On TPUs a kernel reads and writes the rows once, where all tokens of a video share their
    modulation. Elsewhere a barrier makes XLA write them: left alone it normalises them again in
    each product, 0.35 M cycles more a product (18,904 rows of 5120 on tpu7x).
    """
    if layout.runs_kernels and shift.shape[1] == 1:
        # No other path needs the kernel.
        from maxdiffusion.kernels.layer_norm import layer_norm_modulate, takes

        if takes(x.shape[2]):
            rows, vector = ("batch", "sequence", "model"), ("batch", "model")
            run = functools.partial(layer_norm_modulate, eps=eps)
            return layout.on_shards(run, (x, rows), (scale[:, 0], vector), (shift[:, 0], vector))
    return jax.lax.optimization_barrier(modulate(x, shift, scale, eps=eps))


def constrain_tokens(x: Float[Array, "B S D"], layout: ActivationLayout) -> Float[Array, "B S D"]:
    """Constrains tokens to their sharding."""
    return layout.constrain(x, "batch", "sequence", "model")


def constrain_heads(x: Float[Array, "B S D"], layout: ActivationLayout) -> Float[Array, "B S D"]:
    """Constrains heads, side by side as projections write them, to their sharding."""
    return layout.constrain(x, "batch", "sequence", "heads")


def pending(
    x: Float[Array, "B S D"], norm: RmsNorm | None = None, step: StepContext | None = None
) -> ProjectedHeads:
    """Returns a projection whose norm and RoPE are left to the fused pass."""
    return ProjectedHeads(
        values=x,
        gain=None if norm is None else norm.scale[...],
        cosines=None if step is None else step.cosines,
        sines=None if step is None else step.sines,
        eps=0.0 if norm is None else norm.eps,
    )
