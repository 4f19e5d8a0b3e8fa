"""What was denoised outlives a run that is killed, until its video is there."""

from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.config.load import read_config
from maxdiffusion.generation.resume import (
    LatentCache,
    Provenance,
    Video,
    delete_unneeded_latents,
    latents_path,
    store_latents,
)
from maxdiffusion.runtime.files import WritingFailed
from tests.generation.command_line import TINY

SHAPE = (3, 4, 6, 16)


def made(*arguments: str) -> Provenance:
    config = read_config([str(TINY), "prompts_file=prompts.txt", *arguments]).config
    return Provenance.of(config.values)


def videos(folder: Path, count: int = 3) -> list[Video]:
    return [Video(prompt="a cat", seed=n, path=folder / f"{n}.mp4") for n in range(count)]


def latents(count: int) -> np.ndarray:
    values = np.random.default_rng(count).normal(size=(count, *SHAPE)).astype(np.float32)
    values[:, 0, 0, 0, 0] = -0.0
    return values


def test_a_later_run_of_the_same_job_finds_what_was_kept(tmp_path: Path) -> None:
    first, second, third = videos(tmp_path)
    written = latents(3)
    store_latents(made(), [first, second], written)  # the third only filled the group up
    kept = LatentCache(made(), [first, second, third])
    assert len(kept) == 2
    assert [video in kept for video in (first, second, third)] == [True, True, False]
    read = kept.read([second, first])
    assert read.tobytes() == written[[1, 0]].tobytes()


@pytest.mark.parametrize("change", ["num_inference_steps=7", "height=80", "guidance_scale_low=2"])
def test_latents_of_other_settings_are_not_taken(tmp_path: Path, change: str) -> None:
    store_latents(made(), videos(tmp_path), latents(3))
    assert len(LatentCache(made(), videos(tmp_path))) == 3
    assert not LatentCache(made(change), videos(tmp_path))


@pytest.mark.parametrize("content", [b"", b"12345678", bytes(5000)])
def test_what_cannot_be_read_is_made_again(tmp_path: Path, content: bytes) -> None:
    video, *_ = videos(tmp_path)
    latents_path(video).write_bytes(content)
    assert not LatentCache(made(), [video])


def test_a_job_without_a_prompts_file_starts_anew(tmp_path: Path) -> None:
    store_latents(made(), videos(tmp_path), latents(3))
    assert not LatentCache(made("prompts_file="), videos(tmp_path))


def test_latents_of_videos_that_are_there_are_removed(tmp_path: Path) -> None:
    first, second, _ = videos(tmp_path)
    store_latents(made(), [first, second], latents(2))
    delete_unneeded_latents([first])
    assert [file.name for file in tmp_path.iterdir()] == [latents_path(second).name]


def test_a_full_disk_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("maxdiffusion.generation.resume.save_file", fail)
    with pytest.raises(WritingFailed, match=r"latents could not be written to .*No space left"):
        store_latents(made(), videos(tmp_path), latents(3))
    assert not list(tmp_path.iterdir())
