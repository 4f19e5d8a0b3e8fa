"""Inputs of a person: every way to give an image or a video, and one line for each bad one."""

import http.server
import io
import struct
import threading
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.runtime import download, images
from maxdiffusion.runtime.images import frame_files, frame_images, load_image, load_video
from maxdiffusion.runtime.video import resampled, write_video

ROTATE_90 = 6  # EXIF orientation: the camera was turned, show it turned clockwise


def colours(rows=6, columns=9, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), dtype=np.uint8)


def encoded(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def problem(call):
    with pytest.raises(ProblemsFound) as caught:
        call()
    (found,) = caught.value.problems
    assert "\n" not in str(found)
    return str(found)


@pytest.fixture
def png(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(colours()).save(path)
    return path


class Responses(http.server.BaseHTTPRequestHandler):
    """Answers by the server's table of path -> (code, headers, body)."""

    def do_GET(self):
        code, headers, body = self.server.table[self.path.split("?")[0]]
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Responses) as running:
        running.table = {}
        running.address = f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


# Images


def test_every_source_gives_the_same_image(png, server):
    server.table["/a.png"] = (200, {"Content-Type": "image/png"}, png.read_bytes())
    sources = {
        "path": png,
        "text": str(png),
        "address": f"{server.address}/a.png",
        "bytes": png.read_bytes(),
        "image": Image.open(png),
        "array": colours(),
    }
    for kind, source in sources.items():
        image = load_image(source)
        assert image.mode == "RGB", kind
        np.testing.assert_array_equal(np.asarray(image), colours(), kind)


def test_a_float_array_stays_exact():
    pixels = np.random.default_rng(0).random((4, 5, 3))
    loaded = load_image(pixels)
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(loaded, pixels.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.bool_])
def test_grey_arrays_are_repeated_and_alpha_is_dropped(dtype):
    grey = np.eye(3, dtype=dtype)
    for array in (grey, grey[..., None]):
        loaded = np.asarray(load_image(array))
        assert loaded.shape == (3, 3, 3)
        assert loaded.max() == (1 if dtype == np.float32 else 255 if dtype == np.bool_ else 1)
    transparent = np.dstack([colours(), np.zeros((6, 9), np.uint8)])
    np.testing.assert_array_equal(np.asarray(load_image(transparent)), colours())


def test_a_photo_is_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = ROTATE_90
    photo = encoded(Image.fromarray(colours()), exif=exif)
    expected = np.rot90(colours(), k=-1)
    np.testing.assert_array_equal(np.asarray(load_image(photo)), expected)


def test_clipped_grey_is_said(caplog):
    deep = Image.fromarray(np.array([[3, 300]], np.uint16))
    np.testing.assert_array_equal(np.asarray(load_image(deep))[..., 0], [[3, 255]])
    assert "above 255 become white" in caplog.text


def test_bad_images_are_one_line_each(tmp_path, png, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("not pixels")
    empty = tmp_path / "empty.png"
    empty.write_bytes(b"")
    whole = encoded(Image.fromarray(colours(90, 90)))
    bad = {
        "no such file": tmp_path / "none.png",
        "is a folder": tmp_path,
        "is not an image": text,
        "is empty": empty,
        "cut short": whole[: len(whole) // 2],
        "has no pixels": np.zeros((0, 5, 3), np.uint8),
        "must be a path": 3,
        "1, 3 or 4 channels": np.zeros((4, 5, 2), np.uint8),
        "must be uint8": np.zeros((4, 5, 3), np.int64),
        "floats must be in 0..1": np.full((4, 5, 3), -1.0),
        "they are in nan..nan": np.full((4, 5, 3), np.nan),
        "must be the path": "",
    }
    for rule, source in bad.items():
        line = problem(lambda source=source: load_image(source, name="image_url"))
        assert line.startswith("image_url="), line
        assert rule in line
    assert "no pixels" in problem(lambda: load_image(Image.new("RGB", (0, 4))))
    monkeypatch.setattr(images, "MOST_IMAGE_PIXELS", 53)
    assert "million pixels" in problem(lambda: load_image(png))
    monkeypatch.setattr(images, "MOST_IMAGE_BYTES", 60)
    assert "has more than" in problem(lambda: load_image(png))


@pytest.mark.parametrize("side", [9_000, 10_000, 60_000])
def test_an_enormous_image_is_refused_before_it_is_decoded(side):
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    small = encoded(Image.fromarray(colours()))
    large = small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:]
    assert "has more than 80 million pixels" in problem(lambda: load_image(large))


# Addresses


def test_bad_answers_are_one_line_each(server, png):
    image = {"Content-Type": "image/png"}
    server.table = {
        "/page": (200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>"),
        "/large": (200, {**image, "Content-Length": str(10**10)}, b""),
        "/missing": (404, {}, b""),
        "/loop": (302, {"Location": "/loop"}, b""),
        "/file": (302, {"Location": f"file://{png}"}, b""),
        "/ftp": (302, {"Location": "ftp://127.0.0.1/a.png"}, b""),
        "/lost": (200, {**image, "Content-Length": "5000"}, b"12345"),
        "/text": (200, image, b"not pixels"),
    }
    expected = {
        "/page": "the server sends text/html",
        "/large": "has more than 100 MB",
        "/missing": "HTTP 404",
        "/loop": "cannot be downloaded",
        "/file": "is not allowed",
        "/ftp": "redirects to another protocol",
        "/lost": "the connection was lost after 5 bytes",
        "/text": "is not an image",
    }
    for path, rule in expected.items():
        line = problem(lambda path=path: load_image(f"{server.address}{path}?key=secret"))
        assert rule in line, line
        assert "secret" not in line
    assert "cannot be downloaded" in problem(lambda: load_image("http://[bad"))


def test_redirects_are_followed(server, png):
    server.table = {
        "/old": (301, {"Location": "/new"}, b""),
        "/new": (200, {"Content-Type": "application/octet-stream"}, png.read_bytes()),
    }
    np.testing.assert_array_equal(np.asarray(load_image(f"{server.address}/old")), colours())


def test_a_long_body_ends_at_the_limit(server):
    server.table["/a"] = (200, {"Content-Type": "image/png"}, b"x" * 5000)
    limits = download.Limits(types=("image/",), bytes=4999)
    line = problem(lambda: download.download("image", f"{server.address}/a", limits))
    assert "has more than" in line
    assert (
        len(
            download.download(
                "image", f"{server.address}/a", download.Limits(types=("image/",), bytes=5000)
            )
        )
        == 5000
    )
    slow = download.Limits(types=("image/",), bytes=5000, seconds=0)
    assert "took longer" in problem(lambda: download.download("image", f"{server.address}/a", slow))


# Videos


def clip(frames=6, rows=32, columns=48):
    """Returns frames whose grey tells their number."""
    levels = np.arange(frames, dtype=np.uint8) * 20
    return np.broadcast_to(levels[:, None, None, None], (frames, rows, columns, 3)).copy()


def numbers(frames):
    """Returns the numbers of the frames of `clip`."""
    return np.rint(frames.mean((1, 2, 3)) / 20).astype(int).tolist()


@pytest.fixture
def mp4(tmp_path):
    write_video(tmp_path / "a.mp4", clip(), fps=24)
    return tmp_path / "a.mp4"


def test_every_source_gives_the_frames(tmp_path, mp4, server):
    folder = tmp_path / "frames"
    folder.mkdir()
    for index, frame in enumerate(clip(12)):
        Image.fromarray(frame).save(folder / f"frame{index}.png")
    (folder / "notes.txt").write_text("no frame")
    server.table["/a.mp4"] = (200, {"Content-Type": "video/mp4"}, mp4.read_bytes())
    assert numbers(load_video(mp4)) == numbers(load_video(str(mp4))) == list(range(6))
    assert numbers(load_video(f"{server.address}/a.mp4?a=b")) == list(range(6))
    assert numbers(load_video(folder)) == list(range(12))
    assert [file.name for file in frame_files(folder)][2] == "frame2.png"
    np.testing.assert_array_equal(load_video(clip()), clip())
    np.testing.assert_array_equal(load_video(list(clip())), clip())
    pictures = [Image.fromarray(frame).convert("L") for frame in clip()]
    np.testing.assert_array_equal(load_video(pictures), clip())
    floats = clip().astype(np.float32) / 255
    np.testing.assert_array_equal(load_video(floats), floats)
    np.testing.assert_array_equal(frame_images(floats)[2], floats[2])
    np.testing.assert_array_equal(np.asarray(frame_images(clip())[2]), clip()[2])


def test_gif_and_webm_are_read(tmp_path):
    pictures = [Image.fromarray(frame) for frame in clip()]
    pictures[0].save(tmp_path / "a.gif", save_all=True, append_images=pictures[1:], duration=100)
    assert numbers(load_video(tmp_path / "a.gif")) == list(range(6))
    import av

    with av.open(str(tmp_path / "a.webm"), "w") as container:
        stream = container.add_stream("libvpx", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for frame in clip():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    assert numbers(load_video(tmp_path / "a.webm")) == list(range(6))


def test_files_are_resampled_to_the_nearest_frame(mp4):
    assert numbers(load_video(mp4, fps=24)) == [0, 1, 2, 3, 4, 5]
    assert numbers(load_video(mp4, fps=16)) == [0, 2, 3, 5]  # 0, 1.5, 3, 4.5
    assert numbers(load_video(mp4, fps=12)) == [0, 2, 4]
    assert numbers(load_video(mp4, fps=48)) == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert numbers(load_video(mp4, fps=16, most_frames=2)) == [0, 2]
    # Frames without a rate are taken as they are.
    assert numbers(load_video(clip(), fps=16)) == list(range(6))


@pytest.mark.parametrize("step", [Fraction(15, 8), Fraction(2, 3), Fraction(30000, 16016)])
def test_resampling_follows_time(step):
    found = list(resampled(range(100), step))
    times = np.array([float(index * step) for index in range(len(found))])
    assert np.abs(np.array(found) - times).max() <= 0.5
    assert found[-1] >= 98 - step


def cut(path: Path, share: float) -> Path:
    short = path.with_name("short.mp4")
    content = path.read_bytes()
    short.write_bytes(content[: int(len(content) * share)])
    return short


def test_bad_videos_are_one_line_each(tmp_path, mp4, png, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("not frames")
    (tmp_path / "empty").mkdir()
    bad = {
        "no such file": tmp_path / "none.mp4",
        "FFmpeg could not read it": text,
        "the folder has no frames": tmp_path / "empty",
        "has no frames": [],
        "must be [frames, height, width": np.zeros((4, 5, 3), np.uint8),
        "must be a path": 5,
        "all frames must have one size": [colours(4, 4), colours(4, 5)],
        "all frames must be of one kind": [colours(4, 4), np.zeros((4, 4, 3))],
        "has no pixels": np.zeros((4, 0, 5, 3), np.uint8),
    }
    for rule, source in bad.items():
        line = problem(lambda source=source: load_video(source, name="video_path"))
        assert line.startswith("video_path"), line
        assert rule in line, line
    assert "has no frames" in problem(lambda: load_video(np.zeros((0, 4, 5, 3), np.uint8)))
    monkeypatch.setattr(images, "MOST_VIDEO_PIXELS", 5000)
    for source in (mp4, clip(), list(clip())):
        assert "million pixels" in problem(lambda source=source: load_video(source))


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.99])
def test_a_video_that_is_cut_short_is_refused(tmp_path, share):
    noise = np.random.default_rng(0).integers(0, 256, (12, 64, 64, 3), dtype=np.uint8)
    write_video(tmp_path / "noise.mp4", noise, fps=16)
    line = problem(lambda: load_video(cut(tmp_path / "noise.mp4", share)))
    assert "cut short" in line or "FFmpeg could not read it" in line


def test_all_bad_frames_are_named(tmp_path):
    with pytest.raises(ProblemsFound) as caught:
        load_video([tmp_path / "a.png", colours(), tmp_path / "b.png"], name="video")
    assert [found.name for found in caught.value.problems] == ["video[0]", "video[2]"]
