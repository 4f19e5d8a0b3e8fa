"""The command of Animate, from a public config to a file, with a tiny checkpoint."""

from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from maxdiffusion import WanAnimatePipeline, WanImageToVideoPipeline, WanPipeline
from maxdiffusion.attention import AttentionOptions
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.generate_wan_animate import main
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.pipelines.settings import PipelineSettings
from maxdiffusion.pipelines.tasks.animate import segment_seed
from maxdiffusion.runtime.video import read_video
from tests.oracle.tiny_checkpoints import TransformerSize, VaeSize
from tests.oracle.tiny_family import wan22_animate, write_family

PUBLIC = Path(__file__).parents[1] / "config" / "public_files" / "base_wan_animate.yml"
SIZE = {"height": 32, "width": 32, "segment_frame_length": 9, "num_inference_steps": 2}
POSES = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint, with a picture and three folders of frames next to it."""
    folder = tmp_path_factory.mktemp("animate")
    tiny = wan22_animate(
        41,
        transformer=TransformerSize(heads=8, head_dim=12, layers=2, ffn=72),
        vae=VaeSize(base=8, multipliers=(1, 1, 2, 2), res_blocks=1),
    )
    write_family(folder / "model", tiny)
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (40, 30, 3), np.uint8)).save(folder / "character.png")
    for name in ("pose", "face"):
        (folder / name).mkdir()
        for frame in range(POSES):
            pixels = rng.integers(0, 256, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{frame:03}.png")
    return folder


def arguments(folder: Path, *more: str) -> list[str]:
    stated = {
        "pretrained_model_name_or_path": folder / "model",
        "reference_image_path": folder / "character.png",
        "pose_video_path": folder / "pose",
        "face_video_path": folder / "face",
        "output_dir": folder / "videos",
        **{f"{part}_dtype": "float32" for part in ("weights", "activations", "text_encoder")},
        **SIZE,
        "max_sequence_length": 64,
        "prompt": "A dancer",
        "per_device_batch_size": 0.125,
        "flash_min_seq_length": 0,
        "jax_cache_dir": "",
    }
    return [str(PUBLIC), *(f"{name}={value}" for name, value in stated.items()), *more]


def test_a_public_file_makes_a_video_on_eight_devices(folder: Path) -> None:
    assert main(arguments(folder, "attention=ulysses_ring", "ulysses_shards=4")) == 0
    (file,) = (folder / "videos").glob("*.mp4")
    frames, fps = read_video(file)
    assert frames.shape == (POSES, 32, 32, 3)
    assert fps == 24


def test_eight_devices_make_the_video_of_one(folder: Path) -> None:
    videos = {f"{name}_video": folder / name for name in ("pose", "face")}
    call = {"image": folder / "character.png", **videos, "prompt": "A dancer", **SIZE}
    kernels = AttentionOptions(flash_min_seq_length=0)  # also for as few tokens as here
    on = {
        MeshShape(): PipelineSettings(attention="dot_product"),
        MeshShape(fsdp=2, ring=2, tensor=2): PipelineSettings(
            attention="flash", attention_options=kernels
        ),
    }
    made = [
        WanAnimatePipeline.from_pretrained(
            folder / "model",
            mesh=build_mesh(shape, devices=jax.devices()[: shape.devices]),
            settings=settings,
        )(**call, guidance_scale=2.0).frames
        for shape, settings in on.items()
    ]
    assert made[0].shape == (1, POSES, 32, 32, 3)
    np.testing.assert_allclose(made[1], made[0], rtol=0, atol=1e-4)


def test_settings_without_effect_are_refused(folder: Path, capsys) -> None:
    more = ("num_frames=9", "guidance_scale_high=2", "segment_frame_length=5")
    assert main(arguments(folder, *more, "prev_segment_conditioning_frames=5")) == 2
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert "num_frames=9: a video has as many frames as its poses" in text
    assert "guidance_scale_high=2.0: Animate has one guidance scale" in text
    assert "segment_frame_length=5: must be at least 10" in text


def test_a_missing_video_is_named(folder: Path, capsys) -> None:
    assert main(arguments(folder, "mode=replace", "face_video_path=")) == 2
    shown = capsys.readouterr()
    for name in ("face_video_path", "background_video_path", "mask_video_path"):
        assert f"{name}='': Animate needs it" in shown.out + shown.err


def test_modes_take_their_own_videos(folder: Path) -> None:
    pipeline = WanAnimatePipeline.from_pretrained(folder / "model")
    pose = folder / "pose"
    with pytest.raises(ProblemsFound) as caught:
        pipeline("gone.png", pose, None, mask_video=pose, prompt="x")
    names = [problem.name for problem in caught.value.problems]
    assert names == ["face_video", "mask_video", "image"]
    with pytest.raises(ProblemsFound, match="background_video=None: mode replace needs it"):
        pipeline(folder / "character.png", pose, pose, mask_video=pose, mode="replace")
    with pytest.raises(ProblemsFound, match="segment_frame_length=8: must be 4n \\+ 1"):
        pipeline(folder / "character.png", pose, pose, segment_frame_length=8)


def test_other_pipelines_name_the_right_one(folder: Path) -> None:
    size = {"prompt": "x", "height": 32, "width": 32, "num_frames": 5}
    with pytest.raises(ProblemsFound, match="use WanAnimatePipeline"):
        WanPipeline.from_pretrained(folder / "model")(**size)
    with pytest.raises(ProblemsFound, match="Use WanAnimatePipeline"):
        WanImageToVideoPipeline.from_pretrained(folder / "model")(
            image=folder / "character.png", **size
        )


def test_segments_of_neighbouring_seeds_share_no_noise() -> None:
    seeds = [segment_seed(seed, index) for seed in range(20) for index in range(5)]
    assert len({*seeds}) == len(seeds)
    assert segment_seed(7, 0) == 7
