"""Clips encoded once: from frames and captions to the latents and tokens that experts train on."""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiffusion.models.vae import ALL_FRAMES, WanVae
from maxdiffusion.pipelines.prompts import PromptTokenizer
from maxdiffusion.runtime.progress import steps_bar
from maxdiffusion.training.latent_cache import (
    CachedClips,
    CachePlan,
    CaptionedClips,
    Encode,
    fill_cache,
)
from maxdiffusion.training.parts import Part, Values
from maxdiffusion.training.text import Captions
from maxdiffusion.training.wan_loss import ClipBatch
from maxdiffusion.weights.folder import ModelFolder

SHARD = 512


def encoder_of(part: Part[WanVae], values: Values) -> Encode:
    """Turns bytes of clips into normalised latents (the most likely ones)."""

    @jax.jit
    def encode(values: Values, videos: jax.Array) -> jax.Array:
        vae = part.merge(values)
        signed = videos.astype(jnp.float32) / 127.5 - 1.0
        return vae.normalise(vae.encode(signed, chunk=ALL_FRAMES).mean)

    return lambda videos: np.asarray(encode(values, videos))


def cached_clips(
    cache: Path,
    captioned: CaptionedClips,
    folder: ModelFolder,
    *,
    encode: Callable[[], Encode],
    caption_tokens: int,
    length: int,
) -> CachedClips:
    """The cache of these clips, filled where it is not."""
    plan = CachePlan(model=model_hash(folder), caption_tokens=caption_tokens, shard=SHARD)
    tokenizer = PromptTokenizer.load(folder.root / "tokenizer")
    tokenize = partial(tokenizer.ids, max_sequence_length=min(length, caption_tokens))
    shards = -(-len(captioned) // SHARD)
    missing = shards - len(list(cache.glob("shard-*.safetensors")))
    with steps_bar("Encoding clips", shards, unit="shard") as advance:
        fill_cache(
            cache,
            captioned,
            plan,
            encode=encode() if missing > 0 else lambda videos: videos,
            tokenize=tokenize,
            advance=advance,
        )
    return CachedClips(cache)


def model_hash(folder: ModelFolder) -> str:
    """A hash of the autoencoder and the tokenizer, which cached clips depend on."""
    digest = hashlib.sha256()
    for name in ("vae", "tokenizer"):
        for file in sorted((folder.root / name).glob("*")):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def as_clip_batch(rows: Mapping[str, Any]) -> ClipBatch:
    """A batch of cached clips, still on the host."""
    captions = Captions(ids=rows["ids"], lengths=rows["lengths"])
    return ClipBatch(latents=rows["latents"], captions=captions)
