"""Prompt embeddings that outlive a run: a folder with a file for each prompt.

What is there is looked through once, before weights are loaded: if nothing is missing, the text
encoder is not needed at all. Each process reads the files; the first one writes.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxdiffusion.pipelines.prompt_files import (
    Rows,
    UnusableRows,
    digest,
    file_name,
    read_rows,
    write_rows,
)
from maxdiffusion.runtime.coordination import exchange
from maxdiffusion.runtime.problems import RunFailed

KEY = "prompt_embeddings_cache_dir"
READERS = 16  # files that are looked at side by side; those in object storage take their time
Tokens = tuple[int, ...]


class LostRows(RunFailed):
    """Embeddings that were there when the run began are not there any more."""


@dataclass(frozen=True, kw_only=True)
class PromptFolder:
    """Where the embeddings of prompts are kept, and what all of them are made with.

    `say` is told of every file that is there and cannot be used, with the reason.
    """

    folder: Path
    made_with: Mapping[str, Any]
    width: int
    say: Callable[[str], None]

    def key(self, ids: Tokens, length: int) -> dict[str, Any]:
        """Everything that the rows of a text depend on."""
        return {**self.made_with, "max_sequence_length": length, "tokens": list(ids)}

    def path(self, ids: Tokens, length: int) -> Path:
        """The file of a text."""
        return self.folder / file_name(self.key(ids, length))

    def read(self, ids: Tokens, length: int) -> Rows:
        """The rows of a text, one for each token; UnusableRows if they are not there."""
        rows = read_rows(self.path(ids, length), self.key(ids, length))
        if rows.shape != (len(ids), self.width):
            raise UnusableRows(f"it has rows of shape {list(rows.shape)}")
        return rows

    def write(self, ids: Tokens, length: int, rows: Rows) -> None:
        """Keeps the rows of a text; a run goes on without, and says so."""
        path = self.path(ids, length)
        try:
            write_rows(path, self.key(ids, length), rows)
        except OSError as error:
            self.say(f"{KEY}: {path.name} could NOT be written: {error}")

    def look(self, texts: Iterable[Tokens], length: int) -> "KeptPrompts":
        """What is there of these texts; all processes must see the same, or nothing is used."""
        wanted = tuple(dict.fromkeys(texts))
        with ThreadPoolExecutor(READERS) as pool:
            found = pool.map(lambda ids: self._digest(ids, length), wanted)
        there = {ids: seen for ids, seen in zip(wanted, found, strict=True) if seen}
        mine = hashlib.sha256(repr(sorted(there.items())).encode()).hexdigest()
        if len(set(exchange("prompt embeddings", mine))) > 1:
            self.say(
                f"{KEY}: NOT used: the processes see different files in {self.folder}. Put it on "
                "a shared file system or in object storage."
            )
            there = {}
        missing = tuple(ids for ids in wanted if ids not in there)
        return KeptPrompts(place=self, length=length, there=there, missing=missing)

    def _digest(self, ids: Tokens, length: int) -> str:
        """The digest of what is kept of a text; empty if that cannot be used."""
        try:
            return digest(self.read(ids, length))
        except UnusableRows as reason:
            path = self.path(ids, length)
            if path.exists():
                self.say(f"{KEY}: {path.name} is NOT used but made anew: {reason}")
            return ""


@dataclass(frozen=True, kw_only=True)
class KeptPrompts:
    """The texts of a run: `there` are read from their files, the others are kept once encoded."""

    place: PromptFolder
    length: int
    there: Mapping[Tokens, str] = field(repr=False)  # with the digests of their rows
    missing: tuple[Tokens, ...] = field(repr=False)

    def has(self, ids: Tokens, length: int) -> bool:
        """Whether the rows of a text need not be computed."""
        return length == self.length and ids in self.there

    def read(self, ids: Tokens, length: int) -> np.ndarray:
        """The rows of a text that is there, [1 T E], zero after its last token."""
        try:
            rows = self.place.read(ids, length)
        except UnusableRows as reason:
            raise self._lost(ids, str(reason)) from reason
        if digest(rows) != self.there[ids]:
            raise self._lost(ids, "its rows are others")
        return np.pad(rows, ((0, length - len(ids)), (0, 0)))[None]

    def keep(self, ids: Tokens, length: int, rows: jax.Array) -> None:
        """Writes the rows of a text, [1 T E], once for all processes."""
        if jax.process_index() == 0:
            self.place.write(ids, length, np.asarray(rows)[0, : len(ids)])

    @property
    def needless(self) -> tuple[str, ...]:
        """The components that the run does without."""
        return () if self.missing else ("text_encoder",)

    def describe(self) -> str:
        """What will be read and what computed, in one line."""
        texts = len(self.there) + len(self.missing)
        line = f"prompt embeddings: {len(self.there)} of {texts} are in {self.place.folder}"
        if not self.missing:
            return f"{line}; the text encoder is not loaded"
        return f"{line}, {len(self.missing)} will be encoded and kept there"

    def _lost(self, ids: Tokens, reason: str) -> LostRows:
        path = self.place.path(ids, self.length)
        return LostRows(
            f"{path} was there when the run began, and now cannot be used: {reason}. Leave the "
            "folder alone during a run, and start the same command again."
        )
