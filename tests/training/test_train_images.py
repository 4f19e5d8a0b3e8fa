"""The command trains on first frames, continues bit for bit, and its model animates an image."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiffusion import preprocess_wan, train_wan
from maxdiffusion.pipelines.settings import PipelineSettings
from maxdiffusion.pipelines.spec import open_wan_folder
from maxdiffusion.pipelines.tasks.base import Encoders, LatentShape, VisualInputs
from maxdiffusion.pipelines.tasks.image_to_video import ImageToVideo, WanImageToVideoPipeline
from maxdiffusion.runtime.video import read_video
from maxdiffusion.training.data.batches import SyntheticClips
from maxdiffusion.training.data.latent_cache import CachedClips, CachePlan, fill_cache
from maxdiffusion.training.data.synthetic import ClipFormat
from maxdiffusion.training.models import clip_encoder
from tests.training.command_line import small_run
from tests.training.interrupted import Ends, losses_of, shared_programs, terminate, weights

__all__ = ["shared_programs"]

MODEL = Path(__file__).parents[1] / "goldens" / "wan21_t2v"
CLIPS = SyntheticClips(clip=ClipFormat(frames=5, size=32), count=8, seed=0)


def changed_model(folder, index=None, **sizes):
    """The tiny text-to-video model as another kind: its index and its transformer's sizes."""
    shutil.copytree(MODEL, folder)
    for file, changes in (("model_index.json", index or {}), ("transformer/config.json", sizes)):
        held = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(held | changes))
    return folder


def arguments(tmp_path, model, *more):
    return small_run(model, tmp_path, "train_text_encoder=false", "weights_dtype=float32", *more)


@pytest.mark.slow
def test_a_first_frame_run_continues_bit_for_bit_and_animates(
    shared_programs, tmp_path, monkeypatch, capsys
):
    model = changed_model(tmp_path / "blank", {"expand_timesteps": True})

    def train(name):
        return train_wan.main(
            arguments(
                tmp_path,
                model,
                "train_from_scratch=true",
                "first_frame_dropout=0.25",
                "max_train_steps=3",
                shared_programs,
                f"checkpoint_dir={tmp_path / name / 'checkpoints'}",
                f"export_dir={tmp_path / name / 'model'}",
                f"metrics_file={tmp_path / name / 'metrics.jsonl'}",
            )
        )

    assert train("whole") == 0
    assert "25 % of the clips are text to video" in capsys.readouterr().out
    ends = Ends(monkeypatch)
    ends.after(1, terminate)
    assert train("parts") != 0
    ends.never()
    assert train("parts") == 0
    said = capsys.readouterr().out
    assert said.count("continuing after step 2") == 1  # SIGTERM came while step 2 was computed
    whole, parts = (weights(tmp_path / name / "model") for name in ("whole", "parts"))
    for name, value in whole.items():
        np.testing.assert_array_equal(value, parts[name], err_msg=name)
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "parts")
    assert_animates(tmp_path / "whole" / "model")


def assert_animates(folder):
    """The first latent frame of a generated video is that of the image."""
    pipeline = WanImageToVideoPipeline.from_pretrained(
        folder, settings=PipelineSettings(attention="dot_product")
    )
    video = CLIPS[0]["video"]
    made = pipeline(
        video[0],
        CLIPS.caption(0),
        height=32,
        width=32,
        num_frames=5,
        num_inference_steps=2,
        guidance_scale=1.0,
        seed=3,
        output_type="latent",
    ).frames
    opened, spec = open_wan_folder(folder)
    encoded = clip_encoder(opened, spec)(video[None])[0]
    latents = np.moveaxis(made[0], 0, -1)
    assert np.isfinite(latents).all()
    np.testing.assert_allclose(latents[0], encoded[0], atol=1e-4)
    assert np.abs(latents[1:] - encoded[1:]).max() > 0.1


@pytest.mark.slow
def test_channels_train_on_stored_first_frames(tmp_path, capsys):
    index = {"_class_name": "WanImageToVideoPipeline"}
    blank = changed_model(tmp_path / "blank", index, in_channels=36)
    assert preprocess_wan.main(arguments(tmp_path, blank)) == 0
    assert_stores_what_the_pipeline_encodes(blank, tmp_path / "cache")

    def train(model, steps, *more):
        folder = tmp_path / f"steps_{steps}"
        return train_wan.main(
            arguments(
                tmp_path,
                model,
                f"max_train_steps={steps}",
                f"checkpoint_dir={folder / 'checkpoints'}",
                f"export_dir={folder / 'model'}",
                *more,
            )
        )

    assert train(blank, 0, "train_from_scratch=true") == 0
    drawn = tmp_path / "steps_0" / "model"
    sampled = ("sample_every=2", "num_inference_steps=1", f"output_dir={tmp_path / 'samples'}")
    assert train(drawn, 2, *sampled) == 2
    assert "image_url='': image-to-video needs it" in capsys.readouterr().err
    Image.fromarray(CLIPS[0]["video"][0]).save(tmp_path / "first.png")
    assert train(drawn, 2, *sampled, f"image_url={tmp_path / 'first.png'}") == 0
    assert "mask and encoded first frame as channels" in capsys.readouterr().out
    video, _ = read_video(tmp_path / "samples" / "step_000002.mp4")
    assert video.shape == (5, 32, 32, 3)
    folders = (drawn, tmp_path / "steps_2" / "model")
    before, after = (weights(folder)["patch_embedding.weight"] for folder in folders)
    assert (np.abs(after - before).max(axis=(0, 2, 3, 4)) > 0).sum() > 30  # the image's as well


def assert_stores_what_the_pipeline_encodes(model, cache):
    """The stored image is the encoded part of the channels that generation makes of a frame."""
    folder, spec = open_wan_folder(model)
    encode = clip_encoder(folder, spec)
    encoders = Encoders(
        video=lambda pixels: encode((pixels[None] + 1) * np.float32(127.5))[0],
        image=encode,
        latent=LatentShape(frames=2, rows=4, columns=4, channels=16, tokens=8),
        vae=spec.vae,
    )
    stored = CachedClips(cache)
    for clip in (0, 7):
        inputs = [VisualInputs(image=Image.fromarray(CLIPS[clip]["video"][0]))]
        wanted = ImageToVideo().condition(inputs, encoders)
        channels = wanted.conditioning.channels[0, ..., 4:]
        np.testing.assert_allclose(stored[clip]["image"], channels, atol=1e-4)
        assert np.abs(stored[clip]["latents"] - channels)[1:].max() > 0.1


def test_a_cache_without_first_frames_is_refused(tmp_path, capsys):
    """It was made for text to video, and says so before the autoencoder is read."""
    fill_cache(
        tmp_path / "cache",
        CLIPS,
        CachePlan(model="other", caption_tokens=32),
        encode=lambda videos: np.zeros((len(videos), 2, 4, 4, 16)),
        tokenize=lambda text: [1],
    )
    wide = changed_model(tmp_path / "wide", in_channels=36)
    assert preprocess_wan.main(arguments(tmp_path, wide)) == 2
    said = capsys.readouterr().err
    assert 'arrays was null, now ["latents", "image"]' in said
