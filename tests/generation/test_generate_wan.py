"""From a YAML file to mp4 files that are read back and measured."""

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.costs.predictions import describe
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.runtime.video import read_metadata, read_video
from tests.generation.command_line import TINY, generate_wan

PROMPT = "a red circle moves right"
SIZE = ("height=64", "width=48", "num_frames=9", "fps=8", "num_inference_steps=3")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished run of the command."""

    folder: Path
    said: str
    complained: str


def run_on_eight_devices(folder: Path, cache: Path) -> Run:
    """Three videos of one prompt, two at a time, every kind of context parallelism at once."""
    result = generate_wan(
        TINY,
        *SIZE,
        f"prompt={PROMPT}",
        "negative_prompt=blurred",
        "seed=3",
        "num_videos=3",
        "per_device_batch_size=0.25",
        "ici_data_parallelism=2",
        "ici_ring_parallelism=2",
        "ici_ulysses_parallelism=2",
        f"output_dir={folder}",
        f"timing_file={folder / 'timing.json'}",
        f"jax_cache_dir={cache}",
        devices=8,
    )
    assert result.returncode == 0, result.stderr
    return Run(folder=folder, said=result.stdout, complained=result.stderr)


@pytest.fixture(scope="module")
def on_eight_devices(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Run:
    return run_on_eight_devices(tmp_path_factory.mktemp("eight"), cache)


@pytest.fixture(scope="module")
def of_a_prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two prompts, one device, nothing said of the making in the files."""
    folder = tmp_path_factory.mktemp("prompts")
    prompts = folder / "prompts.txt"
    prompts.write_text(f"{PROMPT}\n\nzwölf Füchse — 12 🦊\n", encoding="utf-8")
    result = generate_wan(
        TINY,
        *SIZE,
        f"prompts_file={prompts}",
        "negative_prompt=blurred",
        "seed=4",
        "embed_metadata=false",
        f"output_dir={folder / 'new' / 'folder'}",
    )
    assert result.returncode == 0, result.stderr
    return Run(folder=folder / "new" / "folder", said=result.stdout, complained=result.stderr)


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("*"))


@pytest.mark.slow
def test_videos_are_whole_and_of_the_asked_size(on_eight_devices: Run) -> None:
    folder = on_eight_devices.folder
    assert names_in(folder) == ["timing.json", *(f"wan_output_3_{i}.mp4" for i in range(3))]
    videos = []
    for index in range(3):
        path = folder / f"wan_output_3_{index}.mp4"
        assert f"wrote {path}" in on_eight_devices.said
        frames, fps = read_video(path)
        assert frames.shape == (9, 64, 48, 3)
        assert fps == 8
        # A picture, not one colour, and one that changes in time.
        assert frames.std() > 5
        assert np.abs(frames[0].astype(int) - frames[-1]).mean() > 1
        videos.append(frames.astype(int))
    for one, other in itertools.combinations(videos, 2):
        assert np.abs(one - other).mean() > 1


@pytest.mark.slow
def test_a_file_says_how_it_was_made(on_eight_devices: Run) -> None:
    for index in range(3):
        tags = read_metadata(on_eight_devices.folder / f"wan_output_3_{index}.mp4")
        assert tags["title"] == PROMPT
        settings = json.loads(tags["comment"])
        expected = {"prompt": PROMPT, "seed": 3 + index, "negative_prompt": "blurred"}
        assert settings | expected == settings
        assert (settings["height"], settings["num_inference_steps"]) == (64, 3)


def test_metadata_can_be_left_out(of_a_prompts_file: Run) -> None:
    for index in range(2):
        tags = read_metadata(of_a_prompts_file.folder / f"wan_output_4_{index}.mp4")
        assert not {"title", "comment"} & set(tags)


def test_every_line_of_a_prompts_file_gives_a_video(of_a_prompts_file: Run) -> None:
    folder = of_a_prompts_file.folder
    assert names_in(folder) == ["wan_output_4_0.mp4", "wan_output_4_1.mp4"]
    first, second = (read_video(folder / name)[0].astype(int) for name in names_in(folder))
    assert first.shape == second.shape == (9, 64, 48, 3)
    assert np.abs(first - second).mean() > 0.5  # the seed is the same, the prompt is not


@pytest.mark.slow
def test_a_seed_gives_the_same_video_on_one_device_and_on_eight(
    on_eight_devices: Run, of_a_prompts_file: Run
) -> None:
    # Seed 3 + 1 of the one run is seed 4 of the other.
    many, _ = read_video(on_eight_devices.folder / "wan_output_3_1.mp4")
    one, _ = read_video(of_a_prompts_file.folder / "wan_output_4_0.mp4")
    other, _ = read_video(on_eight_devices.folder / "wan_output_3_0.mp4")
    # A level that rounds otherwise may change what the codec keeps of plain areas: a level or two
    # (frames before the codec are compared in tests/pipelines). Another seed is another video.
    apart = np.abs(many.astype(int) - one).mean()
    assert apart < 2
    assert apart < np.abs(other.astype(int) - one).mean() / 4


@pytest.mark.slow
def test_the_plan_is_said_before_the_run(on_eight_devices: Run) -> None:
    said = on_eight_devices.said
    assert said.index("mesh: data 2 x fsdp 1 x ring 2 x ulysses 2") < said.index("wrote")
    assert said.index("attention dot_product") < said.index("wrote")


@pytest.mark.slow
def test_nothing_but_results_is_said_when_nobody_watches(on_eight_devices: Run) -> None:
    assert "\r" not in on_eight_devices.said + on_eight_devices.complained
    assert "%|" not in on_eight_devices.complained


@pytest.mark.slow
def test_the_summary_has_the_public_form(on_eight_devices: Run) -> None:
    said = on_eight_devices.said
    for label in (
        *("Load (checkpoint)", "Compile", "Inference", "Conditioning", "  - VAE Encode"),
        *("Denoise Total", "VAE Decode", "  - TPU Compute", "  - Host Formatting"),
    ):
        assert re.search(rf"^  {re.escape(label)}: +\d+\.\ds$", said, re.MULTILINE), label


@pytest.mark.slow
def test_times_add_up_in_the_timing_file(on_eight_devices: Run) -> None:
    timing = json.loads((on_eight_devices.folder / "timing.json").read_text())
    seconds = timing["seconds"]
    parts = [seconds[name] for name in ("conditioning", "denoise_total", "vae_decode")]
    assert 0.9 * seconds["inference"] < sum(parts) <= seconds["inference"]
    steps = timing["steps"]
    assert sum(step["seconds"] for step in steps) <= seconds["denoise_total"]
    # Shift 3 in three steps, the boundary at 875: for two videos, then for the third.
    experts = [(step["timestep"], step["expert"].split("-")[0]) for step in steps]
    assert experts == 2 * [(999.0, "high"), (857.0, "low"), (600.0, "low")]
    assert timing["run"]["mesh"]["ulysses"] == 2


@pytest.mark.slow
def test_a_run_is_held_to_its_prediction(on_eight_devices: Run, tmp_path: Path) -> None:
    """A report with the facts of this run, which predicts a thousandth of any second."""
    timing = on_eight_devices.folder / "timing.json"
    report = {
        "job": json.loads(timing.read_text())["run"],
        "clock_hz": 1e9,
        "peak_clock_hz": 1e9,
        "unpinned_clock_hz": None,
        "unpinned_seconds": None,
        "kernels": [],
        "peak_clock_seconds": {"projections": 1e-3},
        "seconds_of_programs": {"decode": {"seconds_per_run": 1e-3}},
    }
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    text = describe([str(timing), str(path)])
    assert "timing.json: 8 x cpu, " in text
    assert "The model is WRONG for this step" in text
    assert text.count("<--") == 2, "the step and the decoding"
    with pytest.raises(ProblemsFound, match="device_kind is 'cpu', predicted for 'TPU"):
        describe([str(timing)])


@pytest.mark.slow
def test_a_second_run_takes_its_programs_from_the_cache(
    on_eight_devices: Run, cache: Path, tmp_path: Path
) -> None:
    again = run_on_eight_devices(tmp_path, cache)
    # Programs are named by what they compute; a second entry would be a second compilation.
    for program in ("jit_decode-*-cache", "jit_denoise_step-*-cache"):
        assert len(list(cache.glob(program))) == 1
    for index in range(3):
        name = f"wan_output_3_{index}.mp4"
        assert (again.folder / name).read_bytes() == (on_eight_devices.folder / name).read_bytes()


def test_print_config_prints_and_runs_nothing(tmp_path: Path) -> None:
    result = generate_wan(TINY, "seed=7", "print_config=true", f"output_dir={tmp_path / 'none'}")
    assert result.returncode == 0
    assert re.search(r"^seed: 7 +# command line$", result.stdout, re.MULTILINE)
    assert re.search(r"^fps: 8 +# .*wan_tiny\.yml", result.stdout, re.MULTILINE)
    assert "wrote" not in result.stdout
    assert not (tmp_path / "none").exists()
