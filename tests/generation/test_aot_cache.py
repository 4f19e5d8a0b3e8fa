"""A second run that starts from kept programs: it compiles none and makes the same frames."""

import re

import numpy as np
import pytest

from maxdiffusion.config.load import read_config
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.generation.settings import aot_cache_folder
from maxdiffusion.runtime.video import read_video
from tests.generation.command_line import TINY, generate_wan

PROGRAMS = ("text_encoder", "read_text", "start", "denoise_step", "decode")
SIZE = ("height=32", "width=32", "num_frames=5", "num_inference_steps=2", "seed=3")


def run(folder, cache):
    result = generate_wan(
        TINY,
        *SIZE,
        "prompt=a red circle",
        "output_name=video_{i}.mp4",
        f"output_dir={folder}",
        f"aot_cache_dir={cache}",
        f"jax_cache_dir={cache / 'jax'}",
        devices=2,
    )
    assert result.returncode == 0, result.stderr
    frames, _ = read_video(folder / "video_0.mp4")
    return result.stdout + result.stderr, np.asarray(frames)


# The programs as jax names them; `encode` is the text encoder.
FUNCTIONS = ("encode", "read_text", "start", "denoise_step", "decode")


def traces(said):
    """Returns how often each program was traced, from what jax says of its misses.

    The `start` of a sampler, a few operations, is also traced for the shapes of its state.
    """
    programs = re.findall(r"(\w+) id=\d+ defined at \S*maxdiffusion/pipelines/", said)
    return {function: programs.count(function) for function in FUNCTIONS}


@pytest.mark.slow
def test_a_second_process_loads_every_program_and_makes_the_same_frames(tmp_path, monkeypatch):
    cache = tmp_path / "programs"
    monkeypatch.setenv("JAX_EXPLAIN_CACHE_MISSES", "1")
    said, frames = run(tmp_path / "first", cache)
    for program in PROGRAMS:
        assert f"aot_cache_dir: {program} is NOT loaded but compiled" in said
    # A bit of one program is changed: that one is compiled again, loudly, and no other.
    (step,) = cache.glob("denoise_step-*")
    content = bytearray(step.read_bytes())
    content[-1] ^= 1
    step.write_bytes(bytes(content))
    said_again, frames_again = run(tmp_path / "second", cache)
    assert f"denoise_step is NOT loaded but compiled: {step.name}: its program is not" in said_again
    assert said_again.count("NOT loaded") == 1
    for program in set(PROGRAMS) - {"denoise_step"}:
        assert f"aot_cache_dir: {program} is loaded from {program}-" in said_again
    np.testing.assert_array_equal(frames, frames_again)
    # The step asks for the results of `read_text`, and gets those of its only trace.
    assert traces(said) == traces(said_again) == dict.fromkeys(FUNCTIONS, 1)
    assert "Time to first video, s: total " in said_again
    # XLA for CPUs cannot store what it has loaded: a third run would start from broken programs.
    assert said.count("jax_cache_dir is not used") == 1
    assert not (cache / "jax").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    config = read_config([str(TINY), f"aot_cache_dir={path}"]).config
    with pytest.raises(ProblemsFound, match=r"aot_cache_dir=.*nothing can be written there"):
        aot_cache_folder(config)
