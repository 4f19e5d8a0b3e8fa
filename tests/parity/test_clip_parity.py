"""The CLIP vision tower against transformers, on weights and images made by the test."""

from pathlib import Path

import jax
import numpy as np
import pytest

from tests.oracle.arrays import normal
from tests.oracle.tiny_family import ClipSize, make_clip, wan21_i2v, write_family
from tests.parity.loaded import load_clip

# Rows of order 1 after at most four layers of float32 sums with 32..588 terms.
TOLERANCE = 1e-5

SIZES = {
    "gelu": ClipSize(width=48, heads=3, layers=5, ffn=80, image=42),
    "quick_gelu": ClipSize(width=40, heads=5, layers=2, ffn=104, activation="quick_gelu"),
    # Three patches of 9 fill 27 of 31 pixels: the rest is not seen.
    "uneven": ClipSize(width=16, heads=2, layers=3, ffn=24, image=31, patch=9),
}


@pytest.mark.parametrize(
    ("name", "shards"), [(name, "10GB") for name in SIZES] + [("gelu", "60KB")]
)
def test_tokens_equal_those_of_transformers(name: str, shards: str, tmp_path: Path) -> None:
    size = SIZES[name]
    theirs = make_clip(size, seed=len(name))
    theirs.save_pretrained(tmp_path, max_shard_size=shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "60KB")
    pixels = normal(4, 2, 3, size.image, size.image)
    expected = theirs(pixels, output_hidden_states=True).hidden_states[-2].numpy()
    found = jax.jit(load_clip(tmp_path).__call__)(np.moveaxis(pixels.numpy(), 1, -1))
    assert found.shape == (2, size.tokens, size.width)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("prefix", ["", "vision_model."])
def test_both_spellings_of_names_are_read(prefix: str, tmp_path: Path) -> None:
    tiny = wan21_i2v(seed=2, clip_prefix=prefix)
    write_family(tmp_path, tiny)
    assert tiny.clip is not None
    theirs = make_clip(tiny.clip, 10 * tiny.seed + 5)
    pixels = normal(4, 1, 3, tiny.clip.image, tiny.clip.image)
    expected = theirs(pixels, output_hidden_states=True).hidden_states[-2].numpy()
    ours = load_clip(tmp_path / "image_encoder")
    found = jax.jit(ours.__call__)(np.moveaxis(pixels.numpy(), 1, -1))
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
