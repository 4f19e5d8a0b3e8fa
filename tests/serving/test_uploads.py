"""Files of requests: decoded from content, limited, kept by digest; no address is opened."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from maxdiffusion.runtime.video import write_video
from maxdiffusion.serving import uploads
from maxdiffusion.serving.errors import ApiError
from maxdiffusion.serving.uploads import MOST_PIXELS, InputFiles, clean_image, given_files
from tests.serving.stand_in import StandIn, offer_of

PROMPT = {"prompt": "x"}


def picture(kind="PNG", size=(32, 24), mode="RGB"):
    buffer = io.BytesIO()
    Image.new(mode, size, 100).save(buffer, format=kind)
    return buffer.getvalue()


def data_url(content):
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@pytest.fixture
def server(tmp_path):
    started = StandIn(tmp_path)
    started.api.offer = offer_of(started.config, inputs={"input_reference": True})
    yield started
    started.stop()


def code(answer):
    return answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_pictures_become_png(kind):
    cleaned = Image.open(io.BytesIO(clean_image(picture(kind))))
    assert (cleaned.format, cleaned.size, cleaned.mode) == ("PNG", (32, 24), "RGB")


def test_transparent_and_gray_pictures_become_colour():
    for mode in ("L", "LA", "RGBA", "P"):
        assert Image.open(io.BytesIO(clean_image(picture(mode=mode)))).mode == "RGB"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a picture",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        picture()[:40],
        picture("GIF", mode="L"),
        picture("TIFF"),
        picture(size=(1, 1)),
    ],
)
def test_other_content_is_refused(content):
    with pytest.raises(ApiError) as raised:
        clean_image(content)
    assert (raised.value.status, raised.value.code) == (400, "invalid_image")
    assert "0x" not in raised.value.message  # addresses of the decoder


def test_large_pictures_are_refused_before_they_are_decoded(monkeypatch):
    content = picture(size=(8000, 8000), mode="1")
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(ApiError, match=str(MOST_PIXELS)):
        clean_image(content)


@pytest.mark.parametrize(
    "value", ["http://127.0.0.1/", "file:///etc/passwd", "data:image/png;base64,%%", 7, ["x"]]
)
def test_addresses_and_other_values_are_refused(value):
    for fields in ({"input_reference": value}, {"input_reference": {"image_url": value}}):
        with pytest.raises(ApiError) as raised:
            given_files(fields, ["input_reference"])
        assert raised.value.param == "input_reference"


def test_a_request_with_a_file_keeps_its_picture(server):
    client = server.client()
    files = {"prompt": (None, "x"), "input_reference": ("../../a.svg", picture("JPEG"))}
    made = client.post("/v1/videos", files=files)
    assert made.status_code == 200, made.text
    digest = made.json()["settings"]["input_reference"]
    assert server.queue.files.path(digest).exists()
    url = client.post("/v1/videos", json=PROMPT | {"input_reference": data_url(picture("JPEG"))})
    assert url.json()["settings"]["input_reference"] == digest
    identifier = made.json()["id"]
    remixed = client.post(f"/v1/videos/{identifier}/remix", json={"prompt": "y"})
    assert remixed.json()["settings"]["input_reference"] == digest


def test_a_model_that_needs_a_picture_says_so(server):
    answer = server.client().post("/v1/videos", json=PROMPT)
    assert code(answer) == (400, "missing_field", "input_reference")
    broken = PROMPT | {"input_reference": data_url(b"x")}
    assert code(server.client().post("/v1/videos", json=broken)) == (
        *(400, "invalid_image"),
        "input_reference",
    )


def test_files_of_no_job_are_removed(tmp_path):
    files = InputFiles(tmp_path)
    kept = files.keep("input_reference", picture())
    gone = files.keep("input_reference", picture(size=(48, 48)))
    assert files.sweep({kept}, older_than=60) == 0  # its request may be on its way
    files.sweep({kept})
    assert files.path(kept).exists()
    assert not files.path(gone).exists()
    with pytest.raises(ValueError, match="not the name"):
        files.path("../x")


def video(tmp_path, *, frames=9, size=(48, 32), suffix=".mp4"):
    path = tmp_path / f"made{suffix}"
    noise = np.random.default_rng(0).integers(0, 255, (frames, size[1], size[0], 3), np.uint8)
    write_video(path, noise, fps=8)
    return path.read_bytes()


@pytest.fixture
def changes_videos(tmp_path):
    started = StandIn(tmp_path / "server")
    started.api.offer = offer_of(started.config, inputs={"input_video": False})
    yield started
    started.stop()


def test_a_video_is_kept_and_its_steps_follow_the_strength(changes_videos, tmp_path):
    files = {
        "prompt": (None, "x"),
        "strength": (None, "0.5"),
        "input_video": ("../../a.txt", video(tmp_path), "text/plain"),
    }
    made = changes_videos.client().post("/v1/videos", files=files).json()
    name = made["settings"]["input_video"]
    assert name.endswith(".mp4")
    assert changes_videos.queue.files.path(name).exists()
    assert (made["steps"], made["settings"]["num_inference_steps"]) == (10, 20)


@pytest.mark.parametrize(
    "content",
    [
        b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/x.ts\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"\x00\x00\x00\x18ftypmp42 and then nothing of a video",
        b"GIF89a",
        b"",
    ],
    ids=["playlist", "concat", "broken mp4", "broken gif", "empty"],
)
def test_other_videos_are_refused_and_leave_nothing(changes_videos, content):
    files = {"prompt": (None, "x"), "input_video": ("a.mp4", content, "video/mp4")}
    answer = changes_videos.client().post("/v1/videos", files=files)
    if content:
        assert code(answer) == (400, "invalid_video", "input_video")
    assert not [*(changes_videos.state / "inputs").glob("*")]


def test_a_video_that_is_cut_short_is_refused(changes_videos, tmp_path):
    content = video(tmp_path)
    with pytest.raises(ApiError, match=r"cut short|readable"):
        changes_videos.queue.files.keep("input_video", content[: len(content) // 2])


def test_videos_over_the_limits_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    content = video(tmp_path)
    monkeypatch.setattr(uploads, "read_frames", lambda *_, **__: pytest.fail("it was decoded"))
    with pytest.raises(ApiError, match="9 frames of 48x32 pixels; at most 10000 pixels"):
        InputFiles(tmp_path / "a", most_video_pixels=10_000).keep("input_video", content)
    monkeypatch.setattr(uploads, "MOST_VIDEO_FRAMES", 8)
    with pytest.raises(ApiError, match="at most 8 are read"):
        InputFiles(tmp_path / "b").keep("input_video", content)


def test_masks_and_references_belong_to_models_that_take_them(server, tmp_path):
    server.api.offer = offer_of(
        server.config,
        inputs={"input_video": False, "input_mask": False, "reference_images": False},
    )
    client = server.client()
    content = video(tmp_path)
    alone = {"prompt": (None, "x"), "input_mask": ("m", content)}
    assert code(client.post("/v1/videos", files=alone)) == (400, "missing_field", "input_mask")
    several = [
        ("prompt", (None, "x")),
        ("input_video", ("v", content)),
        ("reference_images[]", ("a", picture())),
        ("reference_images[]", ("b", picture(size=(48, 48)))),
    ]
    made = client.post("/v1/videos", files=several).json()
    assert len(made["settings"]["reference_images"]) == 2
    many = [("prompt", (None, "x")), *[("reference_images", ("a", picture()))] * 5]
    assert code(client.post("/v1/videos", files=many))[1:] == ("invalid_image", "reference_images")


def test_a_file_goes_with_the_last_job_that_needs_it(server):
    client = server.client()
    body = PROMPT | {"input_reference": data_url(picture())}
    one, other = (client.post("/v1/videos", json=body).json() for _ in range(2))
    path = server.queue.files.path(one["settings"]["input_reference"])
    client.delete(f"/v1/videos/{one['id']}")
    assert path.exists()
    client.delete(f"/v1/videos/{other['id']}")
    assert not path.exists()


def test_files_of_expired_jobs_and_of_refused_requests_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("maxdiffusion.serving.queue.SWEEP_SECONDS", -1.0)
    monkeypatch.setattr("maxdiffusion.serving.queue.ORPHAN_SECONDS", 0.0)
    server = StandIn(tmp_path, serve_max_queue=1)
    server.api.offer = offer_of(server.config, inputs={"input_reference": True})
    body = PROMPT | {"input_reference": data_url(picture())}
    refused = PROMPT | {"input_reference": data_url(picture(size=(48, 48)))}
    made = server.client().post("/v1/videos", json=body).json()
    assert server.client().post("/v1/videos", json=refused).status_code == 429
    kept = server.state / "inputs" / made["settings"]["input_reference"]
    server.queue.tidy()
    assert [*kept.parent.iterdir()] == [kept]
    server.make_all()
    monkeypatch.setattr("maxdiffusion.serving.queue.now", lambda: made["created_at"] + 10**7)
    server.queue.tidy()
    assert not kept.exists()
    server.stop()
