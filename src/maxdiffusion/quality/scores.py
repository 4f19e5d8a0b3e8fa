"""Scores of clips by themselves or by networks, for the modes of a ledger.

    shapes    rates of right colour, shape, motion and background, for captions of moving shapes
    LPIPS     distance of deep features (AlexNet), if `lpips_weights` names its weights
    VBench    dimensions of single clips, if `vbench_weights` names its weights

A scorer is found before anything runs, so that missing files are reported first.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from maxdiffusion.config import Config
from maxdiffusion.quality.runs import Clip, Ledger
from maxdiffusion.training.data.scoring import Marks, score
from maxdiffusion.training.data.synthetic import Scene, scene_of

SIDE = 64
"""Size of clips, in pixels, that shapes are recognised in."""
RATES = ("colour", "shape", "motion", "background")
Scores = Mapping[str, Mapping[str, float]]
"""For each mode, and `exact`: the mean of each column over its clips."""
Scorer = Callable[[Ledger], Scores]


def find_scorers(config: Config) -> list[Scorer]:
    """Returns the scorers of a config; raises if the files that they need are missing."""
    scorers: list[Scorer] = [shape_rates]
    if config.lpips_weights:
        from maxdiffusion.quality.lpips import Lpips  # for this field alone

        scorers.append(lpips_scorer(Lpips.read(Path(config.lpips_weights).expanduser())))
    if config.vbench_weights:
        from maxdiffusion.quality.vbench import Vbench  # for this field alone

        vbench = Vbench.find(Path(config.vbench_weights).expanduser(), config.fps)
        scorers.append(lambda ledger: {n: vbench(clips) for n, clips in clips_of(ledger).items()})
    return scorers


def clips_of(ledger: Ledger) -> dict[str, tuple[Clip, ...]]:
    """Returns the clips of the exact run and of every mode."""
    return {"exact": ledger.reference.clips} | {row.run.name: row.made.clips for row in ledger.rows}


def shape_rates(ledger: Ledger) -> Scores:
    """Returns the rates of clips that show what their captions say; empty for other prompts."""
    scenes = [scene_of(prompt) for prompt in ledger.prompts]
    known = [scene for scene in scenes if scene is not None]
    config = ledger.exact.job.config
    if len(known) < len(scenes) or (config.height, config.width) != (SIDE, SIDE):
        return {}
    return {name: rates(clips, known) for name, clips in clips_of(ledger).items()}


def rates(clips: Sequence[Clip], scenes: Sequence[Scene]) -> dict[str, float]:
    """Returns the share of clips in which each property is right."""
    marks: list[Marks] = [score(clip, scene) for clip, scene in zip(clips, scenes, strict=True)]
    return {name: float(np.mean([vars(mark)[name] for mark in marks])) for name in RATES}


def lpips_scorer(lpips: Callable[[Clip, Clip], float]) -> Scorer:
    """Returns the scorer of LPIPS distances from the exact run."""

    def scorer(ledger: Ledger) -> Scores:
        reference = ledger.reference.clips
        return {
            row.run.name: {
                "LPIPS": float(
                    np.mean([lpips(a, b) for a, b in zip(row.made.clips, reference, strict=True)])
                )
            }
            for row in ledger.rows
        }

    return scorer
