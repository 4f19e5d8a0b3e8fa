"""Videos go where they lose least; a batch has one size, and a stream goes on exactly."""

import json

import jax
import numpy as np
import pytest
from PIL import Image

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.runtime.video import measure_video, read_clip, write_video
from maxdiffusion.training.data import video_folder as buckets
from maxdiffusion.training.data.batches import Batches, Order
from maxdiffusion.training.data.video_folder import (
    ClipSize,
    VideoClips,
    bucket_of,
    kept_share,
    sort_videos,
    videos_in,
)


def size(frames, height, width):
    return ClipSize(frames=frames, height=height, width=width)


WIDE, TALL, SQUARE, SHORT = (
    size(81, 480, 832),
    size(81, 832, 480),
    size(81, 720, 720),
    size(17, 720, 1280),
)
ALL = (WIDE, TALL, SQUARE, SHORT)


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        (size(81, 720, 1280), WIDE),  # two thirds of the detail, rather than half of the picture
        (size(100, 1080, 1080), SQUARE),
        (size(90, 1280, 720), TALL),
        (size(20, 720, 1280), SHORT),  # the only one that is short enough
        (size(81, 480, 832), WIDE),
        (size(81, 100, 100), None),
    ],
)
def test_a_clip_goes_where_it_loses_least(clip, expected):
    assert bucket_of(clip, ALL) == expected


def test_what_is_kept_counts_length_picture_and_detail():
    assert kept_share(WIDE, WIDE) == 1
    assert kept_share(size(162, 480, 832), WIDE) == 0.5  # half of the frames
    assert kept_share(size(81, 960, 1664), WIDE) == 0.5  # half of the detail
    assert kept_share(size(81, 480, 1664), WIDE) == 0.5  # half of the picture


def write(path, frames, height, width):
    video = np.zeros((frames, height, width, 3), np.uint8)
    video[:, : height // 2] = (250, 0, 0)
    video[-1] = (0, 0, 250)
    write_video(path, video, fps=8)
    path.with_suffix(".txt").write_text(path.stem)


def test_videos_are_measured_once_and_cut_to_their_bucket(tmp_path, monkeypatch):
    write(tmp_path / "a.mp4", 7, 32, 64)
    write(tmp_path / "b.mp4", 5, 64, 32)
    write(tmp_path / "c.mp4", 5, 16, 16)
    (tmp_path / "d.mp4").write_bytes(b"nothing")
    (tmp_path / "d.txt").write_text("broken")
    assert measure_video(tmp_path / "a.mp4") == (7, 32, 64)
    wide, tall = size(5, 16, 32), size(5, 32, 16)
    notes = tmp_path / "notes" / "sizes.jsonl"
    found = sort_videos(videos_in(tmp_path), (wide, tall), notes=notes)
    names = {key: [file.name for file, _ in held] for key, held in found.buckets.items()}
    assert names == {wide: ["a.mp4"], tall: ["b.mp4"]}
    reasons = {file.name: why for file, why in found.left_out.items()}
    assert "is 5x16x16, and smaller than every bucket (5x16x32, 5x32x16)" in reasons["c.mp4"]
    assert "could not read" in reasons["d.mp4"]

    measured = []
    monkeypatch.setattr(buckets, "size_of", lambda file: measured.append(file.name) or wide)
    notes.write_text(notes.read_text() + '{"file": "cut sho')  # as a killed process leaves it
    again = sort_videos(videos_in(tmp_path), (wide, tall), notes=notes)
    assert measured == ["d.mp4"]  # which had no size to note
    assert again.left_out.keys() == {tmp_path / "c.mp4"}
    assert [json.loads(line)["size"] for line in notes.read_text().splitlines()[-1:]] == [
        vars(wide)
    ]

    clip = read_clip(tmp_path / "a.mp4", frames=5, height=16, width=16)
    assert clip.shape == (5, 16, 16, 3)
    # H.264 keeps plain colours to a few steps of 255.
    np.testing.assert_allclose(clip[4, 2, 8].astype(int), (250, 0, 0), atol=12)
    np.testing.assert_allclose(clip[4, 13, 8].astype(int), (0, 0, 0), atol=12)


def test_images_go_to_buckets_of_one_frame_and_are_cut_as_videos_are(tmp_path):
    write(tmp_path / "film.mp4", 5, 48, 64)
    picture = np.zeros((40, 60, 3), np.uint8)
    picture[:20] = (250, 0, 0)
    for name in ("a.png", "b.JPG"):
        Image.fromarray(picture).save(tmp_path / name, quality=95)
        (tmp_path / name).with_suffix(".txt").write_text(name)
    (tmp_path / "broken.webp").write_bytes(b"nothing")
    (tmp_path / "broken.txt").write_text("broken")
    film, still = size(5, 32, 48), size(1, 32, 32)
    found = sort_videos(videos_in(tmp_path), (film, still), notes=tmp_path / "sizes.jsonl")
    names = {key: [file.name for file, _ in held] for key, held in found.buckets.items()}
    assert names == {film: ["film.mp4"], still: ["a.png", "b.JPG"]}
    (reason,) = found.left_out.values()
    assert "broken.webp: could not be read as an image" in reason
    clips = VideoClips(videos=found.buckets[still], size=still)
    assert clips.caption(0) == "a.png"
    for index in range(2):
        video = clips[index]["video"]
        assert video.shape == (1, 32, 32, 3)
        # JPEG keeps plain colours to a few steps of 255.
        np.testing.assert_allclose(video[0, 5, 16].astype(int), (250, 0, 0), atol=12)
        np.testing.assert_allclose(video[0, 27, 16].astype(int), (0, 0, 0), atol=12)


class Numbered:
    """Samples that are their own numbers, in rows of some width."""

    def __init__(self, count, width):
        self.count, self.width = count, width

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"rows": np.full(self.width, index)}


def drawn(batches, count):
    return [next(batches)["rows"] for _ in range(count)]


BOTH = (Numbered(8, 2), Numbered(24, 3))
ORDER = Order(batch=4, seed=3)


def test_a_batch_has_one_size_and_a_pass_has_every_clip():
    found = drawn(Batches(BOTH, ORDER), 16)
    for width, count in ((2, 8), (3, 24)):
        numbers = np.concatenate([rows[:, 0] for rows in found if rows.shape[1] == width])
        # Two passes: every clip twice, and in another order.
        assert sorted(numbers) == sorted([*range(count)] * 2)
        assert numbers[:count].tolist() != numbers[count:].tolist()


def test_a_stream_of_several_sizes_goes_on_from_its_position():
    expected = drawn(Batches(BOTH, ORDER), 11)
    first = Batches(BOTH, ORDER)
    drawn(first, 5)
    later = Batches(BOTH, ORDER)
    later.seek(json.loads(json.dumps(first.position)))
    for one, other in zip(drawn(later, 6), expected[5:], strict=True):
        np.testing.assert_array_equal(one, other)


def on_processes(monkeypatch, count, batches, position=None):
    """The batches of several processes, each with the rows of all, and their position after."""
    monkeypatch.setattr(jax, "process_count", lambda: count)
    shares, positions = [], []
    for index in range(count):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        stream = Batches(BOTH, ORDER)
        if position is not None:
            stream.seek(json.loads(json.dumps(position)))
        shares.append(drawn(stream, batches))
        positions.append(stream.position)
    assert all(other == positions[0] for other in positions)
    return [np.concatenate(rows) for rows in zip(*shares, strict=True)], positions[0]


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_run_goes_on_at_the_same_row_on_another_number_of_processes(monkeypatch, before, after):
    whole = drawn(Batches(BOTH, ORDER), 9)
    first, position = on_processes(monkeypatch, before, 5)
    rest, _ = on_processes(monkeypatch, after, 4, position)
    for found, expected in zip([*first, *rest], whole, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_another_order_is_said_and_another_batch_size_goes_on_after_as_many_clips(caplog):
    clips = Numbered(24, 1)
    first = Batches(clips, Order(batch=4, seed=None))
    drawn(first, 3)
    larger = Batches(clips, Order(batch=6, seed=None))
    larger.seek(first.position)
    assert drawn(larger, 1)[0][:, 0].tolist() == [12, 13, 14, 15, 16, 17]
    assert "in another order than before (batch 4, now 6)" in caplog.text
    caplog.clear()
    Batches(clips, Order(batch=4, seed=1)).seek(first.position)
    assert "seed None, now 1" in caplog.text
    caplog.clear()
    older = {"next_index": 3}  # as checkpoints of earlier versions have it
    again = Batches(clips, Order(batch=4, seed=None))
    again.seek(older)
    assert drawn(again, 1)[0][:, 0].tolist() == [12, 13, 14, 15]
    assert not caplog.text


def test_a_size_with_too_few_clips_is_named():
    with pytest.raises(ProblemsFound, match=r"size 1 of 2=8: .*one batch of 9.*video_buckets"):
        Batches(BOTH, Order(batch=9))
