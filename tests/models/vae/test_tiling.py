"""Tiles against diffusers' results, and what a tiling may be."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxdiffusion.models.vae import SpatialSharding, Tiling, WanVae
from maxdiffusion.models.vae.tiling import map_tiles

TOLERANCE = 2e-5  # as for whole frames: fading only takes means
# Tiles of 4 latents, 3 apart, as the goldens were made.
SMALL = Tiling(tile_height=32, tile_width=32, stride_height=24, stride_width=24)


@pytest.mark.slow
def test_tiled_video_equals_that_of_diffusers(
    golden_vae: WanVae, goldens: dict[str, np.ndarray]
) -> None:
    decode = jax.jit(lambda latents: golden_vae.decode(latents, chunk=-1, tiling=SMALL))
    found = decode(goldens["tiled_latents"])
    np.testing.assert_allclose(found, goldens["tiled_decoded"], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_tiled_moments_equal_those_of_diffusers(
    golden_vae: WanVae, goldens: dict[str, np.ndarray]
) -> None:
    encode = jax.jit(lambda video: golden_vae.encode(video, chunk=-1, tiling=SMALL).moments)
    found = encode(goldens["tiled_video"])
    np.testing.assert_allclose(found, goldens["tiled_moments"], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_tiles_can_be_sharded(small_vae: WanVae) -> None:
    # Three tiles, 4, 4 and 2 latents wide: the first two in 2x2 pieces, the last in 2x1.
    tiling = Tiling(tile_height=16, tile_width=16, stride_height=16, stride_width=8)
    latents = np.random.default_rng(0).standard_normal((1, 1, 4, 6, 16), dtype=np.float32)
    sharding = SpatialSharding.over(jax.devices(), -1, batch=1, height=4, width=6)
    whole = jax.jit(lambda x: small_vae.decode(x, tiling=tiling))(latents)
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    decode = partial(small_vae.decode, tiling=tiling, sharding=sharding)
    split = jax.jit(decode, out_shardings=everywhere)(latents)
    np.testing.assert_allclose(split, whole, rtol=0, atol=5e-6)


@pytest.mark.slow
def test_tiles_of_an_encoder_can_be_sharded(small_vae22: WanVae) -> None:
    # After folding 16 x 24 pixels: tiles 4, 4 and 2 latents wide, as above.
    tiling = Tiling(tile_height=16, tile_width=16, stride_height=16, stride_width=8)
    video = np.random.default_rng(0).standard_normal((1, 1, 32, 48, 3), dtype=np.float32)
    sharding = SpatialSharding.over(jax.devices(), -1, batch=1, height=4, width=6)
    whole = jax.jit(lambda x: small_vae22.encode(x, tiling=tiling).mean)(video)
    encode = jax.jit(lambda x: small_vae22.encode(x, tiling=tiling, sharding=sharding).mean)
    np.testing.assert_allclose(encode(video), whole, rtol=0, atol=5e-6)


@pytest.mark.slow
def test_a_tile_as_large_as_the_frame_changes_nothing(small_vae: WanVae) -> None:
    latents = np.random.default_rng(0).standard_normal((1, 1, 2, 2, 16), dtype=np.float32)
    tiled = jax.jit(lambda x: small_vae.decode(x, tiling=Tiling()))(latents)
    np.testing.assert_array_equal(tiled, jax.jit(small_vae.decode)(latents))


@pytest.mark.slow
def test_frames_cut_and_joined_are_the_same() -> None:
    tiling = Tiling(tile_height=4, tile_width=5, stride_height=3, stride_width=2)
    x = np.random.default_rng(0).standard_normal((1, 2, 7, 8, 3), dtype=np.float32)
    # Fading a value into itself rounds once or twice.
    np.testing.assert_allclose(tiling.join(tiling.cut(jnp.asarray(x))), x, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_tiles_of_one_shape_are_compiled_once() -> None:
    tiling = Tiling(tile_height=4, tile_width=4, stride_height=2, stride_width=2)
    shapes = []

    def double(x: jax.Array) -> jax.Array:
        shapes.append(x.shape)
        return 2 * x

    grid = tiling.cut(jnp.ones((1, 1, 8, 8, 1)))
    doubled = map_tiles(double, grid)
    assert len(shapes) == len({tile.shape for row in grid for tile in row}) == 4
    assert [[t.shape for t in row] for row in doubled] == [[t.shape for t in row] for row in grid]
    np.testing.assert_array_equal(tiling.join(doubled), 2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tile_height": 0}, "tile_height=0: must be a positive integer"),
        ({"tile_width": 2.5}, "tile_width=2.5: must be a positive integer"),
        ({"stride_width": 300}, "stride_width=300: must not exceed tile_width=256"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_impossible_tilings_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tiling(**sizes)


def test_tiles_between_latents_are_refused(small_vae: WanVae) -> None:
    tiling = Tiling(tile_height=18, tile_width=16, stride_height=12, stride_width=10)
    with pytest.raises(
        ValueError, match=r"tile_height=18: must be a multiple of 4.*Use 20"
    ) as error:
        small_vae.decode(jnp.zeros((1, 1, 8, 8, 16)), tiling=tiling)
    assert "stride_width=10" in str(error.value)
