"""Start images of requests: decoded from their content, checked, and kept as PNG by digest.

    file of a form, data: URL --> PNG, JPEG or WebP by content --> serve_dir/inputs/DIGEST.png

The declared name and type of a file are not used, and no address is ever opened. What a decoder
says about a broken file stays in the server.
"""

import base64
import binascii
import hashlib
import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from maxdiffusion.runtime.files import replacing
from maxdiffusion.serving.errors import ApiError, bad_request

NAME = "input_reference"
URL_NAME = "input_reference[image_url]"
FORMATS = ("PNG", "JPEG", "WEBP")
MOST_PIXELS = 40_000_000
SHORTEST_SIDE = 16
DATA_URL = re.compile(r"data:[\w/+.-]*;base64,", re.ASCII)
DIGEST = re.compile(r"[0-9a-f]{64}")


def given_image(fields: Mapping[str, Any]) -> tuple[bytes | None, dict[str, Any]]:
    """Returns the image of a request and its other fields; raises ApiError for other kinds."""
    others = {name: value for name, value in fields.items() if name not in (NAME, URL_NAME)}
    stated = [fields[name] for name in (NAME, URL_NAME) if fields.get(name) not in (None, "")]
    if not stated:
        return None, others
    value = stated[0]
    if isinstance(value, Mapping):
        value = value.get("image_url")
    if isinstance(value, bytes):
        return value, others
    found = DATA_URL.match(value) if isinstance(value, str) else None
    if found is None:
        raise refused("must be a file, or a data: URL with base64; addresses are not opened")
    try:
        return base64.b64decode(value[found.end() :], validate=True), others
    except (binascii.Error, ValueError):
        raise refused("is not valid base64") from None


def clean_image(content: bytes) -> bytes:
    """Returns the image as PNG, upright and in RGB; raises ApiError for anything else."""
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            Image.open(io.BytesIO(content), formats=FORMATS) as image,
        ):
            width, height = image.size
            check_size(width, height)
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except ApiError:
        raise
    except Exception:  # decoders raise many kinds, with addresses in their messages
        raise refused(f"is not a readable {', '.join(FORMATS)} image") from None
    buffer = io.BytesIO()
    upright.save(buffer, format="PNG")
    return buffer.getvalue()


def check_size(width: int, height: int) -> None:
    """Raises ApiError before an image of a bad size is decoded."""
    if width * height > MOST_PIXELS:
        raise refused(f"has {width}x{height} pixels; at most {MOST_PIXELS} are read")
    if min(width, height) < SHORTEST_SIDE:
        raise refused(f"has {width}x{height} pixels; both sides need {SHORTEST_SIDE}")


def refused(rule: str) -> ApiError:
    """Returns the error of an image that is not taken."""
    return bad_request(f"{NAME}: {rule}.", param=NAME, code="invalid_image")


class InputImages:
    """The folder of start images."""

    def __init__(self, folder: Path):
        self._folder = folder

    def keep(self, content: bytes) -> str:
        """Stores the image of a request and returns its digest; raises ApiError."""
        clean = clean_image(content)
        digest = hashlib.sha256(clean).hexdigest()
        path = self.path(digest)
        if not path.exists():
            with replacing(path) as unfinished:
                unfinished.write_bytes(clean)
        return digest

    def path(self, digest: str) -> Path:
        """Returns the file of an image; raises ValueError for what is no digest."""
        if not DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is not a digest")
        return self._folder / f"{digest}.png"

    def sweep(self, needed: set[str]) -> None:
        """Removes the images that no job needs."""
        for path in self._folder.glob("*.png"):
            if path.stem not in needed:
                path.unlink(missing_ok=True)
