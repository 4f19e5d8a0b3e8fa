"""Tasks: the visual conditions that a pipeline takes, and the conditioning made from them.

    TextToVideo      none
    ImageToVideo     first (and last) image as extra channels (`image_to_video.py`)
    FirstFrame       the first latent frame is known (`image_to_video.py`)
    VideoToVideo     starts from a noised video (`video_to_video.py`)
    ControlToVideo   control video, mask and reference images (`vace.py`)
    Animate          a character, poses, faces and a scene, in segments (`animate.py`)

A task is a value that programs are compiled for: it states the shapes of its conditioning. The
denoising loop, its programs and the commands are the same for all; a new task is one subclass.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32

from maxdiffusion.diffusion import Sampler
from maxdiffusion.models.vae import WanVaeConfig
from maxdiffusion.models.wan import Conditioning
from maxdiffusion.runtime.video import InputFrames, InputImage


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Size of one video inside the model: latent frames, rows, columns, channels, and tokens."""

    frames: int
    rows: int
    columns: int
    channels: int
    tokens: int

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """Frames, rows, columns and channels of one video's latents."""
        return (self.frames, self.rows, self.columns, self.channels)

    def with_frames(self, frames: int) -> "LatentShape":
        """Returns the shape of a video of the same height and width."""
        per_frame = self.tokens // self.frames
        return LatentShape(
            frames=frames,
            rows=self.rows,
            columns=self.columns,
            channels=self.channels,
            tokens=per_frame * frames,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class VisualInputs:
    """Loaded images and videos of one video, under diffusers' names; None where there is none.

    A video may be made in segments: `segment` is the number of one, and `previous` are the frames
    of the one before, in 0..1. `notes` are lines for the start-up plan, about inputs that do not
    fit as they are.
    """

    image: InputImage | None = None
    last_image: InputImage | None = None
    video: InputFrames | None = None
    mask: InputFrames | None = None
    reference_images: tuple[InputImage, ...] = ()
    pose_video: InputFrames | None = None
    face_video: InputFrames | None = None
    background_video: InputFrames | None = None
    mask_video: InputFrames | None = None
    segment: int = 0
    previous: Float32[np.ndarray, "F Y X 3"] | None = None
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The SHA-256 of all pixels, for the identity of a video and checks across processes."""
        found = hashlib.sha256()
        for field in fields(self):
            value = vars(self)[field.name]
            if field.name in ("notes", "segment", "previous") or value is None:
                continue
            for one in value if isinstance(value, tuple) else (value,):
                array = np.ascontiguousarray(one)
                found.update(f"{field.name} {array.dtype} {array.shape}".encode())
                found.update(array.data)
        return found.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Encoders:
    """Encodes pixels on the devices: a video [F Y X 3] to latents, CLIP's pixels to tokens.

    `latent` is the size of the videos that are made, `vae` that of the autoencoder.
    """

    video: Callable[[Float[np.ndarray, "F Y X C"]], np.ndarray]
    image: Callable[[Float[np.ndarray, "B Y X C"]], np.ndarray]
    latent: LatentShape
    vae: WanVaeConfig

    @property
    def height(self) -> int:
        """Height of the videos in pixels."""
        return self.latent.rows * self.vae.spatial_factor

    @property
    def width(self) -> int:
        """Width of the videos in pixels."""
        return self.latent.columns * self.vae.spatial_factor


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditioning of a batch, and the image tokens that its blocks attend to.

    `source` are the latents of videos that noise is mixed into, for tasks that do not start from
    noise alone. `faces` [B F Y X 3] in -1..1 are for the face adapters of Animate.
    """

    conditioning: Conditioning
    image_tokens: np.ndarray | None = None
    source: np.ndarray | None = None
    faces: Float[np.ndarray, "B F Y X C"] | None = None

    def rows_of_images(self, copies: int) -> np.ndarray | None:
        """Returns the image tokens of the model's batch: those of guidance are the same."""
        return None if self.image_tokens is None else np.tile(self.image_tokens, (copies, 1, 1))

    def rows_of_faces(self, copies: int) -> Float[np.ndarray, "B F Y X C"] | None:
        """Returns the faces of the model's batch: those of guidance are black."""
        if self.faces is None:
            return None
        return np.concatenate([self.faces, *[np.full_like(self.faces, -1)] * (copies - 1)])


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A kind of generation; `inputs` of a request are its visual conditions, one per video.

    `pipeline` is the class that takes its arguments. A task `in_segments` makes a video in parts
    that continue each other. The image encoder gives `clip_tokens` for each image; the motion
    encoder reads `face_batch` faces at once. Both are 0 for a task that does not run them.
    """

    pipeline: ClassVar[str] = "WanPipeline"
    in_segments: ClassVar[bool] = False

    clip_tokens: int = 0
    face_batch: int = 0

    @property
    def title(self) -> str:
        """Name of the task in plans and messages."""
        return "text to video"

    @property
    def image_tokens(self) -> int:
        """Number of image tokens that the blocks of a video attend to."""
        return self.clip_tokens * self.images

    @property
    def images(self) -> int:
        """Number of images of a video that the image encoder reads."""
        return 0

    @property
    def extra_frames(self) -> int:
        """Latent frames in front that are denoised and not decoded."""
        return 0

    def sampler(self, sampler: Sampler) -> Sampler:
        """Returns the sampler of the task, given that of a run from noise."""
        return sampler

    def encoded_frames(self, latent: LatentShape, vae: WanVaeConfig) -> tuple[int, ...]:
        """Returns the length of every clip that the VAE encodes for one video, in frames."""
        del latent, vae
        return ()

    def shapes(self, latent: LatentShape, videos: int) -> Conditioning:
        """Returns the conditioning of a batch as shapes."""
        del latent, videos
        return Conditioning()

    @abstractmethod
    def condition(self, inputs: Sequence[VisualInputs], encoders: Encoders) -> Conditions:
        """Returns the conditioning of a batch of videos, on the host."""


@dataclass(frozen=True, kw_only=True)
class TextToVideo(Task):
    """The prompt alone."""

    def condition(self, inputs: Sequence[VisualInputs], encoders: Encoders) -> Conditions:
        del inputs, encoders
        return Conditions(conditioning=Conditioning())


def shape_of(size: tuple[int, ...]) -> Any:
    """Returns the description of a float32 array, as a part of a conditioning."""
    return jax.ShapeDtypeStruct(size, jnp.float32)
