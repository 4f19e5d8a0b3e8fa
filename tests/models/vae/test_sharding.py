"""Frames cut into rows and columns of devices give what one device gives."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxdiffusion.mesh import AXES
from maxdiffusion.models.vae import ALL_FRAMES, SpatialSharding, WanVae, WanVaeConfig
from maxdiffusion.models.vae.autoencoder import fitting_chunk
from maxdiffusion.models.vae.coders import nearest
from maxdiffusion.models.vae.conv_impl import (
    COLUMNS,
    ROWS,
    Padding,
    convolve_stacked,
    convolve_time,
)
from maxdiffusion.models.vae.sharding import split

# Another order of the same float32 sums: a few last digits of values of order 1.
TOLERANCE = 5e-6


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def over(vae_spatial: int, *, batch: int, height: int, width: int) -> SpatialSharding:
    return SpatialSharding.over(jax.devices(), vae_spatial, batch=batch, height=height, width=width)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vae_spatial", "batch", "height", "width", "grid"),
    [
        (-1, 1, 3, 6, (1, 2)),  # an odd height is not cut, and six columns not in four or eight
        (4, 2, 6, 4, (2, 2)),  # two videos of the batch at a time
    ],
)
def test_decode_equals_that_of_one_device(
    small_vae: WanVae,
    vae_spatial: int,
    batch: int,
    height: int,
    width: int,
    grid: tuple[int, int],
) -> None:
    latents = draw(batch, 2, height, width, 16)
    sharding = over(vae_spatial, batch=batch, height=height, width=width)
    assert (sharding.rows, sharding.columns) == grid
    whole = jax.jit(lambda x: small_vae.decode(x, chunk=-1))(latents)
    pieces = jax.jit(lambda x: small_vae.decode(x, chunk=-1, sharding=sharding))(latents)
    np.testing.assert_allclose(pieces, whole, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small_vae", "small_vae22"])
def test_encode_equals_that_of_one_device_for_every_chunk(
    name: str, request: pytest.FixtureRequest
) -> None:
    vae: WanVae = request.getfixturevalue(name)
    factor = vae.config.spatial_factor
    video = draw(1, 13, 4 * factor, 8 * factor, 3)
    sharding = over(-1, batch=1, height=4, width=8)
    assert (sharding.rows, sharding.columns) == (2, 4)
    whole = jax.jit(lambda x: vae.encode(x).moments)(video)
    for chunk in (1, 2, ALL_FRAMES):
        encode = partial(vae.encode, chunk=chunk, sharding=sharding)
        pieces = jax.jit(lambda x, encode=encode: encode(x).moments)(video)
        np.testing.assert_allclose(pieces, whole, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 2])
def test_decode_of_the_22_autoencoder_equals_that_of_one_device(
    small_vae22: WanVae, chunk: int
) -> None:
    latents = draw(1, 3, 4, 8, 8)
    sharding = over(-1, batch=1, height=4, width=8)
    whole = jax.jit(lambda x: small_vae22.decode(x, chunk=-1))(latents)
    decode = jax.jit(lambda x: small_vae22.decode(x, chunk=chunk, sharding=sharding))
    np.testing.assert_allclose(decode(latents), whole, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_encoder_pieces_gather_only_for_attention(small_vae22: WanVae) -> None:
    structure, state = nnx.split(small_vae22)
    sharding = over(-1, batch=1, height=4, width=8)
    assert sharding.mesh is not None
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    placed = jax.device_put((state, draw(1, 5, 32, 64, 3)), everywhere)

    def encode(state: nnx.State, video: jax.Array) -> jax.Array:
        return nnx.merge(structure, state).encode(video, chunk=-1, sharding=sharding).mean

    with jax.set_mesh(sharding.mesh):
        text = jax.jit(encode, out_shardings=everywhere).lower(*placed).compile().as_text()
    gathered = [
        math.prod(int(size) for size in shape.split(","))
        for shape in re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    ]
    assert " collective-permute(" in text
    # Keys, values and latents: two latent frames of 4 * 8 pixels and 8 channels.
    assert max(gathered) <= 2 * 4 * 8 * 8
    assert not re.search(r" (all-reduce|all-to-all)\(", text)


@pytest.mark.slow
def test_pieces_exchange_borders_and_gather_only_for_attention(small_vae: WanVae) -> None:
    """Runs a scan on arrays of another mesh over the same devices, as a pipeline does."""
    mesh = Mesh(
        np.array(jax.devices()).reshape(1, 1, 1, 8, 1), AXES, axis_types=(AxisType.Auto,) * 5
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    structure, state = nnx.split(small_vae)
    latents = draw(1, 3, 4, 8, 16)
    sharding = over(-1, batch=1, height=4, width=8)
    assert (sharding.rows, sharding.columns) == (2, 4)

    def decode(state: nnx.State, latents: jax.Array) -> jax.Array:
        return nnx.merge(structure, state).decode(latents, sharding=sharding)

    placed = jax.device_put((state, latents), everywhere)
    assert sharding.mesh is not None
    with jax.set_mesh(sharding.mesh):
        program = jax.jit(decode, out_shardings=everywhere).lower(*placed).compile()
    whole = jax.jit(small_vae.decode)(latents)
    np.testing.assert_allclose(program(*placed), whole, rtol=0, atol=TOLERANCE)
    text = program.as_text()
    gathered = [
        math.prod(int(size) for size in shape.split(","))
        for shape in re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    ]
    assert " collective-permute(" in text
    # Keys and values of a latent frame are 4 * 8 pixels of 8 channels, gathered along either side;
    # only the finished video, 9 frames of 16 * 32 pixels of 3 channels, is larger.
    video = 9 * 16 * 32 * 3
    assert {size for size in gathered if size > 4 * 8 * 8} <= {video, video // 2, video // 4}
    assert len([size for size in gathered if size <= 4 * 8 * 8]) >= 4
    assert not re.search(r" (all-reduce|all-to-all)\(", text)


@pytest.mark.parametrize(
    ("devices", "height", "width", "expected"),
    [
        (1, 90, 160, (1, 1)),
        (8, 90, 160, (1, 8)),  # 720p
        (8, 60, 104, (1, 8)),  # 480p
        (16, 60, 104, (2, 8)),
        (128, 90, 160, (2, 32)),  # 90 has only one factor of two
        (6, 90, 160, (6, 1)),
        (8, 4, 6, (2, 2)),  # no piece is less than two latents high or wide
        (8, 3, 5, (1, 1)),
    ],
)
def test_split_is_the_finest_equal_one_with_the_fewest_cut_sides(
    devices: int, height: int, width: int, expected: tuple[int, int]
) -> None:
    assert split(devices, height, width) == expected


def test_describe_says_what_was_not_possible() -> None:
    assert over(-1, batch=1, height=4, width=8).describe() == (
        "VAE: latent frames of 4x8 in 2x4 pieces of 2x2 on 8 devices"
    )
    assert over(4, batch=2, height=3, width=6).describe() == (
        "VAE: latent frames of 3x6 in 1x2 pieces of 3x3 on 8 devices; 4 devices were asked for, "
        "2 is the finest equal split; 2 videos of the batch at a time; "
        "every piece is computed by 2 devices"
    )
    assert SpatialSharding().describe() == "VAE: frames whole, on one device"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("height", "width"), [(4, 4), (4, 8), (8, 4), (16, 3), (6, 8), (4, 6), (6, 2), (2, 16)]
)
def test_borders_are_exchanged_right_at_the_smallest_pieces(height: int, width: int) -> None:
    sharding = over(-1, batch=1, height=height, width=width)
    kernel = jnp.asarray(draw(3, 3, 3, 2, 2))

    def volume(x: jax.Array, _: None, kernel: jax.Array, zeros: Padding) -> jax.Array:
        return convolve_time(x, kernel, step=1, padding=zeros)

    def stacked(x: jax.Array, _: None, kernel: jax.Array, zeros: Padding) -> jax.Array:
        return convolve_stacked(x, kernel, step=1, padding=zeros)  # as on a TPU

    def halving(x: jax.Array, _: None, kernel: jax.Array, zeros: Padding) -> jax.Array:
        return convolve_stacked(x, kernel[None], step=1, stride=2, padding=zeros)

    def convolve(x: jax.Array, split: SpatialSharding) -> tuple[jax.Array, ...]:
        same = [split.by_piece(form, x, kernel, ((1, 1), (1, 1))) for form in (volume, stacked)]
        wide = split.constrain(nearest(x))
        half = split.by_piece(halving, wide, kernel[1], ((0, 1), (0, 1)))
        return tuple(split.constrain(y) for y in (*same, half))

    x = draw(1, 4, height, width, 2)
    whole = jax.jit(lambda x: convolve(x, SpatialSharding()))(x)
    pieces = jax.jit(lambda x: convolve(x, sharding))(x)
    # Sums of at most 54 products of order 1, of size 7: 54 roundings of 7 * 6e-8 at the very worst.
    for found, expected in zip(pieces, whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2.5e-5)


@pytest.mark.parametrize("vae_spatial", [0, -2, 3, 16])
def test_other_device_counts_are_refused(vae_spatial: int) -> None:
    with pytest.raises(
        ValueError, match=rf"vae_spatial={vae_spatial}: .*Use one of \[1, 2, 4, 8\]"
    ):
        over(vae_spatial, batch=1, height=4, width=4)


@pytest.mark.parametrize(
    ("devices", "frames", "expected"),
    [
        (8, 21, 3),  # 480p: 230 MB of 268
        (8, 20, 3),  # seven chunks
        (8, 2, 2),
        (4, 21, 1),
        (1, 21, 1),  # one frame does not fit, and is run
    ],
)
def test_chunks_are_chosen_by_the_memory_of_a_piece(
    devices: int, frames: int, expected: int
) -> None:
    sharding = over(devices, batch=1, height=60, width=104)
    assert fitting_chunk(WanVaeConfig(), sharding, frames=frames) == expected


def test_taps_along_the_side_that_is_whole_become_channels() -> None:
    assert over(-1, batch=1, height=90, width=160).stacked == ROWS
    assert over(-1, batch=1, height=16, width=3).stacked == COLUMNS
    assert over(-1, batch=1, height=4, width=8).stacked is None
    assert SpatialSharding().stacked is None
