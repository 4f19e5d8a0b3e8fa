"""Step caches from a config: their ratios, and what does not go together."""

import pytest

from maxdiffusion.config import load_config
from maxdiffusion.config.job_fields import STEP_CACHES
from maxdiffusion.diffusion.caches.cfg_cache import CfgCache
from maxdiffusion.diffusion.caches.magcache import MagRatios
from maxdiffusion.diffusion.caches.sen_cache import SenCache
from maxdiffusion.diffusion.caches.taylor_cache import TaylorCache
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.generation.settings import run_plan, step_cache
from maxdiffusion.pipelines.spec import open_wan_folder
from maxdiffusion.preflight.command import find_spec
from tests.generation.command_line import TINY

BASE = TINY.parent / "base_wan_27b.yml"
I2V = TINY.parent / "base_wan_i2v_27b.yml"


def spec_of(config):
    location = config.pretrained_model_name_or_path
    return open_wan_folder(location)[1] if location == "embedded" else find_spec(location)


def cache_of(path, *overrides):
    config = load_config([str(path), *overrides])
    return step_cache(config, spec_of(config))


def problems_of(path, *overrides):
    config = load_config([str(path), *overrides])
    with pytest.raises(ProblemsFound) as caught:
        run_plan(config, spec_of(config))
    return {problem.name: problem for problem in caught.value.problems}


def test_no_cache_by_default():
    assert cache_of(BASE) is None


def test_published_ratios_of_a_released_model():
    cache = cache_of(BASE, "use_magcache=true", "magcache_K=3", "retention_ratio=0.4")
    assert cache.ratios == MagRatios.published("wan2.2-t2v-a14b")
    assert (cache.threshold, cache.max_skips, cache.retention) == (0.04, 3, 0.4)


def test_the_public_keys_select_the_cache():
    assert cache_of(BASE, "use_cfg_cache=true") == CfgCache(height=720)
    assert cache_of(BASE, "use_sen_cache=true") == SenCache()
    assert cache_of(BASE, "use_taylor_cache=true") == TaylorCache(interval=2)
    assert cache_of(BASE, "use_taylor_cache=true", "taylor_cache_interval=3").interval == 3


def test_given_ratios_come_first():
    given = cache_of(TINY, "use_magcache=true", f"mag_ratios_base={[0.9] * 40}")
    assert given.ratios == MagRatios.interleaved([0.9] * 40)
    small = cache_of(TINY, "use_magcache=true", f"mag_ratios_base_480p={[0.8] * 40}")
    assert small.ratios == MagRatios.interleaved([0.8] * 40)


def test_a_model_without_published_ratios_is_sent_to_the_calibration():
    problem = problems_of(TINY, "use_magcache=true")["use_magcache"]
    assert "calibrate_cache" in problem.remedy


def test_published_ratios_belong_to_a_shift_and_a_boundary():
    found = problems_of(BASE, "use_magcache=true", "flow_shift=5", "boundary_ratio=0.9")
    assert set(found) == {"flow_shift", "boundary_ratio"}
    assert set(problems_of(BASE, "use_magcache=true", "boundary_step_index=20")) == {
        "boundary_step_index"
    }


def test_one_cache_at_a_time():
    found = problems_of(BASE, *(f"{name}=true" for name in STEP_CACHES))
    assert set(found) == {*STEP_CACHES[1:]}


@pytest.mark.parametrize("name", STEP_CACHES)
def test_few_step_models_have_no_steps_to_spare(name):
    steps = ("denoising_step_list=[1000, 750, 500, 250]", "num_inference_steps=4")
    assert name in problems_of(BASE, f"{name}=true", *steps)


@pytest.mark.parametrize("name", STEP_CACHES)
def test_guidance_that_ends_early_is_refused(name):
    assert name in problems_of(BASE, f"{name}=true", "guidance_end_step=10")
