"""The UMT5 encoder against transformers, on weights and texts made by the test."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.oracle.tiny_checkpoints import TextSize, make_text_encoder
from tests.parity.loaded import load_umt5

# Rows of order 1 after at most three layers of float32 sums with 30..128 terms.
TOLERANCE = 1e-5
VOCABULARY = 77

SIZES = {
    "one-layer": TextSize(width=48, heads=3, head_dim=8, layers=1, ffn=56),
    "three-layers": TextSize(width=40, heads=5, head_dim=16, layers=3, ffn=104),
}


def texts(lengths: list[int], padded: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random ids of the given true lengths, and their mask."""
    ids = np.random.default_rng(seed).integers(3, VOCABULARY, (len(lengths), padded))
    mask = np.arange(padded) < np.asarray(lengths)[:, None]
    return np.where(mask, ids, 0), mask.astype(np.int32)


@pytest.mark.parametrize(("size", "shards"), [("one-layer", "10GB"), ("three-layers", "30KB")])
def test_embeddings_equal_those_of_transformers(size: str, shards: str, tmp_path: Path) -> None:
    theirs = make_text_encoder(SIZES[size], VOCABULARY, seed=len(size))
    theirs.save_pretrained(tmp_path, max_shard_size=shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "30KB")
    # 201 is past the last logarithmic bucket (128), and no length is a round number.
    ids, mask = texts([1, 7, 201, 133], padded=201, seed=5)
    expected = theirs(torch.from_numpy(ids), torch.from_numpy(mask)).last_hidden_state.numpy()
    embeddings = load_umt5(tmp_path)(jnp.asarray(ids), jnp.asarray(mask))
    np.testing.assert_allclose(embeddings, expected * mask[..., None], rtol=0, atol=TOLERANCE)
