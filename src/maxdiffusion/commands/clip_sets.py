"""The clips that a config names, sorted by the sizes that they are trained at."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maxdiffusion.commands.training_settings import clip_size, clips
from maxdiffusion.config.config import Config
from maxdiffusion.pipelines.shapes import VideoShape, shape_problems
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.runtime.json_lines import add_new_lines
from maxdiffusion.runtime.places import place
from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.runtime.progress import steps_bar
from maxdiffusion.training.buckets import Sorted, sort_videos
from maxdiffusion.training.latent_cache import SKIPPED, CaptionedClips
from maxdiffusion.training.video_folder import ClipSize, VideoClips, videos_in

SIZES = "sizes.jsonl"


@dataclass(frozen=True, kw_only=True)
class ClipSet:
    """Clips of one size, and the folder that their latents are kept in."""

    clips: CaptionedClips
    size: ClipSize
    cache: Path


def clip_sets(config: Config, spec: WanSpec) -> tuple[ClipSet, ...]:
    """The clips of a config: one set, or one for each of its buckets that has clips."""
    root = place(config.latent_cache_dir)
    if not config.video_buckets:
        return (ClipSet(clips=clips(config), size=clip_size(config), cache=root),)
    buckets = bucket_sizes(config)
    check_sizes(buckets, spec)
    videos = videos_in(Path(config.train_data_dir).expanduser())
    with steps_bar("Measuring clips", len(videos), unit="clip") as advance:
        found = sort_videos(videos, buckets, notes=root / SIZES, advance=advance)
    list_left_out(root, found, buckets)
    return tuple(
        ClipSet(clips=VideoClips(videos=held, size=size), size=size, cache=root / str(size))
        for size, held in found.buckets.items()
    )


def bucket_sizes(config: Config) -> tuple[ClipSize, ...]:
    """The sizes of `video_buckets`; raises what is wrong with them."""
    buckets: Sequence[Sequence[int]] = config.video_buckets
    rule, remedy = "", "Write it as [[17,480,832],[17,832,480]]"
    if config.dataset_type != "videos":
        rule, remedy = "buckets are for dataset_type=videos", "Leave video_buckets out"
    elif any(len(bucket) != 3 for bucket in buckets):
        rule = "every bucket must be [frames, height, width]"
    elif len({tuple(bucket) for bucket in buckets}) != len(buckets):
        rule, remedy = "has a bucket twice", "Leave one of the two out"
    if rule:
        name = "video_buckets"
        raise ProblemsFound([Problem(name=name, value=list(buckets), rule=rule, remedy=remedy)])
    return tuple(ClipSize(frames=f, height=h, width=w) for f, h, w in buckets)


def check_sizes(buckets: Sequence[ClipSize], spec: WanSpec) -> None:
    """Raises every size that the model cannot have."""
    shapes = [
        VideoShape(height=size.height, width=size.width, num_frames=size.frames) for size in buckets
    ]
    problems = [
        problem for shape in shapes for problem in shape_problems(shape, spec.vae, spec.transformer)
    ]
    if problems:
        raise ProblemsFound(problems)


def list_left_out(root: Path, found: Sorted, buckets: Sequence[ClipSize]) -> None:
    """Lists the videos that no bucket takes; raises if that is all of them."""
    lines = [{"clip": file.name, "reason": why} for file, why in found.left_out.items()]
    add_new_lines(root / SKIPPED, lines)
    if not found.buckets:
        name, value = "video_buckets", [str(size) for size in buckets]
        rule = f"none of {len(lines)} videos fits, such as {lines[0]['reason']}"
        remedy = "Add a smaller bucket, or larger videos"
        raise ProblemsFound([Problem(name=name, value=value, rule=rule, remedy=remedy)])
