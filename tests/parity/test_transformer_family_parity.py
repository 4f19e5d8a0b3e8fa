"""Image tokens, time per token and control blocks of the transformer against diffusers."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from maxdiffusion.attention import (
    AttentionProblem,
    BlockAttention,
    plan_attention,
    plan_cross_attention,
)
from maxdiffusion.mesh import ActivationLayout, MeshShape, build_mesh, single_device_mesh
from maxdiffusion.models.wan import ControlInput, WanTransformer
from tests.oracle.arrays import normal
from tests.oracle.tiny_checkpoints import TransformerSize
from tests.oracle.tiny_family import (
    FamilyCheckpoint,
    make_family_transformer,
    wan21_flf2v,
    wan21_i2v,
    wan21_vace,
    wan22_ti2v,
)
from tests.parity.loaded import channels_first, channels_last, load_transformer

# As in test_transformer_parity.py; diffusers splits image from text tokens at 512.
TOLERANCE = 3e-5
TEXT_LENGTH = 512
MESHES = {
    "one-device": None,
    "data-ring-ulysses": MeshShape(data=2, ring=2, ulysses=2),
    "fsdp-tensor": MeshShape(fsdp=2, tensor=4),
}
EIGHT_HEADS = TransformerSize(heads=8, head_dim=12, layers=3, ffn=72)


def make_pair(tiny: FamilyCheckpoint, folder: Path) -> tuple[torch.nn.Module, WanTransformer]:
    theirs = make_family_transformer(tiny, seed=tiny.seed)
    theirs.save_pretrained(folder)
    return theirs, load_transformer(folder)


def velocity(
    model: WanTransformer,
    mesh_shape: MeshShape | None,
    latents: torch.Tensor,
    timestep: np.ndarray,
    text: torch.Tensor,
    image: torch.Tensor | None = None,
    **arguments: Any,
) -> np.ndarray:
    """Returns our velocity in diffusers' layout."""
    mesh = single_device_mesh() if mesh_shape is None else build_mesh(mesh_shape)
    config, video = model.config, channels_last(latents)

    def problem(keys: int) -> AttentionProblem:
        return AttentionProblem(
            batch=len(video),
            q_len=config.tokens(video.shape[1:4]),
            kv_len=keys,
            heads=config.heads,
            head_dim=config.head_dim,
            dtype=jnp.dtype("float32"),
        )

    def cross(keys: int):
        return plan_cross_attention("dot_product", problem(keys), mesh)

    attention = BlockAttention(
        self_attention=plan_attention(
            "dot_product", problem(config.tokens(video.shape[1:4])), mesh
        ),
        cross_attention=cross(text.shape[1]),
        image_attention=None if image is None else cross(image.shape[1]),
    )
    layout = ActivationLayout(mesh=mesh)

    @jax.jit
    def forward(video, timestep, text, image, control):
        keys_values = model.text_keys_values(text, image, layout=layout)
        return model(
            video,
            timestep,
            keys_values,
            attention=attention,
            layout=layout,
            control=control,
            known_frames=arguments.get("known_frames", 0),
        )

    image_tokens = None if image is None else jnp.asarray(image.numpy())
    with jax.set_mesh(mesh):
        out = forward(
            jnp.asarray(video),
            jnp.asarray(timestep),
            jnp.asarray(text.numpy()),
            image_tokens,
            arguments.get("control"),
        )
    return channels_first(out)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("maker", [wan21_i2v, wan21_flf2v])
def test_image_tokens(maker, mesh: str, tmp_path: Path) -> None:
    tiny = maker(5, transformer=EIGHT_HEADS)
    theirs, ours = make_pair(tiny, tmp_path)
    images = 1 if ours.config.image_positions is None else 2
    tokens = (ours.config.image_positions or 50) // images
    latents, text = normal(1, 4, 36, 3, 4, 6), normal(2, 4, TEXT_LENGTH, ours.config.text_dim)
    image = normal(3, 4 * images, tokens, ours.config.image_dim)
    timestep = torch.tensor([971, 3, 500, 12])
    expected = theirs(latents, timestep, text, image, return_dict=False)[0].numpy()
    joined = image.reshape(4, images * tokens, -1)
    actual = velocity(ours, MESHES[mesh], latents, timestep.numpy(), text, joined)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("mesh", MESHES)
def test_known_frames_have_time_zero(mesh: str, tmp_path: Path) -> None:
    theirs, ours = make_pair(wan22_ti2v(6, transformer=EIGHT_HEADS), tmp_path)
    channels = ours.config.in_channels
    latents = normal(4, 4, channels, 3, 4, 6)
    text = normal(5, 4, TEXT_LENGTH, ours.config.text_dim)
    timestep = torch.tensor([971, 3, 500, 12])
    tokens_of_a_frame = 2 * 3
    per_token = timestep[:, None].repeat(1, 3 * tokens_of_a_frame)
    per_token[:, :tokens_of_a_frame] = 0
    expected = theirs(latents, per_token, text, return_dict=False)[0].numpy()
    arguments = MESHES[mesh], latents, timestep.numpy(), text
    actual = velocity(ours, *arguments, known_frames=1)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
    # One time for all is another result: the test would see a lost mask.
    assert np.abs(velocity(ours, *arguments) - expected).max() > 0.1


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("layers", [(0, 2), (0, 1, 2), (0,)], ids=str)
def test_control_blocks(layers: tuple[int, ...], mesh: str, tmp_path: Path) -> None:
    tiny = wan21_vace(7, transformer=EIGHT_HEADS, control_layers=layers)
    theirs, ours = make_pair(tiny, tmp_path)
    latents, control = normal(6, 4, 16, 3, 4, 6), normal(7, 4, 96, 3, 4, 6)
    text = normal(8, 4, TEXT_LENGTH, ours.config.text_dim)
    timestep = torch.tensor([971, 3, 500, 12])
    scales = torch.tensor([0.8, -0.5, 1.7])[: len(layers)]
    expected = theirs(latents, timestep, text, None, control, scales, return_dict=False)[0]
    given = ControlInput(
        video=jnp.asarray(channels_last(control)), scales=jnp.asarray(scales.numpy())
    )
    arguments = MESHES[mesh], latents, timestep.numpy(), text
    actual = velocity(ours, *arguments, control=given)
    np.testing.assert_allclose(actual, expected.numpy(), rtol=0, atol=TOLERANCE)
