"""Adapters of a real server with 8-bit weights: strengths change, and nothing is compiled."""

import json
from pathlib import Path

import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.pipelines.spec import open_wan_folder
from maxdiffusion.serving.device.start import ServedAdapters
from tests.oracle.lora_files import write_lora
from tests.serving.real_server import RealServer
from tests.serving.stand_in import config_of

PROMPT = {"prompt": "a red circle moves right on a white background", "seed": 3}
ENDED = ("completed", "failed")


def written(folder: Path) -> Path:
    opened, _ = open_wan_folder("embedded")
    tensors = opened.weights["transformer"].tensors
    path = folder / "Ink on Paper.safetensors"
    write_lora(path, {name: tensor.shape for name, tensor in tensors.items()}, "diffusers")
    return path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_strengths_change_between_videos_without_compiling(tmp_path):
    table = {"lora_model_name_or_path": [str(written(tmp_path))], "scale": [2.0]}
    server = RealServer(
        tmp_path,
        *("height=32", "width=32", "enable_lora=true", "lora_rank=8"),
        *("use_qwix_quantization=true", "quantization=int8"),
        f"lora_config={json.dumps(table)}",
    )
    try:
        contents = []
        for factor in (0, 1, 0.5, 0):
            made = server.call("POST", "/v1/videos", PROMPT | {"lora_ink_on_paper": factor})
            done = server.wait(
                f"/v1/videos/{made['id']}",
                lambda video: video["status"] not in ("queued", "in_progress"),
            )
            assert done["status"] == "completed", done
            contents.append(server.fetch(f"/v1/videos/{made['id']}/content?variant=spritesheet"))
        none, full, half, none_again = contents
        assert none == none_again
        assert len({none, full, half}) == 3
        said = server.log.read_text()
        assert "in the background" not in said
        assert "lossy: int8 weights of blocks" in said
        assert "lora_ink_on_paper" in server.call("GET", "/v1/server")["fields"]
    finally:
        server.end()


def test_names_that_requests_cannot_use_are_refused(tmp_path):
    _, spec = open_wan_folder("embedded")
    table = {
        "lora_model_name_or_path": ["a.safetensors", "b.safetensors"],
        "adapter_name": ["x", "Ö"],
    }
    config = config_of(tmp_path, enable_lora=True, lora_rank=4, lora_config=table)
    with pytest.raises(ProblemsFound, match="a-z, 0-9"):
        ServedAdapters.of(config, spec)
    twice = table | {"adapter_name": ["x", "x"]}
    config = config_of(tmp_path, enable_lora=True, lora_rank=4, lora_config=twice)
    with pytest.raises(ProblemsFound, match="two files"):
        ServedAdapters.of(config, spec)
    fused = config_of(tmp_path, enable_lora=True, lora_config=table)
    assert ServedAdapters.of(fused, spec).names == ()
