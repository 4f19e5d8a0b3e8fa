"""Whole runs of WanPipeline against those of diffusers, kept in tests/goldens."""

import json
import shutil
import threading
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.layout import Layout

from maxdiffusion import WanPipeline
from maxdiffusion.errors import ProblemsFound, RunFailed
from maxdiffusion.models import abstract
from maxdiffusion.models.wan import WanTransformer
from maxdiffusion.pipelines.programs import compile_now
from maxdiffusion.pipelines.request import request_from_arguments
from maxdiffusion.pipelines.text import PromptTokenizer
from maxdiffusion.pipelines.wan import CORES_OF_A_COMPILE, noting_programs, run_all
from maxdiffusion.pipelines.weights import WanParameters
from tests.marking import slow_except

GOLDENS = Path(__file__).parents[1] / "goldens"

# A velocity is within 1e-5 of diffusers' (float32); guidance of 3..5 multiplies that by up to
# 2 * 5 - 1, and the steps of a run average it with weights that sum to 1. Half of what the smallest
# mistake worth finding (a norm's eps of 1e-5 instead of 1e-6) would move.
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDENS / "pipe.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def pipeline() -> WanPipeline:
    return WanPipeline.from_pretrained(GOLDENS / "wan22_t2v", dtype="float32")


def recorded_call(golden: dict[str, np.ndarray], name: str) -> dict[str, object]:
    """Returns the arguments of a recorded run."""
    settings = json.loads(str(golden[f"{name}/kwargs_json"]))
    return settings | {"latents": golden[f"{name}/init_latents"]}


def check_latents(
    pipeline: WanPipeline, golden: dict[str, np.ndarray], name: str, **more: object
) -> None:
    """Checks the final latents of one recorded run."""
    latents = pipeline(**recorded_call(golden, name), **more, output_type="latent").frames
    np.testing.assert_allclose(latents, golden[f"{name}/latents"], rtol=0, atol=TOLERANCE)


def check_frames(pipeline: WanPipeline, golden: dict[str, np.ndarray], name: str) -> None:
    """Checks the frames of one recorded run."""
    frames = pipeline(**recorded_call(golden, name), output_type="np").frames
    assert frames.dtype == np.float32
    np.testing.assert_allclose(frames, golden[f"{name}/frames"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", slow_except(["pipe"], ["pipe", "pipe_nocfg", "pipe_b2"]))
def test_latents_and_frames_equal_those_of_diffusers(
    name: str, pipeline: WanPipeline, golden: dict[str, np.ndarray]
) -> None:
    check_latents(pipeline, golden, name)
    check_frames(pipeline, golden, name)


def test_programs_compile_in_threads_before_there_are_weights(
    pipeline: WanPipeline, golden: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    read: list[object] = []
    read_text = WanTransformer.text_keys_values

    def compile_counted(name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        compiled.append(name)
        return compile_now(name, lowered)

    def read_counted(*inputs: Any, **more: Any) -> Any:
        read.append(None)
        return read_text(*inputs, **more)

    monkeypatch.setattr("os.cpu_count", lambda: 3 * CORES_OF_A_COMPILE)
    monkeypatch.setattr(WanTransformer, "text_keys_values", read_counted)
    builder = replace(pipeline.builder, compile=compile_counted)
    made = WanPipeline(
        builder=builder,
        parameters=WanParameters.described(builder),
        tokenizer=PromptTokenizer.load(GOLDENS / "wan22_t2v" / "tokenizer"),
    )
    request = request_from_arguments(builder.spec, **recorded_call(golden, "pipe"))
    made.compile(request)
    before = sorted(compiled)
    assert {"decode", "denoise_step", "read_text", "start", "text_encoder"} == {*before}
    assert len(before) == len({*before})
    assert len(read) == 1  # for its own program and for the step, which are lowered at once
    made.place(pipeline.parameters)
    check_frames(made, golden, "pipe")
    assert sorted(compiled) == before


def test_the_error_of_a_job_is_raised_on_any_number_of_threads() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("no tiles")

    for threads in (1, 2):
        with pytest.raises(ValueError, match="no tiles"):
            run_all([fail, lambda: done.append(1)], threads=threads)
    run_all([lambda: done.append(2), lambda: done.append(2)], threads=2)
    assert done.count(2) == 2


@pytest.mark.slow
def test_device_layouts_of_weights_change_nothing(
    monkeypatch: pytest.MonkeyPatch, golden: dict[str, np.ndarray]
) -> None:
    """Programs take weights in the layout of `AbstractModel.on`, loaded first or placed later."""
    plain = WanPipeline.from_pretrained(GOLDENS / "wan22_t2v", dtype="float32").parameters
    swapped = Layout(major_to_minor=(0, 2, 1))
    chosen = lambda sharding, shape, dtype: swapped if len(shape) == 3 else None  # noqa: E731
    monkeypatch.setattr(abstract, "parameter_layout", chosen)
    pipeline = WanPipeline.from_pretrained(GOLDENS / "wan22_t2v", dtype="float32")
    for weights in (pipeline.parameters, plain):
        pipeline.place(weights)
        expert = weights.transformers["transformer"]
        kernel = expert["blocks"]["attn1"]["to_q"]["kernel"].get_value()
        assert kernel.format.layout.major_to_minor == (0, 2, 1)
        check_latents(pipeline, golden, "pipe")


@pytest.mark.slow
def test_flow_shift_replaces_that_of_the_checkpoint(
    pipeline: WanPipeline, golden: dict[str, np.ndarray]
) -> None:
    check_latents(pipeline, golden, "pipe_shift12_10", flow_shift=12.0)


def test_every_step_and_its_expert_are_those_of_diffusers(
    pipeline: WanPipeline, golden: dict[str, np.ndarray]
) -> None:
    request = request_from_arguments(pipeline.builder.spec, **recorded_call(golden, "pipe"))
    experts = pipeline.condition(request)
    calls = json.loads(str(golden["pipe/calls_json"]))[::2]  # conditional, then unconditional
    names = {"transformer": "high-noise expert", "transformer_2": "low-noise expert"}
    steps = 0
    for step, (latents, report) in enumerate(pipeline.denoise(request, experts)):
        expert, timestep = calls[step]
        assert (report.index, report.expert, report.timestep) == (step, names[expert], timestep)
        expected = golden["pipe/step_latents"][step]
        found = np.moveaxis(np.asarray(latents), -1, 1)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
        steps += 1
    assert steps == len(calls) == 6


@pytest.mark.slow
def test_euler_of_the_checkpoint_is_used(golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDENS / "wan22_t2v", tmp_path / "euler")
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    check_latents(WanPipeline.from_pretrained(folder), golden, "pipe_euler_shift5")


@pytest.mark.slow
def test_one_transformer_of_the_released_head_width() -> None:
    pipeline = WanPipeline.from_pretrained(GOLDENS / "wan21_t2v")
    with np.load(GOLDENS / "pipe_wan21.npz") as file:
        golden = dict(file)
    check_latents(pipeline, golden, "pipe")
    check_frames(pipeline, golden, "pipe")


@pytest.mark.slow
def test_bfloat16_is_as_near_to_diffusers_as_its_rounding(golden: dict[str, np.ndarray]) -> None:
    """Two runs that round differently are sqrt(2) times as far apart as each is from the truth."""
    pipeline = WanPipeline.from_pretrained(GOLDENS / "wan22_t2v", dtype="bfloat16")
    latents = pipeline(**recorded_call(golden, "pipe_bf16"), output_type="latent").frames
    exact, theirs = golden["pipe/latents"], golden["pipe_bf16/latents"]
    rounding = np.std(theirs - exact)
    assert np.std(latents - theirs) < 2**0.5 * rounding
    assert np.std(latents - exact) < 2**0.5 * rounding
    # The latents have a deviation of 1.4; 8 bits of mantissa, six steps and guidance of 4.
    assert np.abs(latents - theirs).max() < 0.1


@pytest.mark.slow
def test_a_seed_gives_a_video_again_and_another_seed_another(pipeline: WanPipeline) -> None:
    settings = {
        "prompt": "two children fly a kite",
        "height": 48,
        "width": 32,
        "num_frames": 9,
        "num_inference_steps": 2,
        "guidance_scale": 4.0,
    }
    first, again, other = (
        pipeline(**settings, seed=seed, output_type="latent").frames for seed in (5, 5, 6)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.5
    both = pipeline(**settings, seed=5, num_videos_per_prompt=2, output_type="latent").frames
    np.testing.assert_allclose(both, np.concatenate([first, other]), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_bytes_are_the_frames_cut_off(pipeline: WanPipeline, golden: dict[str, np.ndarray]) -> None:
    settings = recorded_call(golden, "pipe")
    frames = pipeline(**settings, output_type="np").frames
    pictures = pipeline(**settings, output_type="uint8").frames
    assert pictures.dtype == np.uint8
    # Compiled apart, a value at the edge of two bytes may fall on either side.
    assert np.abs(pictures - np.floor(frames * 255)).max() <= 1
    assert np.mean(pictures == np.floor(frames * 255)) > 0.999


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"height": 50}, "height"),
        ({"width": 8}, "width"),
        ({"num_frames": 8}, "num_frames"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"prompt": []}, "prompt"),
        ({"negative_prompt": ["a", "b", "c"]}, "negative_prompt"),
        ({"latents": np.zeros((1, 16, 2, 6, 4), np.float32)}, "latents"),
        ({"flow_shift": -1.0}, "flow_shift"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(
    pipeline: WanPipeline, change: dict[str, object], named: str
) -> None:
    settings = {"prompt": "a fox", "height": 48, "width": 32, "num_frames": 9} | change
    with pytest.raises(ProblemsFound, match=named):
        pipeline(**settings)


def test_a_second_guidance_scale_needs_a_second_expert() -> None:
    pipeline = WanPipeline.from_pretrained(GOLDENS / "wan21_t2v")
    with pytest.raises(ProblemsFound, match="guidance_scale_2"):
        pipeline(prompt="a fox", height=48, width=32, num_frames=9, guidance_scale_2=3.0)


def test_latents_that_are_not_finite_stop_the_run_by_step_and_expert(
    pipeline: WanPipeline, golden: dict[str, np.ndarray]
) -> None:
    request = request_from_arguments(pipeline.builder.spec, **recorded_call(golden, "pipe"))
    experts = pipeline.condition(request)
    spoiled = jax.tree.map(lambda leaf: leaf * np.nan, experts.low_noise.weights)
    experts = replace(experts, low_noise=replace(experts.low_noise, weights=spoiled))
    with pytest.raises(RunFailed, match=r"step 3 of 6 .*low-noise expert"):
        list(pipeline.denoise(request, experts))


def test_programs_are_noted_by_the_thread_that_uses_them_and_can_be_dropped():
    pipeline = object.__new__(WanPipeline)
    made: list[str] = []
    pipeline._programs, pipeline._programs_lock = {}, threading.Lock()
    pipeline.builder = SimpleNamespace(compile=lambda name, lowered: made.append(name) or lowered)

    def use(*names):
        for name in names:
            pipeline._program((name, 1), lambda: print)

    keys: set[Hashable] = set()
    with noting_programs(keys):
        use("start", "decode")
        other = threading.Thread(target=use, args=("denoise_step",))
        other.start()
        other.join()
    use("encode")
    assert keys == {("start", 1), ("decode", 1)}
    pipeline.drop_programs(keys)
    use("denoise_step", "encode", "start")
    assert made == ["start", "decode", "denoise_step", "encode", "start"]
