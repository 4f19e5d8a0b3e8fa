"""Encodes prompts into the rows that the transformer attends to.

    prompt -> cleaned text -> token ids -> UMT5 at the next bucket length -> rows, then zero rows

A row depends on the real tokens alone, so short prompts are encoded at a short length and padded
with zero rows afterwards. Prompts are encoded one by one: a prompt gives the same bits in every
batch, and few programs serve all prompts.
"""

import html
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ftfy
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from tokenizers import Tokenizer

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.umt5 import Umt5Encoder
from maxdiffusion.pipelines.programs import Compile, compile_now

MAX_SEQUENCE_LENGTH = 512  # text rows that WAN was trained with, most of them zero
BUCKETS = (64, 128, 256, 512)
REMEMBERED_PROMPTS = 16  # 64 MiB of bfloat16 rows for UMT5-XXL

Rows = Float[Array, "B T E"]


def clean_prompt(prompt: str) -> str:
    """Returns the prompt with fixed encoding, decoded HTML entities and single spaces."""
    fixed = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return " ".join(fixed.split())


def bucket_length(tokens: int, max_sequence_length: int) -> int:
    """Returns the length at which a text of `tokens` tokens is encoded."""
    fitting = [bucket for bucket in BUCKETS if tokens <= bucket < max_sequence_length]
    return fitting[0] if fitting else max_sequence_length


class PromptTokenizer:
    """Tokenizes prompts with the tokenizer.json of a checkpoint."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()

    @classmethod
    def load(cls, folder: Path) -> "PromptTokenizer":
        """Returns the tokenizer in `folder`.

        transformers' T5Tokenizer rebuilds parts of tokenizer.json from its own defaults, so the
        tokenizers package reads the file itself.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise _bad_tokenizer(path, "the file must exist")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception for every kind of damage
            raise _bad_tokenizer(path, f"the file must be a tokenizer ({error})") from error
        if not tokenizer.encode("").ids:
            raise _bad_tokenizer(path, "the tokenizer must end every text with an end token")
        return cls(tokenizer)

    @property
    def vocab(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size()

    def ids(self, prompt: str, max_sequence_length: int = MAX_SEQUENCE_LENGTH) -> tuple[int, ...]:
        """Returns the ids of the cleaned prompt; a long one is truncated before its end token."""
        if not isinstance(prompt, str):
            rule = f"must be a string or a list of strings, not {type(prompt).__name__}"
            raise ProblemsFound([Problem(name="prompt", value=prompt, rule=rule)])
        ids = self._tokenizer.encode(clean_prompt(prompt)).ids
        if len(ids) > max_sequence_length:
            ids = [*ids[: max_sequence_length - 1], ids[-1]]
        return tuple(ids)


def _bad_tokenizer(path: Path, rule: str) -> ProblemsFound:
    remedy = "Use the tokenizer folder of a released WAN model"
    return ProblemsFound([Problem(name="tokenizer", value=str(path), rule=rule, remedy=remedy)])


class TextPrograms:
    """Compiled encoders, one for each bucket length in use."""

    def __init__(
        self,
        graph: nnx.GraphDef[Umt5Encoder],
        mesh: Mesh | None = None,
        compile_program: Compile = compile_now,
    ):
        self._graph = graph
        self._compile_program = compile_program
        self._everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        self._layout = ActivationLayout(mesh=mesh)
        self._compiled: dict[tuple[int, int], Callable[..., Rows]] = {}

    def get(self, weights: nnx.State, length: int, max_sequence_length: int) -> Callable[..., Rows]:
        """Returns the encoder of one text padded to `length`, with `max_sequence_length` rows.

        `weights` may be arrays or abstract arrays with shardings; both give the same program.
        """
        key = (length, max_sequence_length)
        if key not in self._compiled:
            self._compiled[key] = self._compile(weights, *key)
        return self._compiled[key]

    def place(self, rows: Float[np.ndarray, "B T E"]) -> Rows:
        """Returns cached rows with the sharding that an encoder's rows have."""
        return jax.device_put(rows, self._everywhere)

    def _compile(
        self, weights: nnx.State, length: int, max_sequence_length: int
    ) -> Callable[..., Rows]:
        def encode(weights: nnx.State, ids: jax.Array, mask: jax.Array) -> Rows:
            rows = nnx.merge(self._graph, weights)(ids, mask, layout=self._layout)
            return jnp.pad(rows, ((0, 0), (0, max_sequence_length - length), (0, 0)))

        text = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=self._everywhere)
        program = jax.jit(encode, out_shardings=self._everywhere)
        return self._compile_program("text_encoder", program.lower(weights, text, text))


class RowCache(ABC):
    """Encoded rows of a run's texts by token ids; `pipelines/prompt_cache.py` has one in files."""

    @abstractmethod
    def has(self, ids: tuple[int, ...], length: int) -> bool:
        """Returns whether the rows of a text are cached."""

    @abstractmethod
    def read(self, ids: tuple[int, ...], length: int) -> Float[np.ndarray, "1 T E"]:
        """Returns the rows of a cached text, zero after its last token."""

    @abstractmethod
    def store(self, ids: tuple[int, ...], length: int, rows: Float[Array, "1 T E"]) -> None:
        """Caches the rows of a text."""

    @property
    @abstractmethod
    def unneeded_components(self) -> tuple[str, ...]:
        """Components that a run with this cache does not load."""


class PromptEncoder:
    """Encodes prompts with loaded weights, and remembers the last few.

    Prompts of the `kept` cache are read instead; without others no weights are needed.
    """

    def __init__(
        self,
        *,
        tokenizer: PromptTokenizer,
        programs: TextPrograms,
        weights: nnx.State | None,
        kept: RowCache | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._programs = programs
        self._weights = weights
        self._kept = kept
        self._remembered: OrderedDict[tuple[int, ...], Rows] = OrderedDict()

    def with_weights(self, weights: nnx.State | None) -> "PromptEncoder":
        """Returns an encoder with other weights and no cache; compiled programs are shared."""
        return PromptEncoder(tokenizer=self._tokenizer, programs=self._programs, weights=weights)

    def place(self, weights: nnx.State | None) -> None:
        """Takes the weights of an encoder that was made with their shapes."""
        self._weights = weights

    def compile(
        self, prompts: Sequence[str], max_sequence_length: int = MAX_SEQUENCE_LENGTH
    ) -> None:
        """Compiles the programs that `encode` needs for these prompts."""
        for prompt in prompts:
            ids = self._tokenizer.ids(prompt, max_sequence_length)
            if self._kept is None or not self._kept.has(ids, max_sequence_length):
                length = bucket_length(len(ids), max_sequence_length)
                self._programs.get(self._loaded, length, max_sequence_length)

    def encode(
        self, prompts: Sequence[str], max_sequence_length: int = MAX_SEQUENCE_LENGTH
    ) -> Rows:
        """Returns `max_sequence_length` rows per prompt, zero after its last token."""
        if isinstance(prompts, str):
            raise TypeError(f"prompts={prompts!r}: must be a list of strings; put it in brackets")
        return jnp.concatenate([self._rows(prompt, max_sequence_length) for prompt in prompts])

    def _rows(self, prompt: str, max_sequence_length: int) -> Rows:
        ids = self._tokenizer.ids(prompt, max_sequence_length)
        key = (max_sequence_length, *ids)
        if key not in self._remembered:
            self._remembered[key] = self._made(ids, max_sequence_length)
        self._remembered.move_to_end(key)
        while len(self._remembered) > REMEMBERED_PROMPTS:
            self._remembered.popitem(last=False)
        return self._remembered[key]

    def _made(self, ids: tuple[int, ...], max_sequence_length: int) -> Rows:
        """Returns rows from the cache, or encodes and caches them."""
        if self._kept is None:
            return self._encode_ids(ids, max_sequence_length)
        if self._kept.has(ids, max_sequence_length):
            return self._programs.place(self._kept.read(ids, max_sequence_length))
        rows = self._encode_ids(ids, max_sequence_length)
        self._kept.store(ids, max_sequence_length, rows)
        return rows

    @property
    def _loaded(self) -> nnx.State:
        if self._weights is None:
            raise ValueError(
                "a prompt is not among those whose embeddings are cached, and the text encoder was "
                "not loaded. Make a pipeline with it."
            )
        return self._weights

    def _encode_ids(self, ids: tuple[int, ...], max_sequence_length: int) -> Rows:
        embedding: Any = self._loaded["embedding"]
        vocab = embedding.shape[0]
        if max(ids) >= vocab:
            # A gather would silently read the last row instead.
            rule = f"the text encoder knows the ids below {vocab}"
            remedy = "Use the tokenizer and the text_encoder folders of the same model"
            raise ProblemsFound(
                [Problem(name="token id", value=max(ids), rule=rule, remedy=remedy)]
            )
        length = bucket_length(len(ids), max_sequence_length)
        padded, mask = np.zeros((2, 1, length), np.int32)
        padded[0, : len(ids)], mask[0, : len(ids)] = ids, 1
        program = self._programs.get(self._loaded, length, max_sequence_length)
        return program(self._loaded, padded, mask)
