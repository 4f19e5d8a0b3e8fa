#!/usr/bin/env python
"""Scores a model of moving shapes on prompts and seeds that training never saw.

    python scripts/score_embedded.py MODEL [--clips 200] [--steps 20] [--pairs]
                                           [--autoencoder | --image [--silent]]

Half of the prompts show combinations of colour, shape and motion that were left out of training.
With --autoencoder clips are only encoded and decoded, which is the best that a model can reach.
With --image the model is given the first frame of the true clip as well, which it has to keep. The
prompt still says all that is scored: --silent leaves it empty, so that colour, shape and background
must come from the image, and motion is free.
Prints a table as JSON; ends with exit code 1 if a figure is below what the small model has to
reach (there is no such limit for --pairs).
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from maxdiffusion.models.vae import ALL_FRAMES
from maxdiffusion.pipelines.settings import PipelineSettings
from maxdiffusion.pipelines.tasks.image_to_video import WanImageToVideoPipeline
from maxdiffusion.pipelines.wan import WanPipeline
from maxdiffusion.runtime.progress import steps_bar
from maxdiffusion.training.data.scoring import Marks, score
from maxdiffusion.training.data.synthetic import (
    ClipFormat,
    Pool,
    Scene,
    caption,
    draw_scene,
    render,
)
from maxdiffusion.training.vae import peak_signal

SEED = 20_221_105  # of the scored draws; training uses small seeds
AT_ONCE = 10
SIZE = 64
FIELDS = ("colour", "shape", "motion", "background")
SAMPLES_REACH = {"colour": 0.97, "motion": 0.93, "shape": 0.85, "background": 0.95}
AUTOENCODER_REACHES = {"shape": 0.97, "decibels": 30.0}
IMAGES_REACH = {
    "colour": 0.97,
    "motion": 0.90,
    "shape": 0.97,
    "background": 0.97,
    "decibels of the first frame": 30.0,
    "decibels": 26.0,  # of the whole clip: 23 for a model that does not see where the shape is
}
# Without a prompt; a model that does not read its image has 0.55 of the colours.
SILENT_REACH = {"colour": 0.97, "background": 0.97, "shape": 0.65}
Make = Callable[[Sequence[Scene], int], np.ndarray]  # scenes, number of the first -> clips


def sampler(pipeline: WanPipeline, arguments: argparse.Namespace) -> Make:
    """Makes clips from the captions of scenes."""

    def make(scenes: Sequence[Scene], first: int) -> np.ndarray:
        return pipeline(captions(scenes, first), **settings_of(arguments, first)).frames

    return make


def animator(pipeline: WanImageToVideoPipeline, arguments: argparse.Namespace) -> Make:
    """Makes clips from the captions and the true first frames of scenes."""

    def make(scenes: Sequence[Scene], first: int) -> np.ndarray:
        images = [*true_clips(scenes, arguments.frames)[:, 0]]
        prompts = [""] * len(scenes) if arguments.silent else captions(scenes, first)
        return pipeline(images, prompts, **settings_of(arguments, first)).frames

    return make


def captions(scenes: Sequence[Scene], first: int) -> list[str]:
    """Sentences for scenes, the first of which has this number."""
    return [caption(s, seed=SEED, index=first + n) for n, s in enumerate(scenes)]


def settings_of(arguments: argparse.Namespace, first: int) -> dict[str, Any]:
    """Size, steps and guidance of a sample."""
    return {
        "height": SIZE,
        "width": SIZE,
        "num_frames": arguments.frames,
        "num_inference_steps": arguments.steps,
        "guidance_scale": 1.0 if arguments.silent else arguments.guidance,
        "seed": SEED + first,
        "output_type": "uint8",
    }


def autoencoder(pipeline: WanPipeline, arguments: argparse.Namespace) -> Make:
    """Makes clips by encoding and decoding the true ones."""
    graph = pipeline.builder.models.vae.graph

    @jax.jit
    def there_and_back(weights, video):
        vae = nnx.merge(graph, weights)
        return vae.decode(vae.encode(video, chunk=ALL_FRAMES).mean, chunk=ALL_FRAMES)

    def make(scenes: Sequence[Scene], first: int) -> np.ndarray:
        videos = true_clips(scenes, arguments.frames).astype(np.float32) / 127.5 - 1
        decoded = np.asarray(there_and_back(pipeline.parameters.vae, videos))
        return np.rint((decoded + 1) * 127.5).astype(np.uint8)

    return make


def true_clips(scenes: Sequence[Scene], frames: int) -> np.ndarray:
    """What the scenes really look like."""
    return np.stack([render(scene, frames=frames, size=SIZE) for scene in scenes])


def draws(count: int, clip: ClipFormat) -> list[Scene]:
    """Fresh scenes, every other one of a combination that was held out."""
    pools = (Pool.TRAINED, Pool.HELD_OUT)
    return [draw_scene(clip, pools[index % 2], seed=SEED, index=index) for index in range(count)]


def shares(marks: Sequence[Marks]) -> dict[str, float]:
    """The share of clips that each thing was right in, and that all was right in."""
    table = {name: float(np.mean([getattr(mark, name) for mark in marks])) for name in FIELDS}
    for name, part in (("", marks), (", trained", marks[::2]), (", held out", marks[1::2])):
        table[f"all{name}"] = float(np.mean([mark.all_right for mark in part]))
    return table


def measure(make: Make, scenes: Sequence[Scene], arguments: argparse.Namespace) -> dict[str, float]:
    """The table of a model."""
    marks: list[Marks] = []
    whole: list[float] = []
    kept: list[float] = []
    with steps_bar("Scoring", len(scenes), unit="clip") as advance:
        for first in range(0, len(scenes), AT_ONCE):
            group = scenes[first : first + AT_ONCE]
            for video, scene in zip(make(group, first), group, strict=True):
                marks.append(score(video, scene))
                truth = true_clips([scene], arguments.frames)[0]
                whole.append(peak_signal(video, truth))
                kept.append(peak_signal(video[:1], truth[:1]))
                advance()
    table = shares(marks)
    if arguments.autoencoder or arguments.image:
        table["decibels"] = float(np.mean(whole))
        table["decibels of the first frame"] = float(np.mean(kept))
        table["decibels of the worst first frame"] = float(np.min(kept))
    return table


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--pairs", action="store_true", help="two shapes in every clip")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--autoencoder", action="store_true", help="encode and decode, nothing else")
    kind.add_argument("--image", action="store_true", help="give the true first frame")
    parser.add_argument("--silent", action="store_true", help="with --image: no prompt")
    arguments = parser.parse_args()
    if arguments.silent and not arguments.image:
        parser.error("--silent needs --image: nothing else says what to show")
    return arguments


def maker(arguments: argparse.Namespace) -> tuple[Make, dict[str, float]]:
    """What makes the clips, and the figures that it has to reach."""
    settings = PipelineSettings(attention="dot_product")
    if arguments.image:
        images = WanImageToVideoPipeline.from_pretrained(arguments.model, settings=settings)
        return animator(images, arguments), SILENT_REACH if arguments.silent else IMAGES_REACH
    pipeline = WanPipeline.from_pretrained(arguments.model, settings=settings)
    if arguments.autoencoder:
        return autoencoder(pipeline, arguments), AUTOENCODER_REACHES
    return sampler(pipeline, arguments), SAMPLES_REACH


def main() -> int:
    """Prints the table; returns 1 if a figure is too low."""
    arguments = parse()
    clip = ClipFormat(frames=arguments.frames, pair_share=1.0 if arguments.pairs else 0.0)
    make, least = maker(arguments)
    table = measure(make, draws(arguments.clips, clip), arguments)
    print(json.dumps({"model": arguments.model, "clips": arguments.clips, **table}, indent=2))
    low = [] if arguments.pairs else [name for name in least if table[name] < least[name]]
    for name in low:
        print(f"{name} is {table[name]:.4g}: at least {least[name]} is needed", file=sys.stderr)
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
