"""The WAN transformer against diffusers, on weights and videos made by the test."""

from pathlib import Path

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
from tests.oracle.arrays import normal
from tests.oracle.tiny_checkpoints import TransformerSize, make_transformer
from tests.parity.loaded import channels_first, channels_last, load_transformer

# Velocities have a deviation of about 1.2 after up to three layers of float32 sums with 64..300
# terms; the smallest mistake worth finding (a norm's eps of 1e-5) moves them by 1e-4.
TOLERANCE = 3e-5
TEXT_WIDTH, TEXT_LENGTH = 24, 37

CASES = {
    "one-layer-six-heads": (TransformerSize(heads=6, head_dim=16, layers=1, ffn=80), (1, 6, 10)),
    "three-layers-odd-frames": (
        TransformerSize(heads=3, head_dim=24, layers=3, ffn=130),
        (5, 2, 14),
    ),
    "released-head-width": (TransformerSize(heads=2, head_dim=128, layers=1, ffn=96), (2, 4, 6)),
}


def make_pair(
    size: TransformerSize, folder: Path, shards: str
) -> tuple[torch.nn.Module, WanTransformer]:
    """Returns diffusers' transformer and ours, which reads the files that diffusers wrote."""
    theirs = make_transformer(size, TEXT_WIDTH, seed=size.heads + 10 * size.layers)
    theirs.save_pretrained(folder, max_shard_size=shards)
    return theirs, load_transformer(folder)


def run_ours(
    model: WanTransformer, latents: np.ndarray, timestep: np.ndarray, text: np.ndarray, mesh
) -> np.ndarray:
    """Returns our velocity on a mesh, in diffusers' layout."""
    config = model.config
    sizes = {
        "batch": latents.shape[0],
        "q_len": config.tokens(latents.shape[1:4]),
        "heads": config.heads,
        "head_dim": config.head_dim,
        "dtype": jnp.dtype("float32"),
    }
    over_itself = AttentionProblem(kv_len=sizes["q_len"], **sizes)
    over_text = AttentionProblem(kv_len=text.shape[1], **sizes)
    attention = BlockAttention(
        self_attention=plan_attention("dot_product", over_itself, mesh),
        cross_attention=plan_cross_attention("dot_product", over_text, mesh),
    )
    layout = ActivationLayout(mesh=mesh)

    @jax.jit
    def forward(latents, timestep, text):
        keys_values = model.text_keys_values(text, layout=layout)
        return model(latents, timestep, keys_values, attention=attention, layout=layout)

    with jax.set_mesh(mesh):
        return channels_first(forward(*map(jnp.asarray, (latents, timestep, text))))


@pytest.mark.parametrize(("case", "shards"), [*zip(CASES, ("10GB", "100KB", "500KB"), strict=True)])
def test_velocity_equals_that_of_diffusers(case: str, shards: str, tmp_path: Path) -> None:
    size, video = CASES[case]
    theirs, ours = make_pair(size, tmp_path, shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards != "10GB")
    latents, text = normal(1, 2, 16, *video), normal(2, 2, TEXT_LENGTH, TEXT_WIDTH)
    timestep = torch.tensor([971, 3])
    expected = theirs(latents, timestep, text, return_dict=False)[0].numpy()
    inputs = channels_last(latents), timestep.numpy(), text.numpy()
    velocity = run_ours(ours, *inputs, single_device_mesh())
    np.testing.assert_allclose(velocity, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "shape",
    [MeshShape(data=2, ring=2, ulysses=2), MeshShape(fsdp=4, tensor=2), MeshShape(ulysses=8)],
    ids=["data-ring-ulysses", "fsdp-tensor", "ulysses"],
)
def test_velocity_on_a_mesh_equals_that_of_diffusers(shape: MeshShape, tmp_path: Path) -> None:
    # 35 tokens: no context degree divides them, so the padded tokens must not be seen.
    size = TransformerSize(heads=8, head_dim=12, layers=2, ffn=64)
    theirs, ours = make_pair(size, tmp_path, "10GB")
    latents, text = normal(3, 4, 16, 5, 2, 14), normal(4, 4, TEXT_LENGTH, TEXT_WIDTH)
    timestep = torch.tensor([999, 500, 20, 1])
    expected = theirs(latents, timestep, text, return_dict=False)[0].numpy()
    inputs = channels_last(latents), timestep.numpy(), text.numpy()
    velocity = run_ours(ours, *inputs, build_mesh(shape))
    np.testing.assert_allclose(velocity, expected, rtol=0, atol=TOLERANCE)
