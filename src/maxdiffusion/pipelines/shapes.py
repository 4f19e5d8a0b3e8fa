"""Sizes of a video in pixels, in latents and in tokens."""

from collections.abc import Iterator
from dataclasses import dataclass

from maxdiffusion.models.vae import WanVaeConfig
from maxdiffusion.models.wan import WanTransformerConfig
from maxdiffusion.runtime.problems import Problem, ProblemsFound


@dataclass(frozen=True, kw_only=True)
class VideoShape:
    """Height and width in pixels and the number of frames."""

    height: int
    width: int
    num_frames: int


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """What one video is inside the model: latent frames, rows, columns, channels, and tokens."""

    frames: int
    rows: int
    columns: int
    channels: int
    tokens: int

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """Frames, rows, columns, channels: the shape of one video's latents."""
        return (self.frames, self.rows, self.columns, self.channels)


def shape_problems(
    video: VideoShape, vae: WanVaeConfig, transformer: WanTransformerConfig
) -> Iterator[Problem]:
    """Yields what stands between a video size and this model."""
    _, patch_rows, patch_columns = transformer.patch
    for name, size, patch in (
        ("height", video.height, patch_rows),
        ("width", video.width, patch_columns),
    ):
        multiple = vae.spatial_factor * patch
        if size < multiple or size % multiple:
            nearest = max(multiple, round(size / multiple) * multiple)
            yield Problem(
                name=name,
                value=size,
                rule=f"must be a positive multiple of {multiple}",
                remedy=f"Use {name}={nearest}",
            )
    frames, factor = video.num_frames, vae.temporal_factor
    if frames < 1 or (frames - 1) % factor:
        nearest = max(0, round((frames - 1) / factor)) * factor + 1
        yield Problem(
            name="num_frames",
            value=frames,
            rule=f"must be {factor}n + 1",
            remedy=f"Use num_frames={nearest}",
        )


def latent_shape(
    video: VideoShape, vae: WanVaeConfig, transformer: WanTransformerConfig
) -> LatentShape:
    """The latents and tokens of a video; a size that does not fit is refused."""
    problems = list(shape_problems(video, vae, transformer))
    if problems:
        raise ProblemsFound(problems)
    frames = (video.num_frames - 1) // vae.temporal_factor + 1
    rows = video.height // vae.spatial_factor
    columns = video.width // vae.spatial_factor
    patch_frames, patch_rows, patch_columns = transformer.patch
    return LatentShape(
        frames=frames,
        rows=rows,
        columns=columns,
        channels=transformer.out_channels,
        tokens=(frames // patch_frames) * (rows // patch_rows) * (columns // patch_columns),
    )
