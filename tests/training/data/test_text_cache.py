"""Captions that were encoded before train as those that are encoded at every step."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.runtime.files import WritingFailed, as_path, read_range
from maxdiffusion.training.data import latent_cache
from maxdiffusion.training.data.batches import Batches, Order, SyntheticClips
from maxdiffusion.training.data.latent_cache import (
    CachedClips,
    CachePlan,
    ClipsWithText,
    Share,
    fill_cache,
    fill_text,
)
from maxdiffusion.training.data.synthetic import ClipFormat
from maxdiffusion.training.data.video_folder import UnusableClip
from maxdiffusion.training.text import (
    TEXT_ENCODER,
    EncodedBefore,
    EncodedCaptions,
    StoredCaptions,
    padded_ids,
)
from maxdiffusion.training.wan import StoredText
from tests import object_storage
from tests.training.full_disk import files_limited_to
from tests.training.tiny_training import CAPTION_TOKENS, batch_of, state_of, training

CLIPS = SyntheticClips(clip=ClipFormat(frames=5, size=32), count=11, seed=4)
PLAN = CachePlan(model="a", caption_tokens=32, shard=4, batch=3)


def cache(folder, clips=CLIPS, share=None, frames=1):
    fill_cache(
        folder,
        clips,
        PLAN,
        encode=lambda videos: videos[:, :frames].astype(np.float32),
        tokenize=lambda text: [ord(letter) for letter in text[:20]],
        share=share,
    )
    return folder


def letters(ids, lengths):
    """Rows that say of each token which it is and where it stands."""
    places = np.arange(ids.shape[1])
    rows = np.stack([ids, np.broadcast_to(places, ids.shape)], axis=-1).astype(np.float32)
    return rows * (places < lengths[:, None])[..., None]


def test_a_cache_in_object_storage_is_read_row_by_row(tmp_path, monkeypatch):
    local = tmp_path / "local"
    fill_text(cache(local, frames=5), model="t", empty=(1,), encode=letters)
    monkeypatch.setenv(object_storage.ROOT, str(tmp_path))
    object_storage.use_buckets()
    remote = as_path("gs://bucket/cache")
    fill_text(cache(remote, frames=5), model="t", empty=(1,), encode=letters)
    requested = []
    monkeypatch.setattr(
        latent_cache, "read_range", lambda *a: requested.append(a) or read_range(*a)
    )
    stored, expected = ClipsWithText(remote), ClipsWithText(local)
    opened = sum(count for file, _, count in requested if "gs://" in str(file))
    requested.clear()
    for index in (0, 5, 10):
        for name, value in expected[index].items():
            np.testing.assert_array_equal(stored[index][name], value)
    np.testing.assert_array_equal(stored.empty, expected.empty)
    rows = [count for file, _, count in requested if "gs://" in str(file)]
    clip = expected[0]["latents"].nbytes + expected[0]["text"].nbytes
    # Twice (one read for each name) of three clips: their own bytes, and of others nothing.
    assert sum(rows) == 2 * 3 * clip
    assert opened < 8 * 5000  # headers of three shards and their texts
    batches = [Batches(held, Order(batch=5, seed=1, threads=4)) for held in (stored, expected)]
    for _ in range(4):
        found, wanted = (next(one) for one in batches)
        np.testing.assert_array_equal(found["latents"], wanted["latents"])


def test_a_shard_that_is_cut_short_is_named(tmp_path):
    folder = cache(tmp_path)
    file = folder / "shard-00001.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    message = f"shard-00001.safetensors of {len(content) - 1} bytes in place of {len(content)}"
    with pytest.raises(ProblemsFound, match=message):
        CachedClips(folder)
    file.write_bytes(b"\x08" + bytes(7) + b"nothing.")
    with pytest.raises(ProblemsFound, match=r"shard-00001\.safetensors, which is no shard"):
        CachedClips(folder)


def test_stored_rows_are_those_of_the_captions(tmp_path):
    fill_text(cache(tmp_path), model="t", empty=(1,), encode=letters)
    stored, tokens = ClipsWithText(tmp_path), CachedClips(tmp_path)
    assert len(stored) == 11
    for index in (0, 5, 10):
        sample, wanted = stored[index], tokens[index]
        assert sample.keys() == {"latents", "text"}
        rows = letters(wanted["ids"][None], wanted["lengths"][None])[0]
        np.testing.assert_array_equal(sample["text"], rows)
        np.testing.assert_array_equal(sample["latents"], wanted["latents"])
    assert stored.empty.shape == (32, 2)
    assert stored.empty[0].tolist() == [1, 0]


def test_it_goes_on_where_it_stopped_and_knows_its_encoder(tmp_path):
    cache(tmp_path)
    calls = []

    def counting(ids, lengths):
        calls.append(len(ids))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return letters(ids, lengths)

    with pytest.raises(KeyboardInterrupt):
        fill_text(tmp_path, model="t", empty=(1,), encode=counting)
    with pytest.raises(ProblemsFound, match="no encoded captions for 2 of 3 shards"):
        ClipsWithText(tmp_path)
    fill_text(tmp_path, model="t", empty=(1,), encode=counting)
    assert calls == [1, 4, 4, 4, 3]
    with pytest.raises(ProblemsFound, match="other inputs: text_encoder was"):
        fill_text(tmp_path, model="other", empty=(1,), encode=counting)


def test_processes_share_the_shards(tmp_path):
    cache(tmp_path, share=Share(index=0, count=2))
    assert [file.name[6:11] for file in CachedClips(tmp_path).files] == ["00000", "00002"]
    cache(tmp_path, share=Share(index=1, count=2))
    assert len(CachedClips(tmp_path)) == 11


class Broken:
    """Clips of which those of the second shard cannot be read."""

    bad = range(4, 8)

    def __len__(self):
        return 11

    def __getitem__(self, index):
        if index in self.bad:
            raise UnusableClip(f"clip {index} is broken")
        return CLIPS[index]

    caption, describe = staticmethod(CLIPS.caption), staticmethod(CLIPS.describe)


def test_a_shard_without_any_good_clip_is_not_tried_again(tmp_path):
    fill_text(cache(tmp_path, Broken()), model="t", empty=(1,), encode=letters)
    stored = ClipsWithText(tmp_path)
    assert len(stored) == 7
    np.testing.assert_array_equal(stored[4]["latents"], CLIPS[8]["video"][:1])
    cache(tmp_path, Broken())
    reasons = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert [line["clip"] for line in reasons] == [4, 5, 6, 7]

    none = Broken()
    none.bad = range(11)
    cache(tmp_path / "none", none)
    with pytest.raises(ProblemsFound, match=r"all 11 could not be used, as skipped\.jsonl"):
        CachedClips(tmp_path / "none")


def test_a_full_disk_leaves_whole_shards_and_one_line(tmp_path):
    cache(tmp_path, share=Share(index=0, count=3))
    with files_limited_to(20_000), pytest.raises(WritingFailed, match="Make room there"):
        cache(tmp_path, frames=5)  # 4 x 5 x 32 x 32 x 3 numbers
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "manifest.json",
        "shard-00000.safetensors",
    ]


@pytest.mark.slow
def test_stored_captions_read_as_encoded_ones_do():
    run = training()
    values, captions = state_of(run).values, batch_of(0, clips=64).captions
    encoder = run.models[TEXT_ENCODER]
    empty = padded_ids([(1,)], CAPTION_TOKENS)
    model = encoder.merge(values[TEXT_ENCODER])
    mask = jnp.asarray(np.arange(CAPTION_TOKENS) < captions.lengths[:, None])
    stored = EncodedBefore(rows=model(jnp.asarray(captions.ids), mask))
    nothing = jnp.arange(CAPTION_TOKENS)[None] < 1
    rows_of_empty = np.asarray(model(jnp.asarray(empty), nothing))[0]
    key = jax.random.key(0)
    one = EncodedCaptions(encoder=encoder, empty=(1,), dropout=0.5)(values, captions, key)
    other = StoredCaptions(empty=rows_of_empty, dropout=0.5)({}, stored, key)
    # The same sums, of at most 16 products of size 1 in float32.
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_training_on_stored_text_has_no_text_encoder():
    rows = np.zeros((CAPTION_TOKENS, 16), np.float32)
    run = training(text=StoredText(empty=rows))
    assert TEXT_ENCODER not in run.models
    assert isinstance(run.loss("transformer").text, StoredCaptions)
