"""Image conditioning of a training: what the transformer is given of a clip's first frame.

    NoImage           text to video      noisy latents; the loss counts all frames
    ImageChannels     WAN 2.2 I2V A14B   noisy latents, mask, encoded image; all frames
                      WAN 2.1 I2V 14B    the same, and CLIP tokens of the image
    KnownFirstFrame   WAN 2.2 TI2V-5B    frame 0 has no noise, and time 0; all frames but that one

The encoded image of `ImageChannels` is that of a whole video, the first frame and mid grey, and is
stored with the latents, as are CLIP tokens: the image encoder is not trained. For
`KnownFirstFrame` nothing is stored: the autoencoder is causal, so the encoded first frame is frame
0 of the encoded clip.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from maxdiffusion.config import Config
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.models.wan import Conditioning
from maxdiffusion.pipelines.preprocess.images import first_frame_mask
from maxdiffusion.pipelines.spec import WanSpec

NONE, CHANNELS, FIRST_FRAME = "none", "channels", "first_frame"  # of `train_image_conditioning`
FIELD = "train_image_conditioning"
GREY = 127.5  # of bytes: 0 in -1..1


@dataclass(frozen=True, kw_only=True)
class NoisyClips:
    """Clips of a batch with and without noise, their times, and encoded first frames, if stored."""

    noisy: Float[Array, "B F Y X C"]
    clean: Float[Array, "B F Y X C"]
    timestep: Float[Array, " B"]
    image: Float[Array, "B F Y X C"] | None = None


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """Conditioning of a batch, the frames that its loss counts (1), and the time of known ones."""

    conditioning: Conditioning
    counted: Float[Array, "B F"]
    known_timestep: Float[Array, " B"] | None = None


@dataclass(frozen=True, kw_only=True)
class ImageConditioning(ABC):
    """Turns noisy clips into what a model is given of their first frames."""

    @property
    def stores_image(self) -> bool:
        """True if encoded first frames are stored with the latents."""
        return False

    @property
    def attended_tokens(self) -> int:
        """CLIP tokens of a first frame that the model attends to, stored with the latents."""
        return 0

    @abstractmethod
    def describe(self) -> str:
        """Returns the line of the start-up report."""

    @abstractmethod
    def __call__(self, clips: NoisyClips, key: PRNGKeyArray) -> ImageInput:
        """Returns the conditioning of clips; `key` draws what is random in it."""


@dataclass(frozen=True, kw_only=True)
class NoImage(ImageConditioning):
    """Text to video."""

    def describe(self) -> str:
        return "image conditioning: none (text to video)"

    def __call__(self, clips: NoisyClips, key: PRNGKeyArray) -> ImageInput:
        del key
        return ImageInput(conditioning=Conditioning(), counted=jnp.ones(clips.noisy.shape[:2]))


@dataclass(frozen=True, kw_only=True)
class ImageChannels(ImageConditioning):
    """The mask of given frames and the encoded first frame are channels of the input.

    Models with an image encoder also attend to `clip_tokens` tokens of that frame.
    """

    clip_tokens: int = 0

    @property
    def stores_image(self) -> bool:
        return True

    @property
    def attended_tokens(self) -> int:
        return self.clip_tokens

    def describe(self) -> str:
        tokens = f", and its {self.clip_tokens} CLIP tokens" if self.clip_tokens else ""
        return f"image conditioning: mask and encoded first frame as channels{tokens}, every clip"

    def __call__(self, clips: NoisyClips, key: PRNGKeyArray) -> ImageInput:
        del key
        assert clips.image is not None, "encoded first frames are stored"
        count, frames, rows, columns, _ = clips.noisy.shape
        mask = jnp.asarray(first_frame_mask(frames, rows, columns))[None]
        masks = jnp.broadcast_to(mask, (count, *mask.shape[1:]))
        channels = jnp.concatenate([masks, clips.image], axis=-1)
        return ImageInput(
            conditioning=Conditioning(channels=channels), counted=jnp.ones((count, frames))
        )


@dataclass(frozen=True, kw_only=True)
class KnownFirstFrame(ImageConditioning):
    """The first latent frame has no noise and time 0; `dropout` clips are text to video.

    In these the first frame has the noise and the time of the others, and the loss counts it.
    """

    dropout: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout={self.dropout}: must be from 0 to 1")

    def describe(self) -> str:
        return (
            "image conditioning: the first latent frame is known; "
            f"{100 * self.dropout:g} % of the clips are text to video"
        )

    def __call__(self, clips: NoisyClips, key: PRNGKeyArray) -> ImageInput:
        noisy = clips.noisy
        dropped_B = jax.random.bernoulli(key, self.dropout, clips.timestep.shape)
        known = jnp.where(dropped_B[:, None, None, None, None], noisy[:, :1], clips.clean[:, :1])
        return ImageInput(
            conditioning=Conditioning(known=known),
            counted=jnp.ones(noisy.shape[:2]).at[:, 0].set(dropped_B.astype(jnp.float32)),
            known_timestep=jnp.where(dropped_B, clips.timestep, 0.0),
        )


def first_frames(videos: np.ndarray) -> Float[np.ndarray, "B F Y X 3"]:
    """Returns clips (bytes) with all frames but the first replaced by mid grey."""
    kept = np.full(videos.shape, GREY, np.float32)
    kept[:, 0] = videos[:, 0]
    return kept


def image_conditioning(config: Config, spec: WanSpec) -> ImageConditioning:
    """Returns the image conditioning of a config; raises if the model has no such input."""
    _check_trainable(config, spec)
    kind = config.train_image_conditioning
    if kind == "auto":
        kind = _of_model(spec)
    reason = _mismatch(kind, spec)
    if reason:
        remedy = f"Use {FIELD}={_of_model(spec)}, or another model"
        raise ProblemsFound([Problem(name=FIELD, value=kind, rule=reason, remedy=remedy)])
    if kind == FIRST_FRAME:
        return KnownFirstFrame(dropout=config.first_frame_dropout)
    _check_no_dropout(config, kind)
    if kind == NONE:
        return NoImage()
    return ImageChannels(clip_tokens=spec.image_encoder.tokens if spec.image_encoder else 0)


def _of_model(spec: WanSpec) -> str:
    """Returns the conditioning that a model was made for."""
    if spec.image_channels:
        return CHANNELS
    return FIRST_FRAME if spec.time_per_token else NONE


def _mismatch(kind: str, spec: WanSpec) -> str:
    """Returns the reason why a model cannot be trained with a conditioning; empty if it can."""
    channels = spec.transformer.in_channels
    if spec.image_channels and kind != CHANNELS:
        return f"the {channels} input channels of this model include a mask and an encoded image"
    if kind == CHANNELS and not spec.image_channels:
        return f"the {channels} input channels of this model have no room for an image"
    if kind == FIRST_FRAME and not spec.time_per_token:
        return "its model_index.json lacks `expand_timesteps: true`: all frames have one time"
    return ""


def _check_trainable(config: Config, spec: WanSpec) -> None:
    """Raises for models that need more than a text and a first frame."""
    reason = ""
    if spec.animates:
        reason = "needs poses and faces (Animate)"
    elif spec.transformer.control_layers:
        reason = "needs control videos (VACE)"
    elif spec.transformer.image_positions is not None:
        reason = "needs a last image too (first and last frame to video)"
    if reason:
        name, value = "pretrained_model_name_or_path", config.pretrained_model_name_or_path
        rule = f"this model {reason}, which training does not give it"
        remedy = "Use a text-to-video or image-to-video model, or WAN 2.2 TI2V"
        raise ProblemsFound([Problem(name=name, value=value, rule=rule, remedy=remedy)])


def _check_no_dropout(config: Config, kind: str) -> None:
    """Raises if a share of clips without an image is stated where it has no meaning."""
    name, value = "first_frame_dropout", config.first_frame_dropout
    if config.given(name) and value:
        rule = f"{FIELD}={kind} has no first frame that may be left out"
        remedy = f"Leave it out, or set {name}=0"
        raise ProblemsFound([Problem(name=name, value=value, rule=rule, remedy=remedy)])
