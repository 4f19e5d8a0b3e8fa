"""The WAN VAE against diffusers, on weights and videos made by the test."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from maxdiffusion.models.vae import ALL_FRAMES, Tiling, WanVae
from tests.oracle.arrays import normal, small_video
from tests.oracle.tiny_checkpoints import VaeSize, make_vae
from tests.oracle.vae import STRIDE, TILE, decode, moments, use_small_tiles
from tests.parity.loaded import channels_first, channels_last, load_vae

# Values of order 1 after about thirty float32 convolutions of 27 * 4..40 terms, each of which is
# brought back to order 1 by a norm.
TOLERANCE = 2e-5

SIZES = {
    "narrow": VaeSize(base=8, multipliers=(1, 1, 2, 2), res_blocks=1),
    "wide": VaeSize(base=10, multipliers=(1, 2, 2, 4), res_blocks=2),
}
Pair = tuple[AutoencoderKLWan, WanVae]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """diffusers' VAEs and ours, which read the shards that diffusers wrote."""
    made = {}
    for name, size in SIZES.items():
        folder = tmp_path_factory.mktemp(name)
        theirs = make_vae(size, seed=len(name))
        theirs.save_pretrained(folder, max_shard_size="200KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        made[name] = theirs, load_vae(folder)
    return made


def run(function: Callable[[jax.Array], jax.Array], values: torch.Tensor) -> np.ndarray:
    """Returns what our function makes of diffusers' array, in diffusers' layout."""
    return channels_first(jax.jit(function)(jnp.asarray(channels_last(values))))


@pytest.mark.parametrize(
    ("name", "frames", "chunk"), [("wide", 13, 1), ("narrow", 9, ALL_FRAMES), ("narrow", 1, 1)]
)
def test_moments_equal_those_of_diffusers(
    pairs: dict[str, Pair], name: str, frames: int, chunk: int
) -> None:
    theirs, ours = pairs[name]
    video = small_video(frames, 2, 3, frames, 24, 16)
    found = run(lambda values: ours.encode(values, chunk=chunk).moments, video)
    np.testing.assert_allclose(found, moments(theirs, video).numpy(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "frames", "chunk"),
    [("wide", 4, 1), ("narrow", 4, 2), ("narrow", 3, ALL_FRAMES), ("wide", 1, 1)],
)
def test_video_equals_that_of_diffusers(
    pairs: dict[str, Pair], name: str, frames: int, chunk: int
) -> None:
    theirs, ours = pairs[name]
    latents = 1.5 * normal(frames, 2, 16, frames, 3, 2)
    found = run(lambda values: ours.decode(values, chunk=chunk), latents)
    np.testing.assert_allclose(found, decode(theirs, latents).numpy(), rtol=0, atol=TOLERANCE)


def test_tiles_are_blended_as_in_diffusers(pairs: dict[str, Pair]) -> None:
    theirs, ours = pairs["narrow"]
    tiling = Tiling(tile_height=TILE, tile_width=TILE, stride_height=STRIDE, stride_width=STRIDE)
    latents = 1.5 * normal(9, 1, 16, 1, 7, 5)
    use_small_tiles(theirs)
    try:
        expected = decode(theirs, latents).numpy()
    finally:
        theirs.disable_tiling()
    found = run(lambda values: ours.decode(values, tiling=tiling), latents)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
