"""A job is checked before weights are touched, and everything wrong with it is said at once."""

from pathlib import Path

import jax
import pytest

from maxdiffusion.attention import ATTENTION_NAMES
from maxdiffusion.config import load_config, read_config
from maxdiffusion.config.config import ALL_FIELDS
from maxdiffusion.config.fields import Effect
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.generation.job import check_without_model, plan_job, resolve_job
from maxdiffusion.pipelines.spec import open_wan_folder
from tests.config.writing import write


@pytest.fixture
def path(tmp_path):
    return write(tmp_path, f"output_dir: {tmp_path / 'videos'}\nprompt: a cat\n")


def checked(path, *overrides, devices=8, **options):
    return check_without_model(load_config([path, *overrides]), device_count=devices, **options)


def workload_of(path, *overrides, **options):
    return checked(path, *overrides, **options)[0]


def mesh_of(path, *overrides, **options):
    return checked(path, *overrides, **options)[1].shape


def message(path, *overrides, devices=8, **options):
    with pytest.raises(ProblemsFound) as caught:
        checked(path, *overrides, devices=devices, **options)
    return str(caught.value)


def test_defaults_make_one_video_on_any_number_of_devices(path):
    for devices in (1, 8, 6):
        job = workload_of(path, devices=devices)
        assert (job.prompts, job.videos, job.batch_size) == (("a cat",), 1, 1)
        assert mesh_of(path, devices=devices).devices == devices


@pytest.mark.parametrize(
    ("overrides", "per_prompt", "batch"),
    [
        (["per_device_batch_size=0.125"], 1, 1),
        (["per_device_batch_size=0.25"], 2, 2),
        (["per_device_batch_size=0.3"], 2, 2),
        (["num_videos=3"], 3, 1),
        (["num_videos=3", "per_device_batch_size=0.25"], 3, 2),
        (["num_videos=1", "per_device_batch_size=1.0"], 1, 1),
    ],
)
def test_videos_per_prompt_and_at_once(path, overrides, per_prompt, batch):
    job = workload_of(path, *overrides)
    assert (job.videos_per_prompt, job.batch_size) == (per_prompt, batch)


def test_batch_of_no_videos(path):
    assert message(path, "per_device_batch_size=0.1") == (
        "per_device_batch_size=0.1: means no video at all: 8 devices x 0.1, rounded down, is 0. "
        "Use 0.125 for one video at a time, or leave the key out."
    )


@pytest.mark.parametrize("devices", [3, 6, 7, 8, 13, 128])
def test_the_way_out_of_no_videos_is_one_video(path, devices):
    remedy = message(path, "per_device_batch_size=0.001", devices=devices)
    value = remedy.split("Use ")[1].split(" ")[0]
    job = workload_of(path, f"per_device_batch_size={value}", devices=devices)
    assert job.batch_size == 1


def test_prompts_of_a_list_and_of_a_file(path, tmp_path):
    assert workload_of(path, 'prompt=["a","b"]').prompts == ("a", "b")
    lines = write(tmp_path, "\ufeffa fox\n\n  a crow \n", "prompts.txt")  # as Windows writes it
    job = workload_of(path, f"prompts_file={lines}", "num_videos=2")
    assert job.prompts == ("a fox", "a crow")
    assert job.videos == 4
    # A batch may hold videos of several prompts, which then share the data axis.
    batched = workload_of(path, f"prompts_file={lines}", "num_videos=1", "per_device_batch_size=1")
    assert (batched.videos, batched.batch_size) == (2, 2)


def test_prompts_file_that_cannot_be_used(path, tmp_path):
    way_out = "Give a text file in UTF-8 with one prompt per line."
    gone = tmp_path / "gone.txt"
    assert message(path, f"prompts_file={gone}") == (
        f"prompts_file='{gone}': cannot be read: No such file or directory. {way_out}"
    )
    blank = write(tmp_path, "\n \n", "blank.txt")
    assert message(path, f"prompts_file={blank}") == (
        f"prompts_file='{blank}': has no prompts. {way_out}"
    )
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x80")
    assert "is not text in UTF-8" in message(path, f"prompts_file={binary}")
    both = message(path, f"prompts_file={blank}", "prompt=a")
    assert "the command line gives prompt as well" in both


def test_unknown_attention(path):
    said = message(path, "attention=flahs")
    names = ", ".join(("auto", *ATTENTION_NAMES))
    assert said == f"attention='flahs': must be one of {names}. The nearest is 'flash'."
    assert workload_of(path, "attention=dot_product")


def test_unknown_sampler(path):
    said = message(path, "scheduler=ddim")
    assert said.startswith("scheduler='ddim': must be one of 'unipc', 'euler', ")


def test_mesh_against_devices(path):
    assert message(path, "ici_context_parallelism=3") == (
        "ici_*_parallelism='data=1, fsdp=1, context=3, tensor=1': their product is 3, but the "
        "number of devices in a slice is 8. Choose sizes whose product is 8, for example "
        "ici_context_parallelism=8."
    )


def test_batch_against_the_data_axis(path):
    assert mesh_of(path, "ici_data_parallelism=2").data == 2
    assert message(path, "ici_data_parallelism=4") == (
        "ici_data_parallelism=4: must divide the 2 rows of a batch (videos: 1 at once with "
        "guidance). Use 1 or 2, or more videos at once with per_device_batch_size."
    )
    off = ("guidance_scale_high=1", "guidance_scale_low=1")
    assert "must divide the 1 rows" in message(path, "ici_data_parallelism=2", *off)
    assert workload_of(path, "ici_data_parallelism=4", "per_device_batch_size=0.25")


def test_tensor_axis_against_heads(path):
    assert message(path, "ici_tensor_parallelism=8", heads=12) == (
        "ici_tensor_parallelism=8: must divide the 12 heads. Use one of 1, 2, 3, 4, 6, 12."
    )


def test_heads_bound_the_ulysses_axis(path):
    shape = mesh_of(path, heads=12)
    assert (shape.ring, shape.ulysses) == (2, 4)


def test_vae_split_and_tiles(path):
    assert message(path, "vae_spatial=3") == (
        "vae_spatial=3: must divide the 8 devices. Use one of 1, 2, 4, 8, or -1 for all."
    )
    assert message(path, "vae_tile_stride_height=512") == (
        "vae_tile_stride_height=512: must not exceed vae_tile_height=256, or pixels are left out. "
        "Use at most 256."
    )


@pytest.mark.parametrize(
    ("pattern", "rule"),
    [
        ("video.mp4", "must contain {i}, so that several videos get different names"),
        ("{i}_{name}.mp4", "may contain {seed} and {i} only"),
        ("{i:03d}.mp4", "may contain {seed} and {i} only"),
        ("{i.mp4", "braces must enclose seed or i"),
        ("{i}.gif", "must be a file name without folders that ends in .mp4"),
        ("../{i}.mp4", "must be a file name without folders that ends in .mp4"),
    ],
)
def test_names_of_videos(path, pattern, rule):
    assert message(path, f"output_name={pattern}", "num_videos=2") == (
        f"output_name='{pattern}': {rule}. Use a name like wan_output_{{seed}}_{{i}}.mp4."
    )


def test_one_video_may_have_a_fixed_name(path):
    assert workload_of(path, "output_name=fox.mp4").videos == 1


def test_output_folder_that_is_a_file(path):
    assert message(path, f"output_dir={path}") == (
        f"output_dir='{path}': nothing can be written there: Not a directory ({path}). "
        "Name a folder that you may write to, such as outputs."
    )
    assert "must be a path on a disk" in message(path, "output_dir=ftp://host/videos")
    assert "pip install adlfs" in message(path, "output_dir=az://container/videos")


def test_guidance_of_the_other_model(path):
    assert message(path, "guidance_scale=5") == (
        "guidance_scale=5.0: wan2.2 has a scale for each of its two experts. "
        "Set guidance_scale_high and guidance_scale_low."
    )
    assert message(path, "model_name=wan2.1", "guidance_scale_low=5") == (
        "guidance_scale_low=5.0: wan2.1 has one transformer only. "
        "Set guidance_scale, or leave it out."
    )


def test_guidance_scales(path):
    two = workload_of(path, "guidance_scale_high=1", "guidance_scale_low=2").guidance
    assert (two.high_noise, two.low_noise, two.active) == (1.0, 2.0, True)
    one = workload_of(path, "model_name=wan2.1").guidance
    assert (one.high_noise, one.low_noise) == (5.0, 5.0)
    assert not workload_of(path, "model_name=wan2.1", "guidance_scale=1").guidance.active


REFUSED = {
    "revision": "v2",
    "converted_weights_dir": "weights",
    "scheduler_dtype": "bfloat16",
    "do_classifier_free_guidance": "false",
    "guidance_rescale": "0.7",
    "compile_topology_num_slices": "2",
    "enable_ml_diagnostics": "true",
    "enable_ssim": "true",
}


def test_the_refusals_below_are_all_there_are():
    assert set(REFUSED) == {
        name for name, field in ALL_FIELDS.items() if field.effect is Effect.REFUSED
    }


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_offered_loads_prints_and_does_not_run(path, name):
    config = load_config([path, f"{name}={REFUSED[name]}"])
    assert f"\n{name}: " in config.describe()
    said = message(path, f"{name}={REFUSED[name]}")
    assert said.startswith(f"{name}={config.values[name]!r}: not offered (")
    assert said.endswith(f"{ALL_FIELDS[name].way_out}.")
    assert "\n" not in said


def test_everything_at_once(path, tmp_path):
    arguments = [
        "height=721",
        "num_frames=80",
        "attention=nonsense",
        "ici_context_parallelism=3",
        "per_device_batch_size=0.01",
        "revision=v2",
        f"prompts_file={tmp_path / 'gone.txt'}",
        "weights_dtype=int4",
    ]
    parsed = read_config([path, *arguments, f"pretrained_model_name_or_path={tmp_path / 'gone'}"])
    with pytest.raises(ProblemsFound) as caught:
        resolve_job(parsed)
    assert [problem.name for problem in caught.value.problems] == [
        "height",
        "num_frames",
        "weights_dtype",
        "pretrained_model_name_or_path",
        "revision",
        "attention",
        "prompts_file",
        "per_device_batch_size",
        "ici_*_parallelism",
    ]


def test_problems_of_model_mesh_and_attention_come_together(path):
    spec = open_wan_folder("embedded")[1]
    arguments = ("model_name=wan2.1", "attention=cudnn_flash_te", "height=72", "revision=v2")
    parsed = read_config([path, *arguments, "output_name=a.gif", "vae_spatial=3"])
    with pytest.raises(ProblemsFound) as caught:
        plan_job(parsed, spec, jax.devices())
    names = [problem.name for problem in caught.value.problems]
    assert len(names) == len(set(names))  # a problem that two checks meet is said once
    assert {"height", "revision", "vae_spatial", "output_name", "model_name"} <= set(names)
    parsed = read_config([path, "attention=cudnn_flash_te", "revision=v2"])
    with pytest.raises(ProblemsFound, match=r"(?s)revision.*NVIDIA GPUs only"):
        plan_job(parsed, spec, jax.devices())


def test_files_that_cannot_be_written_are_found_before_the_run(path):
    for setting in ("timing_file=/proc/nowhere/times.json", "output_dir=/proc/nowhere"):
        name = setting.split("=")[0]
        assert f"{name}='/proc/nowhere" in message(path, setting)
        assert "nothing can be written there" in message(path, setting)
    assert not Path("/proc/nowhere").exists()


def test_checking_a_new_folder_leaves_nothing_behind(path, tmp_path):
    workload_of(path, f"output_dir={tmp_path}/a/b/c")
    assert not (tmp_path / "a").exists()


def test_object_storage_that_cannot_be_used_is_found_before_the_run(path):
    folder = "pretrained_orbax_dir=s3://bucket/weights"
    assert "orbax writes arrays to disks and to gs:// only" in message(path, folder)
    for name in ("aot_cache_dir", "jax_cache_dir", "output_dir"):
        assert f"{name}='ftp://host/a': must be a path on a disk or" in message(
            path, f"{name}=ftp://host/a"
        )
