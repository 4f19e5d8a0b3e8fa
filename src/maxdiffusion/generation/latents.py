"""Initial latents from a file (`latents_path`), in place of the noise of a seed.

    [C, F, H, W] or [1, C, F, H, W]    every video starts from them
    [B, C, F, H, W]                    video i of the job starts from row i; B is their number

The file is read and checked before weights are. It is read again for every group of videos, so that
a job holds the latents of one group only.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.numpy import load_file

from maxdiffusion.config import Config
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.pipelines.programs import ProgramShape
from maxdiffusion.runtime.files import FilePath, as_path, local_copy

SUFFIXES = (".safetensors", ".npy")


def load_latents(
    config: Config, shapes: Sequence[ProgramShape], videos: int
) -> Float[np.ndarray, "B F Y X C"]:
    """Returns the latents of all videos, channels last; one row if they share it.

    Raises `ProblemsFound` unless the file fits every shape of the job.
    """
    if any(shape.task.in_segments for shape in shapes):
        raise _refused(config, "a video that is made in segments has no single initial latent")
    array = _read(config)
    array = array[None] if array.ndim == 4 else array
    for shape in shapes:
        latent = shape.latent
        dims = (latent.channels, latent.frames, latent.rows, latent.columns)
        if array.shape[1:] != dims or len(array) not in (1, videos):
            counts = "1" if videos == 1 else f"1 or {videos}"
            raise _refused(
                config,
                f"has the shape {list(array.shape)}, but [channels, frames, rows, columns] of this "
                f"video are {list(dims)}, for {counts} videos",
                "Check height, width, num_frames and the number of videos",
            )
    if not np.isfinite(array).all():
        raise _refused(config, "contains NaN or infinity")
    return np.moveaxis(array, 1, -1)


def row_digest(latents: Float[np.ndarray, "B F Y X C"], index: int) -> str:
    """Returns a digest of the latents that video `index` starts from."""
    row = np.ascontiguousarray(latents[index % len(latents)])
    return hashlib.sha256(row.tobytes()).hexdigest()[:32]


def rows_of(
    latents: Float[np.ndarray, "N F Y X C"], indices: Sequence[int]
) -> Float[np.ndarray, "B F Y X C"]:
    """Returns the latents of the videos with these numbers."""
    return np.stack([latents[index % len(latents)] for index in indices])


def _read(config: Config) -> np.ndarray:
    """Returns the array of the file as float32, whatever its shape; refuses other contents."""
    path = as_path(config.latents_path)
    if path.suffix not in SUFFIXES:
        raise _refused(config, f"must be a file that ends in {' or '.join(SUFFIXES)}")
    if not path.exists():
        raise _refused(config, "there is no such file", "Give an existing path, or leave it empty")
    try:
        array = _only_tensor(config, path) if path.suffix == ".safetensors" else _npy(path)
    except (ValueError, OSError, SafetensorError) as error:
        if isinstance(error, ProblemsFound):
            raise
        raise _refused(config, f"cannot be read: {error}") from error
    if array.ndim not in (4, 5) or array.dtype.kind != "f":
        rule = "must be floats [C, F, H, W] or [B, C, F, H, W]"
        raise _refused(config, f"{rule}, not {array.dtype} of shape {list(array.shape)}")
    return array.astype(np.float32)


def _npy(path: FilePath) -> np.ndarray:
    return np.load(local_copy(path), allow_pickle=False)


def _only_tensor(config: Config, path: FilePath) -> np.ndarray:
    tensors = load_file(local_copy(path))
    if len(tensors) != 1:
        names = ", ".join(sorted(tensors)) or "none"
        raise _refused(config, f"must hold exactly one tensor, not {len(tensors)}: {names}")
    (array,) = tensors.values()
    return array


def _refused(config: Config, rule: str, remedy: str = "") -> ProblemsFound:
    remedy = remedy or "Give another file, or leave latents_path empty to start from the seed"
    return ProblemsFound(
        [Problem(name="latents_path", value=config.latents_path, rule=rule, remedy=remedy)]
    )
