#!/usr/bin/env python
"""Scores a model of moving shapes on prompts and seeds that training never saw.

    python scripts/score_embedded.py MODEL [--clips 200] [--steps 20] [--autoencoder]

Half of the prompts show combinations of colour, shape and motion that were left out of training.
With --autoencoder clips are only encoded and decoded, which is the best that a model can reach.
"""

import argparse
import json

import numpy as np

from maxdiffusion.models.vae import ALL_FRAMES
from maxdiffusion.pipelines.settings import PipelineSettings
from maxdiffusion.pipelines.wan import WanPipeline
from maxdiffusion.training.clips import ClipFormat, Pool, caption, draw_scene, render
from maxdiffusion.training.scoring import score
from maxdiffusion.training.vae_training import peak_signal

SEED = 20_221_105  # of the scored draws; training uses small seeds
AT_ONCE = 10
FIELDS = ("colour", "shape", "motion", "background")


def scenes(count: int, clip: ClipFormat) -> list:
    """Fresh scenes, every other one of a combination that was held out."""
    pools = (Pool.TRAINED, Pool.HELD_OUT)
    return [draw_scene(clip, pools[index % 2], seed=SEED, index=index) for index in range(count)]


def generated(pipeline: WanPipeline, prompts: list[str], first: int, arguments) -> np.ndarray:
    """The clips of some prompts, as bytes."""
    return pipeline(
        prompts,
        height=64,
        width=64,
        num_frames=arguments.frames,
        num_inference_steps=arguments.steps,
        guidance_scale=arguments.guidance,
        seed=SEED % 2**31 + first,
        output_type="uint8",
    ).frames


def decoded(pipeline: WanPipeline, videos: np.ndarray) -> np.ndarray:
    """Clips after the autoencoder, as bytes."""
    import jax
    from flax import nnx

    graph = pipeline.workshop.models.vae.graph

    @jax.jit
    def there_and_back(weights, video):
        vae = nnx.merge(graph, weights)
        return vae.decode(vae.encode(video, chunk=ALL_FRAMES).mean, chunk=ALL_FRAMES)

    video = there_and_back(pipeline.parameters.vae, videos.astype(np.float32) / 127.5 - 1)
    return np.rint((np.asarray(video) + 1) * 127.5).astype(np.uint8)


def main() -> None:
    """Prints the table as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--pairs", action="store_true", help="two shapes in every clip")
    parser.add_argument("--autoencoder", action="store_true")
    arguments = parser.parse_args()
    clip = ClipFormat(frames=arguments.frames, pair_share=1.0 if arguments.pairs else 0.0)
    settings = PipelineSettings(attention="dot_product")
    pipeline = WanPipeline.from_pretrained(arguments.model, settings=settings)
    wanted, marks, decibels = scenes(arguments.clips, clip), [], []
    for first in range(0, len(wanted), AT_ONCE):
        group = wanted[first : first + AT_ONCE]
        if arguments.autoencoder:
            videos = np.stack([render(scene, frames=clip.frames, size=64) for scene in group])
            frames = decoded(pipeline, videos)
            decibels += [peak_signal(a, b) for a, b in zip(frames, videos, strict=True)]
        else:
            numbers = range(first, first + len(group))
            prompts = [caption(s, seed=SEED, index=n) for s, n in zip(group, numbers, strict=True)]
            frames = generated(pipeline, prompts, first, arguments)
        marks += [score(video, scene) for video, scene in zip(frames, group, strict=True)]
    table = {name: float(np.mean([getattr(mark, name) for mark in marks])) for name in FIELDS}
    table["all"] = float(np.mean([mark.all_right for mark in marks]))
    for name, part in (("trained", marks[::2]), ("held out", marks[1::2])):
        table[f"all, {name}"] = float(np.mean([mark.all_right for mark in part]))
    if decibels:
        table["decibels"] = float(np.mean(decibels))
    print(json.dumps({"model": arguments.model, "clips": len(marks), **table}, indent=2))


if __name__ == "__main__":
    main()
