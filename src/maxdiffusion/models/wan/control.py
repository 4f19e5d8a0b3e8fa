"""Control blocks of VACE: hints for some layers, from a control video.

    control -> patches -> proj_in + tokens -> block -> proj_out -> hint of the first control layer
                                                |
                                              block -> proj_out -> hint of the second ...

A control block is a block of the transformer with weights of its own. Hints depend on the tokens
before the first block alone, so all of them are computed before the layers run.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxdiffusion.attention import BlockAttention
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.wan.block import (
    LayerTerm,
    StepContext,
    TextKeysValues,
    WanBlock,
    constrain_tokens,
    gathered,
)
from maxdiffusion.models.wan.conditioning import ControlInput
from maxdiffusion.models.wan.config import WanTransformerConfig
from maxdiffusion.models.wan.layers import (
    Linear,
    Numerics,
    PatchEmbedding,
    pad_tokens,
    patches_of,
)


@dataclass(frozen=True, kw_only=True)
class Hints(LayerTerm):
    """Hints of all control layers, and the row of `hints` that each layer adds; -1 for none."""

    __no_type_check__: ClassVar[bool] = True

    hints: Float[Array, "L B S D"]
    rows: Int[Array, " L"]

    def added(self, x: Float[Array, "B S D"], row: Int[Array, ""]) -> Float[Array, "B S D"]:
        """Returns tokens plus the hint of a row, or as they are for row -1."""
        return jax.lax.cond(row >= 0, lambda: x + self.hints[row], lambda: x)


class ControlBlock(nnx.Module):
    """A block of the transformer and the projection of its result to a hint."""

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        width = config.model_dim_axis
        self.block = WanBlock(config, numerics, rngs=rngs)
        self.proj_out = Linear((config.model_dim,) * 2, (width, "width"), numerics, rngs=rngs)


class ControlBlocks(nnx.Module):
    """All control blocks, stacked, with the embedding of their input."""

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        assert config.control_channels is not None
        self.config = config
        self.patch_embedding = PatchEmbedding(config, config.control_channels, numerics, rngs=rngs)
        self.proj_in = Linear((config.model_dim,) * 2, ("model", "width"), numerics, rngs=rngs)
        self.blocks = _stacked(config, numerics, rngs)

    def __call__(
        self,
        control: ControlInput,
        tokens: Float[Array, "B S D"],
        step: StepContext,
        text: TextKeysValues,
        *,
        attention: BlockAttention,
        layout: ActivationLayout,
    ) -> Hints:
        """Returns the hints; `tokens` are those that enter the first layer."""
        embedded = self._embed(control.video, tokens.shape[1], layout)
        first = constrain_tokens(self.proj_in(embedded) + tokens, layout)
        graph, layers = nnx.split(self.blocks)
        scales = control.scales.astype(tokens.dtype)

        def one_block(
            x: Float[Array, "B S D"],
            inputs: tuple[nnx.State, TextKeysValues, Float[Array, ""]],
        ) -> tuple[Float[Array, "B S D"], Float[Array, "B S D"]]:
            layer, layer_text, scale = inputs
            block = nnx.merge(graph, gathered(layer, layout))
            x = block.block(x, step, layer_text, attention=attention, layout=layout)
            return x, constrain_tokens(block.proj_out(x) * scale, layout)

        with jax.named_scope("control"):
            _, hints = jax.lax.scan(
                one_block, first, (layers, text, scales), unroll=self.config.unroll
            )
        return Hints(hints=hints, rows=self._rows())

    def _embed(
        self, video: Float[Array, "B F Y X C"], length: int, layout: ActivationLayout
    ) -> Float[Array, "B S D"]:
        """Returns one token per patch; tokens after those of a shorter video are zero."""
        patches = patches_of(video, self.config.patch)
        count = patches.shape[1]
        padded = layout.constrain(pad_tokens(patches, length), "batch", "sequence", "patch")
        embedded = constrain_tokens(self.patch_embedding(padded), layout)
        return jnp.where((jnp.arange(length) < count)[None, :, None], embedded, 0)

    def _rows(self) -> Int[Array, " L"]:
        order = {layer: row for row, layer in enumerate(self.config.control_layers)}
        return jnp.array([order.get(layer, -1) for layer in range(self.config.layers)])


def _stacked(config: WanTransformerConfig, numerics: Numerics, rngs: nnx.Rngs) -> ControlBlock:
    """Returns all control blocks as one, with blocks as the first dimension of parameters."""

    @nnx.split_rngs(splits=len(config.control_layers))
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(layer_rngs: nnx.Rngs) -> ControlBlock:
        return ControlBlock(config, numerics, rngs=layer_rngs)

    return build(rngs)
