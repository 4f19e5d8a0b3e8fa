"""Tasks: the visual conditions that a pipeline takes, and the conditioning made from them.

    TextToVideo      none
    ImageToVideo     first (and last) image as extra channels; CLIP tokens for WAN 2.1
    FirstFrame       the first latent frame is known (WAN 2.2 TI2V-5B)

A task is a value that programs are compiled for: it states the shapes of its conditioning. The
denoising loop, its programs and the commands are the same for all; a new task is one subclass.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from maxdiffusion.models.vae import WanVaeConfig
from maxdiffusion.models.wan import Conditioning

if TYPE_CHECKING:
    from maxdiffusion.pipelines.preprocess.images import ClipPreprocessor, ImageFit
    from maxdiffusion.runtime.images import InputFrames, InputImage

MASK_CHANNELS = 4


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

    `notes` are lines for the start-up plan, about inputs that do not fit as they are.
    """

    image: "InputImage | None" = None
    last_image: "InputImage | None" = None
    video: "InputFrames | None" = None
    mask: "InputFrames | None" = None
    reference_images: "tuple[InputImage, ...]" = ()
    pose_video: "InputFrames | None" = None
    face_video: "InputFrames | None" = None
    background_video: "InputFrames | None" = None
    mask_video: "InputFrames | None" = None
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The SHA-256 of all pixels, for the identity of a video and checks across processes."""
        found = hashlib.sha256()
        for field in fields(self):
            value = vars(self)[field.name]
            if field.name == "notes" or value is None:
                continue
            for one in value if isinstance(value, tuple) else (value,):
                array = np.ascontiguousarray(one)
                found.update(f"{field.name} {array.dtype} {array.shape}".encode())
                found.update(array.data)
        return found.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Encoders:
    """Encodes pixels on the devices: a video [F Y X 3] to latents, CLIP's pixels to tokens."""

    video: Callable[[Float[np.ndarray, "F Y X C"]], np.ndarray]
    image: Callable[[Float[np.ndarray, "B Y X C"]], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditioning of a batch, and the image tokens that its blocks attend to."""

    conditioning: Conditioning
    image_tokens: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A kind of generation; `inputs` of a request are its visual conditions, one per video.

    `pipeline` is the class that takes its arguments.
    """

    pipeline: ClassVar[str] = "WanPipeline"

    @property
    def title(self) -> str:
        """Name of the task in plans and messages."""
        return "text to video"

    @property
    def image_tokens(self) -> int:
        """Number of image tokens that the blocks of a video attend to."""
        return 0

    @property
    def images(self) -> int:
        """Number of images of a video that the image encoder reads."""
        return 0

    @property
    def extra_frames(self) -> int:
        """Latent frames in front that are denoised and not decoded."""
        return 0

    def encoded_frames(self, latent: LatentShape, vae: WanVaeConfig) -> tuple[int, ...]:
        """Returns the lengths of the videos that the VAE encodes, in frames."""
        del latent, vae
        return ()

    def shapes(self, latent: LatentShape, videos: int) -> Conditioning:
        """Returns the conditioning of a batch as shapes."""
        del latent, videos
        return Conditioning()

    @abstractmethod
    def condition(
        self,
        inputs: Sequence[VisualInputs],
        latent: LatentShape,
        vae: WanVaeConfig,
        encoders: Encoders,
    ) -> Conditions:
        """Returns the conditioning of a batch of videos, on the host."""


@dataclass(frozen=True, kw_only=True)
class TextToVideo(Task):
    """The prompt alone."""

    def condition(
        self,
        inputs: Sequence[VisualInputs],
        latent: LatentShape,
        vae: WanVaeConfig,
        encoders: Encoders,
    ) -> Conditions:
        del inputs, latent, vae, encoders
        return Conditions(conditioning=Conditioning())


@dataclass(frozen=True, kw_only=True)
class ImageToVideo(Task):
    """The first image, and the last one if `last`, as channels of the transformer's input.

    Channels are the mask of given frames, then the encoded video of given frames and mid grey.
    With `clip`, the blocks also attend to `clip_tokens` of each image.
    """

    last: bool = False
    fit: "ImageFit" = "stretch"
    clip: "ClipPreprocessor | None" = None
    clip_tokens: int = 0

    pipeline: ClassVar[str] = "WanImageToVideoPipeline"

    @property
    def title(self) -> str:
        return "first and last image to video" if self.last else "image to video"

    @property
    def image_tokens(self) -> int:
        return self.clip_tokens * self.images

    @property
    def images(self) -> int:
        return 0 if self.clip is None else 1 + self.last

    def encoded_frames(self, latent: LatentShape, vae: WanVaeConfig) -> tuple[int, ...]:
        return (vae.video_frames(latent.frames),)

    def shapes(self, latent: LatentShape, videos: int) -> Conditioning:
        *video, channels = latent.dims
        size = (videos, *video, MASK_CHANNELS + channels)
        return Conditioning(channels=_shape(size))

    def condition(
        self,
        inputs: Sequence[VisualInputs],
        latent: LatentShape,
        vae: WanVaeConfig,
        encoders: Encoders,
    ) -> Conditions:
        channels = [self._channels(one, latent, vae, encoders) for one in inputs]
        tokens = [self._tokens(one, encoders) for one in inputs] if self.clip else None
        return Conditions(
            conditioning=Conditioning(channels=np.stack(channels)),
            image_tokens=None if tokens is None else np.stack(tokens),
        )

    def _channels(
        self, one: VisualInputs, latent: LatentShape, vae: WanVaeConfig, encoders: Encoders
    ) -> np.ndarray:
        from maxdiffusion.pipelines.preprocess.images import first_frame_mask, image_condition_video

        assert one.image is not None
        first = fitted(one.image, latent, vae, self.fit)
        last = None if one.last_image is None else fitted(one.last_image, latent, vae, self.fit)
        video = image_condition_video(first, last, vae.video_frames(latent.frames))
        mask = first_frame_mask(latent.frames, latent.rows, latent.columns, last=self.last)
        return np.concatenate([mask, encoders.video(video)], axis=-1)

    def _tokens(self, one: VisualInputs, encoders: Encoders) -> np.ndarray:
        from maxdiffusion.pipelines.preprocess.images import clip_pixels

        images = [image for image in (one.image, one.last_image) if image is not None]
        pixels = np.stack([clip_pixels(image, self.clip) for image in images])
        tokens = encoders.image(pixels)
        return tokens.reshape(-1, tokens.shape[-1])


@dataclass(frozen=True, kw_only=True)
class FirstFrame(Task):
    """The first latent frame is the encoded image; it has no noise and time 0."""

    fit: "ImageFit" = "stretch"

    pipeline: ClassVar[str] = "WanImageToVideoPipeline"

    @property
    def title(self) -> str:
        return "image to video, first frame known"

    def encoded_frames(self, latent: LatentShape, vae: WanVaeConfig) -> tuple[int, ...]:
        del latent, vae
        return (1,)

    def shapes(self, latent: LatentShape, videos: int) -> Conditioning:
        return Conditioning(known=_shape((videos, *latent.with_frames(1).dims)))

    def condition(
        self,
        inputs: Sequence[VisualInputs],
        latent: LatentShape,
        vae: WanVaeConfig,
        encoders: Encoders,
    ) -> Conditions:
        images = [one.image for one in inputs if one.image is not None]
        assert len(images) == len(inputs)
        known = [encoders.video(fitted(one, latent, vae, self.fit)[None]) for one in images]
        return Conditions(conditioning=Conditioning(known=np.stack(known)))


def fitted(
    image: "InputImage", latent: LatentShape, vae: WanVaeConfig, fit: "ImageFit"
) -> Float[np.ndarray, "Y X 3"]:
    """Returns the pixels of an image at the size of the video, in -1..1."""
    from maxdiffusion.pipelines.preprocess.images import fit_pixels

    factor = vae.spatial_factor
    return fit_pixels(image, height=latent.rows * factor, width=latent.columns * factor, fit=fit)


def _shape(size: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(size, jnp.float32)
