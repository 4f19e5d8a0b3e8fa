"""One table of request fields gives validation, OpenAPI, the form and the docs."""

from pathlib import Path

import pytest

from maxdiffusion.config.config import FIELDS
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.serving.errors import ApiError
from maxdiffusion.serving.fields import (
    check_presets,
    markdown_table,
    read_request,
    request_fields,
)
from maxdiffusion.serving.openapi import document
from tests.serving.stand_in import config_of, offer_of

DOCS = Path(__file__).parents[2] / "docs/serving.md"


@pytest.fixture
def offer(tmp_path):
    return offer_of(config_of(tmp_path))


def refused(offer, **given):
    with pytest.raises(ApiError) as raised:
        read_request(offer, {"prompt": "x", **given})
    return raised.value


def test_defaults_are_those_of_the_config(offer):
    request = read_request(offer, {"prompt": "a red circle"})
    assert request.fields["num_inference_steps"] == 20
    assert request.fields["flow_shift"] == 3.0
    assert request.fields["prompt"] == "a red circle"
    assert str(request.size) == "64x64x9"
    assert set(request.fields) <= set(FIELDS)


@pytest.mark.parametrize("seed", [7, "7"])
def test_values_of_forms_and_of_json_are_read_alike(offer, seed):
    assert read_request(offer, {"prompt": "x", "seed": seed}).fields["seed"] == 7


def test_size_and_seconds_choose_a_served_size(offer):
    assert str(read_request(offer, {"prompt": "x", "size": "96x64"}).size) == "96x64x9"
    assert str(read_request(offer, {"prompt": "x", "seconds": "1"}).size) == "64x64x9"
    assert str(read_request(offer, {"prompt": "x", "width": 96}).size) == "96x64x9"


@pytest.mark.parametrize(
    ("given", "code", "param", "words"),
    [
        ({"size": "720x1280"}, "size_not_served", "size", "Served: 64x64x9, 96x64x9"),
        ({"seconds": "8"}, "size_not_served", "num_frames", "nearest is"),
        ({"size": "64x"}, "invalid_value", "size", "WIDTHxHEIGHT"),
        ({"size": "64x64", "width": 96}, "invalid_value", "size", "is given too"),
        ({"num_inference_steps": 100000}, "invalid_value", "num_inference_steps", "200"),
        ({"num_inference_steps": True}, "invalid_value", "num_inference_steps", "integer"),
        ({"flow_shift": "nan"}, "invalid_value", "flow_shift", "finite"),
        ({"guidance_scale_high": 1e9}, "invalid_value", "guidance_scale_high", "100"),
        ({"scheduler": "eular"}, "invalid_value", "scheduler", "nearest is 'euler'"),
        ({"negativ_prompt": "x"}, "unknown_field", "negativ_prompt", "'negative_prompt'"),
        ({"output_dir": "x"}, "not_offered", "output_dir", "set by the server"),
        ({"guidance_scale": 5}, "not_offered", "guidance_scale", "set by the server"),
        ({"input_reference": "x"}, "not_offered", "input_reference", "does not take it"),
        ({"model": "sora-2"}, "invalid_value", "model", "embedded"),
        ({"prompt": ""}, "invalid_value", "prompt", "characters"),
        ({"prompt": "x" * 10_001}, "invalid_value", "prompt", "10000"),
        ({"seed": 2**32}, "invalid_value", "seed", "4294967295"),
        ({"priority": 11}, "invalid_value", "priority", "-10 to 10"),
    ],
)
def test_refusals_name_the_field_and_a_way_out(offer, given, code, param, words):
    error = refused(offer, **given)
    assert (error.status, error.code, error.param) == (400, code, param)
    assert words in error.message


def test_other_sizes_compile_where_the_config_says_so(tmp_path):
    offer = offer_of(config_of(tmp_path, serve_other_sizes="compile"))
    assert str(read_request(offer, {"prompt": "x", "size": "128x64"}).size) == "128x64x9"
    assert refused(offer, size="100x64").code == "invalid_value"
    assert refused(offer, size="8000x8000").code == "size_too_large"


def test_a_preset_sets_values_that_the_request_does_not_state(tmp_path):
    recipe = {
        "denoising_step_list": [1000, 750, 500, 250],
        "scheduler": "euler",
        "guidance_scale_high": 1.0,
        "guidance_scale_low": 1.0,
        "boundary_step_index": 2,
    }
    offer = offer_of(config_of(tmp_path, serve_presets={"four_step": recipe}))
    check_presets(offer)
    request = read_request(offer, {"prompt": "x", "preset": "four_step", "scheduler": "unipc"})
    assert (request.steps, request.fields["num_inference_steps"]) == (4, 4)
    assert request.fields["scheduler"] == "unipc"
    assert request.fields["guidance_scale_high"] == 1.0
    assert [*request.fields["denoising_step_list"]] == recipe["denoising_step_list"]
    assert read_request(offer, {"prompt": "x"}).steps == 20
    assert refused(offer, preset="four_step", num_inference_steps=9).param == "num_inference_steps"
    assert refused(offer, preset="fourstep").code == "invalid_value"
    assert refused(offer, denoising_step_list=[1]).code == "not_offered"


def test_without_presets_of_the_config_there_are_three(offer):
    steps = [
        read_request(offer, {"prompt": "x", "preset": name}).steps
        for name in ("draft", "standard", "fine")
    ]
    assert steps == [7, 20, 40]


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ({"output_dir": "x"}, "cannot set it"),
        ({"width": 96}, "cannot set it"),
        ({"num_inference_steps": 0}, "integer"),
        ({"scheduler": "eular"}, "nearest is 'euler'"),
        ({"denoising_step_list": [1000, 500], "num_inference_steps": 4}, "has 2 steps"),
    ],
)
def test_bad_presets_are_refused_at_the_start(tmp_path, preset, words):
    with pytest.raises(ProblemsFound, match=words):
        check_presets(offer_of(config_of(tmp_path, serve_presets={"quick": preset})))


def test_adapters_are_fields_of_requests(tmp_path):
    offer = offer_of(config_of(tmp_path), adapters=("paper", "ink"))
    request = read_request(offer, {"prompt": "x", "lora_ink": "0.25"})
    assert (request.fields["lora_paper"], request.fields["lora_ink"]) == (1.0, 0.25)
    assert refused(offer, lora_ink=9).param == "lora_ink"
    assert "'lora_ink'" in refused(offer, lora_inc=1).message


def test_models_with_a_list_of_steps_have_no_other_number(tmp_path):
    offer = offer_of(config_of(tmp_path, denoising_step_list=[1000, 500]))
    assert read_request(offer, {"prompt": "x"}).steps == 2
    assert "for 2" in refused(offer, num_inference_steps=20).message


def test_a_strength_that_leaves_no_step_is_refused(tmp_path):
    offer = offer_of(config_of(tmp_path), inputs={"input_video": False})
    given = {"input_video": "x.mp4", "strength": 0.1}
    assert refused(offer, num_inference_steps=5, **given).param == "strength"
    assert read_request(offer, {"prompt": "x", **given}).steps == 2


def test_the_openapi_document_has_the_same_fields(offer):
    schema = document(offer, has_keys=False)["components"]["schemas"]["VideoRequest"]
    assert set(schema["properties"]) == set(request_fields(offer))
    assert schema["required"] == ["prompt"]
    assert schema["properties"]["num_inference_steps"]["maximum"] == 200


def test_the_docs_have_the_same_fields(offer):
    assert markdown_table(request_fields(offer)) in DOCS.read_text()
