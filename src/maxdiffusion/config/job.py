"""What a checked config asks for: which videos, how many at once, on which mesh."""

from dataclasses import dataclass

from maxdiffusion.mesh.request import MeshSplit

# Guidance weighs two predictions; up to this scale the negative prompt has no part in them.
NO_GUIDANCE = 1.0


@dataclass(frozen=True, kw_only=True)
class GuidanceScales:
    """Strength of guidance for each expert; a model with one transformer has both the same."""

    high_noise: float
    low_noise: float

    @property
    def active(self) -> bool:
        """Whether any step needs the negative prompt."""
        return max(self.high_noise, self.low_noise) > NO_GUIDANCE


@dataclass(frozen=True, kw_only=True)
class Job:
    """The videos to make: every prompt `videos_per_prompt` times, `batch_size` at once."""

    prompts: tuple[str, ...]
    videos_per_prompt: int
    batch_size: int
    guidance: GuidanceScales
    mesh: MeshSplit

    @property
    def videos(self) -> int:
        """How many videos there will be in all."""
        return len(self.prompts) * self.videos_per_prompt
