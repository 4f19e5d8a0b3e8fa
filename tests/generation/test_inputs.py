"""VisualInputs of a job: which are taken, which are missing, and what is said about them."""

import numpy as np
import pytest
from PIL import Image

from maxdiffusion.config import load_config
from maxdiffusion.config.validate import VideoRequestLine
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.generation import inputs as module
from maxdiffusion.generation.inputs import (
    ANIMATE,
    IMAGE_TO_VIDEO,
    TEXT_TO_VIDEO,
    VACE,
    VIDEO_TO_VIDEO,
    InputLoader,
    InputOptions,
    load_inputs,
)
from maxdiffusion.runtime.video import write_video
from tests.generation.command_line import TINY

SIZE = ("height=32", "width=48", "num_frames=5", "fps=8")


def config_of(*overrides):
    return load_config([str(TINY), *SIZE, *overrides])


def problems(call):
    with pytest.raises(ProblemsFound) as caught:
        call()
    return [str(problem) for problem in caught.value.problems]


@pytest.fixture
def files(tmp_path):
    """Returns the folder of a picture of 32 x 48, a square one, and videos of 6 frames."""
    Image.new("RGB", (48, 32), "red").save(tmp_path / "a.png")
    Image.new("RGB", (40, 40), "blue").save(tmp_path / "square.png")
    for name, frames, size in (
        ("a", 6, (32, 48)),
        ("mask", 6, (32, 48)),
        ("face", 4, (32, 32)),
        ("small", 6, (16, 16)),
    ):
        write_video(tmp_path / f"{name}.mp4", np.zeros((frames, *size, 3), np.uint8), fps=8)
    return tmp_path


def test_images_of_the_config_and_of_a_line(files):
    config = config_of(f"image_url={files / 'a.png'}", f"last_image_path={files / 'square.png'}")
    loaded = load_inputs(config, IMAGE_TO_VIDEO)
    assert loaded.image.size == (48, 32)
    assert loaded.last_image.size == (40, 40)
    assert loaded.notes == (
        "last_image: 40x40 for a video of 48x32 is stretched; "
        "image_fit=crop or pad keeps its aspect ratio",
    )
    line = VideoRequestLine(prompt="", image=str(files / "square.png"), height=64, width=64)
    other = load_inputs(config, IMAGE_TO_VIDEO, line)
    assert other.image.size == (40, 40)
    assert other.notes == ()
    assert loaded.digest != other.digest
    assert loaded.digest == load_inputs(config, IMAGE_TO_VIDEO).digest


def test_missing_and_unused_inputs_are_named_together(files):
    config = config_of(f"video_path={files / 'a.mp4'}", f"pose_video_path={files / 'a.mp4'}")
    line = VideoRequestLine(prompt="", mask="a.png", source="p.jsonl:2")
    assert [text.split(".")[0] for text in problems(lambda: load_inputs(config, IMAGE_TO_VIDEO))][
        -1
    ] == "image_url='': image-to-video needs it"
    found = problems(lambda: load_inputs(config, IMAGE_TO_VIDEO, line))
    assert [text.split("=")[0] for text in found] == [
        *("video_path", "pose_video_path", "p.jsonl:2 mask", "image_url")
    ]
    assert (
        "text-to-video does not take it" in problems(lambda: load_inputs(config, TEXT_TO_VIDEO))[0]
    )
    assert (
        "a mask needs a video"
        in problems(lambda: load_inputs(config_of(f"mask_path={files / 'mask.mp4'}"), VACE))[0]
    )


def test_all_bad_files_of_all_lines_are_named(files):
    loader = InputLoader(config_of(), IMAGE_TO_VIDEO)
    lines = [
        VideoRequestLine(prompt="", image=str(files / name), source=f"p.jsonl:{number}")
        for number, name in enumerate(("a.png", "none.png", "square.png", "a.mp4"), 1)
    ]
    found = problems(lambda: loader.check(lines))
    assert [text.split("=")[0] for text in found] == ["p.jsonl:2 image", "p.jsonl:4 image"]
    assert len(loader.check([lines[0], lines[2], lines[2]])) == 1
    references = config_of(f'reference_images=["{files / "a.png"}", "x.png", "y.png"]')
    found = problems(lambda: load_inputs(references, VACE))
    assert [text.split("=")[0] for text in found] == ["reference_images[1]", "reference_images[2]"]


def test_videos_are_cut_to_the_frames_of_the_result(files):
    config = config_of(f"video_path={files / 'a.mp4'}")
    assert len(load_inputs(config, VIDEO_TO_VIDEO).video) == 5
    longer = config_of(f"video_path={files / 'a.mp4'}", "num_frames=9")
    assert problems(lambda: load_inputs(longer, VIDEO_TO_VIDEO)) == [
        "video_path='6 frames': num_frames=9 are needed, at the frame rate of `fps`. "
        "Use num_frames=5, or a longer video."
    ]
    # At 16 frames a second the same file has enough.
    faster = config_of(f"video_path={files / 'a.mp4'}", "num_frames=9", "fps=16")
    assert len(load_inputs(faster, VIDEO_TO_VIDEO).video) == 9


def test_a_mask_is_like_its_video(files):
    video = f"video_path={files / 'a.mp4'}"
    good = load_inputs(config_of(video, f"mask_path={files / 'mask.mp4'}"), VACE)
    assert good.mask.shape == good.video.shape
    bad = {"small": "as large as the frames of the video, 48x32", "face": "as many frames"}
    for name, rule in bad.items():
        config = config_of(video, f"mask_path={files / f'{name}.mp4'}")
        assert any(rule in text for text in problems(lambda c=config: load_inputs(c, VACE)))


def test_animate_takes_its_own_fields(files):
    required = (
        f"reference_image_path={files / 'square.png'}",
        f"pose_video_path={files / 'a.mp4'}",
        f"face_video_path={files / 'face.mp4'}",
    )
    scene = (f"background_video_path={files / 'a.mp4'}", f"mask_video_path={files / 'mask.mp4'}")
    loaded = load_inputs(config_of(*required), ANIMATE)
    assert len(loaded.pose_video) == 6
    assert loaded.notes == (
        "image: 40x40 for a video of 48x32 is padded with black bars",
        "face_video: 4 frames for 6 poses; it runs back and forth",
    )
    assert load_inputs(config_of(*required, *scene, "mode=replace"), ANIMATE).mask_video is not None
    found = problems(lambda: load_inputs(config_of("mode=replace"), ANIMATE))
    assert len(found) == 5
    found = problems(lambda: load_inputs(config_of(*required, *scene), ANIMATE))
    assert [text.split("=")[0] for text in found] == ["background_video_path", "mask_video_path"]


def test_an_address_is_downloaded_once(files, monkeypatch):
    fetched = []

    def fetch(name, address, folder):
        fetched.append(address)
        copy = folder / "copy.png"
        copy.write_bytes((files / "a.png").read_bytes())
        return copy

    monkeypatch.setattr(module, "fetch_image", fetch)
    loader = InputLoader(config_of("image_url=https://example.org/a.png"), IMAGE_TO_VIDEO)
    loader.check([VideoRequestLine(prompt="a"), VideoRequestLine(prompt="b")])
    assert loader.load().image.size == (48, 32)
    assert fetched == ["https://example.org/a.png"]


def test_options_of_a_config():
    options = InputOptions.of(config_of("conditioning_scale=[1, 0.5]", "strength=0.7"))
    assert options.conditioning_scale == (1, 0.5)
    assert options.strength == 0.7
    assert (options.image_fit, options.mode, options.segment_frame_length) == (
        *("stretch", "animate", 77),
    )
