"""The server with models that begin with an image, on checkpoints made by the test."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from maxdiffusion.runtime.video import read_video
from tests.oracle.tiny_checkpoints import TransformerSize, VaeSize
from tests.oracle.tiny_family import wan22_i2v, wan22_ti2v, write_family
from tests.serving.real_server import RealServer

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
