"""The arguments that diffusers users know become a request, by diffusers' rules."""

from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.diffusion import UniPC
from maxdiffusion.diffusion.guidance import ClassifierFree, Unguided
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.pipelines.request import request_from_arguments
from maxdiffusion.pipelines.spec import open_wan_folder

GOLDENS = Path(__file__).parents[1] / "goldens"
SIZE = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 4}


@pytest.fixture(scope="module")
def two_experts():
    return open_wan_folder(GOLDENS / "wan22_t2v")[1]


@pytest.fixture(scope="module")
def one_expert():
    return open_wan_folder(GOLDENS / "wan21_t2v")[1]


def test_seeds_count_up_for_every_prompt(two_experts):
    request = request_from_arguments(
        two_experts, prompt=["a", "b"], num_videos_per_prompt=2, seed=7, **SIZE
    )
    assert request.prompts == ("a", "a", "b", "b")
    assert request.seeds == (7, 8, 7, 8)


def test_one_negative_prompt_serves_all(two_experts):
    request = request_from_arguments(two_experts, prompt=["a", "b"], negative_prompt="n", **SIZE)
    assert request.negative_prompts == ("n", "n")


def test_the_second_scale_follows_the_first(two_experts):
    request = request_from_arguments(two_experts, prompt="a", guidance_scale=4.0, **SIZE)
    assert (request.scales.high_noise, request.scales.low_noise) == (4.0, 4.0)
    assert request.plan.guidance == ClassifierFree()


def test_the_first_scale_alone_turns_guidance_off(two_experts):
    request = request_from_arguments(
        two_experts, prompt="a", guidance_scale=1.0, guidance_scale_2=5.0, **SIZE
    )
    assert request.plan.guidance == Unguided()


@pytest.mark.parametrize("name", ["guidance_scale_2", "boundary_ratio"])
def test_one_transformer_has_no_second_of_anything(one_expert, name):
    with pytest.raises(ProblemsFound, match=f"{name}=0.9: this checkpoint has one transformer"):
        request_from_arguments(one_expert, prompt="a", **{name: 0.9}, **SIZE)


def test_latents_are_in_the_layout_of_diffusers(two_experts):
    latents = np.random.default_rng(0).standard_normal((1, 16, 2, 4, 6)).astype(np.float32)
    request = request_from_arguments(two_experts, prompt="a", latents=latents, **SIZE)
    np.testing.assert_array_equal(request.latents, np.moveaxis(latents, 1, -1))
    with pytest.raises(ProblemsFound, match=r"latents.shape=\(1, 16, 2, 6, 4\): must be"):
        request_from_arguments(two_experts, prompt="a", latents=latents.swapaxes(3, 4), **SIZE)


def test_sigmas_replace_the_number_of_steps(two_experts):
    request = request_from_arguments(
        two_experts, prompt="a", sigmas=[1.0, 0.75, 0.5, 0.25], flow_shift=5.0, **SIZE
    )
    assert request.sampler == UniPC(steps=4, shift=5.0, custom_sigmas=(1.0, 0.75, 0.5, 0.25))
    with pytest.raises(ProblemsFound, match=r"sigmas=.*must fall"):
        request_from_arguments(two_experts, prompt="a", sigmas=[0.5, 1.0], **SIZE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, r"prompt=\[\]: must be a text or a list of texts"),
        ({"prompt": 3}, "prompt=3: must be a text"),
        ({"prompt": ["a", "b"], "negative_prompt": ["x", "y", "z"]}, "negative_prompts=3"),
        ({"prompt": "a", "seed": -1}, "seed=-1: must be an integer"),
        ({"prompt": "a", "num_videos_per_prompt": 0}, "num_videos_per_prompt=0"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_bad_arguments_are_named(two_experts, arguments, message):
    with pytest.raises(ProblemsFound, match=message):
        request_from_arguments(two_experts, **arguments, **SIZE)
