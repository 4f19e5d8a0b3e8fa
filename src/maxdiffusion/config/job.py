"""What a checked config asks for: which videos, how many at once, on which mesh."""

from dataclasses import dataclass

from maxdiffusion.mesh.request import MeshSplit
from maxdiffusion.pipelines.scales import GuidanceScales


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
