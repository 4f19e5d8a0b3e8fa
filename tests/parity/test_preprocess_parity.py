"""Inputs as diffusers and transformers make them, from the same images."""

from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import WanImageToVideoPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import load_image as diffusers_load_image
from diffusers.video_processor import VideoProcessor
from transformers.models.clip import CLIPImageProcessorPil

from maxdiffusion.pipelines.preprocess.images import (
    ClipPreprocessor,
    clip_pixels,
    first_frame_mask,
    fit_pixels,
    image_condition_video,
)
from maxdiffusion.runtime.images import load_image

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
