"""Every model of the family through the command: shipped and public YAML files, mp4 files back."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from PIL import Image

from maxdiffusion.cli.commands import GENERATE
from maxdiffusion.generation import generate
from maxdiffusion.runtime.video import read_video, write_video
from tests.generation.command_line import ROOT
from tests.oracle.tiny_checkpoints import (
    TransformerSize,
    VaeSize,
    wan21_t2v,
    wan22_t2v,
    write_checkpoint,
)
from tests.oracle.tiny_family import (
    Vae22Size,
    wan21_flf2v,
    wan21_i2v,
    wan21_vace,
    wan22_i2v,
    wan22_ti2v,
    wan22_vace,
    write_family,
)

pytestmark = pytest.mark.slow
PUBLIC = ROOT / "tests/config/public_files"
SMALL = {"transformer": TransformerSize(heads=2, head_dim=12, layers=2, ffn=32)}
SMALL_VAE = {"vae": VaeSize(base=4, multipliers=(1, 1, 2, 2), res_blocks=1)}
BOTH = {**SMALL, **SMALL_VAE}
MODELS: Mapping[str, Callable[[Path], Path]] = {
    "wan22_i2v": lambda folder: write_family(folder, wan22_i2v(31, **BOTH)),
    "wan21_i2v": lambda folder: write_family(folder, wan21_i2v(32, **BOTH)),
    "wan21_flf2v": lambda folder: write_family(folder, wan21_flf2v(33, **BOTH)),
    "wan22_ti2v": lambda folder: write_family(
        folder, wan22_ti2v(34, vae=Vae22Size(res_blocks=1), **SMALL)
    ),
    "wan21_vace": lambda folder: write_family(
        folder, wan21_vace(35, control_layers=(0, 1), **BOTH)
    ),
    "wan22_vace": lambda folder: write_family(folder, wan22_vace(36, control_layers=(0,), **BOTH)),
    "wan21_t2v": lambda folder: write_checkpoint(folder, wan21_t2v(37, **BOTH)),
    "wan22_t2v": lambda folder: write_checkpoint(folder, wan22_t2v(38, **BOTH)),
}
FRAMES = 5
SIZE = {"height": 32, "width": 64, "num_frames": FRAMES}
QUICK = {
    **SIZE,
    "num_inference_steps": 2,
    "fps": 8,
    "weights_dtype": "float32",
    "activations_dtype": "float32",
    "text_encoder_dtype": "float32",
    "max_sequence_length": 16,
}


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs commands on one of the virtual devices."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: first)


@pytest.fixture(scope="module", autouse=True)
def shared_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiles a program once for all models that share it, such as the autoencoder's."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    jax.config.update(names[0], str(tmp_path_factory.mktemp("programs")))
    jax.config.update(names[1], 0.1)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a model, made when it is first asked for."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name](root / name)
        return made[name]

    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures of other sizes than the video's, a video and its mask."""
    folder = tmp_path_factory.mktemp("files")
    for seed, (name, size) in enumerate({"a": (61, 44), "b": (40, 40), "c": (32, 64)}.items()):
        pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    rows, columns = np.mgrid[0:40, 0:80]
    waves = [np.sin(rows / 5 + t) * np.cos(columns / 7) for t in range(FRAMES + 2)]
    video = (128 + 100 * np.stack(waves)).astype(np.uint8)
    write_video(folder / "video.mp4", np.repeat(video[..., None], 3, -1), fps=8)
    mask = np.zeros((FRAMES + 2, 40, 80, 3), np.uint8)
    mask[:, :, 40:] = 255
    write_video(folder / "mask.mp4", mask, fps=8)
    (folder / "words.txt").write_text("not a picture")
    return folder


def run(config: Path, model: Path, output: Path, changes: Mapping[str, object]) -> int:
    """Runs `generate_wan` and returns its exit code."""
    settings = {**QUICK, "pretrained_model_name_or_path": model, "output_dir": output, **changes}
    return GENERATE.main([str(config), *(f"{name}={value}" for name, value in settings.items())])


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model of the family: its shipped YAML file and its inputs, by file name."""

    model: str
    config: str
    inputs: Mapping[str, object]


ROWS = {
    "2.2 I2V": Row(
        model="wan22_i2v", config="base_wan_i2v_27b", inputs={"image_url": "{files}/a.png"}
    ),
    "2.2 I2V, last image": Row(
        model="wan22_i2v",
        config="base_wan_i2v_27b",
        inputs={"image_url": "{files}/a.png", "last_image_path": "{files}/b.png"},
    ),
    "2.1 I2V": Row(
        model="wan21_i2v",
        config="base_wan_i2v_14b",
        inputs={"image_url": "{files}/a.png", "image_fit": "crop"},
    ),
    "2.1 FLF2V": Row(
        model="wan21_flf2v",
        config="base_wan_i2v_14b",
        inputs={
            "image_url": "{files}/a.png",
            "last_image_path": "{files}/b.png",
            "flow_shift": 16.0,
        },
    ),
    "5B, text": Row(model="wan22_ti2v", config="base_wan_ti2v_5b", inputs={}),
    "5B, image": Row(
        model="wan22_ti2v", config="base_wan_ti2v_5b", inputs={"image_url": "{files}/a.png"}
    ),
    "VACE 14B, all inputs": Row(
        model="wan21_vace",
        config="base_wan_vace_14b",
        inputs={
            "video_path": "{files}/video.mp4",
            "mask_path": "{files}/mask.mp4",
            "reference_images": '["{files}/a.png", "{files}/b.png"]',
            "conditioning_scale": "[0.5, 1.0]",
        },
    ),
    "VACE 1.3B, prompt alone": Row(model="wan21_vace", config="base_wan_vace_1_3b", inputs={}),
    "2.2 VACE-Fun, reference": Row(
        model="wan22_vace",
        config="base_wan_27b",
        inputs={"reference_images": '["{files}/b.png"]', "flow_shift": 5.0},
    ),
    "video to video": Row(
        model="wan21_t2v",
        config="base_wan_1_3b",
        inputs={"video_path": "{files}/video.mp4", "strength": 0.5, "num_inference_steps": 4},
    ),
    "video to video, both experts": Row(
        model="wan22_t2v",
        config="base_wan_27b",
        inputs={"video_path": "{files}/video.mp4", "strength": 0.9, "num_inference_steps": 4},
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_shipped_file_makes_a_video(
    name: str, models: Callable[[str], Path], files: Path, tmp_path: Path
) -> None:
    row = ROWS[name]
    inputs = {key: str(value).format(files=files) for key, value in row.inputs.items()}
    changes = {"attention": "dot_product", "seed": 3, **inputs}
    assert run(ROOT / f"configs/{row.config}.yml", models(row.model), tmp_path, changes) == 0
    (path,) = tmp_path.glob("*")
    frames, fps = read_video(path)
    assert path.name == "wan_output_3_0.mp4"
    assert frames.shape == (FRAMES, SIZE["height"], SIZE["width"], 3)
    assert fps == 8
    assert frames.std() > 5  # a picture, not one colour


def write_lines(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def made_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*")}


def test_lines_with_images_and_sizes_of_their_own_resume(
    models: Callable[[str], Path], files: Path, tmp_path: Path
) -> None:
    lines = [
        {"prompt": "a fox", "image": str(files / "a.png")},
        {"prompt": "a fox", "image": str(files / "b.png"), "height": 64, "width": 32, "seed": 9},
        {"prompt": "an owl"},
    ]
    output = tmp_path / "videos"
    prompts = write_lines(tmp_path / "lines.jsonl", lines)
    changes = {"attention": "dot_product", "prompts_file": prompts}
    job = (ROOT / "configs/base_wan_ti2v_5b.yml", models("wan22_ti2v"), output, changes)
    assert run(*job) == 0
    names = [f"wan_output_0_{index}.mp4" for index in range(3)]
    videos = [read_video(output / name)[0] for name in names]
    assert [video.shape[:3] for video in videos] == [(5, 32, 64), (5, 64, 32), (5, 32, 64)]
    made = made_in(output)
    assert sorted(made) == names
    # Nothing is left to make; then one video is gone; then one image is another.
    assert run(*job) == 0
    assert made_in(output) == made
    (output / names[1]).unlink()
    assert run(*job) == 0
    again = made_in(output)
    assert {name for name in names if again[name] != made[name]} == {names[1]}
    assert (read_video(output / names[1])[0] == videos[1]).all()
    write_lines(prompts, [{**lines[0], "image": str(files / "c.png")}, *lines[1:]])
    assert run(*job) == 0
    other = made_in(output)
    assert {name for name in names if other[name] != again[name]} == {names[0]}


def test_videos_of_lines_are_changed_by_a_text_to_video_model(
    models: Callable[[str], Path], files: Path, tmp_path: Path
) -> None:
    lines = [{"prompt": "a fox", "video": str(files / "video.mp4")}, {"prompt": "a fox"}]
    prompts = write_lines(tmp_path / "lines.jsonl", lines)
    changes = {
        "attention": "dot_product",
        "prompts_file": prompts,
        "strength": 0.5,
        "num_inference_steps": 4,
    }
    output = tmp_path / "videos"
    job = (ROOT / "configs/base_wan_1_3b.yml", models("wan21_t2v"), output)
    assert run(*job, changes) == 0
    first, second = (read_video(output / f"wan_output_0_{i}.mp4")[0].astype(int) for i in (0, 1))
    assert np.abs(first - second).mean() > 1
    before = made_in(output)
    assert run(*job, {**changes, "strength": 0.75}) == 0  # another video, the same text
    after = made_in(output)
    assert [name for name in sorted(after) if after[name] != before[name]] == ["wan_output_0_0.mp4"]


I2V, FIVE, T2V = "base_wan_i2v_27b", "base_wan_ti2v_5b", "base_wan_1_3b"
BAD: Mapping[str, tuple[str, str, dict[str, object], str]] = {
    "no such file": ("wan22_i2v", I2V, {"image_url": "{files}/none.png"}, "image_url='"),
    "not an image": ("wan22_i2v", I2V, {"image_url": "{files}/words.txt"}, "image_url='"),
    "a missing image": (
        *("wan22_i2v", I2V, {}),
        "image_url='': image-to-video needs it. Give a path or an http(s) address.",
    ),
    "a missing last image": (
        *("wan21_flf2v", "base_wan_i2v_14b", {"image_url": "{files}/a.png"}),
        "last_image_path='': image-to-video needs it.",
    ),
    "a last image of 5B": (
        *("wan22_ti2v", FIVE, {"last_image_path": "{files}/b.png", "image_url": "{files}/a.png"}),
        "text- and image-to-video does not take it",
    ),
    "a last image of 2.1 I2V": (
        "wan21_i2v",
        "base_wan_i2v_14b",
        {"last_image_path": "{files}/b.png", "image_url": "{files}/a.png"},
        "image-to-video does not take it",
    ),
    "an image of T2V": (
        *("wan21_t2v", T2V, {"image_url": "{files}/a.png"}),
        "text-to-video does not take it",
    ),
    "a short video": (
        *("wan21_t2v", T2V, {"video_path": "{files}/video.mp4", "num_frames": 9}),
        "video_path='7 frames': num_frames=9 are needed",
    ),
    "a strength without steps": (
        *("wan21_t2v", T2V, {"video_path": "{files}/video.mp4", "strength": 0.1}),
        "strength=0.1: leaves none of num_inference_steps=2",
    ),
    "a mask without a video": (
        *("wan21_vace", "base_wan_vace_14b", {"mask_path": "{files}/mask.mp4"}),
        "a mask needs a video",
    ),
    "too many scales": (
        *("wan21_vace", "base_wan_vace_14b", {"conditioning_scale": "[1.0, 1.0, 1.0]"}),
        "conditioning_scale=",
    ),
    "a size between patches": (
        *("wan22_ti2v", FIVE, {"height": 48}),
        "height=48: must be a positive multiple of 32",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_inputs_are_one_line_before_weights_are_read(
    name: str,
    models: Callable[[str], Path],
    files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, config, inputs, message = BAD[name]
    changes = {key: str(value).format(files=files) for key, value in inputs.items()}
    changes = {"attention": "dot_product", **changes}
    monkeypatch.setattr(generate, "load_wan_parameters", pytest.fail)
    folder = models(model)
    capsys.readouterr()
    assert run(ROOT / f"configs/{config}.yml", folder, tmp_path / "none", changes) == 2
    errors = capsys.readouterr().err
    title, problem = errors.strip().splitlines()
    assert title == "1 problem, nothing was run:"
    assert message in problem
    assert not (tmp_path / "none").exists()


PUBLIC_ROWS = {
    "base_wan_27b": "wan22_t2v",
    "base_wan_14b": "wan21_t2v",
    "base_wan_1_3b": "wan21_t2v",
    "base_wan_i2v_27b": "wan22_i2v",
    "base_wan_i2v_14b": "wan21_i2v",
}


@pytest.mark.parametrize("name", PUBLIC_ROWS)
def test_a_public_file_runs_with_another_model_and_a_small_size(
    name: str, models: Callable[[str], Path], files: Path, tmp_path: Path
) -> None:
    settings = {
        **SIZE,
        "num_inference_steps": 2,
        "pretrained_model_name_or_path": models(PUBLIC_ROWS[name]),
        "output_dir": tmp_path,
        # Addresses are not reached from tests; the public file names one.
        **({"image_url": files / "a.png"} if "i2v" in name else {}),
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    assert GENERATE.main([str(PUBLIC / f"{name}.yml"), *overrides]) == 0
    (path,) = tmp_path.glob("*.mp4")
    assert read_video(path)[0].shape == (FRAMES, SIZE["height"], SIZE["width"], 3)
