"""Inputs at a video's size: the fits, what they say, and what they refuse."""

import numpy as np
import pytest
from PIL import Image

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.pipelines.preprocess.images import (
    FITS,
    ClipPreprocessor,
    aspect_note,
    clip_pixels,
    first_frame_mask,
    fit_pixels,
    image_condition_video,
    nearest_indices,
    scaled_size,
    to_8_bits,
)


def colours(rows, columns, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), dtype=np.uint8)


# Images


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("source", [(20, 40), (40, 20), (32, 48), (1, 300), (300, 1)])
@pytest.mark.parametrize("floats", [False, True])
def test_every_fit_gives_the_size_and_range(fit, source, floats):
    image = colours(*source)
    given = image.astype(np.float32) / 255 if floats else Image.fromarray(image)
    pixels = fit_pixels(given, height=32, width=48, fit=fit)
    assert pixels.shape == (32, 48, 3)
    assert pixels.dtype == np.float32
    assert pixels.min() >= -1
    assert pixels.max() <= 1


@pytest.mark.parametrize("fit", FITS)
def test_an_image_of_the_right_size_is_not_changed(fit):
    image = colours(32, 48)
    pixels = fit_pixels(Image.fromarray(image), height=32, width=48, fit=fit)
    np.testing.assert_array_equal(np.rint((pixels + 1) * 127.5), image)


def test_padding_keeps_everything_and_cropping_fills_everything():
    white = Image.new("RGB", (20, 40), "white")
    padded = fit_pixels(white, height=32, width=48, fit="pad")
    assert scaled_size((40, 20), (32, 48), "pad") == (32, 16)
    np.testing.assert_array_equal(padded[:, 16:32], 1)
    np.testing.assert_array_equal(padded[:, :16], -1)
    np.testing.assert_array_equal(padded[:, 32:], -1)
    assert scaled_size((40, 20), (32, 48), "crop") == (96, 48)
    np.testing.assert_array_equal(fit_pixels(white, height=32, width=48, fit="crop"), 1)


def test_cropping_keeps_the_middle():
    image = np.zeros((96, 48, 3), np.uint8)
    image[32:64] = 255
    pixels = fit_pixels(Image.fromarray(image), height=32, width=48, fit="crop")
    np.testing.assert_array_equal(pixels, 1)


def test_another_aspect_ratio_is_said():
    assert aspect_note("image", (720, 1280), (480, 832), "stretch") is None
    stretched = aspect_note("image", (1000, 1000), (480, 832), "stretch")
    assert stretched == (
        "image: 1000x1000 for a video of 832x480 is stretched; "
        "image_fit=crop or pad keeps its aspect ratio"
    )
    assert "cropped" in aspect_note("image", (1000, 1000), (480, 832), "crop")
    assert "bars" in aspect_note("image", (1000, 1000), (480, 832), "pad")


def test_floats_are_rounded_to_8_bits_where_pillow_is_needed():
    np.testing.assert_array_equal(
        np.asarray(to_8_bits(np.float32([[[0, 0.499, 1]]]))), [[[0, 127, 255]]]
    )
    exact = clip_pixels(Image.fromarray(colours(30, 40)))
    floats = clip_pixels(colours(30, 40).astype(np.float32) / 255)
    np.testing.assert_array_equal(exact, floats)


def test_nearest_pixels():
    assert nearest_indices(4, 2).tolist() == [0, 2]
    assert nearest_indices(2, 4).tolist() == [0, 0, 1, 1]
    assert nearest_indices(9, 3, centre=0.5).tolist() == [1, 4, 7]


# Image to video


def test_first_and_last_frame_in_the_mask():
    mask = first_frame_mask(3, 2, 2, last=True)
    assert mask[:, 0, 0].tolist() == [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert first_frame_mask(3, 2, 2).sum() == 16


def test_a_last_image_needs_a_second_frame():
    image = np.zeros((16, 16, 3), np.float32)
    with pytest.raises(ProblemsFound, match="num_frames=1: a first and a last image"):
        image_condition_video(image, image, 1)
    with pytest.raises(ProblemsFound, match="num_frames=1"):
        first_frame_mask(1, 2, 2, last=True)


@pytest.mark.parametrize("size", [{"longest_edge": 3}, "224", {"height": 3}, None])
def test_a_strange_preprocessor_is_refused(size):
    with pytest.raises(ProblemsFound, match=r"preprocessor_config.json size=.*shortest_edge"):
        ClipPreprocessor.from_config({"size": size})
    with pytest.raises(ProblemsFound, match=r"preprocessor_config.json crop_size="):
        ClipPreprocessor.from_config({"crop_size": size})
