"""Both WAN VAEs against diffusers, on weights and videos made by the test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from maxdiffusion.models.vae import ALL_FRAMES, Tiling, WanVae
from tests.oracle.arrays import normal, small_video
from tests.oracle.tiny_checkpoints import VaeSize, make_vae
from tests.oracle.tiny_family import Vae22Size, make_vae22
from tests.oracle.vae import STRIDE, TILE, decode, moments
from tests.parity.loaded import channels_first, channels_last, load_vae

# Values of order 1 after about thirty float32 convolutions of 27 * 4..40 terms, each of which is
# brought back to order 1 by a norm.
TOLERANCE = 2e-5

SIZES = {
    "narrow": VaeSize(base=8, multipliers=(1, 1, 2, 2), res_blocks=1),
    "wide": VaeSize(base=10, multipliers=(1, 2, 2, 4), res_blocks=2),
}
SIZES_22 = {
    "2.2 narrow": Vae22Size(
        base=4, decoder_base=6, multipliers=(1, 1, 2, 2), res_blocks=1, channels=12
    ),
    "2.2 wide": Vae22Size(base=6, decoder_base=8, multipliers=(1, 2, 4, 4), res_blocks=2),
}
Pair = tuple[AutoencoderKLWan, WanVae]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """diffusers' VAEs and ours, which read the shards that diffusers wrote."""
    made = {}
    built = {name: make_vae(size, seed=len(name)) for name, size in SIZES.items()}
    built |= {name: make_vae22(size, seed=len(name)) for name, size in SIZES_22.items()}
    for name, theirs in built.items():
        folder = tmp_path_factory.mktemp("vae")
        theirs.save_pretrained(folder, max_shard_size="200KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        made[name] = theirs, load_vae(folder)
    return made


def run(function: Callable[[jax.Array], jax.Array], values: torch.Tensor) -> np.ndarray:
    """Returns what our function makes of diffusers' array, in diffusers' layout."""
    return channels_first(jax.jit(function)(jnp.asarray(channels_last(values))))


@pytest.mark.parametrize(
    ("name", "frames", "chunk"),
    [
        ("wide", 13, 1),
        ("narrow", 9, ALL_FRAMES),
        ("narrow", 1, 1),
        ("2.2 wide", 13, 1),
        ("2.2 narrow", 17, 2),
        ("2.2 narrow", 9, ALL_FRAMES),
        ("2.2 narrow", 1, 1),
    ],
)
def test_moments_equal_those_of_diffusers(
    pairs: dict[str, Pair], name: str, frames: int, chunk: int
) -> None:
    theirs, ours = pairs[name]
    factor = ours.config.spatial_factor
    video = small_video(frames, 2, 3, frames, 3 * factor, 2 * factor)
    found = run(lambda values: ours.encode(values, chunk=chunk).moments, video)
    np.testing.assert_allclose(found, moments(theirs, video).numpy(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "frames", "chunk"),
    [
        ("wide", 4, 1),
        ("narrow", 4, 2),
        ("narrow", 3, ALL_FRAMES),
        ("wide", 1, 1),
        ("2.2 wide", 4, 1),
        ("2.2 narrow", 5, 2),
        ("2.2 narrow", 3, ALL_FRAMES),
        ("2.2 narrow", 1, 1),
    ],
)
def test_video_equals_that_of_diffusers(
    pairs: dict[str, Pair], name: str, frames: int, chunk: int
) -> None:
    theirs, ours = pairs[name]
    latents = 1.5 * normal(frames, 2, ours.config.z_dim, frames, 3, 2)
    found = run(lambda values: ours.decode(values, chunk=chunk), latents)
    np.testing.assert_allclose(found, decode(theirs, latents).numpy(), rtol=0, atol=TOLERANCE)


# Latent sizes of 7 x 5 make tiles of 4 that are cut at the bottom and at the right. Pixels of the
# 2.2 VAE: its decoder's tiles are measured before folding, its encoder's after.
@pytest.mark.parametrize(("name", "tile"), [("narrow", TILE), ("2.2 narrow", 2 * TILE)])
def test_tiles_are_blended_as_in_diffusers(pairs: dict[str, Pair], name: str, tile: int) -> None:
    theirs, ours = pairs[name]
    stride = tile * STRIDE // TILE
    latents = 1.5 * normal(9, 1, ours.config.z_dim, 2, 7, 5)
    with tiles_of(theirs, tile, stride) as tiling:
        expected = decode(theirs, latents).numpy()
    found = run(lambda values: ours.decode(values, chunk=-1, tiling=tiling), latents)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("narrow", (56, 40)),
        ("2.2 narrow", (112, 80)),
        ("2.2 narrow", (48, 64)),  # folded, it would fit into one tile, but not into one stride
    ],
)
def test_tiles_are_encoded_as_in_diffusers(
    pairs: dict[str, Pair], name: str, sides: tuple[int, int]
) -> None:
    theirs, ours = pairs[name]
    video = small_video(5, 1, 3, 5, *sides)
    with tiles_of(theirs, TILE, STRIDE) as tiling:
        expected = moments(theirs, video).numpy()
    found = run(lambda values: ours.encode(values, chunk=-1, tiling=tiling).moments, video)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@contextmanager
def tiles_of(vae: AutoencoderKLWan, tile: int, stride: int) -> Iterator[Tiling]:
    """Yields our tiling while diffusers' VAE uses the same."""
    vae.enable_tiling(tile, tile, stride, stride)
    try:
        yield Tiling(tile_height=tile, tile_width=tile, stride_height=stride, stride_width=stride)
    finally:
        vae.disable_tiling()


def test_normalised_latents_equal_those_of_diffusers(pairs: dict[str, Pair]) -> None:
    """diffusers' pipelines take (z - mean) / std with the 48 values of the config."""
    theirs, ours = pairs["2.2 wide"]
    latents = normal(3, 1, 48, 2, 2, 3)
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (theirs.config.latents_mean, theirs.config.latents_std)
    )
    found = run(ours.normalise, latents)
    # One subtraction and one division of values below 10.
    np.testing.assert_allclose(found, ((latents - mean) / std).numpy(), rtol=0, atol=2e-6)
    np.testing.assert_allclose(
        run(ours.denormalise, torch.tensor(found)), latents.numpy(), rtol=0, atol=2e-6
    )
