"""Start images: decoded from content, limited, kept by digest; no address is opened."""

import base64
import io

import pytest
from PIL import Image

from maxdiffusion.serving.errors import ApiError
from maxdiffusion.serving.images import MOST_PIXELS, InputImages, clean_image, given_image
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
    started.api.offer = offer_of(started.config, images="required")
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
            given_image(fields)
        assert raised.value.param == "input_reference"


def test_a_request_with_a_file_keeps_its_picture(server):
    client = server.client()
    files = {"prompt": (None, "x"), "input_reference": ("../../a.svg", picture("JPEG"))}
    made = client.post("/v1/videos", files=files)
    assert made.status_code == 200, made.text
    digest = made.json()["settings"]["input_reference"]
    assert server.queue.images.path(digest).exists()
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


def test_pictures_of_no_job_are_removed(tmp_path):
    images = InputImages(tmp_path)
    kept, gone = images.keep(picture()), images.keep(picture(size=(48, 48)))
    images.sweep({kept})
    assert images.path(kept).exists()
    assert not images.path(gone).exists()
    with pytest.raises(ValueError, match="not a digest"):
        images.path("../x")
