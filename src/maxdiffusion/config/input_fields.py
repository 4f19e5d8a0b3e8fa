"""Config fields of the images and videos that a job is given, declared as in `schema.py`.

Paths are relative to the current folder; each of them may be an http(s) address. Public names are
kept: `image_url` is the first frame, the `_path` fields of Animate are those of its public file.
"""

from typing import TYPE_CHECKING

from maxdiffusion.config.fields import (
    Choice,
    Integer,
    ListOf,
    Nullable,
    Number,
    NumberOrNumbers,
    Text,
    field_group,
    setting,
)

if TYPE_CHECKING:
    from maxdiffusion.config.config import Config


@field_group
class InputFields:
    """Images and videos that a job is given, and how they are used."""

    image_url: str = setting(
        "", "Image to video: path or http(s) address of the first frame; empty = none."
    )
    last_image_path: str = setting("", "Image to video: the last frame; empty = none.")
    image_fit: str = setting(
        "stretch",
        "Inputs of another aspect ratio: stretch them (as diffusers), crop their centre, or pad "
        "them with black bars.",
        Choice(("stretch", "crop", "pad")),
    )
    video_path: str = setting(
        "",
        "Video to video and VACE: video file, address or folder of frames. A file is resampled to "
        "`fps` (frame i is the nearest to i / fps), and its first num_frames are used.",
    )
    strength: float = setting(
        0.8,
        "Video to video: share of the steps that run, from 0 (none) to 1 (the video has no "
        "effect).",
        Number(above=0, maximum=1),
    )
    mask_path: str = setting(
        "",
        "VACE: mask of `video_path`, of its size and number of frames; white is made, black is "
        "kept. Empty = all white.",
    )
    reference_images: tuple[str, ...] = setting(
        (), "VACE: images of what the video shall show.", ListOf(Text())
    )
    conditioning_scale: float | tuple[float, ...] = setting(
        1.0,
        "VACE: strength of the control; a list has one for each control block.",
        NumberOrNumbers(),
    )
    mode: str = setting(
        "animate",
        "Animate: animate the character, or let it replace a person of background_video_path.",
        Choice(("animate", "replace")),
    )
    reference_image_path: str = setting("", "Animate: image of the character.")
    pose_video_path: str = setting(
        "", "Animate: video of poses, resampled to `fps`; the result has as many frames."
    )
    face_video_path: str = setting("", "Animate: video of the face.")
    background_video_path: str = setting("", "Animate, replace: video of the background.")
    mask_video_path: str = setting(
        "", "Animate, replace: mask of the background; white is made, black is kept."
    )
    segment_frame_length: int = setting(
        77,
        "Animate: frames of a segment, 4n + 1; `num_frames` is not used.",
        Integer(minimum=5, step=4, offset=1),
    )
    prev_segment_conditioning_frames: int = setting(
        1,
        "Animate: frames that a segment takes over from the one before, 1 or 5.",
        Integer(minimum=1, maximum=5, step=4, offset=1),
    )
    motion_encode_batch_size: int | None = setting(
        None,
        "Animate: faces that the motion encoder reads at once, at least one per device; the result "
        "does not depend on it. null = 8, the checkpoint's.",
        Nullable(Integer(minimum=1)),
    )
    animate_guidance_scale: float = setting(
        1.0, "Animate: strength of guidance; up to 1 turns it off."
    )


def stated_inputs(config: "Config") -> dict[str, str | tuple[str, ...]]:
    """Returns the images and videos that a config states, by field; empty ones are not given."""
    return {
        "image_url": config.image_url,
        "last_image_path": config.last_image_path,
        "video_path": config.video_path,
        "mask_path": config.mask_path,
        "reference_images": config.reference_images,
        "reference_image_path": config.reference_image_path,
        "pose_video_path": config.pose_video_path,
        "face_video_path": config.face_video_path,
        "background_video_path": config.background_video_path,
        "mask_video_path": config.mask_video_path,
    }
