"""Initial latents from a file: what is taken, what is refused, and which video gets which row."""

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from maxdiffusion.config.load import read_config
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.generation.generate import request_of
from maxdiffusion.generation.job import plan_job
from maxdiffusion.generation.resume import list_videos
from maxdiffusion.pipelines.spec import open_wan_folder
from maxdiffusion.serving.server import check_no_inputs
from tests.generation.command_line import TINY

SIZE = ("height=32", "width=48", "num_frames=5")


@pytest.fixture(scope="module")
def spec():
    return open_wan_folder("embedded")[1]


def planned(spec, path, *overrides):
    parsed = read_config([str(TINY), *SIZE, f"latents_path={path}", *overrides])
    return plan_job(parsed, spec, jax.devices()[:1])


@pytest.fixture(scope="module")
def dims(spec):
    latent = planned(spec, "").shape.latent
    return (latent.channels, latent.frames, latent.rows, latent.columns)


def drawn(shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def test_one_latent_serves_every_video(spec, dims, tmp_path):
    latent = drawn(dims)
    np.save(tmp_path / "x.npy", latent)
    save_file({"latent": latent[None]}, tmp_path / "x.safetensors")
    for name in ("x.npy", "x.safetensors"):
        job = planned(spec, tmp_path / name, "num_videos=2")
        videos = list_videos(job)
        for video in videos:
            request = request_of(job, (video,))
            np.testing.assert_array_equal(request.latents, np.moveaxis(latent, 0, -1)[None])


def test_every_video_may_have_a_row_of_its_own(spec, dims, tmp_path):
    latents = drawn((3, *dims))
    np.save(tmp_path / "x.npy", latents)
    job = planned(spec, tmp_path / "x.npy", "num_videos=3")
    videos = list_videos(job)
    last = request_of(job, videos[2:])
    np.testing.assert_array_equal(last.latents, np.moveaxis(latents[2:], 1, -1))
    assert len({video.changes["latents"] for video in videos}) == 3  # part of their identity


def test_without_a_file_the_seed_gives_the_noise(spec):
    job = planned(spec, "")
    (video,) = list_videos(job)
    assert request_of(job, (video,)).latents is None
    assert "latents" not in video.changes


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("x.pt", None, "must be a file that ends in .safetensors or .npy"),
        ("absent.npy", None, "there is no such file"),
        ("x.npy", np.zeros((2, 3), np.float32), r"must be floats \[C, F, H, W\]"),
        ("x.npy", np.zeros((16, 1, 2, 3), np.int32), "not int32"),
        ("x.npy", np.zeros((16, 9, 9, 9), np.float32), r"has the shape \[1, 16, 9, 9, 9\]"),
        ("x.npy", b"no array", "cannot be read"),
        ("x.safetensors", b"no tensors", "cannot be read"),
        ("x.safetensors", {"a": np.zeros(1), "b": np.zeros(1)}, "exactly one tensor, not 2: a, b"),
    ],
)
def test_other_files_are_refused_before_weights_are_read(spec, tmp_path, name, content, rule):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        save_file(content, path)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(ProblemsFound, match=rule):
        planned(spec, path)


def test_a_server_refuses_latents_that_it_would_not_use(tmp_path):
    parsed = read_config([str(TINY), f"latents_path={tmp_path / 'x.npy'}"])
    with pytest.raises(ProblemsFound, match="from what requests bring"):
        check_no_inputs(parsed.config)


def test_a_wrong_number_of_rows_and_values_that_are_not_finite_are_refused(spec, dims, tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, drawn((3, *dims)))
    with pytest.raises(ProblemsFound, match="for 1 or 2 videos"):
        planned(spec, path, "num_videos=2")
    np.save(path, np.full(dims, np.nan, np.float32))
    with pytest.raises(ProblemsFound, match="contains NaN"):
        planned(spec, path)
