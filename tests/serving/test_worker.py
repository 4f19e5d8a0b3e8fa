"""The device loop before it loads a model: requests and presets that its config cannot run."""

from dataclasses import replace
from functools import cache

import jax
import pytest

from maxdiffusion.config.load import read_config
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.serving.device.worker import Worker
from maxdiffusion.serving.fields import read_request
from tests.serving.stand_in import TINY, StandIn

RATIOS = f"mag_ratios_base={[0.99] * 40}"
MAGCACHE = ("use_magcache=true", RATIOS)
PROMPT = {"prompt": "a red circle moves right on a white background"}


@pytest.fixture(scope="module")
def resolved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worker")
    folders = (f"serve_dir={folder / 'state'}", f"output_dir={folder / 'videos'}")
    context = f"ici_context_parallelism={len(jax.devices())}"

    @cache
    def resolve(*arguments):
        return Worker.resolve(read_config([str(TINY), *folders, context, *arguments]))

    return resolve


@pytest.mark.parametrize(
    ("arguments", "request_fields", "reason"),
    [
        (MAGCACHE, {"num_inference_steps": 4}, "at least 10 steps"),
        (MAGCACHE, {"guidance_scale_low": 1.0}, "needs the same guidance at every step"),
        (MAGCACHE, {"scheduler": "lcm"}, "draws new noise at every step"),
        (("use_cfg_cache=true",), {"num_inference_steps": 3}, "no step of this run"),
        (("use_sen_cache=true",), {"scheduler": "euler_stochastic"}, "draws new noise"),
    ],
)
def test_requests_that_do_not_suit_the_step_cache_are_refused(
    resolved, arguments, request_fields, reason
):
    offer = resolved(*arguments).offer()
    offer.check(read_request(offer, PROMPT).fields)
    with pytest.raises(ProblemsFound, match=reason):
        offer.check(read_request(offer, PROMPT | request_fields).fields)


def test_other_numbers_of_steps_take_ratios_of_the_nearest_steps(resolved):
    worker = resolved(*MAGCACHE)
    offer = worker.offer()
    fields = read_request(offer, PROMPT | {"num_inference_steps": 40}).fields
    (request,) = worker._requests(fields)
    assert len(request.plan) == 40
    assert "." in request.plan.actions


def test_usual_presets_that_cannot_run_are_left_out_and_stated_ones_refused(resolved):
    assert [*resolved().offer().presets] == ["draft", "standard", "fine"]
    assert [*resolved(*MAGCACHE).offer().presets] == ["standard", "fine"]
    stated = ('serve_presets={"quick": {"num_inference_steps": 7}}',)
    with pytest.raises(ProblemsFound, match=r"serve_presets.quick: num_inference_steps=7"):
        resolved(*MAGCACHE, *stated)
    assert [*resolved(*stated).offer().presets] == ["quick"]


def test_a_refused_request_is_answered_with_400(tmp_path):
    def refuse(fields):
        if fields["num_inference_steps"] == 4:
            raise ProblemsFound([Problem(name="num_inference_steps", value=4, rule="too few")])

    server = StandIn(tmp_path)
    server.api.offer = replace(server.offer, check=refuse)
    client = server.client()
    answer = client.post("/v1/videos", json=PROMPT | {"num_inference_steps": 4})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("num_inference_steps", "invalid_value")
    assert "too few" in error["message"]
    made = client.post("/v1/videos", json=PROMPT).json()
    body = {"prompt": "another", "num_inference_steps": 4}
    assert client.post(f"/v1/videos/{made['id']}/remix", json=body).status_code == 400
    assert client.get("/v1/videos").json()["data"][0]["id"] == made["id"]
    server.stop()
