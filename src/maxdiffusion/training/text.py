"""Captions as text embeddings, stored or computed, and attention to their padding.

WAN attends to the zero rows that pad a text to its full length (512). They are equal, so training
attends to one of them and counts it that many times.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from maxdiffusion.attention import Attention, AttentionPlan
from maxdiffusion.models.abstract import AbstractModel, Values, register_tree
from maxdiffusion.models.umt5 import Umt5Encoder

TEXT_ENCODER = "text_encoder"


@register_tree
@dataclass(frozen=True, kw_only=True)
class Captions:
    """Tokens of a batch of captions, zero after the end, and their numbers."""

    ids: Int[Array | np.ndarray, "B T"]
    lengths: Int[Array | np.ndarray, " B"]


@register_tree
@dataclass(frozen=True, kw_only=True)
class EncodedBefore:
    """Stored text embeddings of a batch of captions, zero after their ends."""

    rows: Float[Array | np.ndarray, "B T E"]


@runtime_checkable
class TextReader(Protocol):
    """Interface from captions to text embeddings; replaces some by the empty caption."""

    def __call__(
        self, values: Mapping[str, Values], captions: Any, key: PRNGKeyArray
    ) -> Float[Array, "B T E"]:
        """Returns the embeddings of every caption, with one zero row last."""


@dataclass(frozen=True, kw_only=True)
class EncodedCaptions:
    """Runs the text encoder, which may be trained."""

    encoder: AbstractModel[Umt5Encoder]
    empty: tuple[int, ...]  # the tokens of the empty caption
    dropout: float = 0.1

    def __post_init__(self) -> None:
        _check_dropout(self.dropout)

    def __call__(
        self, values: Mapping[str, Values], captions: Captions, key: PRNGKeyArray
    ) -> Float[Array, "B T E"]:
        length = captions.ids.shape[1]
        empty = jnp.asarray(padded_ids([self.empty], length)[0])
        dropped = jax.random.bernoulli(key, self.dropout, captions.lengths.shape)
        ids = jnp.where(dropped[:, None], empty, captions.ids)
        lengths = jnp.where(dropped, len(self.empty), captions.lengths)
        mask = jnp.arange(length)[None, :] < lengths[:, None]
        rows = self.encoder.merge(values[TEXT_ENCODER])(ids, mask)
        return _with_zero_row(rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredCaptions:
    """Reads stored text embeddings; needs no text encoder."""

    empty: Float[np.ndarray, "T E"]  # the rows of the empty caption
    dropout: float = 0.1

    def __post_init__(self) -> None:
        _check_dropout(self.dropout)

    def __call__(
        self, values: Mapping[str, Values], captions: EncodedBefore, key: PRNGKeyArray
    ) -> Float[Array, "B T E"]:
        dropped = jax.random.bernoulli(key, self.dropout, captions.rows.shape[:1])
        rows = jnp.where(dropped[:, None, None], jnp.asarray(self.empty), captions.rows)
        return _with_zero_row(rows)


def _check_dropout(share: float) -> None:
    if not 0 <= share < 1:
        raise ValueError(f"dropout={share}: must be at least 0 and less than 1")


def _with_zero_row(rows: Float[Array, "B T E"]) -> Float[Array, "B T+1 E"]:
    return jnp.pad(rows, ((0, 0), (0, 1), (0, 0)))


def padded_ids(texts: Sequence[Sequence[int]], length: int) -> Int[np.ndarray, "B T"]:
    """Returns the tokens of several texts, padded with zeros."""
    rows = np.zeros((len(texts), length), np.int32)
    for row, ids in zip(rows, texts, strict=True):
        if len(ids) > length:
            raise ValueError(
                f"a caption has {len(ids)} tokens: at most {length} fit. Raise caption_tokens"
            )
        row[: len(ids)] = ids
    return rows


@dataclass(frozen=True, kw_only=True)
class RepeatedRowAttention(Attention):
    """Dense attention to a text whose last row stands for `repeats` equal rows.

    n equal keys weigh as much as one key whose score is higher by log n.
    """

    plan: AttentionPlan  # for the text with one such row
    repeats: int

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats}: must be at least 1")

    def __call__(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        kv_mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B S N H"]:
        assert kv_mask is None, "texts of WAN have no mask"
        scale = 1 / math.sqrt(q.shape[-1])
        scores = jnp.einsum("BSNH,BTNH->BNST", q, k, preferred_element_type=jnp.float32)
        scores = (scores * scale).at[..., -1].add(math.log(self.repeats))
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("BNST,BTNH->BSNH", weights, v)

    def describe(self) -> str:
        """Returns the line of the start-up report."""
        return (
            f"dot_product, with the zero rows of the text as one row that counts "
            f"{self.repeats} times"
        )
