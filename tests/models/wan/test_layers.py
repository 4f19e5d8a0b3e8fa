"""Every part of the transformer against what diffusers has at the same place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.checkpoint_map import RopeHalves
from maxdiffusion.models.wan import TextKeysValues, WanTransformer
from maxdiffusion.models.wan.block import StepContext, WanBlock
from maxdiffusion.models.wan.layers import modulate, patches_of, sinusoid, standardize, video_of
from tests.models.wan.tiny_transformer import Expert, block_attention, golden_inputs

ALONE = ActivationLayout()
# Values of order 1 to 10 from sums of a few hundred float32 products.
FLOAT32 = 1e-5


class Opened:
    """A transformer on its golden input, opened before its first block."""

    def __init__(self, expert: Expert):
        self.expert = expert
        self.model = expert.model()
        latents, timestep, text = golden_inputs(expert)
        self.grid = self.model.config.grid(latents.shape[1:4])
        tokens = self.model.config.tokens(latents.shape[1:4])
        self.attention = block_attention(self.model, len(latents), tokens)
        self.tokens = self.model.embed(latents, tokens, ALONE)
        self.time, modulation = self.model.time_embedding(timestep)
        cosines, sines = self.model.rotations(self.grid, tokens)
        self.step = StepContext(modulation=modulation, cosines=cosines, sines=sines)
        self.text = self.model.text_keys_values(text)

    def check(self, ours: jax.Array, name: str) -> None:
        golden = self.expert.golden[name]
        np.testing.assert_allclose(ours, golden, rtol=FLOAT32, atol=FLOAT32, err_msg=name)


@pytest.fixture(scope="module")
def opened(expert: Expert) -> Opened:
    return Opened(expert)


def block_at(model: WanTransformer, layer: int) -> WanBlock:
    graph, layers = nnx.split(model.blocks)
    return nnx.merge(graph, jax.tree.map(lambda stacked: stacked[layer], layers))


def text_at(text: TextKeysValues, layer: int) -> TextKeysValues:
    return jax.tree.map(lambda stacked: stacked[layer], text)


def test_patches_become_tokens_in_reading_order(opened):
    golden = opened.expert.golden["patch_embed"]  # [B, D, F, Y, X]
    in_order = golden.reshape(*golden.shape[:2], -1).transpose(0, 2, 1)
    np.testing.assert_allclose(opened.tokens, in_order, rtol=FLOAT32, atol=FLOAT32)


def test_sinusoid_of_the_time(opened):
    ours = sinusoid(jnp.asarray(opened.expert.golden["timestep"]), 128)
    # Phases up to 999: one float32 step of a frequency below 1 moves them by 999 * 6e-8.
    np.testing.assert_allclose(ours, opened.expert.golden["t_sinusoid"], rtol=0, atol=6e-5)


def test_time_embedding_and_modulations(opened):
    opened.check(opened.time, "temb")
    opened.check(opened.step.modulation.reshape(len(opened.time), -1), "timestep_proj")


def test_rotations_are_bit_equal(opened):
    # diffusers repeats each angle for both features of its pair.
    golden = opened.expert.golden
    np.testing.assert_array_equal(opened.step.cosines, golden["rope_cos"][:, ::2])
    np.testing.assert_array_equal(opened.step.sines, golden["rope_sin"][:, ::2])


def test_text_embedding_keeps_rows_of_padding(opened):
    context = opened.model.text_embedding(golden_inputs(opened.expert)[2])
    opened.check(context[:, :24], "context_first24")
    opened.check(context[0, -1], "context_pad_row")


@pytest.mark.slow
def test_inside_of_the_first_block(opened):
    block = block_at(opened.model, 0)
    x, attention = opened.tokens, opened.attention
    opened.check(standardize(x, eps=block.eps), "b0_norm1")
    shift, scale, gate, shift_2, scale_2, _ = block.modulations(opened.step, x.shape[1])
    moved = modulate(x, shift, scale, eps=block.eps)

    regroup = RopeHalves(opened.model.config.head_dim)
    queries = block.attn1.norm_q(block.attn1.queries(moved))
    np.testing.assert_allclose(
        queries, regroup.apply(opened.expert.golden["b0_norm_q"]), rtol=FLOAT32, atol=FLOAT32
    )

    seen = block.attn1(moved, opened.step, attention=attention.self_attention, layout=ALONE)
    opened.check(seen, "b0_attn1")
    x = x + gate * seen
    opened.check(block.norm2(x), "b0_norm2")
    read = block.attn2(
        block.norm2(x),
        text_at(opened.text, 0),
        attention=attention,
        layout=ALONE,
    )
    opened.check(read, "b0_attn2")
    x = x + read
    moved = modulate(x, shift_2, scale_2, eps=block.eps)
    opened.check(block.ffn(moved, layout=ALONE), "b0_ffn")


def test_output_of_every_block(opened):
    x = opened.tokens
    for layer in range(opened.model.config.layers):
        x = block_at(opened.model, layer)(
            x,
            opened.step,
            text_at(opened.text, layer),
            attention=opened.attention,
            layout=ALONE,
        )
        opened.check(x, f"block{layer}")


@pytest.mark.parametrize("patch", [(1, 2, 2), (2, 1, 3)])
def test_video_of_undoes_patches_of(patch):
    video = jnp.arange(2 * 4 * 6 * 6 * 5.0).reshape(2, 4, 6, 6, 5)
    grid = tuple(size // step for size, step in zip((4, 6, 6), patch, strict=True))
    np.testing.assert_array_equal(video_of(patches_of(video, patch), grid, patch), video)
