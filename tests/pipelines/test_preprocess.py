"""Inputs at a video's size: the fits, what they say, and what they refuse."""

import numpy as np
import pytest
from PIL import Image

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.pipelines.preprocess.animate import (
    Segments,
    animate_inputs,
    channels_of_frames,
    reflected,
)
from maxdiffusion.pipelines.preprocess.images import (
    FITS,
    ClipPreprocessor,
    aspect_note,
    clip_pixels,
    first_frame_mask,
    fit_pixels,
    from_8_bits,
    image_condition_video,
    latent_frames,
    nearest_indices,
    resized_frames,
    scaled_size,
    to_8_bits,
    to_pixels,
    video_pixels,
    whole_latent_frames,
)
from maxdiffusion.pipelines.preprocess.vace import (
    mask_channels,
    reference_canvas,
    split_by_mask,
    vace_inputs,
)
from maxdiffusion.pipelines.tasks.video_to_video import start_step, video_to_video_pixels


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


# Videos


def clip(frames, rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (frames, rows, columns, 3), dtype=np.uint8)


@pytest.mark.parametrize("fit", FITS)
def test_bytes_hold_the_same_pixels(fit):
    frames = clip(2, 20, 50)
    expected = video_pixels(frames, height=32, width=48, fit=fit)
    kept = resized_frames(frames, height=32, width=48, fit=fit)
    np.testing.assert_array_equal(from_8_bits(kept), expected)


@pytest.mark.parametrize(("frames", "whole"), [(1, 1), (4, 1), (5, 5), (7, 5), (9, 9), (81, 81)])
def test_frames_that_fill_no_latent_frame_are_left_out(frames, whole):
    assert len(whole_latent_frames(np.zeros(frames))) == whole
    assert latent_frames(frames) == (whole - 1) // 4 + 1
    video = video_to_video_pixels(clip(frames, 4, 4), height=16, width=16)
    assert video.shape == (whole, 16, 16, 3)


def test_strength_is_truncated_and_never_runs_nothing():
    assert start_step(7, 0.7) == 3  # 4.9 steps are 4
    assert start_step(50, 1.0) == 0
    with pytest.raises(ProblemsFound, match=r"strength=0.1: leaves none .* Use at least 0.25"):
        start_step(4, 0.1)
    assert start_step(4, 0.25) == 3
    assert start_step(3, 0.3334) == 2


# VACE


def test_the_mask_splits_a_video():
    video = np.full((1, 8, 8, 3), -0.5, np.float32)
    mask = np.zeros_like(video)
    mask[:, :, :4] = 0.6
    inactive, reactive = split_by_mask(video, mask)
    assert inactive[0, 0, :, 0].tolist() == [0, 0, 0, 0, -0.5, -0.5, -0.5, -0.5]
    assert reactive[0, 0, :, 0].tolist() == [-0.5, -0.5, -0.5, -0.5, 0, 0, 0, 0]


def test_mask_channels_are_the_pixels_of_a_latent_pixel():
    mask = np.random.default_rng(0).random((9, 16, 24, 3), np.float32)
    channels = mask_channels(mask)
    assert channels.shape == (3, 2, 3, 64)
    # Frame 4 of 0..8 is the middle of latent frame 1; row 8 + 2, column 16 + 5.
    assert channels[1, 1, 2, 8 * 2 + 5] == mask[4, 10, 21, 0]


def test_another_aspect_ratio_of_the_control_is_fitted():
    frames = clip(5, 48, 32)
    tall = vace_inputs(frames, height=32, width=48, num_frames=5)
    assert tall.reactive.shape == (5, 32, 48, 3)
    np.testing.assert_array_equal(tall.reactive, video_pixels(frames, height=32, width=48))
    padded = vace_inputs(frames, height=32, width=48, num_frames=5, fit="pad")
    np.testing.assert_array_equal(padded.reactive[:, :, 0], -1)


def test_references_are_centred_on_white_and_the_last_comes_first():
    black, grey = Image.new("RGB", (16, 32), 0), Image.new("RGB", (32, 16), (128,) * 3)
    canvas = reference_canvas(black, height=32, width=48)
    np.testing.assert_array_equal(canvas[:, 16:32], -1)
    np.testing.assert_array_equal(canvas[:, :16], 1)
    np.testing.assert_array_equal(canvas[:, 32:], 1)
    inputs = vace_inputs(reference_images=[black, grey, black], height=32, width=48, num_frames=1)
    assert inputs.references.shape == (3, 32, 48, 3)
    np.testing.assert_array_equal(inputs.references[0], canvas)
    np.testing.assert_array_equal(inputs.references[1][16, 24], to_pixels(grey)[0, 0])
    assert inputs.mask.shape == (4, 4, 6, 64)  # more references than latent frames
    np.testing.assert_array_equal(inputs.mask[:3], 0)
    np.testing.assert_array_equal(inputs.mask[3], 1)
    # A line of pixels keeps at least one of them.
    thin = Image.new("RGB", (8, 2000), 0)
    assert (reference_canvas(thin, height=32, width=48) == -1).any()


def test_bad_inputs_of_vace_are_named_together():
    with pytest.raises(ProblemsFound) as caught:
        vace_inputs(
            clip(9, 16, 16),
            clip(8, 16, 16),
            [Image.new("RGB", (4, 90))],
            height=16,
            width=16,
            num_frames=5,
        )
    assert [problem.name for problem in caught.value.problems] == [
        *("video", "mask", "reference_images[0]")
    ]
    with pytest.raises(ProblemsFound, match="a mask needs a video"):
        vace_inputs(mask=clip(5, 16, 16), height=16, width=16, num_frames=5)
    with pytest.raises(ProblemsFound, match="height and width of the video"):
        vace_inputs(clip(5, 16, 16), clip(5, 16, 8), height=16, width=16, num_frames=5)


# Animate


@pytest.mark.parametrize("overlap", [1, 5])
@pytest.mark.parametrize("poses", [1, 2, 5, 6, 13, 14, 100])
def test_segments_cover_all_poses(poses, overlap):
    segments = Segments(poses=poses, length=13, overlap=overlap)
    assert segments.frames >= poses
    assert segments.count == 1 or segments.frames - segments.step < poses
    assert segments.span(segments.count - 1).stop == segments.frames
    for index in range(1, segments.count):
        assert segments.span(index - 1).stop - segments.span(index).start == overlap


def test_frames_run_back_and_forth():
    assert reflected(3, 8).tolist() == [0, 1, 2, 1, 0, 1, 2, 1]
    assert reflected(1, 3).tolist() == [0, 0, 0]
    assert reflected(5, 2).tolist() == [0, 1]


def test_bad_segments_are_refused():
    with pytest.raises(ProblemsFound) as caught:
        Segments(poses=9, length=12, overlap=3)
    assert [problem.name for problem in caught.value.problems] == [
        *("segment_frame_length", "prev_segment_conditioning_frames")
    ]
    with pytest.raises(ProblemsFound, match=r"segment_frame_length=9: must be at least 10"):
        Segments(poses=9, length=9, overlap=5)


def test_channels_are_the_frames_of_a_latent_frame():
    mask = np.arange(9, dtype=np.float32)[:, None, None] * np.ones((1, 2, 2), np.float32)
    assert channels_of_frames(mask)[:, 0, 0].tolist() == [[0] * 4, [1, 2, 3, 4], [5, 6, 7, 8]]


def test_a_scene_needs_a_mask_of_its_size():
    required = {"pose_video": clip(3, 16, 16), "face_video": clip(3, 8, 8)}
    size = {"height": 16, "width": 16}
    image = Image.new("RGB", (16, 16))
    with pytest.raises(ProblemsFound, match="mask_video=None: mode replace needs"):
        animate_inputs(image, **required, background_video=clip(3, 16, 16), **size)
    scene = {"background_video": clip(3, 16, 16), "mask_video": clip(3, 16, 8)}
    with pytest.raises(ProblemsFound, match="height and width of the background"):
        animate_inputs(image, **required, **scene, **size)
    with pytest.raises(ProblemsFound, match="background_video=None"):
        animate_inputs(image, **required, mask_video=clip(3, 16, 16), **size)


def test_floats_and_bytes_animate_alike():
    pose, face = clip(3, 20, 30), clip(3, 10, 10)
    image = colours(20, 30)
    segments = Segments(poses=3, length=5, overlap=1)
    size = {"height": 16, "width": 32, "face_size": 8}
    of_bytes = animate_inputs(Image.fromarray(image), pose_video=pose, face_video=face, **size)
    of_floats = animate_inputs(
        image.astype(np.float32) / 255,
        pose_video=pose.astype(np.float32) / 255,
        face_video=face.astype(np.float32) / 255,
        **size,
    )
    one, other = (inputs.segment(segments, 0) for inputs in (of_bytes, of_floats))
    np.testing.assert_array_equal(one.pose, other.pose)
    np.testing.assert_array_equal(one.face, other.face)
    np.testing.assert_array_equal(of_bytes.character, of_floats.character)
    assert one.pose.shape == (5, 16, 32, 3)
    np.testing.assert_array_equal(one.condition_video(None, 1), 0)
    assert one.condition_mask(0).shape == (3, 2, 4, 4)
