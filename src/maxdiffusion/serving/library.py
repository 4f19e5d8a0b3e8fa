"""Files of finished jobs: video, thumbnail and spritesheet, each complete or absent.

    output_dir/video_ID.mp4                  the video
    output_dir/video_ID.webp                 thumbnail: the middle frame
    output_dir/video_ID.jpg                  spritesheet: up to 16 frames
    output_dir/video_ID.latents.safetensors  denoised, not decoded yet

Names are made of ids of this server only. In object storage the same names are used; clients then
read through a copy on the disk.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from maxdiffusion.runtime.files import FilePath, is_object_store, local_copy, replacing

logger = logging.getLogger(__name__)
VIDEO, THUMBNAIL, SPRITESHEET = "video", "thumbnail", "spritesheet"
SUFFIXES = {VIDEO: ".mp4", THUMBNAIL: ".webp", SPRITESHEET: ".jpg"}
MEDIA_TYPES = {VIDEO: "video/mp4", THUMBNAIL: "image/webp", SPRITESHEET: "image/jpeg"}
LATENTS = ".latents.safetensors"
IDENTIFIER = re.compile(r"video_[0-9a-f]{32}")
OWN_FILE = re.compile(r"\.?(video_[0-9a-f]{32})(\.latents)?(\.[0-9a-f]{12})?\.[a-z0-9]+")
THUMBNAIL_SIDE = 512
SPRITES, SPRITE_COLUMNS, SPRITE_SIDE = 16, 4, 256
Frames = UInt8[np.ndarray, "F Y X 3"]


class Library:
    """The folder of finished videos."""

    def __init__(self, folder: FilePath):
        self.folder = folder

    def path(self, identifier: str, variant: str = VIDEO) -> FilePath:
        """Returns the file of a job; raises ValueError for an id that this server did not make."""
        if not IDENTIFIER.fullmatch(identifier):
            raise ValueError(f"{identifier!r} is not an id of this server")
        return self.folder / f"{identifier}{SUFFIXES[variant]}"

    def latents(self, identifier: str) -> FilePath:
        """Returns the file of a job's latents."""
        return self.folder / f"{identifier}{LATENTS}"

    def has(self, identifier: str) -> bool:
        """Returns whether the video of a job exists."""
        return self.path(identifier).exists()

    def readable(self, identifier: str, variant: str) -> Path:
        """Returns a path on a disk with the content of a file; raises FileNotFoundError."""
        path = self.path(identifier, variant)
        if not path.exists():
            raise FileNotFoundError(path)
        return local_copy(path)

    def write_stills(self, identifier: str, frames: Frames) -> None:
        """Writes thumbnail and spritesheet of a video."""
        with replacing(self.path(identifier, THUMBNAIL)) as unfinished:
            still = shrunk(frames[len(frames) // 2], THUMBNAIL_SIDE)
            still.save(unfinished, format="WEBP", quality=85)
        with replacing(self.path(identifier, SPRITESHEET)) as unfinished:
            spritesheet(frames).save(unfinished, format="JPEG", quality=85)

    def secure(self, identifier: str) -> int:
        """Returns the bytes of a job's files once they would survive a power failure."""
        size = 0
        for path in self._files(identifier):
            status = path.stat()
            if isinstance(status, os.stat_result):
                size += status.st_size
                flush(path)
            else:  # object storage, by etils
                size += status.length
        if not is_object_store(self.folder):
            flush(self.folder)
        return size

    def remove(self, identifier: str) -> None:
        """Removes all files of a job."""
        for path in (*self._files(identifier), self.latents(identifier)):
            path.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Returns the free space of the disk; object storage has no limit."""
        if is_object_store(self.folder):
            return 1 << 62
        self.folder.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self.folder).free

    def sweep(self, known: set[str], unfinished: set[str]) -> int:
        """Removes what killed servers left; returns how many files.

        Files of unknown jobs and half-written files go; latents stay for `unfinished` jobs only.
        """
        removed = 0
        for path in self._own_files():
            found = OWN_FILE.fullmatch(path.name)
            assert found is not None
            half_written, is_latents = path.name.startswith("."), found[2] is not None
            needed = unfinished if is_latents else known
            if half_written or found[1] not in needed:
                path.unlink(missing_ok=True)
                removed += 1
        if removed:
            logger.info("removed %d files that no job needs", removed)
        return removed

    def _own_files(self) -> Iterator[FilePath]:
        if self.folder.exists():
            yield from (path for path in self.folder.iterdir() if OWN_FILE.fullmatch(path.name))

    def _files(self, identifier: str) -> list[FilePath]:
        paths = [self.path(identifier, variant) for variant in SUFFIXES]
        return [path for path in paths if path.exists()]


def flush(path: FilePath) -> None:
    """Waits until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def shrunk(frame: UInt8[np.ndarray, "Y X 3"], side: int) -> Image.Image:
    """Returns a frame as an image whose longer side is at most `side`."""
    image = Image.fromarray(frame)
    image.thumbnail((side, side))
    return image


def spritesheet(frames: Frames) -> Image.Image:
    """Returns up to 16 frames of a video, evenly spaced, in rows of four."""
    count = min(SPRITES, len(frames))
    chosen = np.linspace(0, len(frames) - 1, count).round().astype(int)
    sprites = [shrunk(frames[index], SPRITE_SIDE) for index in chosen]
    width, height = sprites[0].size
    rows = -(-count // SPRITE_COLUMNS)
    sheet = Image.new("RGB", (width * min(count, SPRITE_COLUMNS), height * rows))
    for index, sprite in enumerate(sprites):
        row, column = divmod(index, SPRITE_COLUMNS)
        sheet.paste(sprite, (column * width, row * height))
    return sheet
