"""What tells one checkpoint from another without reading it whole, to compare it between hosts."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from maxdiffusion.weights.folder import ModelFolder

SAMPLES, SAMPLE_BYTES = 16, 4096
SMALL_BYTES = 64 << 20  # files up to this size are read whole: configs, tokenizers, small models


def component_digests(folder: ModelFolder) -> dict[str, str]:
    """A short hash for each component of a model, of all its files by their names."""
    return {
        f"checkpoint {name}": _digest(
            file for file in sorted((folder.root / name).rglob("*")) if file.is_file()
        )
        for name in folder.components
    }


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            if size <= SMALL_BYTES:
                digest.update(stream.read())
                continue
            # The head lists the tensors; of the numbers a few pieces from all over the file do.
            digest.update(stream.read(1 << 20))
            for piece in range(SAMPLES):
                stream.seek((size - SAMPLE_BYTES) * piece // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
