"""Everything that can be wrong with a job, found before any weight is read."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax

from maxdiffusion.commands.auto_attention import settle_attention
from maxdiffusion.commands.kept_programs import keep_programs
from maxdiffusion.commands.pipeline_settings import (
    pipeline_settings,
    program_shape,
    sampler,
    video_shape,
)
from maxdiffusion.commands.tile_search import search_before_run, tile_notes
from maxdiffusion.commands.weight_placement import SPREAD, settle_weights
from maxdiffusion.config.config import Config
from maxdiffusion.config.features import attention_problems, model_refusal
from maxdiffusion.config.job import Job
from maxdiffusion.config.loading import Reading
from maxdiffusion.config.validation import (
    batch_size,
    check_job,
    data_axis_problems,
    resolve_mesh,
)
from maxdiffusion.mesh import build_mesh
from maxdiffusion.mesh.devices import slice_index
from maxdiffusion.pipelines.programs import ProgramShape, Workshop
from maxdiffusion.pipelines.shapes import shape_problems
from maxdiffusion.pipelines.spec import WanSpec, open_wan_folder
from maxdiffusion.runtime.agreement import agree
from maxdiffusion.runtime.coordination import several
from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.weights.folder import ModelFolder, is_remote
from maxdiffusion.weights.identity import component_digests


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A job that can run: what to make, from which folder, with which programs."""

    config: Config
    job: Job
    folder: ModelFolder
    workshop: Workshop
    shape: ProgramShape
    notes: tuple[str, ...] = ()


def prepare(reading: Reading) -> Preparation:
    """The checked job of a config; raises ProblemsFound with everything that is wrong."""
    config, earlier = reading.config, list(reading.problems)
    refusal = model_refusal(config)
    if refusal is not None:
        raise ProblemsFound([*earlier, refusal])
    devices = jax.devices()
    device_count, slice_count = len(devices), len({*map(slice_index, devices)})
    check = partial(check_job, config, device_count=device_count, slice_count=slice_count)
    location = config.pretrained_model_name_or_path
    if is_remote(location):  # nothing is downloaded for a job that cannot run
        check(earlier=earlier)
    try:
        folder, spec = open_wan_folder(location)
    except ProblemsFound as error:
        check(earlier=[*earlier, *error.problems])
        raise
    config, notes = settle_attention(config, spec, devices)
    config, why = settle_weights(config, spec, devices)
    checks = ModelChecks(spec=spec, device_count=device_count, slice_count=slice_count)
    job = check_job(
        config,
        device_count=device_count,
        slice_count=slice_count,
        heads=spec.transformer.heads,
        checks=(checks,),
        earlier=earlier,
    )
    if several():
        agree("inputs", {"prompts": list(job.prompts), **component_digests(folder)})
    shape = program_shape(config, spec, min(job.batch_size, job.videos))
    workshop = search_before_run(checks.workshop(config), config, shape)
    workshop = keep_programs(workshop, config)
    return Preparation(
        config=config,
        job=job,
        folder=folder,
        workshop=workshop,
        shape=shape,
        notes=(*notes, *why, *tile_notes(workshop, shape)),
    )


@dataclass(frozen=True, kw_only=True)
class ModelChecks:
    """Checks a config against the model that it names; None as devices means those that jax has."""

    spec: WanSpec
    device_count: int
    slice_count: int
    devices: tuple[jax.Device, ...] | None = None

    def __call__(self, config: Config) -> Iterator[Problem]:
        """Yields (or raises) what this model, on these devices, cannot do."""
        spec = self.spec
        yield from expert_problems(config, spec)
        wrong_sizes = list(shape_problems(video_shape(config), spec.vae, spec.transformer))
        yield from wrong_sizes
        sampler(config, spec)
        if wrong_sizes or list(attention_problems(config)) or not self._fits_mesh(config):
            return  # reported already, and the plan needs a name and sizes that fit
        videos = batch_size(config, self.device_count)
        workshop, shape = self.workshop(config), program_shape(config, spec, videos)
        workshop.attention(shape)

    def workshop(self, config: Config) -> Workshop:
        """The workshop of the config, on its mesh."""
        heads = self.spec.transformer.heads
        split = resolve_mesh(config, self.device_count, self.slice_count, heads)
        return Workshop(
            spec=self.spec.with_scan(config.scan_layers).with_spread_weights(
                config.weight_placement == SPREAD
            ),
            settings=pipeline_settings(config),
            mesh=build_mesh(split.ici, dcn=split.dcn, devices=self.devices),
        )

    def _fits_mesh(self, config: Config) -> bool:
        try:
            heads = self.spec.transformer.heads
            split = resolve_mesh(config, self.device_count, self.slice_count, heads)
            videos = batch_size(config, self.device_count)
        except ProblemsFound:
            return False
        divides = heads % split.shape.tensor == 0
        return divides and not list(data_axis_problems(config, videos, split))


def expert_problems(config: Config, spec: WanSpec) -> Iterator[Problem]:
    """A problem if the config is for a model with another number of experts."""
    expected = 2 if config.model_name == "wan2.2" else 1
    if len(spec.experts) != expected:
        other = "wan2.1" if expected == 2 else "wan2.2"
        yield Problem(
            name="model_name",
            value=config.model_name,
            rule=f"has {expected} transformer(s), and "
            f"{config.pretrained_model_name_or_path!r} has {len(spec.experts)}",
            remedy=f"Use model_name={other}, or another model",
        )
