"""The parts of the transformer that only Animate has, against diffusers."""

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
from maxdiffusion.models.wan import WanTransformer
from maxdiffusion.models.wan.motion import encode_motion
from tests.oracle.arrays import normal
from tests.oracle.tiny_checkpoints import TransformerSize
from tests.oracle.tiny_family import make_family_transformer, wan22_animate
from tests.parity.loaded import channels_first, channels_last, load_transformer

# As in test_transformer_parity.py; diffusers splits image from text tokens at 512.
TOLERANCE = 3e-5
TEXT_LENGTH = 512
IMAGE_TOKENS = 5
MESHES = {
    "one-device": None,
    "data-ring-ulysses": MeshShape(data=2, ring=2, ulysses=2),
    "fsdp-tensor": MeshShape(fsdp=2, tensor=4),
}
ROWS, FRAMES = 4, 9


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, WanTransformer]:
    """Returns a transformer of diffusers with drawn weights, and ours with the same."""
    size = TransformerSize(heads=8, head_dim=12, layers=4, ffn=72)
    theirs = make_family_transformer(wan22_animate(21, transformer=size), seed=21)
    folder = tmp_path_factory.mktemp("animate")
    theirs.save_pretrained(folder)
    return theirs, load_transformer(folder)


def layout_on(mesh: str) -> ActivationLayout:
    shape = MESHES[mesh]
    return ActivationLayout(mesh=single_device_mesh() if shape is None else build_mesh(shape))


def faces(seed: int) -> torch.Tensor:
    """Returns faces of diffusers' layout; the last row has none, as the unconditional call."""
    drawn = normal(seed, ROWS, 3, FRAMES, 32, 32).clamp(-1, 1)
    drawn[-1] = -1
    return drawn


@pytest.mark.parametrize("batch", [3, 50])
@pytest.mark.parametrize("mesh", MESHES)
def test_motion_features(pair, mesh: str, batch: int) -> None:
    theirs, ours = pair
    pictures = faces(1)
    flat = pictures.transpose(1, 2).flatten(0, 1)
    expected = theirs.motion_encoder(flat).reshape(ROWS, FRAMES, -1).numpy()
    layout = layout_on(mesh)
    encode = jax.jit(
        lambda x: encode_motion(ours.animation.motion_encoder, x, batch=batch, layout=layout)
    )
    with jax.set_mesh(layout.mesh):
        actual = encode(jnp.asarray(channels_last(pictures)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("frames", [1, 5, 13])
def test_face_tokens(pair, frames: int) -> None:
    theirs, ours = pair
    features = normal(2, 2, frames, 20)
    expected = theirs.face_encoder(features).numpy()
    actual = jax.jit(ours.animation.face_encoder.__call__)(jnp.asarray(features.numpy()))
    assert actual.shape[1] == (frames - 1) // 4 + 1
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("index", [0, 1])
def test_face_adapter(pair, index: int) -> None:
    theirs, ours = pair
    tokens, face = normal(3, 2, 3 * 8, 96), normal(4, 2, 3, 5, 96)
    face[:, 0] = 0
    expected = tokens + theirs.face_adapter[index](tokens, face)
    animation = ours.animation

    @jax.jit
    def adapt(x, face):
        layout = ActivationLayout()
        of_adapters = jax.tree.map(lambda one: one[index], animation.adapters)
        keys_values = of_adapters.keys_values(face.reshape(2, 15, -1), layout)
        same = (jnp.arange(24) // 8)[:, None] == (jnp.arange(15) // 5)[None]
        return x + of_adapters(x, keys_values, same, layout)

    actual = adapt(jnp.asarray(tokens.numpy()), jnp.asarray(face.numpy()))
    np.testing.assert_allclose(actual, expected.numpy(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("mesh", MESHES)
def test_velocity(pair, mesh: str) -> None:
    theirs, ours = pair
    latents, pose = normal(5, ROWS, 36, 4, 4, 6), normal(6, ROWS, 16, 3, 4, 6)
    text = normal(7, ROWS, TEXT_LENGTH, ours.config.text_dim)
    image = normal(8, ROWS, IMAGE_TOKENS, ours.config.image_dim)
    pictures, timestep = faces(9), torch.tensor([971, 3, 500, 12])
    expected = theirs(latents, timestep, text, image, pose, pictures, return_dict=False)[0].numpy()
    actual = velocity(ours, layout_on(mesh), latents, pose, text, image, pictures, timestep)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


def velocity(
    model: WanTransformer, layout: ActivationLayout, latents: torch.Tensor, pose, *rest
) -> np.ndarray:
    """Returns our velocity in diffusers' layout."""
    text, image, pictures, timestep = rest
    config, video = model.config, channels_last(latents)
    tokens = config.tokens(video.shape[1:4])

    def problem(keys: int) -> AttentionProblem:
        return AttentionProblem(
            batch=ROWS,
            q_len=tokens,
            kv_len=keys,
            heads=config.heads,
            head_dim=config.head_dim,
            dtype=jnp.dtype("float32"),
        )

    attention = BlockAttention(
        self_attention=plan_attention("dot_product", problem(tokens), layout.mesh),
        cross_attention=plan_cross_attention("dot_product", problem(TEXT_LENGTH), layout.mesh),
        image_attention=plan_cross_attention("dot_product", problem(IMAGE_TOKENS), layout.mesh),
    )

    @jax.jit
    def forward(video, pose, text, image, pictures, timestep):
        keys_values = model.text_keys_values(text, image, pictures, layout=layout)
        return model(video, timestep, keys_values, attention=attention, layout=layout, pose=pose)

    inputs = (video, channels_last(pose), text.numpy(), image.numpy(), channels_last(pictures))
    with jax.set_mesh(layout.mesh):
        return channels_first(forward(*map(jnp.asarray, (*inputs, timestep.numpy()))))
