"""Two runs of the command: the second finds its prompts encoded, and makes the same files."""

import threading

import pytest

from maxdiffusion.config.load import read_config
from maxdiffusion.generation import generate as command
from maxdiffusion.generation import resume as video_writer
from maxdiffusion.pipelines.wan import WanPipeline
from tests.generation.command_line import ROOT, TINY

MODEL = ROOT / "tests" / "goldens" / "wan22_t2v"
SOON = 60  # seconds


def run(folder, output):
    parsed = read_config(
        [
            *(str(TINY), f"pretrained_model_name_or_path={MODEL}"),
            *("height=16", "width=16", "num_frames=1", "num_inference_steps=2", "seed=3"),
            *(f"prompts_file={folder / 'prompts.txt'}", "per_device_batch_size=0.125"),
            *("num_videos=1", "negative_prompt=blurred"),
            f"prompt_embeddings_cache_dir={folder / 'prompts'}",
            *(f"aot_cache_dir={folder / 'programs'}", f"output_dir={folder / output}"),
        ]
    )
    command.generate(parsed)
    return [file.read_bytes() for file in sorted((folder / output).glob("*.mp4"))]


@pytest.mark.slow
def test_a_run_without_text_encoder_makes_the_same_videos(tmp_path, capsys, monkeypatch):
    (tmp_path / "prompts.txt").write_text("a red fox\na quiet harbour\n")
    # The file of the first video is held back until the second video is being made.
    made, making, write_video = [], threading.Event(), video_writer.write_video
    denoise = WanPipeline.denoise

    def count(*arguments):
        made.append(arguments)
        if len(made) == 2:
            making.set()
        return denoise(*arguments)

    def hold_back(path, frames, **about):
        assert making.wait(SOON)
        assert frames.dtype == "uint8"
        write_video(path, frames, **about)

    monkeypatch.setattr(WanPipeline, "denoise", count)
    monkeypatch.setattr(video_writer, "write_video", hold_back)
    first = run(tmp_path, "first")
    said = capsys.readouterr().out
    assert "prompt embeddings: 0 of 3 are in" in said
    assert "aot_cache_dir: stored text_encoder" in said
    assert len(first) == 2

    loaded, load = [], command.load_wan_parameters

    def keep(*arguments, **options):
        loaded.append(load(*arguments, **options))
        return loaded[-1]

    monkeypatch.setattr(command, "load_wan_parameters", keep)
    second = run(tmp_path, "second")
    said = capsys.readouterr().out
    assert "prompt embeddings: 3 of 3 are in" in said
    assert "the text encoder is not loaded" in said
    assert "NOT loaded" not in said
    assert "aot_cache_dir: text_encoder" not in said, "neither compiled nor read"
    assert loaded[0].parameters.text_encoder is None
    assert second == first
