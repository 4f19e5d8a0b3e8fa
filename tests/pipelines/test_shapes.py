"""Sizes of videos in pixels, latents and tokens."""

import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.models.vae import WanVaeConfig
from maxdiffusion.models.wan import WanTransformerConfig
from maxdiffusion.pipelines.request import VideoShape, latent_shape


def shape_of(**sizes):
    return latent_shape(VideoShape(**sizes), WanVaeConfig(), WanTransformerConfig())


@pytest.mark.parametrize(
    ("height", "width", "frames", "dims", "tokens"),
    [
        (720, 1280, 81, (21, 90, 160, 16), 75_600),
        (480, 832, 81, (21, 60, 104, 16), 32_760),
        (16, 16, 1, (1, 2, 2, 16), 1),
    ],
)
def test_latents_and_tokens(height, width, frames, dims, tokens):
    shape = shape_of(height=height, width=width, num_frames=frames)
    assert (shape.dims, shape.tokens) == (dims, tokens)


def test_every_bad_size_is_reported_with_the_nearest_good_one():
    with pytest.raises(ProblemsFound) as caught:
        shape_of(height=721, width=8, num_frames=80)
    assert [str(problem) for problem in caught.value.problems] == [
        "height=721: must be a positive multiple of 16. Use height=720.",
        "width=8: must be a positive multiple of 16. Use width=16.",
        "num_frames=80: must be 4n + 1. Use num_frames=81.",
    ]
