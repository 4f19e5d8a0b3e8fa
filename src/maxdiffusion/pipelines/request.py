"""What one generation is asked to make."""

from dataclasses import dataclass

import numpy as np

from maxdiffusion.pipelines.guidance import ClassifierFree, Guidance, Unguided
from maxdiffusion.pipelines.scales import GuidanceScales
from maxdiffusion.pipelines.shapes import VideoShape
from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.schedulers import Sampler


@dataclass(frozen=True, kw_only=True)
class Request:
    """A batch of videos, one for each prompt: what they show, their size, and how they are sampled.

    The videos start from the noise of their `seeds`, or from `latents` [B, F, Y, X, C].
    """

    prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...]
    video: VideoShape
    sampler: Sampler
    scales: GuidanceScales
    boundary_ratio: float | None
    seeds: tuple[int, ...] = ()
    latents: np.ndarray | None = None

    def __post_init__(self) -> None:
        problems = [*self._count_problems(), *self._seed_problems()]
        if problems:
            raise ProblemsFound(problems)

    @property
    def guidance(self) -> Guidance:
        """One batch of two if any scale asks for it; otherwise the prompt alone."""
        return ClassifierFree() if self.scales.active else Unguided()

    def _count_problems(self) -> list[Problem]:
        videos = len(self.prompts)
        counts = {"negative_prompts": len(self.negative_prompts)}
        if self.latents is None:
            counts["seeds"] = len(self.seeds)
        else:
            counts["latents"] = len(self.latents)
        return [
            Problem(
                name=name,
                value=count,
                rule=f"there must be one for each of the {videos} videos",
                remedy=f"Give {videos} of them",
            )
            for name, count in counts.items()
            if count != videos or not videos
        ]

    def _seed_problems(self) -> list[Problem]:
        return [
            Problem(
                name="seed",
                value=seed,
                rule="must be a whole number from 0 to 4294967295",
                remedy="Use a smaller or positive one",
            )
            for seed in self.seeds
            if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32
        ]
