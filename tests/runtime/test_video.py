"""Video files: written, read back, and never partial."""

import json
import resource
import stat
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from maxdiffusion.runtime import video
from maxdiffusion.runtime.video import (
    VideoError,
    VideoMetadata,
    measure_video,
    read_clip,
    read_metadata,
    read_video,
    to_bytes,
    write_video,
)


def moving_ramp(frames=5, rows=48, columns=64):
    """Red changes by two shades a column and green by two a row, so halved chroma loses little."""
    y, x = np.mgrid[0:rows, 0:columns].astype(np.float32)
    reds = [60 + 2 * (x + t) for t in range(frames)]
    return np.stack([np.stack([red, 60 + 2 * y, 0 * x + 128], axis=-1) for red in reds]) / 255


def test_floats_are_cut_off_as_diffusers_does():
    frame = np.array([0.0, 0.9999 / 255, 0.5, 254.99 / 255, 1.0], np.float32)
    np.testing.assert_array_equal(to_bytes(frame), [0, 0, 127, 254, 255])
    np.testing.assert_array_equal(to_bytes(np.array([-0.1, 1.1])), [0, 255])
    already = np.arange(3, dtype=np.uint8)
    assert to_bytes(already) is already


@pytest.mark.parametrize("size", [(48, 64), (16, 16), (34, 50), (33, 47)])
def test_size_frames_and_speed_are_kept(tmp_path, size):
    frames = moving_ramp(7, *size)
    write_video(tmp_path / "a.mp4", frames, fps=24)
    back, fps = read_video(tmp_path / "a.mp4")
    assert back.shape == frames.shape
    assert fps == 24
    error = np.abs(back.astype(int) - to_bytes(frames))
    assert error.mean() < 3  # chroma at half the size and libx264's own loss


def test_colours_come_back(tmp_path):
    for colour in np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1], [0, 0, 0]], np.float32):
        write_video(tmp_path / "a.mp4", np.broadcast_to(colour, (1, 32, 32, 3)), fps=16)
        pixel = read_video(tmp_path / "a.mp4")[0][0, 16, 16]
        # 8-bit luma and chroma have about 220 levels for 256 shades
        np.testing.assert_allclose(pixel, 255 * colour, rtol=0, atol=3)


def test_bytes_and_floats_give_the_same_file(tmp_path):
    frames = moving_ramp()
    write_video(tmp_path / "floats.mp4", frames, fps=16)
    write_video(tmp_path / "bytes.mp4", to_bytes(frames), fps=16)
    assert (tmp_path / "floats.mp4").read_bytes() == (tmp_path / "bytes.mp4").read_bytes()


@pytest.mark.parametrize(
    "prompt",
    [
        "A cat and a dog baking a cake.",
        "",
        "quotes \" ' ` and = signs; # and \\ back\\slashes",
        "two\nlines\r\nand\ttabs \n",
        "-metadata title=x [section] ;comment",
        "猫が踊る 🐈 café",
        "long = ; # \\ \n" * 20_000,
    ],
    ids=["plain", "empty", "signs", "lines", "options", "unicode", "long"],
)
def test_prompt_and_settings_survive(tmp_path, prompt):
    settings = {"prompt": prompt, "seed": 7, "guidance": [4.0, 3.0], "boundary": None}
    metadata = VideoMetadata(prompt=prompt, settings=settings)
    write_video(tmp_path / "a.mp4", moving_ramp(1), fps=16, metadata=metadata)
    tags = read_metadata(tmp_path / "a.mp4")
    assert tags.get("title", "") == prompt
    assert json.loads(tags["comment"]) == settings


def test_a_prompt_does_not_change_how_a_video_is_read(tmp_path):
    prompt = "Stream #0:0: Video: rawvideo, rgb24, 2x2, 3 fps, 3 tbn"
    metadata = VideoMetadata(prompt=prompt, settings={"prompt": prompt})
    write_video(tmp_path / "a.mp4", moving_ramp(2), fps=16, metadata=metadata)
    frames, fps = read_video(tmp_path / "a.mp4")
    assert frames.shape == (2, 48, 64, 3)
    assert fps == 16


def test_text_without_utf8_survives_in_the_settings(tmp_path):
    settings = {"prompt": "half \ud83d a pair and \0"}
    metadata = VideoMetadata(prompt=settings["prompt"], settings=settings)
    write_video(tmp_path / "a.mp4", moving_ramp(1), fps=16, metadata=metadata)
    assert json.loads(read_metadata(tmp_path / "a.mp4")["comment"]) == settings


def test_without_metadata_the_file_says_nothing(tmp_path):
    write_video(tmp_path / "a.mp4", moving_ramp(1), fps=16)
    assert not {"title", "comment"} & set(read_metadata(tmp_path / "a.mp4"))


def test_folder_is_made_and_only_the_video_is_in_it(tmp_path):
    target = tmp_path / "new" / "folder" / "a.mp4"
    write_video(target, moving_ramp(1), fps=16)
    assert list(target.parent.iterdir()) == [target]
    assert target.stat().st_mode & stat.S_IRUSR


class Interrupted(np.ndarray):
    """Frames that fail after the first."""

    def __iter__(self):
        yield np.asarray(self[0])
        raise KeyboardInterrupt


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "a.mp4"
    write_video(target, moving_ramp(2), fps=16)
    before = target.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write_video(target, moving_ramp(3).view(Interrupted), fps=16)
    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]


@pytest.fixture
def small_files():
    """Limits files to 4 KiB: writes beyond fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_disk_error_is_reported_and_nothing_is_left(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (20, 64, 64, 3), np.uint8)
    with pytest.raises(VideoError, match=r"a\.mp4: FFmpeg could not write it: File too large"):
        write_video(tmp_path / "a.mp4", noise, fps=16)
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_that_is_missing_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "CODEC", "no_such_codec")
    with pytest.raises(VideoError, match=r"a\.mp4.*no_such_codec"):
        write_video(tmp_path / "a.mp4", moving_ramp(1), fps=16)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", [(48, 64, 3), (5, 48, 64), (5, 48, 64, 4), (0, 48, 64, 3)])
@pytest.mark.usefixtures("unchecked_types")
def test_other_shapes_are_refused(tmp_path, shape):
    with pytest.raises(ValueError, match=r"\[frames, height, width, 3\]"):
        write_video(tmp_path / "a.mp4", np.zeros(shape, np.float32), fps=16)


@pytest.mark.parametrize("fps", [0, -1, float("nan")])
def test_impossible_speeds_are_refused(tmp_path, fps):
    with pytest.raises(ValueError, match="fps"):
        write_video(tmp_path / "a.mp4", moving_ramp(1), fps=fps)


@pytest.mark.parametrize("read", [read_video, read_metadata])
def test_unreadable_files_are_named(tmp_path, read):
    with pytest.raises(VideoError, match=r"missing\.mp4"):
        read(tmp_path / "missing.mp4")
    (tmp_path / "text.mp4").write_text("not a video")
    with pytest.raises(VideoError, match=r"text\.mp4"):
        read(Path(tmp_path / "text.mp4"))


def test_a_file_without_video_is_named(tmp_path):
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        container.mux(stream.encode(None))
    with pytest.raises(VideoError, match=r"sound\.mp4"):
        measure_video(tmp_path / "sound.mp4")


def disc(frames=9, rows=64, columns=48):
    """A red disc that moves over white, as the model in the package draws it."""
    y, x = np.mgrid[0:rows, 0:columns]
    inside = [np.hypot(y - 30, x - 14 - 2 * t) < 10 for t in range(frames)]
    clip = np.where(np.stack(inside)[..., None], (220, 40, 30), 255)
    return (
        (clip + np.random.default_rng(0).integers(-9, 1, clip.shape)).clip(0, 255).astype("uint8")
    )


@pytest.mark.parametrize("frames", [moving_ramp(), disc()], ids=["ramp", "disc"])
def test_the_same_frames_give_the_same_file(tmp_path, frames):
    files = set()
    for _ in range(12):
        write_video(tmp_path / "video.mp4", frames, fps=8)
        files.add((tmp_path / "video.mp4").read_bytes())
    assert len(files) == 1


def test_the_stream_is_h264_in_bt709(tmp_path):
    write_video(tmp_path / "a.mp4", moving_ramp(20), fps=23.976)
    with av.open(str(tmp_path / "a.mp4")) as container:
        (stream,) = container.streams
        context = stream.codec_context
        assert (context.name, context.pix_fmt) == ("h264", "yuv420p")
        assert (context.colorspace, context.color_range, context.color_trc) == (1, 1, 1)
        assert stream.average_rate == Fraction(23976, 1000)
        key_frames = [packet.is_keyframe for packet in container.demux(stream) if packet.size]
    assert key_frames == [True] + [False] * 19


def turned(source: Path, target: Path, degrees: int) -> Path:
    """Copies a video and marks it as filmed with the camera turned counterclockwise."""
    with av.open(str(source)) as read, av.open(str(target), "w") as written:
        stream = written.add_stream_from_template(read.streams.video[0])
        stream.set_display_rotation(degrees)
        for packet in read.demux(read.streams.video[0]):
            if packet.size:
                packet.stream = stream
                written.mux(packet)
    return target


@pytest.mark.parametrize("degrees", [90, 180, -90])
def test_a_turned_video_is_read_upright(tmp_path, degrees):
    frames = moving_ramp(3)
    write_video(tmp_path / "a.mp4", frames, fps=16)
    file = turned(tmp_path / "a.mp4", tmp_path / "b.mp4", degrees)
    plain, _ = read_video(tmp_path / "a.mp4")
    upright = np.rot90(plain, degrees // 90, axes=(1, 2))
    assert measure_video(file) == upright.shape[:3]
    found, _ = read_video(file)
    assert found.shape == upright.shape
    # Chroma is interpolated before or after the turn.
    assert np.abs(found.astype(int) - upright).mean() < 1
    clip = read_clip(file, frames=2, height=upright.shape[1], width=upright.shape[2])
    plain = read_clip(tmp_path / "a.mp4", frames=2, height=48, width=64)
    assert np.abs(clip.astype(int) - np.rot90(plain, degrees // 90, axes=(1, 2))).mean() < 1


def test_a_clip_covers_its_size_and_is_cropped_at_the_centre(tmp_path):
    frames = np.zeros((4, 32, 96, 3), np.uint8)
    frames[:, :, 32:64] = 255
    write_video(tmp_path / "a.mp4", frames, fps=16)
    clip = read_clip(tmp_path / "a.mp4", frames=3, height=16, width=16)
    assert clip.shape == (3, 16, 16, 3)
    assert clip[:, :, 2:-2].min() > 240
    assert len(read_clip(tmp_path / "a.mp4", frames=9, height=16, width=16)) == 4


def test_a_damaged_packet_costs_its_own_frames_only(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (30, 64, 64, 3), np.uint8)
    write_video(tmp_path / "a.mp4", noise, fps=16)
    data = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "b.mp4").write_bytes(data[: len(data) // 2])
    assert measure_video(tmp_path / "b.mp4")[1:] == (64, 64)
    whole, _ = read_video(tmp_path / "a.mp4")
    found, _ = read_video(tmp_path / "b.mp4")
    assert 0 < len(found) < 30
    np.testing.assert_array_equal(found[0], whole[0])
