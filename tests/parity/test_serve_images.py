"""The server with models that take images and videos, on checkpoints made by the test."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiffusion.config.load import parse_config
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.runtime.video import read_video, write_video
from maxdiffusion.serving.device.worker import Worker
from tests.oracle.tiny_checkpoints import TransformerSize, VaeSize
from tests.oracle.tiny_family import (
    wan21_flf2v,
    wan21_vace,
    wan22_animate,
    wan22_i2v,
    wan22_ti2v,
    write_family,
)
from tests.serving.real_server import TINY, RealServer

SMALL = {"transformer": TransformerSize(heads=3, head_dim=20, layers=2, ffn=72)}
SMALL_VAE = {"vae": VaeSize(base=8, multipliers=(1, 1, 2, 2), res_blocks=1)}
PROMPT = {"prompt": "a small robot walks", "num_inference_steps": 2}
MODELS = {
    "image to video": (wan22_i2v(11, **SMALL, **SMALL_VAE), ("model_type=I2V",), True),
    "text or image": (
        wan22_ti2v(14, **SMALL),
        ("model_type=T2V", "model_name=wan2.2", "height=64", "width=64"),
        False,
    ),
}


def data_url(colour: str) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), colour).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@pytest.mark.parametrize("name", MODELS)
def test_a_video_begins_with_the_image_of_its_request(tmp_path: Path, name: str) -> None:
    tiny, options, required = MODELS[name]
    model = write_family(tmp_path / "model", tiny)
    server = RealServer(
        tmp_path,
        *(f"pretrained_model_name_or_path={model}", "height=32", "width=32", "num_frames=5"),
        *options,
    )
    try:
        bare = server.call("POST", "/v1/videos", PROMPT)
        assert ("error" in bare and bare["error"] is not None) == required, bare
        made = [
            server.call("POST", "/v1/videos", PROMPT | {"input_reference": data_url(colour)})
            for colour in ("red", "blue")
        ]
        wanted = [*made, *([] if required else [bare])]
        for video in wanted:
            server.wait(f"/v1/videos/{video['id']}", lambda now: now["status"] == "completed")
        files = [tmp_path / "videos" / f"{video['id']}.mp4" for video in wanted]
        frames = [read_video(file)[0] for file in files]
        assert all(one.shape == frames[0].shape for one in frames)
        assert len({one.tobytes() for one in frames}) == len(frames)
    finally:
        server.end()


def video_url(folder: Path, value: int) -> str:
    path = folder / f"{value}.mp4"
    frames = np.full((5, 32, 32, 3), value, np.uint8)
    frames[:, 8:24, 8:24] = 255
    write_video(path, frames, fps=8)
    return f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"


def made_videos(server: RealServer, requests: list[dict[str, object]]) -> list[bytes]:
    """Returns the frames of the videos of requests."""
    identifiers = [server.call("POST", "/v1/videos", PROMPT | one)["id"] for one in requests]
    found = []
    for identifier in identifiers:
        ended = server.wait(
            f"/v1/videos/{identifier}", lambda now: now["status"] in ("completed", "failed")
        )
        assert ended["status"] == "completed", ended
        file = server.log.parent / "videos" / f"{identifier}.mp4"
        found.append(read_video(file)[0].tobytes())
    return found


def test_vace_takes_video_mask_and_references(tmp_path: Path) -> None:
    model = write_family(
        tmp_path / "model", wan21_vace(12, control_layers=(0, 1), **SMALL, **SMALL_VAE)
    )
    server = RealServer(
        tmp_path,
        *(f"pretrained_model_name_or_path={model}", "height=32", "width=32", "num_frames=5"),
        *("model_name=wan2.1", "guidance_scale=1.0", "per_device_batch_size=1"),
    )
    try:
        video, mask = video_url(tmp_path, 90), video_url(tmp_path, 0)
        requests = [
            {},
            {"input_video": video},
            {"input_video": video, "conditioning_scale": 0.5},
            {"input_video": video, "input_mask": mask},
            {"input_video": video, "reference_images": [data_url("red"), data_url("blue")]},
        ]
        assert len({*made_videos(server, requests)}) == len(requests)
        assert server.call("POST", "/v1/videos", PROMPT | {"input_mask": mask})["error"]
    finally:
        server.end()


def test_a_model_of_two_images_needs_both(tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", wan21_flf2v(13, **SMALL, **SMALL_VAE))
    server = RealServer(
        tmp_path,
        *(f"pretrained_model_name_or_path={model}", "height=32", "width=32", "num_frames=5"),
        *("model_name=wan2.1", "model_type=I2V", "guidance_scale=1.0"),
    )
    try:
        first = {"input_reference": data_url("red")}
        refused = server.call("POST", "/v1/videos", PROMPT | first)
        assert refused["error"]["param"] == "input_last_image"
        requests = [first | {"input_last_image": data_url(end)} for end in ("green", "blue")]
        assert len({*made_videos(server, requests)}) == 2
    finally:
        server.end()


def test_animate_is_refused_at_the_start(tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", wan22_animate(15))
    values = {
        "pretrained_model_name_or_path": str(model),
        "model_type": "I2V",
        "serve_dir": str(tmp_path / "state"),
    }
    with pytest.raises(ProblemsFound, match="generate_wan_animate"):
        Worker.resolve(parse_config(str(TINY), values))
