"""Latents of denoised videos, kept beside the videos until those are there.

To denoise takes minutes, to decode seconds. A job of a prompts file keeps what it has denoised
before it goes on, so that one that is killed loses what it was denoising and nothing else.

    wan_output_5_0.latents.safetensors: latents [F Y X C]; metadata: the identity of the video
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from maxdiffusion.commands.videos import Video, identity
from maxdiffusion.config.config import Config
from maxdiffusion.runtime.atomic import replacing
from maxdiffusion.runtime.coordination import from_first, several
from maxdiffusion.runtime.disk import writing
from maxdiffusion.runtime.places import local_copy

LATENTS = "latents"
IDENTITY = "identity"
LatentsOfGroup = Float[np.ndarray, "B F Y X C"]


def latents_path(video: Video) -> Path:
    """The file of a video's latents."""
    return video.path.with_name(f"{video.path.stem}.{LATENTS}.safetensors")


def keep_latents(config: Config, videos: Sequence[Video], latents: LatentsOfGroup) -> None:
    """Writes the latents of each video, whole or not at all; for one process."""
    for video, one in zip(videos, latents, strict=False):
        path = latents_path(video)
        with writing("latents", path.parent), replacing(path) as unfinished:
            tensors = {LATENTS: np.ascontiguousarray(one, np.float32)}
            save_file(tensors, unfinished, {IDENTITY: identity(config, video)})


def forget_latents(video: Video) -> None:
    """Removes the latents of a video, if there are any."""
    latents_path(video).unlink(missing_ok=True)


def forget_needless(written: Sequence[Video]) -> None:
    """Removes the latents of videos that are there: a run was killed between the two."""
    folders = {video.path.parent for video in written}
    found = {file.name for folder in folders for file in folder.iterdir()}
    for video in written:
        if latents_path(video).name in found:
            forget_latents(video)


class KeptLatents:
    """What an earlier run of the same job has denoised and not written; the same on all processes.

    The first process looks and reads; the others need not see its folder.
    """

    def __init__(self, config: Config, videos: Sequence[Video]):
        self._config = config
        shapes: list[list[int]] = [[] for _ in videos]
        if config.prompts_file:
            shapes = from_first("kept latents", lambda: [self._shape(video) for video in videos])
        self._shapes = {
            video.path: tuple(shape) for video, shape in zip(videos, shapes, strict=True) if shape
        }

    def __contains__(self, video: Video) -> bool:
        return video.path in self._shapes

    def __len__(self) -> int:
        return len(self._shapes)

    def read(self, videos: Sequence[Video]) -> LatentsOfGroup:
        """The latents of videos that are all in it, on every process."""
        latents = np.zeros((len(videos), *self._shapes[videos[0].path]), np.float32)
        if jax.process_index() == 0:
            latents = np.stack([self._read(video) for video in videos])
        if several():
            # As whole numbers: what travels is a sum with zeros, which would lose the sign of -0.
            bits = multihost_utils.broadcast_one_to_all(latents.view(np.uint32))
            latents = np.asarray(bits).view(np.float32)
        return latents

    def _shape(self, video: Video) -> list[int]:
        """The shape of what is kept of a video; empty if that is nothing, or of another video."""
        try:
            return list(self._read(video).shape)
        except (OSError, KeyError, SafetensorError):
            return []

    def _read(self, video: Video) -> np.ndarray:
        file: Any
        with safe_open(local_copy(latents_path(video)), framework="np") as file:
            if (file.metadata() or {}).get(IDENTITY) != identity(self._config, video):
                raise KeyError(IDENTITY)
            return file.get_tensor(LATENTS)
