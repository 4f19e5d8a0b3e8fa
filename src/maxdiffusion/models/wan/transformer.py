"""The WAN transformer: velocity of a latent video from the video, the time and a text."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from maxdiffusion.attention import BlockAttention
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.wan.block import (
    CrossAttention,
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
    ImageEmbedding,
    Linear,
    Numerics,
    PatchEmbedding,
    TextEmbedding,
    TimeEmbedding,
    by_token,
    modulate,
    modulation_table,
    pad_tokens,
    patches_of,
    rotation_tables,
    video_of,
)

if TYPE_CHECKING:
    from maxdiffusion.models.wan.animate import Animation
    from maxdiffusion.models.wan.control import ControlBlocks
    from maxdiffusion.models.wan.eight_bit import WeightFormat

_ONE_DEVICE = ActivationLayout()

BlockStep = Callable[..., tuple[Array, Any]]  # (tokens, (weights, text) of a layer) -> tokens, seen
WrapBlock = Callable[[BlockStep], BlockStep]
AroundBlocks = Callable[[Array, Callable[[], Array]], Array]
"""Returns the tokens after all blocks, from those before them and a function that computes them."""
EmbeddedTime = tuple[Float[Array, "B D"], Float[Array, "B D"] | None]
"""The embedded time of the step, and that of known frames (0) if there are some."""


def unwrapped(step: BlockStep) -> BlockStep:
    """Returns the step of one layer as it is."""
    return step


def computed(tokens: Array, compute: Callable[[], Array]) -> Array:
    """Returns the tokens that the blocks compute."""
    del tokens
    return compute()


class WanTransformer(nnx.Module):
    """Predicts the velocity of a latent video from the video, the time of the step and a text.

        text, image -> text_keys_values (once per prompt) -----.
        time ----> six modulations ---------------------.      |
        latents -> patches -> tokens -> block x layers (scan) -> output head -> velocity
                                 control blocks -> hints ^

    Blocks are stacked: every parameter of `blocks` has the layers as its first dimension. Image
    tokens (WAN 2.1 image-to-video), control blocks (VACE), poses and face adapters (Animate) are
    parts that most models lack.
    """

    def __init__(
        self,
        config: WanTransformerConfig,
        *,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        weight_format: "WeightFormat | None" = None,
        rngs: nnx.Rngs,
    ):
        """`weight_format` is that of the linear maps of all blocks; None keeps `param_dtype`."""
        numerics = Numerics(dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(param_dtype))
        of_blocks = replace(numerics, weight_format=weight_format)
        patch_values = int(np.prod(config.patch)) * config.out_channels
        self.config = config
        self.dtype = numerics.dtype
        self.patch_embedding = PatchEmbedding(config, config.in_channels, numerics, rngs=rngs)
        self.time_embedding = TimeEmbedding(config, numerics, rngs=rngs)
        self.text_embedding = TextEmbedding(config, numerics, rngs=rngs)
        self.image_embedding = (
            None if config.image_dim is None else ImageEmbedding(config, numerics, rngs=rngs)
        )
        self.blocks = _stacked_blocks(config, of_blocks, rngs)
        self.control = _control_blocks(config, of_blocks, rngs)
        self.animation = _animation(config, numerics, rngs)
        self.scale_shift_table = modulation_table((2, config.model_dim), rngs)
        self.proj_out = Linear(
            (config.model_dim, patch_values), ("model", "channels"), numerics, rngs=rngs
        )

    def text_keys_values(
        self,
        text_BTE: Float[Array, "B T E"],
        image_BIO: Float[Array, "B I O"] | None = None,
        faces: Float[Array, "B F Y X C"] | None = None,
        *,
        face_batch: int | None = None,
        layout: ActivationLayout = _ONE_DEVICE,
    ) -> TextKeysValues:
        """Returns keys and values [L B T N H] of a text; once per prompt and expert.

        `image_BIO` are the image tokens of a model that attends to them, `faces` the pictures of a
        face in -1..1 that Animate reads, `face_batch` at a time.
        """
        context_BTD = self.text_embedding(text_BTE)
        image_BID = None
        if self.image_embedding is not None:
            assert image_BIO is not None
            image_BID = self.image_embedding(image_BIO)

        def of_layers(attention: CrossAttention) -> TextKeysValues:
            graph, layers = nnx.split(attention)

            def one_layer(carry: None, layer: nnx.State) -> tuple[None, TextKeysValues]:
                merged = nnx.merge(graph, gathered(layer, layout))
                return carry, merged.keys_values(context_BTD, image_BID, layout)

            return jax.lax.scan(one_layer, None, layers, unroll=self.config.unroll)[1]

        with jax.named_scope("text_keys_values"):
            text = of_layers(self.blocks.attn2)
            if self.control is not None:
                text = replace(text, control=of_layers(self.control.blocks.block.attn2))
        if self.animation is not None:
            assert faces is not None
            face = self.animation.face_keys_values(faces, batch=face_batch, layout=layout)
            text = replace(text, face=face)
        return text

    def __call__(
        self,
        latents_BFYXC: Float[Array, "B F Y X C"],
        timestep_B: Num[Array, " B"],
        text: TextKeysValues,
        *,
        attention: BlockAttention,
        layout: ActivationLayout,
        known_frames: int = 0,
        known_timestep_B: Num[Array, " B"] | None = None,
        control: ControlInput | None = None,
        pose: Float[Array, "B f Y X I"] | None = None,
        wrap_block: WrapBlock = unwrapped,
        around_blocks: AroundBlocks = computed,
    ) -> Float[Array, "B F Y X O"]:
        """Returns the velocity of `latents_BFYXC` at `timestep_B`, in the dtype of the model.

        The first `known_frames` have no noise: their tokens are of time 0. Training states their
        time as `known_timestep_B`, where some videos of a batch have noise there after all.
        `wrap_block` changes how the loop calls a layer, such as `jax.checkpoint` for training;
        `around_blocks` may keep or replace what all blocks compute, as step caches do.
        """
        length, grid = attention.self_attention.padded_q_len, self.grid(latents_BFYXC)
        tokens, time, step = self.embed_inputs(
            latents_BFYXC,
            timestep_B,
            length,
            layout,
            known_frames=known_frames,
            known_timestep_B=known_timestep_B,
            pose=pose,
        )

        def compute() -> Float[Array, "B S D"]:
            term = self.layer_term(
                tokens, step, text, control, attention=attention, layout=layout, grid=grid
            )
            return self.run_blocks(
                tokens,
                step,
                text,
                attention=attention,
                layout=layout,
                term=term,
                wrap_block=wrap_block,
            )

        through = around_blocks(tokens, compute)
        with jax.named_scope("head"):
            patches = self.output_head(through, time, step)[:, : int(np.prod(grid))]
            return video_of(patches, grid, self.config.patch)

    def fixed_m_eligible_heads(
        self,
        latents_BFYXC: Float[Array, "B F Y X C"],
        timestep_B: Num[Array, " B"],
        text: TextKeysValues,
        *,
        attention: BlockAttention,
        layout: ActivationLayout,
        known_frames: int = 0,
        control: ControlInput | None = None,
        pose: Float[Array, "B f Y X I"] | None = None,
    ) -> Int[Array, " L"]:
        """Returns how many (batch, head) pairs of each layer pass the gate of fixed-m softmax."""
        length, grid = attention.self_attention.padded_q_len, self.grid(latents_BFYXC)
        tokens, _, step = self.embed_inputs(
            latents_BFYXC, timestep_B, length, layout, known_frames=known_frames, pose=pose
        )
        term = self.layer_term(
            tokens, step, text, control, attention=attention, layout=layout, grid=grid
        )

        def count(block: WanBlock, x: Float[Array, "B S D"]) -> Int[Array, ""]:
            return block.fixed_m_eligible_heads(x, step, attention=attention, layout=layout)

        _, counts = self._scan(
            tokens, step, text, attention=attention, layout=layout, term=term, watch=count
        )
        return counts

    def layer_term(
        self,
        tokens: Float[Array, "B S D"],
        step: StepContext,
        text: TextKeysValues,
        control: ControlInput | None,
        *,
        attention: BlockAttention,
        layout: ActivationLayout,
        grid: tuple[int, int, int],
    ) -> LayerTerm | None:
        """Returns what some layers add to their result: hints of control blocks, or faces."""
        if self.control is not None:
            assert control is not None
            assert text.control is not None
            return self.control(
                control, tokens, step, text.control, attention=attention, layout=layout
            )
        if self.animation is not None:
            assert text.face is not None
            return self.animation.face_term(text.face, grid, tokens.shape[1], layout)
        return None

    def grid(self, latents_BFYXC: Float[Array, "B F Y X C"]) -> tuple[int, int, int]:
        """Returns the number of tokens along frames, rows and columns."""
        _, frames, rows, columns, _ = latents_BFYXC.shape
        return self.config.grid((frames, rows, columns))

    def embed_inputs(
        self,
        latents_BFYXC: Float[Array, "B F Y X C"],
        timestep_B: Num[Array, " B"],
        length: int,
        layout: ActivationLayout,
        *,
        known_frames: int = 0,
        known_timestep_B: Num[Array, " B"] | None = None,
        pose: Float[Array, "B f Y X I"] | None = None,
    ) -> tuple[Float[Array, "B S D"], EmbeddedTime, StepContext]:
        """Returns tokens, the embedded time, and the inputs that all blocks share."""
        frames, rows, columns = self.grid(latents_BFYXC)
        with jax.named_scope("embed"):
            tokens = self.embed(latents_BFYXC, length, layout)
            if self.animation is not None:
                assert pose is not None
                tokens = self.animation.with_pose(tokens, pose, layout)
            time_BD, modulation_BAD = self.time_embedding(timestep_B)
            if known_timestep_B is None:
                known_timestep_B = jnp.zeros_like(timestep_B)
            still_BD, still_BAD = (
                self.time_embedding(known_timestep_B) if known_frames else (None, None)
            )
        cosines_SR, sines_SR = self.rotations((frames, rows, columns), length)
        step = StepContext(
            modulation=modulation_BAD,
            cosines=cosines_SR,
            sines=sines_SR,
            still=still_BAD,
            known_tokens=known_frames * rows * columns,
        )
        return tokens, (time_BD, still_BD), step

    def embed(
        self, latents_BFYXC: Float[Array, "B F Y X C"], length: int, layout: ActivationLayout
    ) -> Float[Array, "B S D"]:
        """Returns one token per patch, padded to `length` so that the mesh splits them evenly."""
        patches_BSP = pad_tokens(patches_of(latents_BFYXC, self.config.patch), length)
        patches_BSP = layout.constrain(patches_BSP, "batch", "sequence", "patch")
        return constrain_tokens(self.patch_embedding(patches_BSP), layout)

    def rotations(
        self, grid: tuple[int, int, int], length: int
    ) -> tuple[Float[Array, "S R"], Float[Array, "S R"]]:
        """Returns cosines and sines of every token, and zeros for padding tokens."""
        cosines, sines = rotation_tables(grid, self.config.head_dim)
        padding = ((0, length - len(cosines)), (0, 0))
        return jnp.pad(cosines, padding), jnp.pad(sines, padding)

    def run_blocks(
        self,
        tokens: Float[Array, "B S D"],
        step: StepContext,
        text: TextKeysValues,
        *,
        attention: BlockAttention,
        layout: ActivationLayout,
        term: LayerTerm | None = None,
        wrap_block: WrapBlock = unwrapped,
    ) -> Float[Array, "B S D"]:
        """Returns `tokens` after all blocks."""
        return self._scan(
            tokens,
            step,
            text,
            attention=attention,
            layout=layout,
            term=term,
            wrap_block=wrap_block,
        )[0]

    def _scan(
        self,
        tokens: Float[Array, "B S D"],
        step: StepContext,
        text: TextKeysValues,
        *,
        attention: BlockAttention,
        layout: ActivationLayout,
        term: LayerTerm | None = None,
        watch: Callable[[WanBlock, Float[Array, "B S D"]], Any] | None = None,
        wrap_block: WrapBlock = unwrapped,
    ) -> tuple[Float[Array, "B S D"], Any]:
        """Returns `tokens` after all blocks, and `watch(block, input)` of every block."""
        graph, layers = nnx.split(self.blocks)

        def one_layer(
            x: Float[Array, "B S D"],
            inputs: tuple[nnx.State, TextKeysValues, Int[Array, ""] | None],
        ) -> tuple[Float[Array, "B S D"], Any]:
            layer, layer_text, row = inputs
            block = nnx.merge(graph, gathered(layer, layout))
            seen = None if watch is None else watch(block, x)
            x = block(x, step, layer_text, attention=attention, layout=layout)
            return x if term is None or row is None else term.added(x, row), seen

        of_text = replace(text, control=None, face=None)
        of_layers = (layers, of_text, None if term is None else term.rows)
        with jax.named_scope("blocks"):
            body = wrap_block(one_layer)
            return jax.lax.scan(body, tokens, of_layers, unroll=self.config.unroll)

    def output_head(
        self, tokens: Float[Array, "B S D"], time: EmbeddedTime, step: StepContext
    ) -> Float[Array, "B S P"]:
        """Returns the predicted patches; modulated by the time itself, not by its projection."""
        table = self.scale_shift_table[...][None]
        moving, still = (
            None if one is None else table + one.astype(jnp.float32)[:, None, :] for one in time
        )
        assert moving is not None
        shift, scale = by_token(moving, still, tokens=tokens.shape[1], known=step.known_tokens)
        return self.proj_out(modulate(tokens, shift, scale, eps=self.config.eps))


def _control_blocks(
    config: WanTransformerConfig, numerics: Numerics, rngs: nnx.Rngs
) -> "ControlBlocks | None":
    """Returns the control blocks of a model that has some."""
    if not config.control_layers:
        return None
    from maxdiffusion.models.wan.control import ControlBlocks  # for VACE alone

    return ControlBlocks(config, numerics, rngs=rngs)


def _animation(
    config: WanTransformerConfig, numerics: Numerics, rngs: nnx.Rngs
) -> "Animation | None":
    """Returns the parts that only Animate has."""
    if config.face is None:
        return None
    from maxdiffusion.models.wan.animate import Animation  # for Animate alone

    return Animation(config, numerics, rngs=rngs)


def _stacked_blocks(config: WanTransformerConfig, numerics: Numerics, rngs: nnx.Rngs) -> WanBlock:
    """Returns all blocks as one, with layers as the first dimension of every parameter."""

    @nnx.split_rngs(splits=config.layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(layer_rngs: nnx.Rngs) -> WanBlock:
        return WanBlock(config, numerics, rngs=layer_rngs)

    return build(rngs)
