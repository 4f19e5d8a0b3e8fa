"""From prompts to the rows that the transformer reads.

    prompt -> cleaned text -> token ids -> UMT5 at the next bucket length -> rows, then zero rows

A row depends on the real tokens alone, so short prompts are encoded at a short length and the zero
rows are added afterwards. Prompts are encoded one by one: a prompt gives the same bits whatever
else is generated with it, and few programs serve all prompts.
"""

import html
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

from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.umt5 import Umt5Encoder
from maxdiffusion.pipelines.executables import Compile, compile_now
from maxdiffusion.pipelines.kept_prompts import KeptPrompts
from maxdiffusion.runtime.problems import Problem, ProblemsFound

MAX_SEQUENCE_LENGTH = 512  # WAN was trained with so many text rows, most of them zero
BUCKETS = (64, 128, 256, 512)
REMEMBERED_PROMPTS = 16  # 64 MiB of bfloat16 rows for UMT5-XXL

Rows = Float[Array, "B T E"]


def clean_prompt(prompt: str) -> str:
    """The prompt with broken encodings and HTML entities mended and white space made single."""
    mended = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return " ".join(mended.split())


def bucket_length(tokens: int, max_sequence_length: int) -> int:
    """The length at which a text of `tokens` tokens is encoded."""
    fitting = [bucket for bucket in BUCKETS if tokens <= bucket < max_sequence_length]
    return fitting[0] if fitting else max_sequence_length


class PromptTokenizer:
    """Turns prompts into token ids, by the tokenizer.json of a checkpoint."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()

    @classmethod
    def load(cls, folder: Path) -> "PromptTokenizer":
        """The tokenizer in `folder`, taken as its tokenizer.json says.

        transformers' T5Tokenizer rebuilds parts of the file from its own defaults, so the file is
        read by the tokenizers package itself.
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
        """How many ids there are, added tokens included."""
        return self._tokenizer.get_vocab_size()

    def ids(self, prompt: str, max_sequence_length: int = MAX_SEQUENCE_LENGTH) -> tuple[int, ...]:
        """The ids of the cleaned prompt; a long one is cut and keeps its end token."""
        if not isinstance(prompt, str):
            rule = f"must be text, and is a {type(prompt).__name__}"
            remedy = "Give a string, or a list of strings"
            raise ProblemsFound([Problem(name="prompt", value=prompt, rule=rule, remedy=remedy)])
        ids = self._tokenizer.encode(clean_prompt(prompt)).ids
        if len(ids) > max_sequence_length:
            ids = [*ids[: max_sequence_length - 1], ids[-1]]
        return tuple(ids)


def _bad_tokenizer(path: Path, rule: str) -> ProblemsFound:
    remedy = "Use the tokenizer folder of a released WAN model"
    return ProblemsFound([Problem(name="tokenizer", value=str(path), rule=rule, remedy=remedy)])


class TextPrograms:
    """The compiled encoders, one for each bucket length that was needed."""

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
        """The encoder of one text padded to `length`, that returns `max_sequence_length` rows.

        `weights` may be the arrays or their shapes (with shardings); both give the same program.
        """
        key = (length, max_sequence_length)
        if key not in self._compiled:
            self._compiled[key] = self._compile(weights, *key)
        return self._compiled[key]

    def place(self, rows: Float[np.ndarray, "B T E"]) -> Rows:
        """Rows that were encoded before, where an encoder would have left them."""
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


class PromptEncoder:
    """Encodes prompts with loaded weights, and remembers the last few.

    What is `kept` in files is not encoded; if that is every prompt, there need be no weights.
    """

    def __init__(
        self,
        *,
        tokenizer: PromptTokenizer,
        programs: TextPrograms,
        weights: nnx.State | None,
        kept: KeptPrompts | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._programs = programs
        self._weights = weights
        self._kept = kept
        self._remembered: OrderedDict[tuple[int, ...], Rows] = OrderedDict()

    def with_weights(self, weights: nnx.State | None) -> "PromptEncoder":
        """The same with other weights, that nothing is kept of; compiled programs are shared."""
        return PromptEncoder(tokenizer=self._tokenizer, programs=self._programs, weights=weights)

    def compile(
        self, prompts: Sequence[str], max_sequence_length: int = MAX_SEQUENCE_LENGTH
    ) -> None:
        """Compiles what `encode` needs for these prompts, and runs none of it."""
        for prompt in prompts:
            ids = self._tokenizer.ids(prompt, max_sequence_length)
            if self._kept is None or not self._kept.has(ids, max_sequence_length):
                length = bucket_length(len(ids), max_sequence_length)
                self._programs.get(self._loaded, length, max_sequence_length)

    def encode(
        self, prompts: Sequence[str], max_sequence_length: int = MAX_SEQUENCE_LENGTH
    ) -> Rows:
        """`max_sequence_length` rows for each prompt, zero after its last token."""
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
        """Rows from their file, or new ones, which are then kept."""
        if self._kept is None:
            return self._encode_ids(ids, max_sequence_length)
        if self._kept.has(ids, max_sequence_length):
            return self._programs.place(self._kept.read(ids, max_sequence_length))
        rows = self._encode_ids(ids, max_sequence_length)
        self._kept.keep(ids, max_sequence_length, rows)
        return rows

    @property
    def _loaded(self) -> nnx.State:
        if self._weights is None:
            raise ValueError(
                "a prompt is not among those whose embeddings are kept, and the text encoder was "
                "not loaded. Make a pipeline with it."
            )
        return self._weights

    def _encode_ids(self, ids: tuple[int, ...], max_sequence_length: int) -> Rows:
        embedding: Any = self._loaded["embedding"]
        vocab = embedding.shape[0]
        if max(ids) >= vocab:
            # A gather would read the last row instead, and nobody would know.
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
