"""The second model of the package continues pictures of shapes as their prompts say."""

import numpy as np
import pytest

from maxdiffusion.pipelines.settings import PipelineSettings
from maxdiffusion.pipelines.tasks.image_to_video import WanImageToVideoPipeline
from maxdiffusion.training.data.scoring import score
from maxdiffusion.training.data.synthetic import ClipFormat, Pool, caption, draw_scene, render
from maxdiffusion.training.vae import peak_signal

pytestmark = pytest.mark.slow
SEED = 77  # neither that of the training nor that of scripts/score_embedded.py


def test_pictures_are_continued():
    clip = ClipFormat(frames=9, pair_share=0.0)
    scenes = [draw_scene(clip, Pool.HELD_OUT, seed=SEED, index=index) for index in range(6)]
    truth = np.stack([render(scene, frames=9, size=64) for scene in scenes])
    pipeline = WanImageToVideoPipeline.from_pretrained(
        "embedded_image", settings=PipelineSettings(attention="dot_product")
    )
    prompts = [caption(scene, seed=SEED, index=index) for index, scene in enumerate(scenes)]
    frames = pipeline(
        [*truth[:, 0]],
        prompts,
        height=64,
        width=64,
        num_frames=9,
        num_inference_steps=20,
        guidance_scale=3.0,
        seed=SEED,
        output_type="uint8",
    ).frames
    marks = [score(video, scene) for video, scene in zip(frames, scenes, strict=True)]
    assert sum(mark.all_right for mark in marks) >= 5
    for video, true in zip(frames, truth, strict=True):
        assert peak_signal(video[:1], true[:1]) >= 30.0
