"""The command on the embedded model: refusals first, one run for all outputs."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiffusion.cli.commands import COMPARE_QUALITY
from maxdiffusion.config.load import read_config
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.pipelines.weights import load_wan_parameters
from maxdiffusion.quality.compare import compare
from maxdiffusion.quality.runs import resolve_modes

TINY = str(Path(__file__).parents[2] / "configs/wan_tiny.yml")
SMALL = ("height=32", "width=32", "num_frames=5", "num_inference_steps=4")


def resolved(tmp_path, names, *overrides):
    arguments = [TINY, *SMALL, f"output_dir={tmp_path}", *overrides]
    return resolve_modes(read_config(arguments), arguments, names)


def problems_of(tmp_path, names, *overrides):
    with pytest.raises(ProblemsFound) as caught:
        resolved(tmp_path, names, *overrides)
    return [str(problem) for problem in caught.value.problems]


def test_named_modes_that_do_not_go_are_refused_together(tmp_path):
    said = problems_of(tmp_path, ["magcache", "four_steps", "sen_cache"])
    assert len(said) == 2
    assert said[0].startswith("mode magcache: use_magcache=True: there are no published ratios")
    assert said[1].startswith("mode four_steps: lora_config.lora_model_name_or_path=[]: must name")


def test_without_names_they_are_left_out_with_their_reasons(tmp_path):
    exact, runs, refused = resolved(tmp_path, [])
    assert exact.name == "exact"
    names = {run.name for run in runs}
    assert {"other_dtype", "data_axis", "fp8_attention", "sen_cache", "half_steps"} <= names
    assert {one.mode.name for one in refused} >= {"magcache", "four_steps"}
    assert all(one.problems for one in refused)


def test_modes_share_weights_where_they_are_the_same(tmp_path):
    exact, runs, _ = resolved(tmp_path, ["other_dtype", "data_axis", "ulysses", "sen_cache"])
    by_name = {run.name: run for run in runs}
    same = {name for name, run in by_name.items() if run.weights_key == exact.weights_key}
    assert same == {"ulysses", "sen_cache"}
    assert by_name["sen_cache"].program_key == exact.program_key
    assert by_name["ulysses"].program_key != exact.program_key


def test_an_exact_run_that_is_lossy_is_refused(tmp_path):
    (said,) = problems_of(tmp_path, ["ring"], "use_sen_cache=true")
    assert "the exact run is lossy itself (mode sen_cache)" in said
    (said,) = problems_of(tmp_path, ["cfg_cache"], "attention=ulysses_ring_custom_fp8")
    assert "(mode fp8_attention)" in said


def test_a_mode_that_the_config_is_already(tmp_path):
    (said,) = problems_of(tmp_path, ["ulysses"], "attention=ulysses_custom")
    assert "the exact run has attention=ulysses_custom already" in said


def test_missing_weights_of_lpips_come_first(tmp_path, capsys):
    code = COMPARE_QUALITY.main([TINY, "--modes", "ring", f"lpips_weights={tmp_path}/gone"])
    assert code == 2
    assert "lpips_weights=" in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs the command once; counts how often weights are read."""
    folder = tmp_path_factory.mktemp("quality")
    loads = []

    def counted(*arguments, **options):
        loads.append(1)
        return load_wan_parameters(*arguments, **options)

    prompts = (
        '["a red circle grows on a white background", "a blue box rests on a navy background"]'
    )
    arguments = [TINY, "num_frames=5", "num_inference_steps=4", f"output_dir={folder}"]
    arguments += [f"prompt={prompts}", "seed=3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maxdiffusion.generation.generate.load_wan_parameters", counted)
        compare(read_config(arguments), arguments, ["data_axis", "half_steps", "sen_cache"])
    (folder / "loads").write_text(str(len(loads)))
    return folder


@pytest.mark.slow
def test_the_report(folder):
    found = json.loads((folder / "quality.json").read_text())
    assert [row["mode"] for row in found["floor"]] == ["data_axis"]
    assert [row["mode"] for row in found["lossy"]] == ["sen_cache", "half_steps"]
    assert [clip["seed"] for clip in found["clips"]] == [3, 3]
    floor, half = found["floor"][0], found["lossy"][1]
    # Another order of float32 sums moves a byte by one level at most, here and there.
    assert floor["psnr"] is None or floor["psnr"] > 60
    assert half["psnr"] < 45
    assert half["ssim"] < floor["ssim"]
    assert (half["forwards"], half["forwards_of"]) == (4, 4)
    assert found["exact"]["forwards"] == 8
    assert set(found["exact"]["scores"]) == {"colour", "shape", "motion", "background"}
    assert len(half["clips"]) == 2
    assert found["ms_ssim_scales"] == 3


@pytest.mark.slow
def test_weights_are_read_once_for_each_mesh(folder):
    assert (folder / "loads").read_text() == "2"


@pytest.mark.slow
def test_the_contact_sheet(folder):
    sheet = np.asarray(Image.open(folder / "quality.png"))
    # Two columns of five frames of 64 x 2 pixels, four rows under titles.
    assert sheet.shape == (4 * (18 + 128) + 3 * 4, 2 * (5 * 132 - 4) + 16, 3)
    exact = sheet[18 : 18 + 128, :128]
    assert np.ptp(exact) > 100
