"""Measures the ratios of MagCache for a config: every prompt once, all steps computed.

The result is a YAML file with `mag_ratios_base`, the mean over the prompts. It belongs to the
model, the number of steps, the shift and the boundary of the run.
"""

import logging
from dataclasses import replace

import jax
import numpy as np
from jaxtyping import Float

from maxdiffusion.config.load import ParsedConfig
from maxdiffusion.diffusion.caches.magcache import MagCalibration, interleaved_means
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.generation.generate import Group, load, request_of, start_up_plan
from maxdiffusion.generation.job import ResolvedJob, resolve_job
from maxdiffusion.generation.resume import batches, list_videos
from maxdiffusion.generation.settings import step_cache, use_compilation_cache
from maxdiffusion.pipelines.wan import VideoPipeline
from maxdiffusion.runtime.files import as_path, replacing
from maxdiffusion.runtime.progress import steps_bar
from maxdiffusion.runtime.timing import Timings

logger = logging.getLogger(__name__)

RATIOS_FILE = "mag_ratios.yml"


def calibrate(parsed: ParsedConfig) -> None:
    """Measures ratios over the videos of a config, and writes them to its output folder."""
    use_compilation_cache(parsed.config)
    job, folder = resolve_job(parsed)
    if step_cache(job.config, job.builder.spec) is not None:
        rule = "ratios are measured with every step computed"
        remedy = "Leave the keys of step caches out"
        raise ProblemsFound([Problem(name="calibrate_cache", value="", rule=rule, remedy=remedy)])
    logger.info(start_up_plan(job))
    videos = list_videos(job)
    pipeline = load(job, folder, videos, Timings())
    measured = [measure(job, pipeline, group) for group in batches(videos, job.shape.videos)]
    write_ratios(job, np.mean(measured, axis=0).round(5).tolist(), len(videos))


def measure(job: ResolvedJob, pipeline: VideoPipeline, group: Group) -> Float[np.ndarray, " Q"]:
    """Returns the ratios of one group of videos, prompt and negative prompt in turn."""
    request = request_of(job, group)
    shape, steps = pipeline.shape(request), len(request.sampler.timesteps)
    calibration = MagCalibration(steps=steps, tokens=shape.latent.tokens)
    request = replace(request, step_cache=calibration)
    experts, ratios = pipeline.condition(request), None
    with steps_bar("Measuring", steps) as advance:
        for state, _ in pipeline.states(request, experts):
            ratios = state.cache.ratios
            advance()
    return np.asarray(interleaved_means(np.asarray(ratios), shape.videos))


def write_ratios(job: ResolvedJob, ratios: list[float], videos: int) -> None:
    """Writes the ratios as a YAML file, from the first process."""
    config = job.config
    path = as_path(config.output_dir) / RATIOS_FILE
    about = (
        f"# Ratios of MagCache for {config.pretrained_model_name_or_path}\n"
        f"# mean of {videos} videos, {config.num_inference_steps} steps of {config.scheduler}, "
        f"flow_shift {config.flow_shift:g}\n"
        f"# {config.width}x{config.height}, {config.num_frames} frames\n"
    )
    if jax.process_index() == 0:
        with replacing(path) as unfinished:
            unfinished.write_text(f"{about}use_magcache: true\nmag_ratios_base: {ratios}\n")
        logger.info("wrote %s; lowest ratio %g", path, min(ratios))
