"""Step cache of a config: which one, with which ratios; raises what does not go together."""

from maxdiffusion.config import Config
from maxdiffusion.config.job_fields import STEP_CACHES
from maxdiffusion.diffusion.caches.magcache import MagCache, MagRatios, published_ratios
from maxdiffusion.diffusion.denoise import StepCache
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.pipelines.spec import WanSpec

A14B = (40, 5120)
TALL = 720


def step_cache_of(config: Config, spec: WanSpec) -> StepCache | None:
    """Returns the step cache of a config; None if it asks for none."""
    used = [name for name in STEP_CACHES if config.values[name]]
    if used:
        check_steps_of_cache(config, spec, used)
    if config.use_cfg_cache:
        from maxdiffusion.diffusion.caches.cfg_cache import CfgCache

        return CfgCache(height=config.height)
    if config.use_sen_cache:
        from maxdiffusion.diffusion.caches.sen_cache import SenCache

        return SenCache()
    if config.use_taylor_cache:
        from maxdiffusion.diffusion.caches.taylor_cache import TaylorCache

        return TaylorCache(interval=config.taylor_cache_interval)
    if config.use_magcache:
        return MagCache(
            ratios=mag_ratios(config, spec),
            threshold=config.magcache_thresh,
            max_skips=config.magcache_K,
            retention=config.retention_ratio,
        )
    return None


def check_steps_of_cache(config: Config, spec: WanSpec, used: list[str]) -> None:
    """Raises for several caches, and for steps that caches are not made for."""
    problems = [
        Problem(
            name=name,
            value=True,
            rule=f"only one step cache can run, and {used[0]} is true",
            remedy=f"Leave out {name} or {used[0]}",
        )
        for name in used[1:]
    ]
    lists = {"denoising_step_list": config.denoising_step_list, "sigmas": config.sigmas}
    problems += [
        Problem(
            name=used[0],
            value=True,
            rule=f"step caches run on the sampler's own steps, and {name} gives others",
            remedy=f"Leave out {name} or {used[0]}",
        )
        for name, values in lists.items()
        if values
    ]
    if config.video_path and not spec.transformer.control_layers:
        rule = "step caches need a whole run, and video to video starts in the middle"
        remedy = f"Leave out video_path or {used[0]}"
        problems.append(Problem(name=used[0], value=True, rule=rule, remedy=remedy))
    Collector(problems).raise_if_any()


def mag_ratios(config: Config, spec: WanSpec) -> MagRatios:
    """Returns the ratios of a config, or the published ones of its model."""
    by_height = (
        config.mag_ratios_base_720p if config.height >= TALL else config.mag_ratios_base_480p
    )
    given = config.mag_ratios_base or by_height
    if given:
        return MagRatios.interleaved(given)
    name = published_name(config, spec)
    if name is None:
        problem = Problem(
            name="use_magcache",
            value=True,
            rule="there are no published ratios for a model of these sizes",
            remedy="Run python -m maxdiffusion.calibrate_cache, and set mag_ratios_base",
        )
        raise ProblemsFound([problem])
    check_measured(config, name)
    return MagRatios.published(name)


def published_name(config: Config, spec: WanSpec) -> str | None:
    """Returns the name of a released model with published ratios, found by its sizes."""
    model, two_experts = spec.transformer, len(spec.experts) == 2
    sizes = (model.layers, model.model_dim)
    if model.control_layers:
        return None
    if sizes == A14B and two_experts:
        return "wan2.2-i2v-a14b" if spec.image_channels else "wan2.2-t2v-a14b"
    if sizes == A14B and spec.image_channels:
        return f"wan2.1-i2v-14b-{'720p' if config.height >= TALL else '480p'}"
    names = {
        (A14B, False): "wan2.1-t2v-14b",
        ((30, 1536), False): "wan2.1-t2v-1.3b",
        ((30, 3072), True): f"wan2.2-ti2v-5b-{'image' if config.model_type == 'I2V' else 'text'}",
    }
    return names.get((sizes, spec.time_per_token))


def check_measured(config: Config, name: str) -> None:
    """Raises unless the run has the shift and the boundary that the ratios were measured with.

    At the boundary the ratio dips to 0.66 (0.91 for image to video): elsewhere it would be wrong.
    """
    entry = published_ratios()[name]
    remedy = "Use mag_ratios_base with ratios that calibrate_cache measures for this run"
    found = {"flow_shift": config.flow_shift, "boundary_ratio": config.boundary_ratio}
    measured = {"flow_shift": entry["shift"], "boundary_ratio": entry["boundary"]}
    problems = [
        Problem(
            name=field,
            value=found[field],
            rule=f"the published ratios of MagCache were measured with {value:g}",
            remedy=remedy,
        )
        for field, value in measured.items()
        if value is not None and found[field] != value
    ]
    if entry["boundary"] is not None and config.boundary_step_index is not None:
        problems.append(
            Problem(
                name="boundary_step_index",
                value=config.boundary_step_index,
                rule="the published ratios of MagCache belong to the boundary_ratio "
                f"{entry['boundary']:g}",
                remedy=remedy,
            )
        )
    Collector(problems).raise_if_any()
