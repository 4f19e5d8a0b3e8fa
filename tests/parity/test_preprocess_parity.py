"""Inputs as diffusers and transformers make them, from the same images."""

from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import (
    WanAnimatePipeline,
    WanImageToVideoPipeline,
    WanVACEPipeline,
    WanVideoToVideoPipeline,
)
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.wan.image_processor import WanAnimateImageProcessor
from diffusers.utils import load_image as diffusers_load_image
from diffusers.video_processor import VideoProcessor
from transformers.models.clip import CLIPImageProcessorPil

from maxdiffusion.pipelines.preprocess.animate import (
    Segments,
    animate_inputs,
    character_pixels,
    reflected,
)
from maxdiffusion.pipelines.preprocess.images import (
    ClipPreprocessor,
    clip_pixels,
    first_frame_mask,
    fit_pixels,
    image_condition_video,
    video_pixels,
)
from maxdiffusion.pipelines.preprocess.vace import vace_inputs
from maxdiffusion.pipelines.tasks.video_to_video import start_step
from maxdiffusion.runtime.images import load_image, load_video

SIZES = [((50, 37), (64, 96)), ((64, 96), (64, 96)), ((33, 200), (48, 32)), ((7, 5), (80, 48))]


def colours(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def channels_last(tensor):
    return tensor.movedim(-3, -1).numpy()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F"])
@pytest.mark.parametrize("orientation", [None, 3, 6, 7])
def test_images_are_loaded_as_by_diffusers(mode, orientation):
    image = PIL.Image.fromarray(colours((9, 14))).convert(mode)
    if orientation:
        image.getexif()[0x0112] = orientation
    expected = diffusers_load_image(image)
    np.testing.assert_array_equal(np.asarray(load_image(image)), np.asarray(expected))


@pytest.mark.parametrize("mode", ["I;16", "RGBA", "P", "LA"])
def test_files_are_loaded_as_by_diffusers(tmp_path, mode):
    image = PIL.Image.fromarray(colours((9, 14)))
    if mode == "I;16":
        image = PIL.Image.fromarray((np.arange(126, dtype=np.uint16) * 7).reshape(9, 14))
    elif mode == "P":
        image = image.quantize(9)
        image.info["transparency"] = bytes(range(9))
    else:
        image = image.convert(mode)
        image.putalpha(77)
    path = str(tmp_path / "a.png")
    image.save(path)
    expected = diffusers_load_image(path) if mode != "P" else PIL.Image.open(path).convert("RGBA")
    np.testing.assert_array_equal(np.asarray(load_image(path)), np.asarray(expected)[..., :3])


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_images_are_resized_as_by_diffusers(source, target):
    image, (height, width) = PIL.Image.fromarray(colours(source)), target
    expected = VideoProcessor(vae_scale_factor=8).preprocess(image, height=height, width=width)
    ours = fit_pixels(image, height=height, width=width)
    np.testing.assert_array_equal(ours, channels_last(expected)[0])


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_float_arrays_are_resized_as_tensors(source, target):
    pixels, (height, width) = np.random.default_rng(1).random((*source, 3), np.float32), target
    tensor = torch.from_numpy(pixels).movedim(-1, 0)[None]
    expected = VideoProcessor(vae_scale_factor=8).preprocess(tensor, height=height, width=width)
    ours = fit_pixels(pixels, height=height, width=width)
    np.testing.assert_array_equal(ours, channels_last(expected)[0])


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_crops_are_those_of_diffusers(source, target):
    image, (height, width) = PIL.Image.fromarray(colours(source)), target
    processor = VaeImageProcessor(vae_scale_factor=8)
    expected = processor.preprocess(image, height=height, width=width, resize_mode="crop")
    ours = fit_pixels(image, height=height, width=width, fit="crop")
    np.testing.assert_array_equal(ours, channels_last(expected)[0])


@pytest.mark.parametrize("size", [(300, 500), (500, 300), (224, 224), (40, 31), (225, 1000)])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        {"size": {"height": 20, "width": 30}, "crop_size": 28, "resample": 2},
        {"do_center_crop": False, "image_mean": [0.5] * 3, "image_std": [0.25] * 3},
        {"do_resize": False, "do_normalize": False, "crop_size": {"height": 100, "width": 51}},
        {"do_rescale": False, "do_normalize": False},
    ],
)
def test_clip_pixels_are_those_of_transformers(size, config):
    image = PIL.Image.fromarray(colours(size))
    expected = CLIPImageProcessorPil(**config)(image, return_tensors="pt")["pixel_values"]
    ours = clip_pixels(image, ClipPreprocessor.from_config(config))
    np.testing.assert_array_equal(ours, channels_last(expected.float())[0])


class Recorder(torch.nn.Module):
    """Stands in for a VAE: keeps the videos that it is given; their latents are zeros."""

    dtype = torch.float32
    device = torch.device("cpu")
    config = SimpleNamespace(latents_mean=[0.0] * 16, latents_std=[1.0] * 16, z_dim=16)

    def __init__(self):
        super().__init__()
        self.videos = []

    def encode(self, video):
        self.videos.append(video)
        frames, rows, columns = video.shape[2:]
        size = (len(video), 16, (frames - 1) // 4 + 1, rows // 8, columns // 8)
        return SimpleNamespace(latents=torch.zeros(size))


@pytest.mark.parametrize(("frames", "last"), [(1, False), (5, False), (9, True), (13, True)])
def test_first_and_last_frame_are_placed_as_by_diffusers(frames, last):
    height, width = 32, 48
    first, final = (2 * colours((height, width), seed) / np.float32(255) - 1 for seed in (1, 2))
    vae = Recorder()
    pipeline = SimpleNamespace(
        vae=vae,
        vae_scale_factor_temporal=4,
        vae_scale_factor_spatial=8,
        config=SimpleNamespace(expand_timesteps=False),
    )
    tensors = [torch.from_numpy(image).movedim(-1, 0)[None] for image in (first, final)]
    _, condition = WanImageToVideoPipeline.prepare_latents(
        pipeline,
        tensors[0],
        batch_size=1,
        height=height,
        width=width,
        num_frames=frames,
        dtype=torch.float32,
        device=vae.device,
        last_image=tensors[1] if last else None,
    )
    video = image_condition_video(first, final if last else None, frames)
    np.testing.assert_array_equal(video, vae.videos[0][0].movedim(0, -1).numpy())
    mask = first_frame_mask((frames - 1) // 4 + 1, height // 8, width // 8, last=last)
    np.testing.assert_array_equal(mask, condition[0, :4].movedim(0, -1).numpy())


# Videos


def clip(frames, size, seed=0):
    return np.stack([colours(size, seed + frame) for frame in range(frames)])


def pictures(frames):
    return [PIL.Image.fromarray(frame) for frame in frames]


def one_video(tensor):
    """Returns the video [F Y X C] of a tensor [1 C F Y X]."""
    return tensor[0].movedim(0, -1).numpy()


@pytest.mark.parametrize("floats", [False, True])
def test_videos_are_resized_as_by_diffusers(floats):
    frames = clip(3, (50, 37))
    given = frames.astype(np.float32) / 255 if floats else pictures(frames)
    expected = VideoProcessor(vae_scale_factor=8).preprocess_video(given, height=64, width=48)
    ours = video_pixels(load_video(given), height=64, width=48)
    np.testing.assert_array_equal(ours, one_video(expected))


@pytest.mark.parametrize("steps", [1, 2, 4, 7, 30, 50])
def test_the_first_step_of_video_to_video(steps):
    scheduler = SimpleNamespace(order=1)
    pipeline = SimpleNamespace(scheduler=scheduler)
    for strength in np.arange(1, 101) / 100:
        timesteps = np.arange(steps)
        kept, _ = WanVideoToVideoPipeline.get_timesteps(
            pipeline, steps, timesteps, float(strength), "cpu"
        )
        if len(kept):
            assert start_step(steps, float(strength)) == kept[0]


# VACE


def vace_pipeline(vae):
    transformer = SimpleNamespace(config=SimpleNamespace(patch_size=(1, 2, 2)))
    return SimpleNamespace(
        vae=vae,
        transformer=transformer,
        vae_scale_factor_temporal=4,
        vae_scale_factor_spatial=8,
        video_processor=VideoProcessor(vae_scale_factor=8),
        _execution_device=vae.device,
    )


@pytest.mark.parametrize("frames", [1, 7, 9, 13])
@pytest.mark.parametrize(
    ("size", "references"),
    [((64, 96), ()), ((128, 192), ((50, 37), (100, 300))), (None, ((9, 70),)), (None, ())],
)
@pytest.mark.parametrize("masked", [False, True])
def test_vace_inputs_are_those_of_diffusers(frames, size, references, masked):
    references = references[: (frames + 3) // 4]  # diffusers fails with more
    height, width = 64, 96
    video = None if size is None else pictures(clip(frames, size))
    mask = pictures(clip(frames, size, seed=9)) if masked and size else None
    images = [PIL.Image.fromarray(colours(each, seed)) for seed, each in enumerate(references)]
    vae = Recorder()
    pipeline = vace_pipeline(vae)
    pixels, soft, canvases = WanVACEPipeline.preprocess_conditions(
        pipeline, video, mask, images or None, 1, height, width, frames, torch.float32, vae.device
    )
    WanVACEPipeline.prepare_video_latents(pipeline, pixels, soft, canvases, device=vae.device)
    channels = WanVACEPipeline.prepare_masks(pipeline, soft, canvases)
    ours = vace_inputs(
        None if video is None else load_video(video),
        None if mask is None else load_video(mask),
        images,
        height=height,
        width=width,
        num_frames=frames,
    )
    inactive, reactive, *encoded = map(one_video, vae.videos)
    whole = (frames - 1) // 4 * 4 + 1
    np.testing.assert_array_equal(ours.inactive, inactive[:whole])
    np.testing.assert_array_equal(ours.reactive, reactive[:whole])
    np.testing.assert_array_equal(ours.mask, one_video(channels))
    # diffusers puts one after the other in front.
    assert ours.reference_frames == len(encoded)
    for canvas, expected in zip(ours.references, reversed(encoded), strict=True):
        # Four products of weights in float32, of values up to 1.
        np.testing.assert_allclose(canvas, expected[0], rtol=0, atol=1e-6)


# Animate


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_the_character_is_fitted_as_by_diffusers(source, target):
    image, (height, width) = PIL.Image.fromarray(colours(source)), target
    processor = WanAnimateImageProcessor(
        vae_scale_factor=8, spatial_patch_size=(2, 2), resample="bilinear", fill_color=0
    )
    expected = processor.preprocess(image, height=height, width=width, resize_mode="fill")
    ours = character_pixels(image, height=height, width=width)
    np.testing.assert_array_equal(ours, channels_last(expected)[0])


@pytest.mark.parametrize("frames", [2, 3, 8])
@pytest.mark.parametrize("wanted", [1, 2, 7, 30])
def test_videos_are_reflected_as_by_diffusers(frames, wanted):
    expected = WanAnimatePipeline.pad_video_frames(None, list(range(frames)), wanted)
    assert reflected(frames, wanted).tolist() == expected


@pytest.mark.parametrize("mode", ["animate", "replace"])
@pytest.mark.parametrize("overlap", [1, 5])
def test_segments_are_those_of_diffusers(mode, overlap):
    height, width, length, poses = 32, 48, 13, 20
    size = (40, 60)
    videos = {name: clip(poses, size, seed) for seed, name in enumerate(("pose", "background"))}
    mask = clip(poses, size, seed=50)
    face = clip(7, (30, 20), seed=80)
    vae = Recorder()
    pipeline = SimpleNamespace(vae=vae, vae_scale_factor_temporal=4, vae_scale_factor_spatial=8)
    pipeline.get_i2v_mask = WanAnimatePipeline.get_i2v_mask.__get__(pipeline)
    segments = Segments(poses=poses, length=length, overlap=overlap)
    target = segments.frames
    video = VideoProcessor(vae_scale_factor=8)
    for_mask = VideoProcessor(vae_scale_factor=8, do_normalize=False, do_convert_grayscale=True)

    def prepared(processor, frames, rows=height, columns=width):
        padded = WanAnimatePipeline.pad_video_frames(None, pictures(frames), target)
        return processor.preprocess_video(padded, height=rows, width=columns)

    pose, background = (prepared(video, frames) for frames in videos.values())
    masks, faces = prepared(for_mask, mask), prepared(video, face, 24, 24)
    replaces = mode == "replace"
    ours = animate_inputs(
        PIL.Image.fromarray(colours(size)),
        pose_video=videos["pose"],
        face_video=face,
        background_video=videos["background"] if replaces else None,
        mask_video=mask if replaces else None,
        height=height,
        width=width,
        face_size=24,
    )
    rng = np.random.default_rng(3)
    for index in range(segments.count):
        span = segments.span(index)
        kept = rng.random((overlap, height, width, 3), np.float32) * 2 - 1 if index else None
        previous = None if kept is None else torch.from_numpy(kept).movedim(-1, 0)[None]
        condition = WanAnimatePipeline.prepare_prev_segment_cond_latents(
            pipeline,
            previous,
            background_video=background[:, :, span],
            mask_video=masks[:, :, span],
            segment_frame_length=length,
            start_frame=span.start,
            height=height,
            width=width,
            prev_segment_cond_frames=overlap,
            task=mode,
            device=vae.device,
        )
        segment = ours.segment(segments, index)
        np.testing.assert_array_equal(segment.pose, one_video(pose[:, :, span]))
        np.testing.assert_array_equal(segment.face, one_video(faces[:, :, span]))
        expected = one_video(vae.videos[-1])
        np.testing.assert_array_equal(segment.condition_video(kept, overlap), expected)
        given = segment.condition_mask(overlap if index else 0)
        reference = pipeline.get_i2v_mask(1, 1, height // 8, width // 8, 1, None, device="cpu")
        np.testing.assert_array_equal(given[:1], one_video(reference))
        np.testing.assert_array_equal(given[1:], one_video(condition)[..., :4])


@pytest.mark.parametrize("length", [13, 77])
@pytest.mark.parametrize("overlap", [1, 5])
def test_segments_are_counted_as_by_diffusers(length, overlap):
    step = length - overlap
    for poses in range(overlap + 1, 3 * length):
        rest = (poses - overlap) % step
        target = poses + (step - rest if rest else 0)
        segments = Segments(poses=poses, length=length, overlap=overlap)
        assert (segments.frames, segments.count) == (target, target // step)
