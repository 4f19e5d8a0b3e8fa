"""The result does not depend on how many frames are run at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxdiffusion.models.vae import ALL_FRAMES, WanVae, WanVaeConfig

# The same sums of at most 27 * 8 float32 terms, which another shape may add up in another order:
# a few last digits of values of order 1.
TOLERANCE = 5e-6


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


@pytest.fixture(scope="module")
def decoded(small_vae: WanVae) -> np.ndarray:
    return jax.jit(small_vae.decode)(draw(2, 6, 3, 2, 16))


@pytest.fixture(scope="module")
def encoded(small_vae: WanVae) -> np.ndarray:
    return jax.jit(lambda video: small_vae.encode(video).moments)(draw(2, 21, 12, 8, 3))


# Of six latent frames, the first aside: 2 leaves a remainder of one, 3 of two, 5 fills one chunk.
@pytest.mark.slow
@pytest.mark.parametrize("chunk", [2, 3, 5, ALL_FRAMES])
def test_decode_is_the_same_for_every_chunk(
    small_vae: WanVae, decoded: np.ndarray, chunk: int
) -> None:
    found = jax.jit(lambda latents: small_vae.decode(latents, chunk=chunk))(draw(2, 6, 3, 2, 16))
    assert found.shape == (2, 21, 12, 8, 3)
    np.testing.assert_allclose(found, decoded, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [2, 3, ALL_FRAMES])
def test_encode_is_the_same_for_every_chunk(
    small_vae: WanVae, encoded: np.ndarray, chunk: int
) -> None:
    encode = jax.jit(lambda video: small_vae.encode(video, chunk=chunk).moments)
    found = encode(draw(2, 21, 12, 8, 3))
    assert found.shape == (2, 6, 3, 2, 32)
    np.testing.assert_allclose(found, encoded, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [6, 100])
def test_a_chunk_of_the_clip_or_more_is_all_of_it(small_vae: WanVae, chunk: int) -> None:
    latents = draw(1, 6, 2, 2, 16)
    programs = [
        jax.jit(lambda x, size=size: small_vae.decode(x, chunk=size)).lower(latents).as_text()
        for size in (chunk, ALL_FRAMES)
    ]
    assert programs[0] == programs[1]


def test_the_program_does_not_grow_with_the_clip(small_vae: WanVae) -> None:
    decode = jax.jit(small_vae.decode)
    short, long = (
        len(decode.lower(draw(1, frames, 2, 2, 16)).as_text().splitlines()) for frames in (4, 40)
    )
    assert short == long


def test_chunks_and_equal_blocks_share_one_body() -> None:
    def convolutions(blocks: int, frames: int) -> int:
        config = WanVaeConfig(
            base_dim=4, dim_mult=(1, 2), num_res_blocks=blocks, temperal_downsample=(True,)
        )
        vae = nnx.eval_shape(lambda: WanVae(config, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(vae)
        decode = jax.jit(lambda state, x: nnx.merge(graph, state).decode(x))
        return decode.lower(state, draw(1, frames, 2, 2, 16)).as_text().count("stablehlo.convol")

    counts = {convolutions(*sizes) for sizes in ((1, 2), (1, 9), (3, 9))}
    # In and out, four of the middle, two of each stage, two to double.
    assert counts == {12}


@pytest.mark.parametrize("chunk", [0, -2])
def test_other_chunks_are_refused(small_vae: WanVae, chunk: int) -> None:
    with pytest.raises(ValueError, match=f"chunk={chunk}: .* -1 for all"):
        small_vae.decode(jnp.asarray(draw(1, 2, 2, 2, 16)), chunk=chunk)
