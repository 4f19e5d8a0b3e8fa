"""Caches prompt embeddings across runs: a folder with one safetensors file per prompt.

    tokens + text encoder + precision --CacheKey--> prompt-<digest>.safetensors
        rows [T E]   one row per token; the zero padding is left out
        metadata     the key, and the SHA-256 of the rows

A run scans the folder once, before weights are loaded: if no prompt is missing, the text encoder is
not loaded at all. Rows are used only if key, shape and digest agree. Every process reads the files;
the first one writes them.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from maxdiffusion.checkpoints.diffusers_folder import CONFIG, TOKENIZER, ModelFolder
from maxdiffusion.distributed.coordination import all_gather_str, broadcast_from_first
from maxdiffusion.errors import RunFailed
from maxdiffusion.pipelines.settings import Precision
from maxdiffusion.pipelines.text import RowCache
from maxdiffusion.runtime.files import (
    CacheKey,
    FileDigest,
    FilePath,
    digest_files,
    digest_value,
    local_copy,
    replacing,
)

logger = logging.getLogger(__name__)

FIELD = "prompt_embeddings_cache_dir"
CONTENT = "maxdiffusion prompt embeddings 1"
ROWS = "rows"
READERS = 16
"""Files that are read at the same time; each takes long in object storage."""
Tokens = tuple[int, ...]
Rows = Float[np.ndarray, "T E"]


class UnusableRows(ValueError):
    """A file without the wanted rows; the message says why."""


class LostRows(RunFailed):
    """Embeddings that the run found at its start are gone."""


def digest_rows(rows: Rows) -> str:
    """Returns the SHA-256 of rows."""
    return hashlib.sha256(np.ascontiguousarray(rows).view(np.uint8).data).hexdigest()


def write_rows(path: FilePath, key: CacheKey, rows: Rows) -> None:
    """Writes rows under their key, atomically."""
    about = {"content": CONTENT, "key": key.text, "sha256": digest_rows(rows)}
    with replacing(path) as unfinished:
        save_file({ROWS: np.ascontiguousarray(rows)}, unfinished, about)


def read_rows(path: FilePath, key: CacheKey) -> Rows:
    """Returns the rows of a file that was written under exactly this key; else `UnusableRows`."""
    try:
        about, rows = _read_file(path)
    except FileNotFoundError:
        raise UnusableRows("there is no such file") from None
    except OSError as error:
        raise UnusableRows(f"it cannot be read: {error.strerror}") from error
    except SafetensorError as error:
        raise UnusableRows(f"it is damaged: {error}") from error
    if about.get("content") != CONTENT or rows is None:
        raise UnusableRows("it holds no prompt embeddings that maxdiffusion wrote")
    if about.get("key") != key.text:
        raise UnusableRows("it is of another prompt, length, dtype or text encoder")
    if digest_rows(rows) != about.get("sha256"):
        raise UnusableRows("it is damaged: its rows are not those that were written")
    return rows


def _read_file(path: FilePath) -> tuple[dict[str, str], Rows | None]:
    """Returns metadata and rows of a safetensors file; None if it has no rows."""
    copy = local_copy(path)
    try:
        file: Any
        with safe_open(copy, framework="np") as file:
            rows = file.get_tensor(ROWS) if ROWS in file.keys() else None  # noqa: SIM118
            return file.metadata() or {}, rows
    finally:
        if copy != path:
            copy.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class PromptCache:
    """A folder of prompt embeddings; `made_with` holds the facts that all of them share."""

    folder: FilePath
    made_with: Mapping[str, Any]
    width: int

    @classmethod
    def of_encoder(
        cls, folder: FilePath, model: ModelFolder, precision: Precision, width: int
    ) -> "PromptCache":
        """Returns the cache of one text encoder, in the precision that it runs in."""
        digest = broadcast_from_first("text encoder", lambda: encoder_digest(model, folder))
        made_with = {
            "text_encoder": digest,
            "dtype": str(precision.text_encoder),
            "matmul": precision.matmul,
        }
        return cls(folder=folder, made_with=made_with, width=width)

    def key(self, ids: Tokens, length: int) -> CacheKey:
        """Returns everything that the rows of a text depend on."""
        return CacheKey({**self.made_with, "max_sequence_length": length, "tokens": list(ids)})

    def path(self, ids: Tokens, length: int) -> FilePath:
        """Returns the file of a text."""
        return self.folder / f"prompt-{self.key(ids, length).file_stem}.safetensors"

    def read(self, ids: Tokens, length: int) -> Rows:
        """Returns the rows of a text, one per token; `UnusableRows` if there are none."""
        rows = read_rows(self.path(ids, length), self.key(ids, length))
        if rows.shape != (len(ids), self.width):
            raise UnusableRows(f"it has rows of shape {list(rows.shape)}")
        return rows

    def write(self, ids: Tokens, length: int, rows: Rows) -> None:
        """Stores the rows of a text; a failure is logged and the run continues."""
        path = self.path(ids, length)
        try:
            write_rows(path, self.key(ids, length), rows)
        except (OSError, SafetensorError) as error:
            logger.info("%s: %s could NOT be written: %s", FIELD, path.name, error)

    def scan(self, texts: Iterable[Tokens], length: int) -> "CachedPrompts":
        """Returns which texts are cached; none if the processes see different files."""
        wanted = tuple(dict.fromkeys(texts))
        with ThreadPoolExecutor(READERS) as pool:
            digests = pool.map(lambda ids: self._digest(ids, length), wanted)
        found = {ids: digest for ids, digest in zip(wanted, digests, strict=True) if digest}
        mine = hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()
        if len(set(all_gather_str("prompt embeddings", mine))) > 1:
            logger.info(
                "%s: NOT used: the processes see different files in %s. Put it on a shared file "
                "system or in object storage.",
                FIELD,
                self.folder,
            )
            found = {}
        missing = tuple(ids for ids in wanted if ids not in found)
        return CachedPrompts(cache=self, length=length, found=found, missing=missing)

    def _digest(self, ids: Tokens, length: int) -> str:
        """Returns the digest of a text's rows; empty if they cannot be used."""
        try:
            return digest_rows(self.read(ids, length))
        except UnusableRows as reason:
            path = self.path(ids, length)
            if path.exists():
                logger.info("%s: %s is NOT used but encoded again: %s", FIELD, path.name, reason)
            return ""


@dataclass(frozen=True, kw_only=True)
class CachedPrompts(RowCache):
    """The texts of a run: `found` ones are read from their files, `missing` ones are encoded."""

    cache: PromptCache
    length: int
    found: Mapping[Tokens, str] = field(repr=False)  # with the digests of their rows
    missing: tuple[Tokens, ...] = field(repr=False)

    def has(self, ids: Tokens, length: int) -> bool:
        """Returns whether the rows of a text are cached."""
        return length == self.length and ids in self.found

    def read(self, ids: Tokens, length: int) -> Float[np.ndarray, "1 T E"]:
        """Returns the rows of a cached text, zero after its last token."""
        try:
            rows = self.cache.read(ids, length)
        except UnusableRows as reason:
            raise self._lost(ids, str(reason)) from reason
        if digest_rows(rows) != self.found[ids]:
            raise self._lost(ids, "its rows have changed")
        return np.pad(rows, ((0, length - len(ids)), (0, 0)))[None]

    def store(self, ids: Tokens, length: int, rows: Float[jax.Array, "1 T E"]) -> None:
        """Writes the rows of a text, once for all processes."""
        if jax.process_index() == 0:
            self.cache.write(ids, length, np.asarray(rows)[0, : len(ids)])

    @property
    def unneeded_components(self) -> tuple[str, ...]:
        """Components that the run does not load."""
        return () if self.missing else ("text_encoder",)

    def describe(self) -> str:
        """Returns one line on what is read and what is computed."""
        texts = len(self.found) + len(self.missing)
        line = f"prompt embeddings: {len(self.found)} of {texts} are in {self.cache.folder}"
        if not self.missing:
            return f"{line}; the text encoder is not loaded"
        return f"{line}, {len(self.missing)} will be encoded and stored there"

    def _lost(self, ids: Tokens, reason: str) -> LostRows:
        path = self.cache.path(ids, self.length)
        return LostRows(
            f"{path} was there when the run began, and now cannot be used: {reason}. Leave the "
            "folder alone during a run, and start the same command again."
        )


def encoder_digest(model: ModelFolder, folder: FilePath) -> str:
    """Returns a digest of the contents of text encoder and tokenizer.

    The digests of their files are stored in `folder`; a file with the same size and modification
    time is not read again.
    """
    files = [
        model.path("text_encoder", CONFIG),
        *model.weights["text_encoder"].files,
        model.path("tokenizer", TOKENIZER),
    ]
    where = hashlib.sha256(str(model.root.absolute()).encode()).hexdigest()[:24]
    notes = folder / f"text_encoder-{where}.json"
    known = _known_digests(notes)
    hashed = digest_files(files, known)
    if hashed != known:
        with replacing(notes) as unfinished:
            unfinished.write_text(json.dumps([asdict(file) for file in hashed], indent=2) + "\n")
    return digest_value([(file.name, file.sha256) for file in hashed])


def _known_digests(notes: FilePath) -> tuple[FileDigest, ...]:
    """Returns the digests of an earlier run; none if they cannot be read."""
    try:
        return tuple(FileDigest(**fields) for fields in json.loads(notes.read_bytes()))
    except (OSError, ValueError, TypeError):
        return ()
