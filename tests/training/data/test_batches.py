"""Batches come in a fixed order; caches are filled once and go on where they stopped."""

import json
from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.runtime.video import write_video
from maxdiffusion.training.data.batches import Batches, Order, SyntheticClips
from maxdiffusion.training.data.latent_cache import CachedClips, CachePlan, fill_cache
from maxdiffusion.training.data.synthetic import ClipFormat
from maxdiffusion.training.data.video_folder import ClipSize, UnusableClip, VideoClips, videos_in

CLIPS = SyntheticClips(clip=ClipFormat(frames=5, size=32), count=11, seed=4)
PLAN = CachePlan(model="a", caption_tokens=64, shard=4, batch=3)


def first_frame(videos):
    return videos[:, :1, ::8, ::8, :].astype(np.float32)


def letters(text):
    return [ord(letter) % 100 for letter in text[:20]]


def fill(folder, clips=CLIPS, plan=PLAN, encode=first_frame):
    fill_cache(folder, clips, plan, encode=encode, tokenize=letters)


def numbers(batches, count):
    return [next(batches)["video"].sum(axis=(1, 2, 3, 4)).tolist() for _ in range(count)]


def test_a_stream_goes_on_from_its_position():
    order = Order(batch=4, seed=1)
    whole = Batches(CLIPS, order)
    expected = numbers(whole, 6)
    first = Batches(CLIPS, order)
    assert numbers(first, 2) == expected[:2]
    position = json.loads(json.dumps(first.position))
    later = Batches(CLIPS, order)
    later.seek(position)
    assert numbers(later, 4) == expected[2:]


def test_every_pass_has_every_clip_in_another_order():
    batches = Batches(CLIPS, Order(batch=11, seed=1))
    one, two = numbers(batches, 2)
    assert one != two
    assert sorted(one) == sorted(two)
    unshuffled = Batches(CLIPS, Order(batch=3, seed=None))
    assert numbers(unshuffled, 1)[0] == [int(CLIPS[i]["video"].sum()) for i in range(3)]


def test_too_few_clips_are_refused():
    with pytest.raises(ProblemsFound, match="training clips=11: is fewer than one batch of 12"):
        Batches(CLIPS, Order(batch=12))


def test_a_cache_holds_what_was_encoded(tmp_path):
    fill(tmp_path)
    cached = CachedClips(tmp_path)
    assert len(cached) == 11
    assert cached.latent_shape == (1, 4, 4, 3)
    for index in (0, 3, 4, 10):
        sample = cached[index]
        np.testing.assert_array_equal(
            sample["latents"], first_frame(CLIPS[index]["video"][None])[0]
        )
        ids = letters(CLIPS.caption(index))
        assert sample["ids"][: sample["lengths"]].tolist() == ids


def test_a_cache_goes_on_where_it_stopped(tmp_path):
    calls = []

    def counting(videos):
        calls.append(len(videos))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return first_frame(videos)

    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path, encode=counting)
    assert [file.name for file in tmp_path.glob("shard*")] == ["shard-00000.safetensors"]
    fill(tmp_path, encode=counting)
    assert calls == [3, 1, 3, 3, 1, 3]
    assert len(CachedClips(tmp_path)) == 11


def test_a_cache_of_other_clips_is_refused(tmp_path):
    fill(tmp_path)
    with pytest.raises(ProblemsFound, match="other inputs: model was"):
        fill(tmp_path, plan=CachePlan(model="b", caption_tokens=64, shard=4))
    with pytest.raises(ProblemsFound, match="holds no cached latents"):
        CachedClips(tmp_path / "none")


SIZE = ClipSize(frames=5, height=16, width=32)


def clips_of(path):
    return VideoClips(videos=videos_in(path), size=SIZE)


def write(path, frames=6, size=(32, 64), caption="a clip"):
    video = np.random.default_rng(0).integers(0, 255, (frames, *size, 3), dtype=np.uint8)
    write_video(path, video, fps=8)
    if caption:
        path.with_suffix(".txt").write_text(caption)


def test_videos_with_captions_become_clips_of_one_size(tmp_path):
    write(tmp_path / "b.mp4", caption="second")
    write(tmp_path / "a.mp4", caption="first")
    clips = clips_of(tmp_path)
    assert [clips.caption(index) for index in range(len(clips))] == ["first", "second"]
    assert clips[0]["video"].shape == (5, 16, 32, 3)


def test_captions_may_stand_in_one_file(tmp_path):
    write(tmp_path / "a.mp4", caption="")
    line = {"file": "a.mp4", "caption": "listed"}
    (tmp_path / "captions.jsonl").write_text(json.dumps(line) + "\n")
    assert clips_of(tmp_path).caption(0) == "listed"
    (tmp_path / "captions.jsonl").write_text('{"file": "a.mp4"}\n')
    with pytest.raises(ProblemsFound, match="line 1 must be"):
        videos_in(tmp_path)


def test_what_is_wrong_with_a_folder_is_said_at_once(tmp_path):
    with pytest.raises(ProblemsFound, match=r"holds no \.mp4, no image"):
        videos_in(tmp_path)
    write(tmp_path / "a.mp4", caption="")
    (tmp_path / "b.txt").write_text("no video")
    with pytest.raises(ProblemsFound) as caught:
        videos_in(tmp_path)
    assert [(Path(str(problem.value)).name, problem.rule) for problem in caught.value.problems] == [
        ("a.mp4", "has no caption (a .txt of the same name)"),
        ("b.mp4", "is missing"),
    ]


def test_bad_clips_are_skipped_and_listed(tmp_path):
    write(tmp_path / "good.mp4")
    write(tmp_path / "short.mp4", frames=2)
    write(tmp_path / "small.mp4", size=(8, 8))
    (tmp_path / "broken.mp4").write_bytes(b"not a video")
    (tmp_path / "broken.txt").write_text("a clip")
    clips = clips_of(tmp_path)
    with pytest.raises(UnusableClip, match="could not read"):
        clips[0]
    cache = tmp_path / "cache"
    fill(cache, clips=clips)
    assert len(CachedClips(cache)) == 1
    skipped = cache / "skipped.jsonl"
    reasons = [json.loads(line)["reason"] for line in skipped.read_text().splitlines()]
    assert len(reasons) == 3
    assert "is 2x32x64, and 5x16x32" in reasons[1]
    assert "is 6x8x8, and 5x16x32" in reasons[2]
